"""What each ablation changes in an update: its gradient against a slow loop that is written from the rules alone.

All run the same loop (train_rl.main) on the same trajectories; only their YAML differs.
"""

import copy
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_rl
import train_sft
from envace import data, rewards
from envace.config import load_config
from envace.data import open_source
from envace.demo.demonstrations import Clerk, make_demonstrations
from envace.demo.desk import TOOLS, CallCounter
from envace.demo.model import build_model
from envace.demo.source import DemoSource
from envace.demo.tasks import make_task, make_tasks
from envace.evaluation import assign_rewards, unfold
from envace.filters import consistent
from envace.metrics import rollout_metrics
from envace.policy import Policy
from envace.services import Services
from envace.settings import SamplingConfig
from envace.team import evaluation_team, training_team
from envace.types import Evidence, Exchange, Role, Segment, Sequence, Status, Task, ToolCall, Trajectory

pytestmark = pytest.mark.slow  # all together, though each alone is quick

ROOT = Path(__file__).parent.parent
KL_COEF = 0.3
# (group, reward, outputs as (role, length)); counts per role are ragged, so that every baseline is another one.
EPISODES = [
    ("x", 1.0, [("act", 3), ("rehearse", 2), ("act", 4)]),
    ("x", 0.0, [("act", 5)]),
    ("x", 0.0, [("act", 2), ("rehearse", 3), ("act", 2), ("rehearse", 5), ("act", 1)]),
    ("y", 1.0, [("act", 4), ("rehearse", 4), ("rehearse", 2), ("act", 3)]),
    ("y", 0.0, [("act", 2), ("rehearse", 1), ("act", 6)]),
    ("y", 1.0, [("act", 3)]),
]
INCONSISTENT = {2, 4}  # their only exchange answers about another id


def make_trajectories(*, simulated=False):
    """simulated: what REHEARSE would write is context, written by another model."""
    draw = torch.Generator().manual_seed(7)
    tasks = dict(zip("xy", make_tasks(2, 0, held_out=False), strict=True))
    made = []
    for number, (group, reward, outputs) in enumerate(EPISODES):
        segments = [Segment(Role.CONTEXT, [5, 6, 7, 8], Evidence.GIVEN)]
        for name, length in outputs:
            ids = torch.randint(10, 300, (length,), generator=draw).tolist()
            role = Role.ACT if name == "act" else Role.CONTEXT if simulated else Role.REHEARSE
            segments += [Segment(role, ids, Evidence.CLAIMED), Segment(Role.CONTEXT, [9], Evidence.GIVEN)]
        trajectory = Trajectory(replace(tasks[group], goal=reward), group, sequences=[Sequence(segments, open=False)])
        seen = {"order_id": "B2" if number in INCONSISTENT else "A1"}
        call = ToolCall("get_order", {"order_id": "A1"})
        trajectory.exchanges = [Exchange(call, seen, 0, 0, Evidence.REHEARSED)]
        made.append(trajectory)
    return made


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("team") / "base"
    recorded = make_demonstrations(16, 0, CallCounter())
    build_model(folder, [(task.tools, said) for task, said in recorded], seed=0, hidden=32, layers=1)
    return folder


@pytest.fixture
def gradients(base, tmp_path, monkeypatch):
    """gradients(variant, *overrides) -> for each player (gradient by name, its policy), of the one update of a step."""
    prepare, found = Policy.prepare_training, []

    def prepare_and_move(policy, **settings):
        """Away from the reference, where the KL term would have no gradient."""
        prepare(policy, **settings)
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in policy.lm.parameters():
                if p.requires_grad:
                    p.add_(0.02 * torch.randn(p.shape, generator=draw))

    def capture(policy, lr):
        grads = {n: p.grad.clone() for n, p in policy.lm.named_parameters() if p.requires_grad and p.grad is not None}
        found.append((grads, policy))
        policy.optimizer.zero_grad()
        return {"grad_norm": 0.0, "skipped": 0.0}

    monkeypatch.setattr(Policy, "prepare_training", prepare_and_move)
    monkeypatch.setattr(Policy, "step", capture)
    monkeypatch.setattr(train_rl, "evaluate_held_out", lambda *_: ({}, None))
    monkeypatch.setitem(rewards.REWARDS, "goal", lambda trajectory: (trajectory.task.goal, {}))

    def run(variant, *overrides):
        found.clear()
        made = make_trajectories(simulated=variant in ("grpo", "grpo_real", "constant_response"))
        monkeypatch.setattr(train_rl, "unfold", lambda *_, **__: (copy.deepcopy(made), 0))
        settings = [f"model.path={base}", f"run_dir={tmp_path / variant}", "rl.steps=1", "data.train_tasks=16"]
        settings += ["data.eval_tasks=4", "eval.tasks=2", "rl.micro_batch_size=4", *overrides]
        if variant != "no_kl":
            settings.append(f"rl.kl_coef={KL_COEF}")
        if variant == "grpo":
            settings.append(f"simulator.path={base}")
        train_rl.main(load_config(str(ROOT / "configs" / "ablations" / f"{variant}.yaml"), settings))
        return list(found)

    return run


