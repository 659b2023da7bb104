"""One whole step of multi-turn GRPO, as train_rl.py takes it; the peer is bench/peers/trl_step.py.

    python -m bench.cases.step STEPS THREADS MODEL_FOLDER DECODE

The model folder is the peer's; DECODE as in policy.decode. Takes 1 + STEPS optimizer steps; the first
one, which also compiles, is not counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from bench import work
from bench.measure import peak_mib, seconds, tell
from envace.advantages import BASELINES, group_advantages
from envace.batching import output_table
from envace.chat import ChatFormat
from envace.config import load_config
from envace.data import ExecutableSource
from envace.evaluation import unfold
from envace.services import Services
from envace.settings import Config, SamplingConfig
from envace.team import Team, Writers, training_team
from envace.types import Completion, Request, Task, ToolCall
from train_rl import update

PLACE = {"type": "string", "description": "the place to look at."}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {"type": "object", "properties": {"place": PLACE}, "required": ["place"]},
    },
}


class Room:
    def execute(self, call: ToolCall) -> str:
        return work.RESPONSE


class Source(ExecutableSource):
    """A task source as far as a step asks for one."""

    counter = Counter()

    def executable(self, task: Task, purpose: str) -> Room:
        return Room()


class Scripted:
    """Samples as always; then a valid call, or an answer, of the same length stands in place of a random model's."""

    def __init__(self, writers: Writers, chat: ChatFormat):
        self.writers = writers
        self.chat = chat
        self.turn = 0

    def __call__(self, requests: list[Request]) -> list[Completion]:
        endless = [replace(request, stop_ids=frozenset()) for request in requests]
        completions = self.writers(endless)
        script = work.output(self.chat.tokenizer, self.turn)
        self.turn += 1
        return [replace(completion, ids=list(script), finish_reason="stop") for completion in completions]

    @property
    def sampled_tokens(self) -> int:
        return self.writers.sampled_tokens


class ScriptedTeam(Team):
    @contextmanager
    def generating(self, sampling: SamplingConfig) -> Iterator[Scripted]:
        with super().generating(sampling) as writers:
            yield Scripted(writers, self.lead.chat)


def step(team: Team, config: Config, number: int) -> int:
    """Rollout and update; how many tokens were sampled."""
    tasks = [
        Task(f"{number}-{k}", "", [LOOK], [work.messages(k)[0]["content"]]) for k in range(config.rl.prompts_per_step)
    ]
    trajectories, sampled = unfold(
        team,
        tasks,
        config,
        Source(),
        Services(config),
        environment="real",
        purpose="training",
        sampling=config.sampling,
        samples=config.rl.group_size,
    )
    if any(trajectory.rounds != work.TURNS for trajectory in trajectories):
        raise RuntimeError(f"a trajectory is not as long as the work demands: {trajectories[0].reason}")
    for i, trajectory in enumerate(trajectories):
        trajectory.reward = work.reward(i)
    rewards, group_ids, role_ids, trajectory_ids = output_table(trajectories)
    advantages = group_advantages(
        rewards,
        BASELINES[config.rl.baseline](group_ids, role_ids),
        normalize_std=config.rl.normalize_std,
        baseline_over=config.rl.baseline_over,
        trajectory_ids=trajectory_ids,
    )
    update(team.players[0], trajectories, advantages, number, config)
    return sampled


def main() -> None:
    steps, threads, folder, decode = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(threads)
    settings = {
        "model.path": folder,
        "policy.decode": decode,
        "rl.steps": 1 + steps,
        "rl.prompts_per_step": work.PROMPTS,
        "rl.group_size": work.GROUP,
        "rl.kl_coef": 0,
        "rl.lr": 1e-4,
        "rollout.environment": "real",
        "rollout.max_new_tokens": work.NEW_TOKENS,
        "rollout.max_rounds": work.TURNS,
    }
    config = load_config(None, [f"{name}={value}" for name, value in settings.items()])
    trained = training_team(config)
    team = ScriptedTeam(trained.writers, trained.players, trained.own_sampling)
    sampled = step(team, config, 0)
    with seconds() as found:
        for number in range(steps):
            sampled += step(team, config, 1 + number)
    tell(
        {
            "cpu_s": found["cpu_s"] / steps,
            "wall_s": found["wall_s"] / steps,
            "peak_mib": peak_mib(),
            "sampled_tokens": sampled / (1 + steps),
        }
    )


if __name__ == "__main__":
    main()
