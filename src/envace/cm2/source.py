"""CM2 data as a source of demonstrations and tasks. It has reference dialogues and no environment to execute."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from envace.chat import parse_observation
from envace.cm2.records import Record, load_rl, load_sft
from envace.cm2.rows import Message
from envace.config import Config
from envace.demo.desk import CallCounter
from envace.demo.model import build_model
from envace.rewards import Branch, Goal, Says, Seen, TurnGoal, as_text, contains
from envace.types import RecordedCall, Task

SHOWN_PROBLEMS = 5  # the log names the first ones; `python -m envace.data inspect` tells all kinds
logger = logging.getLogger("envace")


class CM2Source:
    """data.path for RL, data.sft_path for SFT, data.eval_path held out.

    The goal of a task is its checklist, or for the other rewards what the reference dialogue called and answered.
    Raises FileError and RowError; with data.on_bad_row=skip, bad rows are logged and left out.
    """

    def __init__(self, config: Config):
        self.config = config
        self.counter = CallCounter()  # nothing is ever executed

    def build_embedded_model(self, path: Path, seed: int) -> None:
        """Tokenizer and untrained tiny model as a Hugging Face folder; the same data give the same files."""
        build_model(path, [(task.tools, messages) for task, messages in self.demonstrations()], seed=seed)

    def demonstrations(self) -> list[tuple[Task, list[dict[str, Any]]]]:
        """Recorded dialogues for SFT: (task, messages)."""
        data = self.config.data
        rows = self._load(data.sft_path, load_sft) if data.sft_path else self._load(data.path, load_rl)
        rows = rows[: data.demonstrations or None]
        return [(row.task(), row.messages(thinking=self.config.rollout.thinking)) for row in rows]

    def train_tasks(self) -> list[Task]:
        return self._tasks(self.config.data.path, self.config.data.train_tasks)

    def eval_tasks(self) -> list[Task]:
        data = self.config.data
        return self._tasks(data.eval_path, data.eval_tasks) if data.eval_path else []

    def _tasks(self, path: str, n: int) -> list[Task]:
        return [self._task(record) for record in self._load(path, load_rl)[: n or None]]

    def _task(self, record: Record) -> Task:
        task, reward = record.task(), self.config.reward
        if reward.name == "checklist":
            return replace(task, goal=replace(task.goal, dependence=reward.dependence))
        return replace(task, goal=goal_of(record.dialogue(), task.recorded))

    def _load(self, path: str, load: Callable[..., Any]) -> list[Any]:
        rows, problems = load(path, self.config.data.on_bad_row)
        for problem in problems[:SHOWN_PROBLEMS]:
            logger.warning("left out %s", problem)
        if problems:
            logger.warning("left out %d of %d rows of %s", len(problems), len(problems) + len(rows), path)
        return rows


def goal_of(dialogue: list[Message], recorded: tuple[tuple[RecordedCall, ...], ...]) -> Goal:
    """What the reference dialogue did as a Goal: its calls, and in each answer the fields of responses it states.

    Such a field is compared with the response that the agent saw, recorded or rehearsed.
    """
    answers = [m.text for m in dialogue if m.role == "assistant" and not m.calls]
    return Goal(
        tuple(
            TurnGoal((Branch(writes=tuple(r.call for r in calls), says=tuple(_facts(calls, answer))),))
            for calls, answer in zip(recorded, answers, strict=True)
        )
    )


def _facts(calls: tuple[RecordedCall, ...], answer: str) -> Iterator[Says]:
    for recorded in calls:
        response = parse_observation(recorded.response).value
        for name, value in response.items() if isinstance(response, dict) else ():
            # True and null are written in too many ways.
            if (
                isinstance(value, str | int | float)
                and not isinstance(value, bool)
                and contains(answer, as_text(value))
            ):
                yield Says(Seen(recorded.call, name))
