"""Two steps of everything: warm-up, reinforcement learning and evaluation through their entry points, on a tiny model.

The model has one layer and has learned one dialogue by heart, so that what it samples is mostly well-formed.
"""

import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import evaluate
import train_rl
import train_sft
from envace import data, rewards
from envace.advantages import rolewise_advantages
from envace.batching import output_table, rows_to_batch
from envace.checkpoints import CheckpointError, exports
from envace.config import load_config
from envace.demo.demonstrations import Clerk, make_demonstrations
from envace.demo.desk import CallCounter
from envace.demo.model import build_model
from envace.demo.source import DemoSource
from envace.demo.tasks import make_task
from envace.dynamics import __main__ as dynamics
from envace.evaluation import unfold
from envace.policy import Diverged, Policy, SaveError
from envace.services import Services
from envace.team import Player, Team
from envace.types import Evidence, Role, Segment, Sequence, ServiceFault, Task, Trajectory, UserError

ROOT = Path(__file__).parent.parent
SETTINGS = [
    "data.demonstrations=8 data.train_tasks=8 data.eval_tasks=4",
    "rollout.max_rounds=3 rollout.max_parallel_calls=2 rollout.max_context_tokens=1024 rollout.max_new_tokens=48",
    "sft.steps=2 sft.batch_size=4 sft.micro_batch_size=4 sft.lr=1e-2 sft.warmup=0",
    "rl.steps=2 rl.prompts_per_step=2 rl.group_size=4 rl.micro_batch_size=4 rl.lr=1e-4 eval.every=1",
]


class OneTask(DemoSource):
    """The same task everywhere, recorded without a flaw."""

    task = make_task("status", "one", random.Random(0), held_out=False)

    def demonstrations(self):
        clerk = Clerk(self.task, random.Random(0), self.counter, habit_share=0.0, slip_share=0.0)
        return [(self.task, clerk.work())] * self.config.demonstrations

    def train_tasks(self):
        return [self.task] * self.config.train_tasks

    def eval_tasks(self):
        return [self.task] * self.config.eval_tasks


@pytest.fixture(autouse=True)
def one_task(monkeypatch):
    monkeypatch.setitem(data.SOURCES, "demo", OneTask)


@pytest.fixture
def mixed_rewards(monkeypatch):
    """Rewards that differ within each group, whatever the model does, so that there is something to learn."""
    made = []

    def score(trajectory):
        made.append(trajectory)
        return float(len(made) % 2), {"finished": 1.0}

    monkeypatch.setitem(rewards.REWARDS, "goal", score)


def configure(model, run_dir, *overrides):
    settings = [f"model.path={model}", f"run_dir={run_dir}", *" ".join(SETTINGS).split(), *overrides]
    return load_config(None, settings)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("training") / "base"
    recorded = make_demonstrations(64, 0, CallCounter())
    build_model(path, [(task.tools, messages) for task, messages in recorded], seed=0, hidden=32, layers=1)
    return path


@pytest.fixture(scope="module")
def warm(base, tmp_path_factory):
    """The folder of a model after SFT."""
    folder = tmp_path_factory.mktemp("sft")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(data.SOURCES, "demo", OneTask)
        return train_sft.main(configure(base, folder, "sft.steps=75", "sft.batch_size=1", "sft.lr=2e-2"))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def logged(run_dir, stage):
    return [record for record in lines(Path(run_dir) / "metrics.jsonl") if record["stage"] == stage]


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def equal_weights(a, b):
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Supervised warm-up


def test_supervised_training_lowers_the_loss_and_leaves_a_folder(base, warm):
    run_dir = warm.parent
    records = logged(run_dir, "sft")
    losses = [record["loss/sft"] for record in records]
    assert losses[0] > 5 and losses[-1] < 0.1
    assert [record["step"] for record in records] == list(range(75))
    assert all(record["throughput/trained_tokens_per_second"] > 0 for record in records)
    assert all(math.isfinite(record["grad_norm"]) and record["skipped"] == 0 for record in records)
    assert {file.name for file in run_dir.iterdir()} == {
        *("sft", "sft.config.yaml", "sft.versions.json", "metrics.jsonl", "tensorboard")
    }
    assert load_config(str(run_dir / "sft.config.yaml"), []).sft.steps == 75
    assert not equal_weights(base, warm)


