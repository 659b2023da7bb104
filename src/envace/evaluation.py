"""Held-out evaluation with the rollout code of training: real success, rehearsed success, and what lies between.

- real success: the share of held-out tasks solved in the real environment;
- right final state: the share of real episodes that leave the environment as right work would (never rewarded);
- rehearsed success: the same tasks, the same scorer, the policy's own responses;
- imagination gap: rehearsed minus real success, over the tasks whose reward is known in both;
- rehearsal fidelity: the share of JSON fields in a rehearsed response that equal the real environment's response after
  the same calls, by interaction round.

Data without an executable environment (CM2) has only what rehearsal tells: rehearsed success and reward.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch

from envace.data import ExecutableSource, Source
from envace.environments import Constant, Environment, Real, Recorded, Rehearsed, Remote, SchemaCheck, Simulated
from envace.episodes import rollout
from envace.filters import FILTERS
from envace.gate import Gate
from envace.metrics import bootstrap_ci, fidelity_shares, gap_growth, is_reward_hacking, rehearsal_fidelity
from envace.policy import Policy
from envace.prompts import not_recorded_error
from envace.rewards import REWARDS
from envace.services import Services
from envace.settings import Config, SamplingConfig
from envace.team import Team
from envace.types import FILTERED, Limits, Result, Role, ServiceFault, Status, Task, Trajectory, UserError

CONSTANT_RESPONSE = {"ok": True}
logger = logging.getLogger("envace")


def environment_factory(
    name: str, config: Config, source: Source, team: Team, services: Services, purpose: str
) -> Callable[[Task], Environment]:
    """task -> a fresh environment for one episode. name: as in rollout.environment."""

    def real(task: Task) -> Environment:
        if not isinstance(source, ExecutableSource):
            raise UserError("this data has no executable environment: set rollout.environment=rehearsed")
        return guarded(Real(source.executable(task, purpose)), config, team)

    def mixed(task: Task) -> Environment:
        # Drawn from torch's random state, which checkpoints restore.
        shares = config.rollout.mixture
        index = int(torch.multinomial(torch.tensor(list(shares.values())), 1))
        return factories[list(shares)[index]](task)

    factories: dict[str, Callable[[Task], Environment]] = {
        "rehearsed": lambda task: rehearsed(config, team.writers[Role.REHEARSE].name),
        "simulated": lambda task: simulated(config, services),
        "recorded": lambda task: Recorded(Constant(not_recorded_error())),
        "constant": lambda task: Constant(CONSTANT_RESPONSE),
        "real": real,
        "mixed": mixed,
    }
    return factories[name]


def rehearsed(config: Config, model: str) -> Environment:
    """The policy's own world for one episode, in the layers that the settings put around it."""
    return layered(
        Rehearsed(separate=config.rollout.view == "separate", grounded=is_grounded(config), model=model), config
    )


def is_grounded(config: Config) -> bool:
    return config.rehearse.grounding == "earlier_recorded_calls"


def layered(environment: Environment, config: Config) -> Environment:
    """What is in the reference dialogue is not imagined, and what breaks a tool's schema is not answered."""
    if config.rehearse.reuse_recorded:
        environment = Recorded(environment)
    return SchemaCheck(environment) if config.rehearse.schema_check else environment


def guarded(inner: Environment, config: Config, team: Team) -> Environment:
    """A real environment behind the gate that the settings ask for."""
    if config.gate.mode == "none":
        return inner
    return Gate(inner, rehearsed(config, team.writers[Role.REHEARSE].name), config.gate)


def simulated(config: Config, services: Services) -> Environment:
    """Another model as the world of one episode: behind an endpoint, or one that the team has loaded.

    In the same layers as a rehearsal, so that what is compared is who imagines.
    """
    if services.simulate is not None:
        remote = Remote(services.simulate, config.simulator_endpoint.model, grounded=is_grounded(config))
        return layered(remote, config)
    separate = config.rollout.view == "separate"
    return layered(Simulated(separate=separate, grounded=is_grounded(config), model=config.simulator.path), config)


def limits_of(config: Config) -> Limits:
    r = config.rollout
    return Limits(r.max_rounds, r.max_parallel_calls, r.max_context_tokens, r.max_new_tokens)


