"""Which policy plays which role, and which tokens each is trained on. Chosen once, before the training loop.

| team     | ACT        | REHEARSE       | trained                                                   |
| shared   | one policy | the same one   | it, on both roles as rl.role_weights says                 |
| per_role | one policy | another policy | each on its own role, by its weight in rl.role_weights   |

A simulator (rollout.environment=simulated) stands beside any of them and is not trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from envace.batching import Row
from envace.generation import CachedGenerator
from envace.policy import Policy
from envace.settings import Config, SamplingConfig
from envace.types import Completion, Request, Role, Trajectory


@dataclass(frozen=True)
class Player:
    """A policy that is trained, and the loss weight of each role's tokens. name: "" for the first one."""

    policy: Policy
    role_weights: dict[str, float]
    name: str = ""

    def named(self, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics of a further player under its own name."""
        return {f"{self.name}/{key}": value for key, value in metrics.items()} if self.name else metrics


class Writers:
    """A `Generate` callable: each request goes to the generator of its role."""

    def __init__(self, generators: dict[Role, CachedGenerator]):
        self.generators = generators

    def __call__(self, requests: list[Request]) -> list[Completion]:
        completions: dict[int, Completion] = {}
        for generator in dict.fromkeys(self.generators.values()):
            mine = [(i, r) for i, r in enumerate(requests) if self.generators[r.role] is generator]
            if mine:
                written = generator([request for _, request in mine])
                completions |= {i: completion for (i, _), completion in zip(mine, written, strict=True)}
        return [completions[i] for i in range(len(requests))]

    @property
    def sampled_tokens(self) -> int:
        """By those who are trained or evaluated; what a simulator writes is not sampled from a policy."""
        trained = {g for role, g in self.generators.items() if role is not Role.CONTEXT}
        return sum(generator.sampled_tokens for generator in trained)


class Team:
    """writers: who writes in which role. players: who of them is trained; the first one leads between ranks."""

    def __init__(self, writers: dict[Role, Policy], players: list[Player], sampling: dict[Role, SamplingConfig]):
        self.writers = writers
        self.players = players
        self.own_sampling = sampling

    @property
    def lead(self) -> Policy:
        return self.writers[Role.ACT]

    @contextmanager
    def generating(self, sampling: SamplingConfig) -> Iterator[Writers]:
        """A `generate` callable for one rollout phase; a policy that plays both roles keeps one cache for them."""
        with ExitStack() as stack:
            generators: dict[Policy, CachedGenerator] = {}
            for role, policy in self.writers.items():
                if policy not in generators:
                    how = self.own_sampling.get(role, sampling)
                    generators[policy] = stack.enter_context(policy.generating(how))
            yield Writers({role: generators[policy] for role, policy in self.writers.items()})

    @torch.no_grad()
    def output_logprobs(self, trajectories: list[Trajectory], temperature: float) -> list[list[float]]:
        """Of each output the log-probabilities of its tokens under the weights as they are now, [] if no player is
        trained on it; in the order of `for t in trajectories for output in t.outputs()`. All ranks call it alike.
        """
        found: dict[int, list[float]] = {}
        for player in self.players:
            trained = {role for role in (Role.ACT, Role.REHEARSE) if player.role_weights[role.name.lower()]}
            for sequence in (s for t in trajectories for s in t.sequences):
                weights = [float(role in trained) for role in sequence.role_ids]
                if not any(weights):
                    continue
                # One at a time needs the least memory, and they are few.
                batch = player.policy.batch([Row(sequence.ids, sequence.role_ids, weights, [0.0] * len(sequence))])
                logprobs, _ = player.policy.logprobs(batch, temperature, with_entropy=False)
                values = iter(logprobs[0].tolist())
                for segment in sequence.segments:
                    of_segment = list(islice(values, len(segment.ids)))
                    if segment.role in trained:
                        found[id(segment)] = of_segment
        return [found.get(id(output), []) for t in trajectories for output in t.outputs()]

    def save(self, folder: Path) -> None:
        """Write the first player's model to `folder` and a further one's beside it: rl, rl_rehearse. All ranks."""
        for player in self.players:
            player.policy.save(folder.with_name("_".join(filter(None, (folder.name, player.name)))))

    # What checkpoints need

    @property
    def rank(self) -> int:
        return self.lead.rank

    @property
    def world_size(self) -> int:
        return self.lead.world_size

    def save_state(self, folder: Path) -> None:
        for player in self.players:
            player.policy.save_state(folder / player.name)

    def load_state(self, folder: Path) -> None:
        for player in self.players:
            player.policy.load_state(folder / player.name)

    def randomness(self) -> Any:
        return self.lead.randomness()

    def restore_randomness(self, states: Any) -> None:
        self.lead.restore_randomness(states)

    def any_rank(self, flag: bool) -> bool:
        return self.lead.any_rank(flag)

    def sum_over_ranks(self, value: float) -> float:
        return self.lead.sum_over_ranks(value)

    def wait(self) -> None:
        self.lead.wait()


def shared(config: Config, load: Callable[[str], Policy]) -> tuple[dict[Role, Policy], list[Player]]:
    policy = load(config.model.path)
    return {Role.ACT: policy, Role.REHEARSE: policy}, [Player(policy, config.rl.role_weights)]


def per_role(config: Config, load: Callable[[str], Policy]) -> tuple[dict[Role, Policy], list[Player]]:
    act, rehearse = load(config.model.path), load(config.model.rehearse_path or config.model.path)
    weights = config.rl.role_weights
    players = [
        Player(act, weights | {"rehearse": 0.0}),
        Player(rehearse, weights | {"act": 0.0}, "rehearse"),
    ]
    return {Role.ACT: act, Role.REHEARSE: rehearse}, players


TEAMS = {"shared": shared, "per_role": per_role}


def training_team(config: Config) -> Team:
    """The team of rl.team, each player with an optimizer and, if the KL term needs it, a reference of its own."""

    def load(path: str) -> Policy:
        model = replace(config.model, path=path)
        policy = Policy(model, config.policy, thinking=config.rollout.thinking, seed=config.seed, training=True)
        policy.prepare_training(
            lr=config.rl.lr,
            adam_beta2=config.rl.adam_beta2,
            weight_decay=config.rl.weight_decay,
            grad_clip=config.rl.grad_clip,
            max_nonfinite_steps=config.rl.max_nonfinite_steps,
            with_reference=config.rl.kl_coef > 0,
        )
        return policy

    return _team(config, load)


def evaluation_team(config: Config) -> Team:
    return _team(config, lambda path: _frozen(config, path))


def rehearsing_team(team: Team, config: Config) -> Team:
    """Who rehearses before `team` acts: itself, or the model of rehearsal.path in both roles."""
    path = config.rehearsal.path
    if not path:
        return team
    policy = _frozen(config, path)
    return Team({Role.ACT: policy, Role.REHEARSE: policy}, [], {})


def _team(config: Config, load: Callable[[str], Policy]) -> Team:
    writers, players = TEAMS[config.rl.team](config, load)
    if config.simulator.path:
        writers[Role.CONTEXT] = _frozen(config, config.simulator.path)
    return Team(writers, players, {Role.CONTEXT: config.simulator.sampling})


def _frozen(config: Config, path: str) -> Policy:
    model = replace(config.model, path=path)
    return Policy(model, config.policy, thinking=config.rollout.thinking, seed=config.seed)