def trained_tokens(base, folder, monkeypatch, *overrides):
    """Of the first SFT batch: the text of the tokens that carry loss, row by row."""
    found = []
    loss = train_sft.sft_loss

    def watch(logprobs, mask, **settings):
        found.append(mask)
        return loss(logprobs, mask, **settings)

    micro_batches = Policy.micro_batches

    def remember(policy, rows, size):
        remember.policy, remember.batches = policy, micro_batches(policy, rows, size)
        return remember.batches

    monkeypatch.setattr(train_sft, "sft_loss", watch)
    monkeypatch.setattr(Policy, "micro_batches", remember)
    train_sft.main(configure(base, folder, "sft.steps=1", "sft.batch_size=1", *overrides))
    [mask], [batch] = found, remember.batches
    return [remember.policy.decode(ids[spoken > 0].tolist()) for ids, spoken in zip(batch.input_ids, mask, strict=True)]


def test_both_roles_carry_loss_unless_one_is_left_out(base, tmp_path, monkeypatch):
    act_starts, act_ends, response = "<tool_call>", "<|im_end|>", '"status"'
    [both] = trained_tokens(base, tmp_path, monkeypatch)
    [act] = trained_tokens(base, tmp_path, monkeypatch, "sft.roles=[act]")
    [rehearse] = trained_tokens(base, tmp_path, monkeypatch, "sft.roles=[rehearse]")
    assert act_starts in both and response in both
    assert act_starts in act and response not in act and act.endswith(act_ends)
    assert act_starts not in rehearse and response in rehearse and rehearse.endswith("</tool_response>")
    assert len(act) + len(rehearse) == len(both)


def test_in_view_separate_each_role_is_trained_in_its_own_chat(base, tmp_path, monkeypatch):
    rows = trained_tokens(base, tmp_path, monkeypatch, "rollout.view=separate")
    assert sorted(("<tool_call>" in row, "<execution_result>" in row) for row in rows) == [(False, True), (True, False)]


def test_a_batch_without_a_token_to_train_on_changes_nothing(base, tmp_path, monkeypatch):
    # A dialogue without a call has nothing to rehearse.
    task = make_task("neighbour", "n", random.Random(0), held_out=False)
    messages = [{"role": "system", "content": task.system}, {"role": "user", "content": task.user_turns[0]}]
    messages.append({"role": "assistant", "content": "I cannot do that."})
    monkeypatch.setattr(OneTask, "demonstrations", lambda self: [(task, messages)])
    assert equal_weights(train_sft.main(configure(base, tmp_path, "sft.roles=[rehearse]")), base)


def test_supervised_training_stops_when_the_loss_stays_nan(base, tmp_path, monkeypatch):
    loss = train_sft.sft_loss
    monkeypatch.setattr(train_sft, "sft_loss", lambda *a, **settings: loss(*a, **settings) * float("nan"))
    with pytest.raises(Diverged):
        train_sft.main(configure(base, tmp_path, "sft.steps=9", "sft.max_nonfinite_steps=3"))
    assert [record["loss/sft"] for record in logged(tmp_path, "sft")] == ["NaN"] * 3
    assert not (tmp_path / "sft").exists()


# Reinforcement learning

PROMISED = [
    *("reward/mean", "reward/success", "reward/unknown_share", "reward/zero_variance_share"),
    *(f"status/{status}" for status in ("finished", "parse_error", "truncated", "fault")),
    *(f"rollout/{role}_{what}" for role in ("act", "rehearse") for what in ("outputs", "tokens")),
    "rollout/sampled_tokens",
    *(f"advantage/{role}_{what}" for role in ("act", "rehearse") for what in ("count", "mean", "std", "abs_max")),
    *(f"loss/{what}" for what in ("policy", "ratio_mean", "clip_fraction", "kl", "entropy", "skipped_steps")),
    *("lr", "grad_norm", "skipped", "time/rollout", "time/update"),
    *("update/trained_tokens", "throughput/sampled_tokens_per_second", "throughput/trained_tokens_per_second"),
    *("env_calls/training", "eval/real_success", "eval/rehearsed_success", "eval/imagination_gap", "fidelity/round_0"),
]