def unfold(
    team: Team,
    tasks: list[Task],
    config: Config,
    source: Source,
    services: Services,
    *,
    environment: str,
    purpose: str,
    sampling: SamplingConfig,
    samples: int,
    on_done: Callable[[int], object] = lambda n: None,
) -> tuple[list[Trajectory], int]:
    """(trajectories, sampled tokens) of this rank's share of `tasks` x `samples`, without rewards.

    `Policy.gather` makes the whole of them: those of one task adjacent, in the order of `tasks`.
    """
    factory = environment_factory(environment, config, source, team, services, purpose)
    with team.generating(sampling) as generate:
        trajectories = rollout(
            tasks,
            generate,
            factory,
            team.lead.chat,
            limits_of(config),
            end_turn=services.end_turn,
            samples=samples,
            share=team.lead.share,
            batch_size=config.rollout.batch_size,
            on_done=on_done,
        )
    return trajectories, generate.sampled_tokens


def assign_rewards(trajectories: list[Trajectory], name: str, keep: str = "all") -> None:
    """name: a key of REWARDS. keep: a key of FILTERS; what that leaves out has an unknown reward."""
    for trajectory in trajectories:
        trajectory.reward, trajectory.reward_parts = REWARDS[name](trajectory)
        if problem := FILTERS[keep](trajectory):
            trajectory.reward, trajectory.reason = None, f"{FILTERED}{problem}"


def evaluate_team(
    team: Team,
    tasks: list[Task],
    config: Config,
    source: Source,
    services: Services,
    *,
    on_done: Callable[[int], object] = lambda n: None,
) -> tuple[dict[str, float], dict[str, list[Trajectory]]]:
    """(metrics, trajectories by environment) of eval.samples sampled runs, real (if there is one) and rehearsed."""
    unfolded, mine, gather = {}, {}, team.lead.gather
    for environment in ("real", "rehearsed") if isinstance(source, ExecutableSource) else ("rehearsed",):
        mine[environment], _ = unfold(
            team,
            tasks,
            config,
            source,
            services,
            environment=environment,
            purpose="evaluation",
            sampling=config.eval.sampling,
            samples=config.eval.samples,
            on_done=on_done,
        )
        assign_rewards(mine[environment], config.reward.name)
        unfolded[environment] = gather(mine[environment])
    imagined = unfolded["rehearsed"]
    metrics = {
        "eval/rehearsed_success": success(imagined),
        "eval/rehearsed_reward": mean_or_nan([t.reward for t in imagined if t.reward is not None]),
        "eval/rehearsed_parse_error": mean_or_nan([float(t.status is Status.PARSE_ERROR) for t in imagined]),
        "eval/unknown_rewards": mean_or_nan([float(t.reward is None) for t in imagined]),
    }
    if isinstance(source, ExecutableSource):
        metrics |= against_reality(team.lead, mine, unfolded, config, source)
    return metrics, unfolded


def against_reality(
    policy: Policy,
    mine: dict[str, list[Trajectory]],
    unfolded: dict[str, list[Trajectory]],
    config: Config,
    source: ExecutableSource,
) -> dict[str, float]:
    """What only an executable environment can tell. mine: this rank's trajectories; unfolded: those of all ranks."""
    real = unfolded["real"]
    happened = [t for t in mine["real"] if t.status is not Status.FAULT]
    states = policy.gather(right_states(happened, source))
    counts = unbroken(
        lambda t: rehearsal_fidelity([t], lambda task: source.executable(task, "fidelity")), mine["rehearsed"]
    )
    fidelity = fidelity_shares(policy.gather([pair for count in counts for pair in count.items()]))
    return {
        "eval/real_success": success(real),
        "eval/right_final_state": mean_or_nan(states),
        "eval/imagination_gap": imagination_gap(real, unfolded["rehearsed"], config.eval.samples),
        "eval/truncated": mean_or_nan([float(t.status is Status.TRUNCATED) for t in real]),
        **{f"fidelity/round_{number}": share for number, share in fidelity.items()},
    }


def right_states(trajectories: list[Trajectory], source: ExecutableSource) -> list[float]:
    """1 if a trajectory leads to the right state, else 0; without those of which the environment cannot tell."""
    return [float(state) for state in unbroken(source.reaches_right_state, trajectories) if state is not None]