# The oracle: one output at a time, straight from the equations.


def output_advantages(trajectories, *, rolewise=True, over_outputs=True, std=True):
    """{(trajectory number, output number): A}"""
    outputs = [(t, n, o) for t in trajectories for n, o in enumerate(t.outputs())]

    def peers(t, role):
        same = [(u, m) for u, m, o in outputs if u.group_id == t.group_id and (not rolewise or o.role is role)]
        rewards = [u.reward for u, _ in same]
        members = rewards if over_outputs else list({id(u): u.reward for u, _ in same}.values())
        return rewards, members

    advantages = {}
    for t, n, output in outputs:
        rewards, members = peers(t, output.role)
        if len(set(rewards)) == 1:
            advantages[id(t), n] = 0.0
            continue
        spread = torch.tensor(members).std().item() + 1e-6 if std else 1.0
        advantages[id(t), n] = (t.reward - sum(members) / len(members)) / spread
    return advantages


def slow_gradient(policy, reference, trajectories, advantages, weights, kl_coef):
    """By name: the gradient of sum(w * (-A ratio + kl_coef * k3)) / sum(w), with ratio = 1, one token at a time."""
    policy.lm.zero_grad()
    total, denominator = 0.0, 0.0
    for t in trajectories:
        [sequence] = t.sequences
        ids = torch.tensor([sequence.ids])
        logprobs = policy.lm(ids).logits[0, :-1].log_softmax(-1)
        with torch.no_grad():
            ref = reference(ids).logits[0, :-1].log_softmax(-1)
        position, n = 0, 0
        for segment in sequence.segments:
            weight = 0.0 if segment.role is Role.CONTEXT else weights[segment.role]
            for token in segment.ids:
                if weight:
                    new, old = logprobs[position - 1, token], ref[position - 1, token]
                    ratio = (new - new.detach()).exp()
                    k3 = (old - new).exp() - (old - new) - 1
                    total = total + weight * (-ratio * advantages[id(t), n] + kl_coef * k3)
                    denominator += weight
                position += 1
            n += segment.role is not Role.CONTEXT
    (total / denominator).backward()
    return {name: p.grad.clone() for name, p in policy.lm.named_parameters() if p.grad is not None}


BOTH, ACT, REHEARSE = {Role.ACT: 1, Role.REHEARSE: 1}, {Role.ACT: 1, Role.REHEARSE: 0}, {Role.ACT: 0, Role.REHEARSE: 1}
# variant -> what each player's update is: (which tokens, how the baseline differs, KL coefficient, trajectories)
RULES = {
    "envace": [(BOTH, {}, KL_COEF)],
    "shared_baseline": [(BOTH, {"rolewise": False}, KL_COEF)],
    "baseline_over_trajectories": [(BOTH, {"over_outputs": False}, KL_COEF)],
    "no_std": [(BOTH, {"std": False}, KL_COEF)],
    "no_kl": [(BOTH, {}, 0.0)],
    "act_only": [(ACT, {}, KL_COEF)],
    "rehearse_only": [(REHEARSE, {}, KL_COEF)],
    "per_role_policy": [(ACT, {}, KL_COEF), (REHEARSE, {}, KL_COEF)],
    "grpo": [(ACT, {}, KL_COEF)],
    "grpo_real": [(ACT, {}, KL_COEF)],
    "constant_response": [(ACT, {}, KL_COEF)],
    "verifier_filter": [(BOTH, {}, KL_COEF)],
    "mixed_10": [(BOTH, {}, KL_COEF)],
    "separate_view": [(BOTH, {}, KL_COEF)],
    "no_sft": [(BOTH, {}, KL_COEF)],
}