@pytest.fixture(scope="module")
def rehearsed_run(warm, tmp_path_factory):
    """The folder of two RL steps purely in rehearsal, with rewards as the scorer gives them."""
    folder = tmp_path_factory.mktemp("rl")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(data.SOURCES, "demo", OneTask)
        assert train_rl.main(configure(warm, folder)) == folder / "rl"
    return folder


def test_each_step_logs_everything_that_was_promised(rehearsed_run):
    records = logged(rehearsed_run, "rl")
    assert [record["step"] for record in records] == [0, 1]
    for record in records:
        assert [key for key in PROMISED if key not in record] == []
        assert [key for key in PROMISED if not math.isfinite(record[key])] == []
        assert record["rollout/act_tokens"] > 1 and record["rollout/rehearse_tokens"] > 1
        assert record["throughput/sampled_tokens_per_second"] > 0 < record["throughput/trained_tokens_per_second"]
        assert record["loss/ratio_mean"] == pytest.approx(1, abs=1e-5) and record["loss/clip_fraction"] == 0
        assert record["loss/entropy"] > 0
        # Eight trajectories; what was sampled is what they hold.
        assert record["rollout/sampled_tokens"] == pytest.approx(8 * record["rollout/tokens"])
        assert record["eval/gap_growth"] == "NaN"  # two evaluations are no window of three
    assert records[0]["loss/kl"] == pytest.approx(0, abs=1e-6)


def test_the_files_of_a_run_are_complete(rehearsed_run):
    names = {file.name for file in rehearsed_run.iterdir()}
    assert names == {
        *("rl", "rl.config.yaml", "rl.versions.json", "metrics.jsonl", "trajectories.jsonl", "tensorboard")
    }
    assert any((rehearsed_run / "tensorboard" / "rl").iterdir())
    assert Policy(configure(rehearsed_run / "rl", rehearsed_run).model).world_size == 1


def test_training_in_rehearsal_never_calls_the_real_world(rehearsed_run):
    records = logged(rehearsed_run, "rl")
    assert [record["env_calls/training"] for record in records] == [0, 0]
    assert records[-1]["env_calls/evaluation"] > 0 and records[-1]["env_calls/fidelity"] > 0


def test_every_segment_says_on_what_evidence_it_stands(rehearsed_run, warm):
    records = lines(rehearsed_run / "trajectories.jsonl")
    assert {record["split"] for record in records} == {"train", "eval-real", "eval-rehearsed"}
    assert [len([r for r in records if (r["split"], r["step"]) == ("train", step)]) for step in (0, 1)] == [8, 8]
    kinds = {split: set() for split in ("train", "eval-real", "eval-rehearsed")}
    for record in records:
        for segment in record["segments"]:
            kinds[record["split"]].add((segment["role"], segment["evidence"]))
            if segment["evidence"] == "rehearsed":
                assert segment["provenance"]["model"] == str(warm)
                assert len(segment["provenance"]["prompt_hash"]) == 16
            if segment["evidence"] == "observed":
                assert len(segment["provenance"]["payload_hash"]) == 16
    given, claimed = ("context", "given"), ("act", "claimed")
    assert kinds["train"] == kinds["eval-rehearsed"] == {given, claimed, ("rehearse", "rehearsed")}
    assert kinds["eval-real"] == {given, claimed, ("context", "observed")}
    groups = {record["group_id"] for record in records if (record["split"], record["step"]) == ("train", 0)}
    assert len(groups) == 2


@pytest.mark.slow
def test_the_record_tells_what_the_update_did_to_each_token(rehearsed_run):
    for record in lines(rehearsed_run / "trajectories.jsonl"):
        for segment in record["segments"]:
            is_trained = record["split"] == "train" and segment["role"] != "context"
            assert ("updated_logprobs" in segment) == is_trained
            if is_trained:
                assert len(segment["updated_logprobs"]) == segment["tokens"] == len(segment["logprobs"])
                moved = zip(segment["updated_logprobs"], segment["logprobs"], strict=True)
                assert max(abs(new - old) for new, old in moved) < 0.5  # one small step away