def unbroken(measure: Callable[[Trajectory], Result], trajectories: list[Trajectory]) -> list[Result]:
    """`measure` of each trajectory; those at which the environment breaks are left out, and told in the log."""
    measured = []
    for trajectory in trajectories:
        try:
            measured.append(measure(trajectory))
        except ServiceFault as fault:
            logger.warning("left out of a comparison with the environment: task %s: %s", trajectory.task.id, fault)
    return measured


class GapWatch:
    """Sees reward hacking through rehearsal: over the last `window` evaluations of a training rehearsed success rises,
    real success does not. `Checkpoints` keeps what it has seen. Without a real environment it does nothing."""

    def __init__(self, window: int = 3):
        self.window = window
        self.rehearsed: list[float] = []
        self.real: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rehearsed": self.rehearsed, "real": self.real}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rehearsed, self.real = state["rehearsed"], state["real"]

    def evaluated(self, metrics: dict[str, float]) -> dict[str, float]:
        """metrics: of one evaluation. Returns eval/gap_growth over the window, NaN until that many were made; warns."""
        if "eval/real_success" not in metrics:
            return {}
        # New lists: a state that was handed out stays what it was.
        self.rehearsed = [*self.rehearsed, metrics["eval/rehearsed_success"]][-self.window :]
        self.real = [*self.real, metrics["eval/real_success"]][-self.window :]
        if len(self.real) < self.window:
            return {"eval/gap_growth": float("nan")}
        growth = gap_growth(self.rehearsed, self.real)
        if is_reward_hacking(self.rehearsed, self.real):
            logger.warning(
                "reward hacking? Over the last %d evaluations rehearsed success rose from %.3f to %.3f while real "
                "success went from %.3f to %.3f: the imagination gap grew by %.1f points",
                self.window,
                *(self.rehearsed[0], self.rehearsed[-1], self.real[0], self.real[-1]),
                100 * growth,
            )
        return {"eval/gap_growth": growth}


def success(trajectories: list[Trajectory]) -> float:
    """The share of known rewards that are 1; NaN if none is known."""
    return mean_or_nan([float(t.succeeded) for t in trajectories if t.reward is not None])


def success_by_task(trajectories: list[Trajectory], samples: int) -> list[float | None]:
    """The success of each task's `samples` adjacent runs, None where no reward is known."""
    groups = [trajectories[i : i + samples] for i in range(0, len(trajectories), samples)]
    return [None if all(t.reward is None for t in group) else success(group) for group in groups]


def success_by_rounds(trajectories: list[Trajectory]) -> dict[str, tuple[float, int]]:
    """{number of rounds of calls: (success, known rewards)}: whether long dialogues go wrong more often."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.reward is not None:
            groups.setdefault(trajectory.rounds, []).append(trajectory)
    return {str(rounds): (success(groups[rounds]), len(groups[rounds])) for rounds in sorted(groups)}


def interval(by_task: list[float | None]) -> tuple[float, float]:
    known = [value for value in by_task if value is not None]
    return bootstrap_ci(known) if known else (float("nan"), float("nan"))


def by_kind(trajectories: list[Trajectory]) -> dict[str, float]:
    kinds = defaultdict(list)
    for trajectory in trajectories:
        kinds[trajectory.task.kind].append(trajectory)
    return {kind: success(group) for kind, group in sorted(kinds.items())}


def known_pairs(after: list[float | None], before: list[float | None]) -> tuple[list[float], list[float]]:
    """The entries of tasks that are known in both lists."""
    pairs = [(a, b) for a, b in zip(after, before, strict=True) if a is not None and b is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]


def imagination_gap(real: list[Trajectory], rehearsed: list[Trajectory], samples: int) -> float:
    """Imagination gap: gap = rehearsed success - real success, over the same tasks

    Those known in both; NaN if there is none.
    """
    imagined, happened = known_pairs(success_by_task(rehearsed, samples), success_by_task(real, samples))
    return mean_or_nan(imagined) - mean_or_nan(happened)


def mean_or_nan(values: list[float]) -> float:
    return fmean(values) if values else float("nan")