def expected(policy, base, variant, tokens, baseline, kl_coef):
    trajectories = make_trajectories(simulated=variant in ("grpo", "grpo_real", "constant_response"))
    if variant == "verifier_filter":
        trajectories = [t for n, t in enumerate(trajectories) if n not in INCONSISTENT]
    for trajectory in trajectories:
        trajectory.reward = trajectory.task.goal
    reference = type(policy.lm).from_pretrained(base)
    return slow_gradient(policy, reference, trajectories, output_advantages(trajectories, **baseline), tokens, kl_coef)


def distance(a, b):
    flat = [torch.cat([grads[name].flatten() for name in sorted(grads)]) for grads in (a, b)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


@pytest.mark.parametrize("variant", RULES)
def test_the_update_of_a_variant_is_what_its_rule_says(base, gradients, variant):
    found = gradients(variant)
    assert len(found) == len(RULES[variant]), "a player each"
    for (got, policy), rule in zip(found, RULES[variant], strict=True):
        wanted = expected(policy, base, variant, *rule)
        assert got.keys() == wanted.keys()
        assert distance(got, wanted) < 1e-4


CHANGED = sorted(
    RULES.keys() - {"envace", "grpo", "grpo_real", "constant_response", "mixed_10", "separate_view", "no_sft"}
)


@pytest.mark.parametrize("variant", CHANGED)
def test_the_oracle_tells_the_variants_from_the_method(base, gradients, variant):
    """Otherwise the test above would pass for a variant that selects nothing."""
    [(method, policy)] = gradients("envace")
    for rule in RULES[variant]:
        assert distance(expected(policy, base, variant, *rule), method) > 0.01


def test_two_policies_start_equal_and_share_nothing(gradients):
    [(_, act), (_, rehearse)] = gradients("per_role_policy")
    assert act is not rehearse and act.optimizer is not rehearse.optimizer
    assert not {p.data_ptr() for p in act.lm.parameters()} & {p.data_ptr() for p in rehearse.lm.parameters()}


def test_adapters_of_two_policies_are_trained_on_a_role_each(base, gradients):
    found = gradients("per_role_lora")
    assert all("lora" in name for grads, _ in found for name in grads)
    [[act, _], [rehearse, _]] = found
    assert act.keys() == rehearse.keys() and distance(act, rehearse) > 0.1


# Who writes what


def warm_config(warm, run_dir, *overrides):
    settings = ["rollout.max_rounds=3", "rollout.max_new_tokens=48", "rollout.max_context_tokens=1024", *overrides]
    return load_config(None, [f"model.path={warm}", f"run_dir={run_dir}", "data.train_tasks=16", *settings])


def unfolded(config, *, environment, tasks=4, temperature=0.0):
    """Greedy trajectories, and the team that wrote them."""
    team, source = evaluation_team(config), open_source(config)
    options = {"environment": environment, "purpose": "training", "samples": 2}
    sampling = SamplingConfig(temperature)
    found, _ = unfold(
        team, source.train_tasks()[:tasks], config, source, Services(config), sampling=sampling, **options
    )
    return found, team, source


def ids_of(trajectories):
    return [[sequence.ids for sequence in t.sequences] for t in trajectories]


class OneTask(DemoSource):
    """The same task everywhere, recorded without a flaw."""

    task = make_task("status", "one", random.Random(0), held_out=False)

    def demonstrations(self):
        clerk = Clerk(self.task, random.Random(0), self.counter, habit_share=0.0, slip_share=0.0)
        return [(self.task, clerk.work())] * self.config.demonstrations

    def train_tasks(self):
        return [self.task] * self.config.train_tasks


@pytest.fixture(scope="module")
def warm(base, tmp_path_factory):
    """A model that knows one dialogue by heart, so that its runs call tools and answer them."""
    folder = tmp_path_factory.mktemp("warm")
    settings = ["data.demonstrations=8", "sft.steps=75", "sft.batch_size=1", "sft.lr=2e-2"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(data.SOURCES, "demo", OneTask)
        yield train_sft.main(load_config(None, [f"model.path={base}", f"run_dir={folder}", *settings]))


@pytest.mark.parametrize("view", ["shared", "separate"])
def test_two_equal_policies_write_what_one_writes_in_both_roles(warm, tmp_path, view):
    one, *_ = unfolded(warm_config(warm, tmp_path, f"rollout.view={view}"), environment="rehearsed")
    config = warm_config(warm, tmp_path, f"rollout.view={view}", "rl.team=per_role")
    two, team, _ = unfolded(config, environment="rehearsed")
    assert ids_of(one) == ids_of(two)
    assert any(segment.role is Role.REHEARSE for t in two for segment in t.outputs())
    assert team.writers[Role.ACT] is not team.writers[Role.REHEARSE]


@pytest.mark.parametrize("view", ["shared", "separate"])
def test_a_simulator_writes_in_the_same_place_and_is_context(warm, tmp_path, view):
    overrides = [f"rollout.view={view}", "rollout.environment=simulated", f"simulator.path={warm}"]
    config = warm_config(warm, tmp_path, *overrides, "simulator.sampling.temperature=0")
    simulated, *_ = unfolded(config, environment="simulated")
    rehearsed, *_ = unfolded(config, environment="rehearsed")
    answered = 0
    for theirs, own in zip(simulated, rehearsed, strict=True):
        assert not [s for s in theirs.outputs() if s.role is Role.REHEARSE]
        assert ids_of([theirs]) == ids_of([own])
        if own.outputs()[-1].role is Role.REHEARSE and own.status is not Status.FINISHED:
            assert theirs.status is Status.FAULT and theirs.reason.startswith("simulator: ")
            continue
        assert theirs.status is own.status
        assert [e.evidence for e in theirs.exchanges] == [Evidence.SIMULATED] * len(own.exchanges)
        written = [s for q in theirs.sequences for s in q.segments if s.evidence is Evidence.SIMULATED]
        assert all(s.role is Role.CONTEXT and s.logprobs is None for s in written)
        answered += len(written)
    # In view separate this model, which learned the other one, answers with nothing but noise.
    assert answered or view == "separate"


def test_a_mixture_gives_each_environment_its_share(warm, tmp_path):
    mixture = "rollout.mixture={rehearsed: 0.5, constant: 0.5}"
    config = warm_config(warm, tmp_path, "rollout.environment=mixed", mixture)
    torch.manual_seed(0)
    found, _, source = unfolded(config, environment="mixed", tasks=16, temperature=1.0)
    kinds = [{e.evidence for e in t.exchanges} for t in found if t.exchanges]
    assert all(len(kind) == 1 for kind in kinds), "an episode has one environment"
    shares = [sum(kind == {evidence} for kind in kinds) for evidence in (Evidence.REHEARSED, Evidence.SIMULATED)]
    assert min(shares) > len(kinds) / 4
    torch.manual_seed(0)
    again, *_ = unfolded(config, environment="mixed", tasks=16, temperature=1.0)
    assert ids_of(again) == ids_of(found), "drawn from the random state that checkpoints restore"


def test_a_real_step_of_a_mixture_carries_no_loss_and_is_counted(warm, tmp_path):
    mixture = "rollout.mixture={rehearsed: 0.5, real: 0.5}"
    found, _, source = unfolded(warm_config(warm, tmp_path, "rollout.environment=mixed", mixture), environment="mixed")
    real = [s for t in found for s in t.sequences[0].segments if s.evidence is Evidence.OBSERVED]
    assert real and all(s.role is Role.CONTEXT for s in real)
    assert source.counter.calls["training"] == len(real)


# Filters


def judged(call, response, *more, tools=TOOLS):
    pairs = [(call, response), *more]
    exchanges = [Exchange(c, r, 0, i, Evidence.REHEARSED) for i, (c, r) in enumerate(pairs)]
    return consistent(Trajectory(Task("t", "", tools, ["?"]), "g", exchanges=exchanges))


GET, OTHER = ToolCall("get_order", {"order_id": "A1"}), ToolCall("get_order", {"order_id": "B2"})


def test_what_is_wrong_for_sure_is_told():
    assert judged(GET, {"order_id": "A1", "status": "shipped"}) == ""
    assert judged(GET, {"order_id": "B2"}) == "get_order: order_id differs from the argument"
    assert judged(GET, {"error": "unknown_id", "order_id": "B2"}) == "", "an error may say anything"
    assert (
        judged(ToolCall("get_order", {}), {"status": "x"}) == "get_order: a call that the schema forbids was answered"
    )
    assert judged(ToolCall("fly", {}), {"status": "x"}) == "fly: a call that the schema forbids was answered"
    assert judged(ToolCall("fly", {}), {"error": "unknown_tool"}) == ""
    assert judged(GET, {"status": "x"}, (GET, {"status": "y"})) == "get_order: the same call has two responses"
    assert judged(GET, {"status": "x"}, (OTHER, {}), (GET, {"status": "y"})) == "", "something may have changed"
    assert judged(GET, [1, 2]) == "" and judged(GET, None) == ""


def test_what_was_not_rehearsed_is_not_held_against_the_policy():
    observed = [Exchange(GET, {"order_id": "B2"}, 0, 0, Evidence.OBSERVED)]
    assert consistent(Trajectory(Task("t", "", TOOLS, ["?"]), "g", exchanges=observed)) == ""


def test_filtered_trajectories_are_unknown_and_counted():
    trajectories = make_trajectories()
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(rewards.REWARDS, "goal", lambda trajectory: (trajectory.task.goal, {}))
        assign_rewards(trajectories, "goal", "consistent")
    assert [t.reward is None for t in trajectories] == [n in INCONSISTENT for n in range(len(EPISODES))]
    metrics = rollout_metrics(trajectories)
    assert metrics["reward/filtered_share"] == metrics["reward/unknown_share"] == pytest.approx(2 / 6)


# What an update did to single tokens


def plain_logprobs(policy, trajectory, temperature):
    """Of each output, one forward pass and a softmax over everything."""
    [sequence] = trajectory.sequences
    ids = torch.tensor([sequence.ids])
    with torch.no_grad():
        table = (policy.model(ids).logits / temperature).log_softmax(-1)[0]
    values, end = [], 0
    for segment in sequence.segments:
        begin, end = end, end + len(segment.ids)
        if segment.role is not Role.CONTEXT:
            values.append([float(table[t - 1, ids[0, t]]) for t in range(begin, end)])
    return values


@pytest.mark.parametrize("weights", [{"act": 1.0, "rehearse": 0.5}, {"act": 1.0, "rehearse": 0.0}])
def test_logprobs_of_outputs_are_those_of_a_plain_forward_where_a_role_is_trained(base, tmp_path, weights):
    settings = [f"model.path={base}", f"run_dir={tmp_path}", *(f"rl.role_weights.{k}={v}" for k, v in weights.items())]
    team = training_team(load_config(None, settings))
    made = make_trajectories()
    expected = [values for t in made for values in plain_logprobs(team.lead, t, 0.7)]
    outputs = [output for t in made for output in t.outputs()]
    for output, found, values in zip(outputs, team.output_logprobs(made, 0.7), expected, strict=True):
        trained = weights[output.role.name.lower()] > 0
        torch.testing.assert_close(found, values if trained else [], atol=1e-5, rtol=0)


def test_each_of_two_policies_is_trained_by_the_weight_of_its_role(base, tmp_path):
    variant = str(ROOT / "configs" / "ablations" / "per_role_policy.yaml")
    weights = ["rl.role_weights.act=2", "rl.role_weights.rehearse=0.5"]
    team = training_team(load_config(variant, [f"model.path={base}", f"run_dir={tmp_path}", *weights]))
    assert [player.role_weights for player in team.players] == [
        {"act": 2.0, "rehearse": 0.0},
        {"act": 0.0, "rehearse": 0.5},
    ]


def test_of_two_policies_each_tells_of_its_own_role(base, tmp_path):
    variant = str(ROOT / "configs" / "ablations" / "per_role_policy.yaml")
    team = training_team(load_config(variant, [f"model.path={base}", f"run_dir={tmp_path}"]))
    with torch.no_grad():
        for p in team.players[1].policy.lm.parameters():
            p.mul_(1.1)
    made = make_trajectories()
    by_role = {Role.ACT: team.players[0].policy, Role.REHEARSE: team.players[1].policy}
    both = {role: [v for t in made for v in plain_logprobs(policy, t, 1.0)] for role, policy in by_role.items()}
    outputs = [output for t in made for output in t.outputs()]
    for number, (output, found) in enumerate(zip(outputs, team.output_logprobs(made, 1.0), strict=True)):
        torch.testing.assert_close(found, both[output.role][number], atol=1e-5, rtol=0)
    assert both[Role.ACT] != both[Role.REHEARSE]