def test_training_in_the_real_world_is_counted_and_rehearses_nothing(warm, tmp_path):
    train_rl.main(configure(warm, tmp_path, "rollout.environment=real"))
    counts = [record["env_calls/training"] for record in logged(tmp_path, "rl")]
    assert 0 < counts[0] < counts[1]
    trained = [record for record in lines(tmp_path / "trajectories.jsonl") if record["split"] == "train"]
    assert {segment["role"] for record in trained for segment in record["segments"]} == {"context", "act"}


def test_training_on_a_constant_response_is_never_rewarded_here(warm, tmp_path):
    train_rl.main(configure(warm, tmp_path, "rollout.environment=constant", "eval.every=0"))
    records = logged(tmp_path, "rl")
    assert [record["reward/mean"] for record in records] == [0, 0]
    assert records[-1]["env_calls/training"] == 0
    trained = [record for record in lines(tmp_path / "trajectories.jsonl") if record["split"] == "train"]
    evidence = {segment["evidence"] for record in trained for segment in record["segments"]}
    assert evidence == {"given", "claimed", "simulated"}
    updated = {r["step"] for r in trained for segment in r["segments"] if "updated_logprobs" in segment}
    assert updated == {1}, "it costs a forward pass, so it is told only of steps that are evaluated"


def test_in_view_separate_rehearsals_are_trained_in_chats_of_their_own(warm, tmp_path, mixed_rewards):
    train_rl.main(configure(warm, tmp_path, "rollout.view=separate", "rl.steps=1"))
    [record] = logged(tmp_path, "rl")
    assert record["rollout/rehearse_outputs"] > 0 and record["advantage/rehearse_abs_max"] > 0
    assert record["grad_norm"] > 1e-3 and record["env_calls/training"] == 0
    trained = [record for record in lines(tmp_path / "trajectories.jsonl") if record["split"] == "train"]
    roles = {(segment["sequence"] > 0, segment["role"]) for record in trained for segment in record["segments"]}
    assert roles == {(False, "context"), (False, "act"), (True, "context"), (True, "rehearse")}


def ratios_of_updates(model, folder, monkeypatch, *overrides):
    """ratio_mean of each optimizer step on one rollout batch."""
    ratios = []
    loss = train_rl.policy_loss

    def watch(*tensors, **settings):
        value, metrics = loss(*tensors, **settings)
        ratios.append(float(metrics["ratio_mean"]))
        return value, metrics

    monkeypatch.setattr(train_rl, "policy_loss", watch)
    train_rl.main(configure(model, folder, "rl.steps=1", "rl.micro_batch_size=64", "eval.every=0", *overrides))
    return ratios


@pytest.mark.slow
def test_of_two_updates_on_a_batch_only_the_first_is_on_policy(base, tmp_path, monkeypatch, mixed_rewards):
    first, second = ratios_of_updates(base, tmp_path, monkeypatch, "rl.updates_per_batch=2", "rl.lr=1e-2")
    assert first == pytest.approx(1, abs=1e-5)
    assert abs(second - 1) > 1e-3
    [record] = logged(tmp_path, "rl")
    assert record["loss/ratio_mean"] == pytest.approx((first + second) / 2, abs=1e-5)


def test_the_first_update_is_on_policy_at_any_temperature(base, tmp_path, monkeypatch, mixed_rewards):
    ratios = ratios_of_updates(base, tmp_path, monkeypatch, "rl.updates_per_batch=2", "sampling.temperature=0.7")
    assert ratios[0] == pytest.approx(1, abs=1e-5)


class Stepping:
    """A policy whose updates go as `norms` say."""

    def __init__(self, norms):
        self.norms, self.lrs, self.skipped_steps = iter(norms), [], 0

    def step(self, lr):
        self.lrs.append(lr)
        norm = next(self.norms)
        return {"grad_norm": norm, "skipped": float(not math.isfinite(norm))}

    def micro_batches(self, rows, size):
        return [rows_to_batch(rows, 0)]

    def accumulating(self, batches):
        return iter(batches)

    def logprobs(self, batch, temperature, *, with_entropy=True):
        return torch.zeros_like(batch.weights, requires_grad=True), torch.full_like(batch.weights, 2.0)

    def backward(self, loss):
        pass

    def sum_over_ranks(self, value):
        return value


