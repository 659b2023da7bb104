"""What tests/test_zero3.py runs on ranks of its own: scenarios one after the other, results in files.

    torchrun --nproc_per_node 2 tests/zero3_worker.py FOLDER scenario ...

FOLDER holds the models `base` and `adapter` and gets <scenario>.<rank>.pt. Start-up takes longer than a scenario.
"""

import gc
import json
import os
import signal
import sys
from pathlib import Path

import deepspeed.comm.torch
import torch
from accelerate.state import AcceleratorState, GradientState
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

import train_rl
import train_sft
from envace.batching import Row, total_weight
from envace.config import load_config
from envace.data import Sampler
from envace.losses import policy_loss, sft_loss
from envace.outage import EndpointOutage
from envace.policy import Diverged, Policy
from envace.services import Services
from envace.settings import LoraConfig, ModelConfig, PolicyConfig, SamplingConfig
from envace.types import Evidence, Request, Role, Segment, Sequence

ROOT = Path(__file__).parents[1]
SETTINGS = {"lr": 1e-3, "weight_decay": 0.01, "grad_clip": 1.0, "max_nonfinite_steps": 3}
KL_COEF = 0.1
UPDATES = 5


def make_rows(lengths=(3, 9, 4, 7, 2, 12, 5)):
    """Uneven rows with advantages of both signs; dealt to two ranks they are 4 and 3."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for number, n in enumerate(lengths):
        ids = [5, 6, 7, 8, *torch.randint(10, 300, (n,), generator=draw).tolist()]
        roles = [int(Role.CONTEXT)] * 4 + [int(Role.ACT)] * (n - 1) + [int(Role.REHEARSE)]
        weights = [0.0] * 4 + [1.0] * (n - 1) + [0.5]
        rows.append(Row(ids, roles, weights, [0.0] * 4 + [(-1.0) ** number * (0.5 + number)] * n))
    return rows


def deepspeed_file(folder):
    """The project's own settings, but every weight is partitioned, however small; and with what a user may leave."""
    config = json.loads((ROOT / "configs" / "deepspeed" / "zero3.json").read_text())
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    del config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"]
    config |= {"gradient_clipping": "auto", "train_batch_size": "auto"}
    path = folder / f"zero3.{torch.distributed.get_rank() if torch.distributed.is_initialized() else 0}.json"
    path.write_text(json.dumps(config))
    return str(path)


def _reset():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()


def fresh_policy(folder, *, model="base", dtype="float32", with_reference=True, **sharding):
    """A policy as a new process would make it."""
    _reset()
    if model == "adapter":
        sharding["lora"] = LoraConfig(r=4)
    policy = Policy(
        ModelConfig(path=str(folder / model), dtype=dtype),
        PolicyConfig(deepspeed=deepspeed_file(folder), cpu=True, logprob_chunk=4, **sharding),
        training=True,
    )
    policy.prepare_training(**SETTINGS, with_reference=with_reference)
    return policy


def trained(policy):
    named = [(name.removeprefix("lm."), p) for name, p in policy.scorer.named_parameters() if p.requires_grad]
    return dict(named)


def whole_weights(policy):
    return {name: safe_get_full_fp32_param(p).clone() for name, p in trained(policy).items()}


def accumulate(policy, rows, kind, size, *, denominator_factor=1.0, drop_rank=None):
    denominator = denominator_factor * total_weight(rows)
    for batch in policy.accumulating(policy.micro_batches(rows, size)):
        reference = policy.ref_logprobs(batch, 1.0) if kind == "rl" else None
        logprobs, _ = policy.logprobs(batch, 1.0)
        weights = batch.weights * (policy.rank != drop_rank)
        if kind == "rl":
            settings = {"kl_coef": KL_COEF, "kl_estimator": "k3", "denominator": denominator}
            loss, _ = policy_loss(logprobs, None, reference, batch.advantages, weights, **settings)
        else:
            loss = sft_loss(logprobs, weights, denominator=denominator)
        policy.backward(loss)


def updates(folder, kind, model, size, *, count=UPDATES, sharding=None, **broken):
    policy, rows = fresh_policy(folder, model=model, **(sharding or {})), make_rows()
    found = {"start": whole_weights(policy)}
    for number in range(count):
        accumulate(policy, rows, kind, size, **broken)
        if number == 0:
            found["gradients"] = {name: safe_get_full_grad(p).clone() for name, p in trained(policy).items()}
        found["grad_norm"] = policy.step(SETTINGS["lr"])["grad_norm"]
    return found | {"end": whole_weights(policy)}


def sampled(policy, prompts, *, budgets, stops=frozenset()):
    """The outputs of streams on this rank, `budgets[i]` tokens in turn i; a rank with fewer turns is done earlier."""
    streams = [Sequence([Segment(Role.CONTEXT, list(ids), Evidence.GIVEN)]) for ids in prompts]
    turns = []
    with policy.generating(SamplingConfig(0.0)) as generate:
        for budget in budgets:
            completions = generate([Request(s, Role.ACT, stops, budget) for s in streams])
            for stream, completion in zip(streams, completions, strict=True):
                stream.segments.append(Segment(Role.ACT, completion.ids, Evidence.CLAIMED))
                stream.segments.append(Segment(Role.CONTEXT, [9, 8], Evidence.GIVEN))
            turns.append([completion.ids for completion in completions])
    return turns


