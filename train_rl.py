"""Role-wise GRPO purely in rehearsal: the policy acts, answers its own tool calls, and learns from task success.

    python train_rl.py --config configs/demo.yaml model.path=runs/demo/sft [key=value ...]

One step, as the algorithm has it:

| stage       | function                                   | equation                                                 |
| tasks       | Sampler.next                               | x ~ D                                                    |
| episodes    | unfold (rollout over Rehearsed)            | tau_1..K ~ pi(. | x), ACT and REHEARSE in turn           |
| rewards     | assign_rewards over REWARDS                | R_i in [0, 1], None if unknown                           |
| advantages  | group_advantages over BASELINES            | A = (R - mean_{x,role}) / (std_{x,role} + eps)           |
| logprobs    | Policy.logprobs, Policy.ref_logprobs       | log pi, log pi_old, log pi_ref of each token             |
| loss        | policy_loss                                | -min(ratio A, clip(ratio) A) + kl_coef KL(pi || ref)     |
| step        | Policy.backward, Policy.step               | one denominator over all ranks and micro-batches         |
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from envace.advantages import BASELINES, group_advantages
from envace.batching import output_table, rows_from_trajectories, total_weight
from envace.checkpoints import Checkpoints, Stateful, check_exports, export_folder
from envace.console import run
from envace.data import ExecutableSource, Sampler, Source, open_source, tasks_within
from envace.evaluation import GapWatch, assign_rewards, evaluate_team, unfold
from envace.losses import policy_loss
from envace.memory import describe
from envace.metrics import advantage_metrics, rollout_metrics
from envace.policy import check_output, learning_rate
from envace.services import Services
from envace.settings import Config
from envace.team import Player, Team, training_team
from envace.tracking import Tracker, logger, places
from envace.types import Batch, Interruption, Task, Trajectory, UserError

PURPOSES = ("training", "evaluation", "fidelity")  # what the executable environment was called for
HEADLINE = {
    "reward": "reward/mean",
    "kl": "loss/kl",
    "entropy": "loss/entropy",
    "real": "eval/real_success",
    "gap": "eval/imagination_gap",
    "rehearsed": "eval/rehearsed_reward",
}


def main(config: Config) -> Path:
    output = Path(config.run_dir) / "rl"
    for folder in (output, output.with_name("exports")):
        check_output(folder, config.model.path)
    check_exports(config)
    with Services(config) as services:
        train(config, services, output)
    return output


def train(config: Config, services: Services, output: Path) -> None:
    team = training_team(config)
    policy = team.lead
    if policy.is_sharded:
        logger.info(describe(config, policy.model.config, policy.num_parameters, policy.world_size, "rl"))
    source = open_source(config)
    longest, at_once = config.data.max_prompt_tokens, config.rl.prompts_per_step
    train_tasks = tasks_within(source.train_tasks(), policy.chat, longest)
    if len(train_tasks) < at_once:
        raise UserError(
            f"rl.prompts_per_step={at_once} would draw a task twice: there are {len(train_tasks)}; "
            "lower it, or take more tasks (data.train_tasks, data.path, data.max_prompt_tokens)"
        )
    sampler = Sampler(train_tasks, config.seed, [task.id for task in train_tasks])
    held_out = tasks_within(source.eval_tasks(), policy.chat, longest)[: config.eval.tasks or None]
    watch = GapWatch()
    kept: dict[str, Stateful] = {"sampler": sampler, "env_calls": source.counter, "gap_watch": watch}
    checkpoints = Checkpoints(team, config, "rl", kept)
    first = checkpoints.resume()
    with (
        Tracker(
            config.run_dir,
            config,
            name="rl",
            total_steps=config.rl.steps,
            headline=HEADLINE,
            decode=policy.decode,
            enabled=policy.is_main,
            first_step=first,
        ) as tracker,
        checkpoints,
    ):
        for step in range(first, config.rl.steps):
            trajectories, advantages, metrics = take_step(
                team, sampler.next(at_once), config, source, services, step, tracker
            )
            # What the update did to them costs a forward pass of each, so it is told where the policy is looked at.
            recorded = trajectories[: config.record_tokens] if is_due(step, config) else []
            after = team.output_logprobs(recorded, config.sampling.temperature) if recorded else None
            tracker.trajectories(step, "train", trajectories, advantages=advantages, updated_logprobs=after)
            lost = None
            if held_out and is_due(step, config):
                evaluated, lost = evaluate_held_out(team, held_out, config, source, services, step, tracker)
                metrics |= evaluated | watch.evaluated(evaluated)
            metrics |= {f"env_calls/{p}": policy.sum_over_ranks(source.counter.calls[p]) for p in PURPOSES}
            tracker.log(step, metrics)
            for player in team.players:
                player.policy.check_progress()
            if config.checkpoint.export_every and (step + 1) % config.checkpoint.export_every == 0:
                team.save(export_folder(config.run_dir, step + 1))
            checkpoints.after_step(step, config.rl.steps)
            if lost is not None:
                raise lost
        for player in team.players:
            if player.policy.skipped_steps:
                logger.warning("%d steps had no finite gradient and were skipped", player.policy.skipped_steps)
        team.save(output)


def take_step(
    team: Team,
    tasks: list[Task],
    config: Config,
    source: Source,
    services: Services,
    step: int,
    tracker: Tracker,
) -> tuple[list[Trajectory], torch.Tensor, dict[str, float]]:
    """(trajectories of all ranks, an advantage for each of their outputs, metrics) of one step of the algorithm."""
    policy, rl, started = team.lead, config.rl, time.perf_counter()
    mine = policy.share_of(len(tasks) * rl.group_size)
    with tracker.phase(mine, f"step {step + 1}/{rl.steps} rollout") as bar:
        trajectories, sampled_here = unfold(
            team,
            tasks,
            config,
            source,
            services,
            environment=config.rollout.environment,
            purpose="training",
            sampling=config.sampling,
            samples=rl.group_size,
            on_done=bar.update,
        )
    assign_rewards(trajectories, config.reward.name, rl.keep)
    trajectories = policy.gather(trajectories)
    service_metrics = services.end_step(policy.sum_over_ranks)
    sampled_tokens = policy.sum_over_ranks(sampled_here)
    rolled_out = time.perf_counter()

    rewards, group_ids, role_ids, trajectory_ids = output_table(trajectories)
    advantages = group_advantages(
        rewards,
        BASELINES[rl.baseline](group_ids, role_ids),
        normalize_std=rl.normalize_std,
        baseline_over=rl.baseline_over,
        trajectory_ids=trajectory_ids,
    )
    updates = [update(player, trajectories, advantages, step, config) for player in team.players]
    updated = time.perf_counter()

    trained_tokens = sum(found["update/trained_tokens"] for found in updates)
    metrics = {
        **rollout_metrics(trajectories),
        **advantage_metrics(advantages, role_ids, ~rewards.isnan()),
        **service_metrics,
        "rollout/sampled_tokens": sampled_tokens,
        "time/rollout": rolled_out - started,
        "time/update": updated - rolled_out,
        "throughput/sampled_tokens_per_second": sampled_tokens / (rolled_out - started),
        "throughput/trained_tokens_per_second": trained_tokens / (updated - rolled_out),
    }
    for player, found in zip(team.players, updates, strict=True):
        metrics |= player.named(found)
    return trajectories, advantages, metrics


def update(
    player: Player, trajectories: list[Trajectory], advantages: torch.Tensor, step: int, config: Config
) -> dict[str, float]:
    """`updates_per_batch` optimizer steps of one player on one rollout batch.

    Returns means over these steps; of grad_norm the largest, of skipped how many, of lr the last.
    update/trained_tokens: what their forward passes with gradients saw on all ranks, context included.
    """
    policy, rl, temperature = player.policy, config.rl, config.sampling.temperature
    rows = rows_from_trajectories(
        trajectories,
        advantages,
        loss_aggregation=rl.loss_aggregation,
        role_weights=player.role_weights,
    )
    denominator = total_weight(rows)
    batches = policy.micro_batches(rows, rl.micro_batch_size)
    if not batches:
        return {"loss/policy": 0.0, "loss/skipped_empty": 1.0, "update/trained_tokens": 0.0}
    for batch in batches:
        if rl.kl_coef > 0:
            batch.ref_logprobs = policy.ref_logprobs(batch, temperature)
        if rl.updates_per_batch > 1:
            with torch.no_grad():
                batch.old_logprobs, _ = policy.logprobs(batch, temperature, with_entropy=False)

    sums: dict[str, float] = {}
    taken = []
    for number in range(rl.updates_per_batch):
        for batch in policy.accumulating(batches):
            logprobs, entropy = policy.logprobs(batch, temperature)
            loss, metrics = policy_loss(
                logprobs,
                batch.old_logprobs,
                batch.ref_logprobs,
                batch.advantages,
                batch.weights,
                clip_eps_low=rl.clip_eps_low,
                clip_eps_high=rl.clip_eps_high,
                kl_coef=rl.kl_coef,
                kl_estimator=rl.kl_estimator,
                denominator=denominator,
            )
            policy.backward(loss)
            add_metrics(sums, batch, loss, entropy, metrics)
        lr = learning_rate(
            step * rl.updates_per_batch + number,
            steps=rl.steps * rl.updates_per_batch,
            peak=rl.lr,
            warmup=rl.warmup,
            schedule=rl.schedule,
        )
        taken.append(policy.step(lr))
    reduced = {name: policy.sum_over_ranks(value) / rl.updates_per_batch for name, value in sums.items()}
    norms = torch.tensor([step_taken["grad_norm"] for step_taken in taken])
    return {
        "loss/policy": reduced.pop("loss"),
        **{f"loss/{name}": value / max(denominator, 1e-12) for name, value in reduced.items()},
        "loss/skipped_steps": float(policy.skipped_steps),
        "lr": lr,
        "grad_norm": float(norms.max()),  # NaN if one of them is
        "skipped": sum(step_taken["skipped"] for step_taken in taken),
        "update/trained_tokens": float(rl.updates_per_batch * sum(map(len, rows))),
    }


def add_metrics(
    sums: dict[str, float],
    batch: Batch,
    loss: torch.Tensor,
    entropy: torch.Tensor | None,
    metrics: dict[str, torch.Tensor],
) -> None:
    """Add one micro-batch to `sums`, weighted by its tokens, so that the sums divide by the denominator."""
    weight = batch.weights.sum()
    spoken = batch.weights > 0
    values = {
        "loss": loss,
        **({} if entropy is None else {"entropy": (entropy * batch.weights)[spoken].sum()}),
        **{name: value * weight for name, value in metrics.items()},
    }
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + float(value.detach())


def is_due(step: int, config: Config) -> bool:
    """Whether to evaluate after this step; the last one always is."""
    last = step == config.rl.steps - 1
    return last or (config.eval.every > 0 and (step + 1) % config.eval.every == 0)


def evaluate_held_out(
    team: Team,
    tasks: list[Task],
    config: Config,
    source: Source,
    services: Services,
    step: int,
    tracker: Tracker,
) -> tuple[dict[str, float], Interruption | None]:
    """Held-out tasks, real (if there is an environment) and rehearsed. No checkpoint is chosen by it.

    A judge that is gone is returned and not raised: the step is done, and shall be recorded and saved first.
    """
    started = time.perf_counter()
    policy = team.lead
    runs = policy.share_of(len(tasks) * config.eval.samples) * (1 + isinstance(source, ExecutableSource))
    with tracker.phase(runs, f"step {step + 1}/{config.rl.steps} evaluation") as bar, policy.own_randomness():
        metrics, trajectories = evaluate_team(team, tasks, config, source, services, on_done=bar.update)
    lost = None
    try:
        metrics |= {f"eval/{name}": value for name, value in services.end_step(policy.sum_over_ranks).items()}
    except Interruption as interruption:
        lost = interruption
        logger.error("the evaluation after step %d is incomplete: resume, then make it up with evaluate.py", step + 1)
    for environment, unfolded in trajectories.items():
        tracker.trajectories(step, f"eval-{environment}", unfolded)
    return metrics | {"time/eval": time.perf_counter() - started}, lost


def summary(config: Config, output: Path) -> dict[str, str]:
    rehearse = f" model.rehearse_path={output}_rehearse" if config.rl.team == "per_role" else ""
    found = places(config, "rl", weights=output)
    return found | {"next": f'make eval CONFIG={found["config"]} ARGS="model.path={output}{rehearse}"'}


if __name__ == "__main__":
    run(main, __doc__, summary)