@pytest.mark.parametrize(
    ("norms", "norm", "skipped"), [([1.0, 3.0, 2.0], 3.0, 0.0), ([1.0, math.nan, 2.0], math.nan, 1.0)]
)
def test_several_updates_on_a_batch_are_logged_as_one(norms, norm, skipped):
    config = configure("x", "y", "rl.updates_per_batch=3", "rl.kl_coef=0")
    segments = [Segment(Role.CONTEXT, [1, 2], Evidence.GIVEN), Segment(Role.ACT, [3, 4, 5], Evidence.CLAIMED)]
    trajectory = Trajectory(Task("t", "", [], []), "t", sequences=[Sequence(segments)], reward=1.0)
    unknown = replace(trajectory, reward=None)
    policy = Stepping(norms)
    player = Player(policy, {"act": 1.0, "rehearse": 1.0})
    found = train_rl.update(player, [trajectory, unknown], torch.tensor([1.0, 0.0]), 0, config)
    assert len(policy.lrs) == 3
    assert found["grad_norm"] == pytest.approx(norm, nan_ok=True) and found["skipped"] == skipped
    assert found["loss/entropy"] == pytest.approx(2) and found["loss/policy"] == pytest.approx(-1)
    assert found["update/trained_tokens"] == 3 * 5, "of a trajectory whose reward is unknown nothing is trained"


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(warm, tmp_path, mixed_rewards):
    def run(name, seed):
        return train_rl.main(configure(warm, tmp_path / name, f"seed={seed}", "eval.every=0", "eval.tasks=1"))

    first, again, other = run("first", 3), run("again", 3), run("other", 4)
    assert equal_weights(first, again)
    assert not equal_weights(first, other)
    assert not equal_weights(first, warm)

    def texts(name):
        return [[s["text"] for s in t["segments"]] for t in lines(tmp_path / name / "trajectories.jsonl")]

    assert texts("first") == texts("again") != texts("other")


@pytest.mark.parametrize(("kl_coef", "copies"), [(0.0, 0), (0.01, 1)])
def test_a_reference_is_only_kept_where_the_penalty_needs_it(warm, tmp_path, monkeypatch, kl_coef, copies):
    policies = []
    prepare = Policy.prepare_training

    def watch(policy, **settings):
        policies.append(policy)
        prepare(policy, **settings)

    monkeypatch.setattr(Policy, "prepare_training", watch)
    train_rl.main(configure(warm, tmp_path, f"rl.kl_coef={kl_coef}", "rl.steps=1"))
    assert sum(policy.reference is not None for policy in policies) == copies
    assert ("loss/kl" in logged(tmp_path, "rl")[0]) == bool(copies)


def test_a_penalty_alone_pulls_back_towards_the_reference(warm, tmp_path, monkeypatch):
    # Constant rewards: all advantages are 0, and at the reference itself the penalty has no gradient either.
    monkeypatch.setitem(rewards.REWARDS, "goal", lambda trajectory: (1.0, {}))
    train_rl.main(configure(warm, tmp_path, "rl.kl_coef=0.1", "rl.steps=1", "rl.weight_decay=0"))
    [record] = logged(tmp_path, "rl")
    assert record["reward/zero_variance_share"] == 1
    assert record["advantage/act_abs_max"] == record["advantage/rehearse_abs_max"] == 0
    assert record["grad_norm"] < 1e-4


def test_unknown_rewards_leave_the_weights_alone(warm, tmp_path, monkeypatch):
    monkeypatch.setitem(rewards.REWARDS, "goal", lambda trajectory: (None, {}))
    assert equal_weights(train_rl.main(configure(warm, tmp_path)), warm)
    for record in logged(tmp_path, "rl"):
        assert record["reward/unknown_share"] == 1 and record["reward/mean"] == "NaN"
        assert record["loss/skipped_empty"] == 1 and "grad_norm" not in record


