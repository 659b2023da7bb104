"""Held-out evaluation with the rollout code of training: real success, rehearsed success, and what lies between.

- real success: the share of held-out tasks solved in the real environment;
- right final state: the share of real episodes that leave the environment as right work would (never rewarded);
- rehearsed success: the same tasks, the same scorer, the policy's own responses;
- imagination gap: rehearsed minus real success, over the tasks whose reward is known in both;
- rehearsal fidelity: the share of JSON fields in a rehearsed response that equal the real environment's response after
  the same calls, by interaction round.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from envace.config import Config, SamplingConfig
from envace.data import Source
from envace.environments import Constant, Environment, Real, Rehearsed
from envace.episodes import rollout
from envace.metrics import fidelity_shares, rehearsal_fidelity
from envace.policy import Policy
from envace.types import Limits, Status, Task, Trajectory

CONSTANT_RESPONSE = {"ok": True}


def environment_factory(
    name: str, config: Config, source: Source, policy: Policy, purpose: str
) -> Callable[[Task], Environment]:
    """task -> a fresh environment for one episode. name: as in rollout.environment."""
    return {
        "rehearsed": lambda task: Rehearsed(separate=config.rollout.view == "separate", model=policy.name),
        "constant": lambda task: Constant(CONSTANT_RESPONSE),
        "real": lambda task: Real(source.executable(task, purpose)),
    }[name]


def limits_of(config: Config) -> Limits:
    r = config.rollout
    return Limits(r.max_rounds, r.max_parallel_calls, r.max_context_tokens, r.max_new_tokens)


def unfold(
    policy: Policy,
    tasks: list[Task],
    config: Config,
    source: Source,
    *,
    environment: str,
    purpose: str,
    sampling: SamplingConfig,
    samples: int,
    on_done: Callable[[int], object] = lambda n: None,
) -> tuple[list[Trajectory], int]:
    """(trajectories, sampled tokens) of this rank's share of `tasks` x `samples`, without rewards.

    `policy.gather` makes the whole of them: those of one task adjacent, in the order of `tasks`.
    """
    factory = environment_factory(environment, config, source, policy, purpose)
    with policy.generating(sampling) as generate:
        trajectories = rollout(
            tasks,
            generate,
            factory,
            policy.chat,
            limits_of(config),
            samples=samples,
            share=policy.share,
            batch_size=config.rollout.batch_size,
            on_done=on_done,
        )
    return trajectories, generate.sampled_tokens


def assign_rewards(trajectories: list[Trajectory], source: Source) -> None:
    for trajectory in trajectories:
        trajectory.reward, trajectory.reward_parts = source.score(trajectory)


def evaluate_policy(
    policy: Policy,
    tasks: list[Task],
    config: Config,
    source: Source,
    *,
    on_done: Callable[[int], object] = lambda n: None,
) -> tuple[dict[str, float], dict[str, list[Trajectory]]]:
    """(metrics, trajectories by environment) of eval.samples sampled runs, real and rehearsed."""
    unfolded, mine = {}, {}
    for environment in ("real", "rehearsed"):
        mine[environment], _ = unfold(
            policy,
            tasks,
            config,
            source,
            environment=environment,
            purpose="evaluation",
            sampling=config.eval.sampling,
            samples=config.eval.samples,
            on_done=on_done,
        )
        assign_rewards(mine[environment], source)
        unfolded[environment] = policy.gather(mine[environment])
    real, rehearsed = unfolded["real"], unfolded["rehearsed"]
    happened = [t for t in mine["real"] if t.status is not Status.FAULT]
    right_states = policy.gather([float(source.reaches_right_state(t)) for t in happened])
    counts = rehearsal_fidelity(mine["rehearsed"], lambda task: source.executable(task, "fidelity"))
    fidelity = fidelity_shares(policy.gather(list(counts.items())))
    metrics = {
        "eval/real_success": success(real),
        "eval/right_final_state": mean_or_nan(right_states),
        "eval/rehearsed_success": success(rehearsed),
        "eval/imagination_gap": imagination_gap(real, rehearsed, config.eval.samples),
        "eval/truncated": mean_or_nan([float(t.status is Status.TRUNCATED) for t in real]),
        "eval/rehearsed_parse_error": mean_or_nan([float(t.status is Status.PARSE_ERROR) for t in rehearsed]),
        **{f"fidelity/round_{number}": share for number, share in fidelity.items()},
    }
    return metrics, unfolded


def success(trajectories: list[Trajectory]) -> float:
    """The share of known rewards that are 1; NaN if none is known."""
    return mean_or_nan([float(t.reward == 1.0) for t in trajectories if t.reward is not None])


def success_by_task(trajectories: list[Trajectory], samples: int) -> list[float | None]:
    """The success of each task's `samples` adjacent runs, None where no reward is known."""
    groups = [trajectories[i : i + samples] for i in range(0, len(trajectories), samples)]
    return [None if all(t.reward is None for t in group) else success(group) for group in groups]


def known_pairs(after: list[float | None], before: list[float | None]) -> tuple[list[float], list[float]]:
    """The entries of tasks that are known in both lists."""
    pairs = [(a, b) for a, b in zip(after, before, strict=True) if a is not None and b is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]


def imagination_gap(real: list[Trajectory], rehearsed: list[Trajectory], samples: int) -> float:
    """Rehearsed minus real success over the tasks known in both; NaN if there is none."""
    imagined, happened = known_pairs(success_by_task(rehearsed, samples), success_by_task(real, samples))
    return mean_or_nan(imagined) - mean_or_nan(happened)


def mean_or_nan(values: list[float]) -> float:
    return fmean(values) if values else float("nan")