def ragged_turns(folder, rollout_weights):
    """One rank has one turn, the other three, then both train: [turns], the loss of an update, forward passes."""
    policy = fresh_policy(folder, rollout_weights=rollout_weights)
    accumulate(policy, make_rows(), "rl", 2)
    policy.step(SETTINGS["lr"])
    forwards = []
    hook = policy.model.model.embed_tokens.register_forward_hook(lambda *_: forwards.append(1))
    prompts = [[[5, 6, 7]], [[5, 6, 7, 8, 10], [5, 6]]][policy.rank]
    turns = sampled(policy, prompts, budgets=[[2], [5, 3, 4]][policy.rank])
    hook.remove()
    accumulate(policy, make_rows(), "rl", 2)
    norm = policy.step(SETTINGS["lr"])["grad_norm"]
    return {"turns": turns, "forwards": len(forwards), "grad_norm": norm, "weights": whole_weights(policy)}


def no_generation(folder):
    """Two updates as in ragged_turns, with nothing sampled in between."""
    return {"grad_norm": updates(folder, "rl", "base", 2, count=2)["grad_norm"]}


def save_and_tell(folder, model):
    policy = fresh_policy(folder, model=model)
    accumulate(policy, make_rows(), "rl", 2)
    policy.step(0.1)
    policy.save(folder / f"saved-{model}")
    [batch] = policy.micro_batches(make_rows()[:1] * 2, 1)
    with torch.no_grad():
        logprobs, _ = policy.logprobs(batch, 1.0)
    return {"logprobs": logprobs}


def optimizer_states(policy):
    keys = ("exp_avg", "exp_avg_sq")
    return [safe_get_full_optimizer_state(p, key).clone() for p in trained(policy).values() for key in keys]


def lora_start(folder, model, **settings):
    """KL to the reference before and after an update with adapters, rollouts between: new ones, or those of an SFT."""
    if model == "base":
        settings["lora"] = LoraConfig(r=4)
    policy, rows = fresh_policy(folder, model=model, **settings), make_rows()
    found = {"kl": []}
    for _ in range(2):
        [batch, *_] = policy.micro_batches(rows, 2)
        with torch.no_grad():
            logprobs, _ = policy.logprobs(batch, 1.0)
        found["kl"].append(float((policy.ref_logprobs(batch, 1.0) - logprobs).abs().max()))
        sampled(policy, [[5, 6, 7]], budgets=[2])
        accumulate(policy, rows, "rl", 2)
        policy.step(0.01)
    return found | {"trained": sorted(trained(policy))}


def nothing_to_train(folder):
    """A step without a backward pass."""
    policy = fresh_policy(folder)
    before = whole_weights(policy)
    stepped = policy.step(0.1)
    return stepped | {"unchanged": all(torch.equal(before[name], w) for name, w in whole_weights(policy).items())}


def bad_gradients(folder, dtype):
    """An update, a bad one (only the last rank's loss is NaN), a good one, then bad ones until it stops."""
    policy, rows = fresh_policy(folder, dtype=dtype), make_rows()

    def update(factor):
        for batch in policy.accumulating(policy.micro_batches(rows, 2)):
            logprobs, _ = policy.logprobs(batch, 1.0)
            bad = factor if policy.rank == policy.world_size - 1 else 1.0
            policy.backward(sft_loss(logprobs * bad, batch.weights, denominator=total_weight(rows)))
        return policy.step(1e-2)

    found = {"good": update(1.0)}
    before = whole_weights(policy), optimizer_states(policy)
    found["bad"] = update(float("nan"))
    after = whole_weights(policy), optimizer_states(policy)
    found["unchanged"] = all(torch.equal(before[0][name], after[0][name]) for name in before[0]) and all(
        torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True)
    )
    found["skipped"] = policy.skipped_steps
    found["again"] = update(1.0)
    found["moved"] = any(not torch.equal(w, after[0][name]) for name, w in whole_weights(policy).items())
    try:
        for _ in range(5):
            update(float("inf"))
            policy.check_progress()
            found["infinite"] = policy.skipped_in_a_row
    except Diverged as error:
        found["stopped"] = str(error)
    return found


def shares(folder):
    policy = fresh_policy(folder)
    items = list(range(5))
    return {
        "share": policy.share(items),
        "gathered": policy.gather(policy.share(items)),
        "any": policy.any_rank(policy.rank == 1),
        "random": torch.rand(1).item(),
    }


def idle_rank(folder):
    """A batch of one row: one rank has a micro-batch, the other none."""
    policy = fresh_policy(folder)
    accumulate(policy, make_rows()[:1], "rl", 1)
    return {"gradients": {name: safe_get_full_grad(p).clone() for name, p in trained(policy).items()}}