@pytest.mark.slow
def test_a_world_that_is_down_makes_rewards_unknown_and_training_goes_on(warm, tmp_path, monkeypatch):
    class Down:
        def execute(self, call):
            raise ServiceFault("the desk is closed")

    executable = OneTask.executable
    up_for = {"evaluation", "fidelity", "final state"}
    monkeypatch.setattr(
        OneTask, "executable", lambda self, task, why: executable(self, task, why) if why in up_for else Down()
    )
    train_rl.main(configure(warm, tmp_path, "rollout.environment=real"))
    records = lines(tmp_path / "trajectories.jsonl")
    called = [record for record in records if record["status"] == "fault"]
    assert called and all(record["reward"] is None and record["reason"] == "the desk is closed" for record in called)


def test_one_unknown_reward_is_neither_a_failure_nor_a_part_of_the_baseline(warm, tmp_path):
    config = configure(warm, tmp_path)
    policy, source = Policy(config.model, seed=1), OneTask(config)
    options = {"environment": "rehearsed", "purpose": "training", "sampling": config.sampling, "samples": 4}
    writers = {role: policy for role in (Role.ACT, Role.REHEARSE)}
    trajectories, _ = unfold(Team(writers, [], {}), [OneTask.task], config, source, Services(config), **options)
    for trajectory, reward in zip(trajectories, (1.0, None, 0.0, 1.0), strict=True):
        trajectory.sequences[0].segments = trajectory.sequences[0].segments[:2]
        trajectory.sequences[1:] = []
        trajectory.reward = reward
    rewards, group_ids, role_ids, _ = output_table(trajectories)
    advantages = rolewise_advantages(rewards, group_ids, role_ids)
    assert advantages.tolist() == pytest.approx([0.5774, 0, -1.1547, 0.5774], abs=1e-4)


@pytest.mark.slow
def test_training_stops_after_too_many_bad_steps_in_a_row(warm, tmp_path, monkeypatch, mixed_rewards):
    loss = train_rl.policy_loss
    bad = iter([True, False, True, True, True])

    def sometimes_nan(*tensors, **settings):
        value, metrics = loss(*tensors, **settings)
        return (value * float("nan") if next(bad) else value), metrics

    monkeypatch.setattr(train_rl, "policy_loss", sometimes_nan)
    overrides = ["rl.steps=9", "rl.micro_batch_size=64", "rl.max_nonfinite_steps=3", "eval.every=0"]
    with pytest.raises(Diverged, match="3 updates in a row"):
        train_rl.main(configure(warm, tmp_path, *overrides))
    records = logged(tmp_path, "rl")
    assert [record["loss/policy"] == "NaN" for record in records] == [True, False, True, True, True]
    assert [record["loss/skipped_steps"] for record in records] == [1, 1, 2, 3, 4]
    assert not (tmp_path / "rl").exists()


def test_nothing_is_evaluated_before_the_end_when_not_asked_for(warm, tmp_path):
    train_rl.main(configure(warm, tmp_path, "eval.every=0", "eval.tasks=1"))
    records = logged(tmp_path, "rl")
    assert ["eval/real_success" in record for record in records] == [False, True]
    evaluated = [record for record in lines(tmp_path / "trajectories.jsonl") if record["split"] == "eval-real"]
    assert len(evaluated) == 1


def test_the_watch_for_reward_hacking_is_fed_and_kept(warm, tmp_path):
    train_rl.main(configure(warm, tmp_path, "rl.steps=3", "eval.tasks=2", "checkpoint.every=3"))
    records = logged(tmp_path, "rl")
    seen = {what: [record[f"eval/{what}_success"] for record in records] for what in ("rehearsed", "real")}
    growth = seen["rehearsed"][2] - seen["real"][2] - seen["rehearsed"][0] + seen["real"][0]
    assert [record["eval/gap_growth"] for record in records] == ["NaN", "NaN", pytest.approx(growth)]
    kept = json.loads((tmp_path / "checkpoints" / "rl" / "step-000003" / "rank0.json").read_text())["stateful"]
    assert kept["gap_watch"] == seen


# Exported models and what became of them


@pytest.fixture(scope="module")
def exported_run(warm, tmp_path_factory):
    """The folder of three RL steps that exported after each second one."""
    folder = tmp_path_factory.mktemp("exports")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(data.SOURCES, "demo", OneTask)
        train_rl.main(configure(warm, folder, "rl.steps=4", "rl.lr=1e-3", *EXPORTING))
    return folder


