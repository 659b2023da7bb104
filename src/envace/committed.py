"""Evaluation with private rehearsal: every rehearsal first, then a real environment and one execution of each run.

What is done here is evaluate.py's with rehearsal.mode other than none: a memory by `envace.rehearsal`, then the one
execution that sees it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from envace.chat import ChatFormat
from envace.claims import Claim, unsupported_claims
from envace.data import ExecutableSource
from envace.episodes import episode, in_batches, repeated, write_action
from envace.evaluation import (
    assign_rewards,
    by_kind,
    environment_factory,
    interval,
    limits_of,
    mean_or_nan,
    rehearsed,
    right_states,
    success,
    success_by_task,
)
from envace.metrics import execution_metrics
from envace.policy import Policy
from envace.rehearsal import Memory, Rehearsal, Rehearser
from envace.services import Services
from envace.settings import Config
from envace.team import Team
from envace.types import Role, Status, Task, Trajectory, UserError


@dataclass
class Runs:
    """What one evaluation with rehearsal made, of all ranks. trajectories: real ones, those of a task adjacent.

    tokens: sampled, seconds: of wall time, each by phase ("rehearsal", "execution").
    """

    trajectories: list[Trajectory]
    memories: list[Memory]
    tokens: dict[str, float]
    seconds: dict[str, float]

    @property
    def claims(self) -> list[list[Claim]]:
        """Of each run, what its answers state that only its rehearsals tell."""
        imagined = [[rehearsal.trajectory for rehearsal in memory.rehearsals] for memory in self.memories]
        return [unsupported_claims(t, i) for t, i in zip(self.trajectories, imagined, strict=True)]

    @property
    def rehearsals(self) -> list[Rehearsal]:
        return [rehearsal for memory in self.memories for rehearsal in memory.rehearsals]

    @property
    def executions(self) -> list[int]:
        """Of each rehearsal, the index in `trajectories` of the execution that it prepared."""
        return [number for number, memory in enumerate(self.memories) for _ in memory.rehearsals]


def rehearser_of(config: Config, chat: ChatFormat, model: str) -> Rehearser:
    """model: the name that is logged as the author of rehearsed responses."""
    return Rehearser(
        config.rehearsal,
        chat,
        limits_of(config),
        imagine=lambda task: rehearsed(config, model),
        separate=config.rollout.view == "separate",
    )


def rehearse_and_execute(
    team: Team,
    rehearsing: Team,
    tasks: list[Task],
    config: Config,
    source: ExecutableSource,
    services: Services,
    *,
    on_done: Callable[[int], object] = lambda n: None,
) -> Runs:
    """eval.samples runs of each task. rehearsing: the team that rehearses; `team` itself, or one of its own.

    Committed execution: a_k ~ pi(. | x, m_x, h_k), where h_k holds what was really observed
    """
    runs = team.lead.share(repeated(tasks, config.eval.samples))
    together = config.rollout.batch_size
    rehearser = rehearser_of(config, rehearsing.lead.chat, rehearsing.writers[Role.REHEARSE].name)
    memories, tokens, seconds = [Memory("", [], Counter()) for _ in runs], {"rehearsal": 0}, {}
    started = time.perf_counter()
    if config.rehearsal.mode != "candidates" and config.rehearsal.n:
        with rehearsing.generating(config.rehearsal.sampling) as generate:
            # All rehearsals of a task live together in mode parallel.
            tasks_together = max(1, together // config.rehearsal.n)
            memories = in_batches([(task,) for _, task in runs], rehearser.prepare, generate, batch_size=tasks_together)
        tokens["rehearsal"] = generate.sampled_tokens
        if config.rehearsal.shuffle:
            memories = of_other_tasks(memories, config.eval.samples, team.lead)
    seconds["rehearsal"] = time.perf_counter() - started

    # From here on, and not before, there is a real environment.
    environment_for = environment_factory("real", config, source, team, services, "evaluation")
    act = rehearser.choose_action if config.rehearsal.mode == "candidates" and config.rehearsal.n else write_action

    def execute(group_id: str, task: Task, memory: Memory) -> Any:
        unfold = partial(episode, task, environment_for(task), team.lead.chat, limits_of(config))
        return unfold(group_id=group_id, memory=memory.text, act=act)

    started = time.perf_counter()
    with team.generating(config.eval.sampling) as generate:
        items = [(group, task, memory) for (group, task), memory in zip(runs, memories, strict=True)]
        trajectories = in_batches(items, execute, generate, batch_size=together, on_done=on_done)
    tokens["execution"] = generate.sampled_tokens
    seconds["execution"] = time.perf_counter() - started

    assign_rewards(trajectories, config.reward.name)
    policy = team.lead
    return Runs(
        policy.gather(trajectories),
        policy.gather(memories),
        {phase: policy.sum_over_ranks(count) for phase, count in tokens.items()},
        seconds,
    )


def of_other_tasks(memories: list[Memory], samples: int, policy: Policy) -> list[Memory]:
    """The memory of the next task for each run of this rank. `samples`: runs of a task, which are adjacent.

    Raises UserError if there is no other task.
    """
    of_all = policy.gather(memories)
    if len(of_all) <= samples:
        raise UserError("rehearsal.shuffle gives each task the memory of another: evaluate two at least (eval.tasks)")
    return policy.share(of_all[samples:] + of_all[:samples])


def results_of(
    runs: Runs, config: Config, source: ExecutableSource, encode: Callable[[str], list[int]]
) -> dict[str, Any]:
    """What evaluation.json says. unsupported_claims: the share of runs with such an answer; see `envace.claims`.

    Costs are means over runs; seconds are of wall time in which runs share batches.
    """
    real, rehearsals = runs.trajectories, runs.rehearsals
    happened = [t for t in real if t.status is not Status.FAULT]
    by_task = success_by_task(real, config.eval.samples)
    return {
        "real_success": success(real),
        "ci": interval(by_task),
        "unknown_rewards": sum(t.reward is None for t in real),
        "right_final_state": mean_or_nan(right_states(happened, source)),
        "execution": execution_metrics(happened),
        "unsupported_claims": mean_or_nan([float(bool(claims)) for claims in runs.claims]),
        "rehearsal": {
            "mode": config.rehearsal.mode,
            "n": config.rehearsal.n,
            "rehearser": config.rehearsal.path or config.model.path,
            "memory_tokens": mean_or_nan([len(encode(memory.text)) for memory in runs.memories]),
            "left_out": dict(sum((memory.left_out for memory in runs.memories), Counter())),
            **judged(rehearsals, config.reward.name),
        },
        "cost": {
            "tokens_per_run": {phase: count / len(real) for phase, count in runs.tokens.items()},
            "seconds_per_run": {phase: seconds / len(real) for phase, seconds in runs.seconds.items()},
        },
        "by_kind": by_kind(real),
        "success_by_task": by_task,
    }


def judged(rehearsals: list[Rehearsal], reward: str) -> dict[str, float]:
    """How well the policy judges its own rehearsals, by the scorer that judges real runs.

    rehearsed_success: of the imagined trajectories. called_good: share of those with a verdict that have a good one.
    verdict_accuracy: share in which the verdict is the scorer's, among those with both. broken_off, no_verdict: shares.
    """
    trajectories = [rehearsal.trajectory for rehearsal in rehearsals]
    assign_rewards(trajectories, reward)
    spoken = [r for r in rehearsals if r.trajectory.status is Status.FINISHED and r.verdict is not None]
    return {
        "rehearsed_success": success(trajectories),
        "called_good": mean_or_nan([float(r.verdict is True) for r in spoken]),
        "verdict_accuracy": mean_or_nan([float(r.verdict == r.trajectory.succeeded) for r in spoken]),
        "broken_off": mean_or_nan([float(t.status is not Status.FINISHED) for t in trajectories]),
        "no_verdict": mean_or_nan([float(r.verdict is None) for r in rehearsals]),
    }