class LosesItsJudge(Services):
    """One rank loses the judge in the third step; all ranks hear of it as they do from a real one."""

    steps = 0

    def end_step(self, total):
        self.steps += 1
        if total(torch.distributed.get_rank() == 1 and self.steps == 3):
            raise EndpointOutage("the judge is gone")
        return {}


def train(folder, stage, run_dir, *, stop_at=None, resume=False, services=Services):
    """One stage by its entry point, 5 steps of an epoch of 4. `stop_at`: one rank gets SIGTERM in that step."""
    _reset()
    sampler_next, drawn = Sampler.next, []

    def interrupted(sampler, n):
        drawn.append(n)
        if len(drawn) == stop_at and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return sampler_next(sampler, n)

    settings = [
        *("data.demonstrations=8", "data.train_tasks=8", "data.eval_tasks=4", "eval.every=3", "eval.tasks=3"),
        *("sft.steps=5", "sft.batch_size=2", "sft.micro_batch_size=1", "rl.steps=5", "rl.prompts_per_step=2"),
        *("rl.group_size=3", "rl.micro_batch_size=2", "rl.lr=3e-3", "rl.kl_coef=0.1", "rl.updates_per_batch=2"),
        *("rollout.max_rounds=2", "rollout.max_new_tokens=6", f"policy.deepspeed={deepspeed_file(folder)}"),
        *("policy.cpu=true", f"model.path={folder / 'base'}", f"run_dir={folder / run_dir}"),
        *(f"checkpoint.resume={str(resume).lower()}", "checkpoint.export_every=2"),
    ]

    def reward(trajectories, name, keep):
        for trajectory in trajectories:
            trajectory.reward = float(trajectory.sequences[0].ids[-1] % 2)

    # An untrained model earns nothing, and without rewards that differ there would be no policy gradient.
    assign_rewards, train_rl.assign_rewards = train_rl.assign_rewards, reward
    Sampler.next = interrupted
    train_rl.Services = services
    try:
        {"sft": train_sft, "rl": train_rl}[stage].main(load_config(str(ROOT / "configs" / "demo.yaml"), settings))
        return {"exit": None}
    except SystemExit as stopped:
        return {"exit": stopped.code}
    except EndpointOutage as outage:
        return {"exit": str(outage)}
    finally:
        train_rl.Services = Services
        Sampler.next, train_rl.assign_rewards = sampler_next, assign_rewards


SCENARIOS = {
    **{
        f"{kind}-{model}-{size}": lambda folder, kind=kind, model=model, size=size: updates(folder, kind, model, size)
        for kind in ("sft", "rl")
        for model in ("base", "adapter")
        for size in (1, 4)
    },
    "packed": lambda folder: updates(folder, "rl", "base", 1, count=1, sharding={"pack_tokens": 24}),
    "recomputed": lambda folder: updates(folder, "rl", "base", 1, count=1, sharding={"gradient_checkpointing": True}),
    "offloaded": lambda folder: updates(folder, "rl", "base", 4, count=2, sharding={"offload_reference": True}),
    "doubled": lambda folder: updates(folder, "rl", "base", 4, count=1, denominator_factor=2.0),
    "dropped": lambda folder: updates(folder, "rl", "base", 4, count=1, drop_rank=1),
    "gathered": lambda folder: ragged_turns(folder, "gathered"),
    "partitioned": lambda folder: ragged_turns(folder, "partitioned"),
    "no_generation": no_generation,
    "save": lambda folder: save_and_tell(folder, "base"),
    "save_adapter": lambda folder: save_and_tell(folder, "adapter"),
    "bad-float32": lambda folder: bad_gradients(folder, "float32"),
    "bad-bfloat16": lambda folder: bad_gradients(folder, "bfloat16"),
    "lora-new": lambda folder: lora_start(folder, "base"),
    "lora-adapter-bfloat16": lambda folder: lora_start(
        folder, "adapter", dtype="bfloat16", gradient_checkpointing=True, pack_tokens=24
    ),
    "nothing": nothing_to_train,
    "shares": shares,
    "idle_rank": idle_rank,
    **{
        f"{stage}-{name}": lambda folder, stage=stage, run=f"{stage}-{run}", settings=settings: train(
            folder, stage, run, **settings
        )
        for stage in ("sft", "rl")
        for name, run, settings in [
            ("straight", "straight", {}),
            ("stopped-3", "at-3", {"stop_at": 3}),
            ("resumed-3", "at-3", {"resume": True}),
            ("stopped-4", "at-4", {"stop_at": 4}),
            ("resumed-4", "at-4", {"resume": True}),
        ]
    },
    "rl-judge-gone": lambda folder: train(folder, "rl", "rl-without-judge", services=LosesItsJudge),
    "rl-judge-back": lambda folder: train(folder, "rl", "rl-without-judge", resume=True),
}


def main():
    # DeepSpeed would compile a shared-memory extension for minutes; gloo alone is right, too. The attribute of that
    # name is another module.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for name in names:
        found = SCENARIOS[name](folder)
        torch.save(found, folder / f"{name}.{torch.distributed.get_rank()}.pt")
    torch.distributed.barrier()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