EXPORTING = ("checkpoint.export_every=2", "eval.every=0", "eval.tasks=1")


def test_models_are_exported_on_the_way(warm, exported_run):
    found = exports(exported_run)
    assert found == {2: exported_run / "exports" / "step-000002", 4: exported_run / "exports" / "step-000004"}
    assert equal_weights(found[4], exported_run / "rl") and not equal_weights(found[2], found[4])
    assert not equal_weights(found[2], warm)
    assert sorted(path.name for path in (exported_run / "exports").iterdir()) == ["step-000002", "step-000004"]


def test_exporting_changes_nothing_that_is_trained(warm, exported_run, tmp_path):
    settings = ["rl.steps=4", "rl.lr=1e-3", "eval.every=0", "eval.tasks=1"]
    assert equal_weights(train_rl.main(configure(warm, tmp_path, *settings)), exported_run / "rl")
    assert not (tmp_path / "exports").exists() and exports(tmp_path) == {}


def test_exports_of_an_earlier_run_are_not_mixed_with_new_ones(warm, tmp_path):
    old = tmp_path / "exports" / "step-000002"
    old.mkdir(parents=True)
    with pytest.raises(
        CheckpointError, match="exports/step-000002 is of an earlier run: use another run_dir, or delete"
    ):
        train_rl.main(configure(warm, tmp_path))
    with pytest.raises(SaveError, match="would replace"):
        train_rl.main(configure(old, tmp_path, "checkpoint.resume=true"))
    assert [path.name for path in tmp_path.iterdir()] == ["exports"]


@pytest.mark.slow
def test_two_policies_are_exported_side_by_side_and_evaluated_together(warm, tmp_path, monkeypatch):
    settings = ("rl.team=per_role", "rl.steps=2", *EXPORTING)
    train_rl.main(configure(warm, tmp_path, *settings))
    assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == ["step-000002", "step-000002_rehearse"]
    assert list(exports(tmp_path)) == [2]
    evaluated = []
    monkeypatch.setattr(evaluate, "main", lambda config: evaluated.append(config) or evaluation_results())
    dynamics.main(configure("unused", tmp_path, *settings))
    assert evaluated[0].model.path == str(tmp_path / "exports" / "step-000002")
    assert evaluated[0].model.rehearse_path == str(tmp_path / "exports" / "step-000002_rehearse")


def evaluation_results():
    return {
        "tasks": 4,
        "samples": 1,
        "real_success": 0.5,
        "ci": (0.25, 0.75),
        "rehearsed_success": float("nan"),
        "rehearsed_ci": (float("nan"), float("nan")),
        "imagination_gap": float("nan"),
        "fidelity_by_round": {"0": 0.5, "1": float("nan")},
        "success_by_rounds": {"1": (0.5, 4)},
    }


@pytest.mark.slow
def test_dynamics_evaluates_every_export_beside_the_records_of_the_run(exported_run):
    before = (exported_run / "metrics.jsonl").read_bytes()
    report = dynamics.main(configure("unused", exported_run, "eval.samples=2"))
    assert json.loads((exported_run / "dynamics.json").read_text()) == json.loads(json.dumps(report))
    assert [entry["step"] for entry in report["curve"]] == [2, 4] and report["tasks"] == 4
    for entry in report["curve"]:
        assert entry["ci"][0] <= entry["real_success"] <= entry["ci"][1]
        assert entry["rehearsed_ci"][0] <= entry["rehearsed_success"] <= entry["rehearsed_ci"][1]
    assert report["last"]["fidelity_by_round"] == report["curve"][-1]["fidelity_by_round"]
    assert sum(count for _, count in report["last"]["success_by_rounds"].values()) == 8
    assert (exported_run / "dynamics.png").read_bytes().startswith(b"\x89PNG")
    assert (exported_run / "metrics.jsonl").read_bytes() == before
    assert (exported_run / "dynamics" / "step-000004" / "evaluation.json").exists()


def test_dynamics_keeps_nan_visible_and_its_file_readable(tmp_path, monkeypatch):
    (tmp_path / "exports" / "step-000010").mkdir(parents=True)
    monkeypatch.setattr(evaluate, "main", lambda config: evaluation_results())
    dynamics.main(configure("unused", tmp_path))
    assert json.loads((tmp_path / "dynamics.json").read_text())["curve"][0]["rehearsed_success"] == "NaN"


def test_dynamics_says_what_it_lacks(tmp_path):
    with pytest.raises(UserError, match="has no exports: train with checkpoint.export_every=10, or set run_dir"):
        dynamics.main(configure("unused", tmp_path))
    records = "data.source=cm2", f"data.path={ROOT / 'tests' / 'data' / 'cm2_rl.json'}"
    with pytest.raises(UserError, match="data.source=cm2 has no executable environment"):
        dynamics.main(configure("unused", tmp_path, *records))


def test_how_often_it_is_evaluated_changes_nothing_that_is_trained(warm, tmp_path):
    often, seldom = (
        train_rl.main(configure(warm, tmp_path / name, "rl.steps=3", *settings))
        for name, settings in [
            ("often", ["eval.every=1", "eval.tasks=3"]),
            ("seldom", ["eval.every=0", "eval.tasks=1"]),
        ]
    )
    assert equal_weights(often, seldom)
    rewards = [[record["reward/mean"] for record in logged(tmp_path / name, "rl")] for name in ("often", "seldom")]
    assert rewards[0] == rewards[1]


# Evaluation


def test_evaluation_reports_success_and_how_sure_it_is(warm, tmp_path):
    results = evaluate.main(configure(warm, tmp_path, "eval.samples=2"))
    assert json.loads((tmp_path / "evaluation.json").read_text()) == json.loads(json.dumps(results))
    assert results["tasks"] == 4 and results["samples"] == 2 and len(results["success_by_task"]) == 4
    assert results["unknown_rewards"] == 0
    assert results["greedy"] == 1.0
    assert results["ci"][0] <= results["real_success"] <= results["ci"][1]
    assert results["real_success"] == pytest.approx(sum(results["success_by_task"]) / 4)
    assert results["imagination_gap"] == pytest.approx(results["rehearsed_success"] - results["real_success"])
    assert 0 < dict(results["fidelity_by_round"])["0"] <= 1
    assert set(results["by_kind"]) == {"status"}
    assert results["rehearsed_ci"][0] <= results["rehearsed_success"] <= results["rehearsed_ci"][1]
    by_rounds = results["success_by_rounds"]
    assert sum(count for _, count in by_rounds.values()) == 8
    assert sum(share * count for share, count in by_rounds.values()) / 8 == pytest.approx(results["real_success"])
    splits = {record["split"] for record in lines(tmp_path / "trajectories.jsonl")}
    assert splits == {"eval-real", "eval-greedy", "eval-rehearsed"}


def test_evaluation_is_repeatable(warm, tmp_path):
    first, again = (evaluate.main(configure(warm, tmp_path / name)) for name in ("first", "again"))
    assert first == again


# The demo's own tasks, from the untrained model on


@pytest.mark.slow
def test_the_stages_run_one_after_another_on_the_demo(base, tmp_path, monkeypatch):
    monkeypatch.setitem(data.SOURCES, "demo", DemoSource)
    sft = train_sft.main(configure(base, tmp_path))
    rl = train_rl.main(configure(sft, tmp_path))
    evaluate.main(configure(rl, tmp_path))
    assert [record["step"] for record in logged(tmp_path, "sft")] == [0, 1]
    assert [record["step"] for record in logged(tmp_path, "rl")] == [0, 1]
    assert [record["step"] for record in logged(tmp_path, "evaluation")] == [0]
    assert (tmp_path / "evaluation.json").exists()


@pytest.mark.slow
def test_a_wrong_key_is_one_line_and_exit_code_2(tmp_path):
    script, config = ROOT / "train_rl.py", ROOT / "configs" / "demo.yaml"
    command = [sys.executable, str(script), "--config", str(config), "sft.lrr=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: unknown key 'sft.lrr' (command line): did you mean sft.lr?\n"
    assert list(tmp_path.iterdir()) == []
