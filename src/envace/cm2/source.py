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
from envace.demo.desk import CallCounter
from envace.demo.model import build_model
from envace.rewards import Branch, Goal, Says, Seen, TurnGoal, as_text, contains, resolve
from envace.settings import Config
from envace.types import Evidence, Exchange, RecordedCall, Task, ToolCall

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
        n = data.demonstrations
        rows = self._load(data.sft_path, load_sft, n) if data.sft_path else self._load(data.path, load_rl, n)
        return [(row.task(), row.messages(thinking=self.config.rollout.thinking)) for row in rows]

    def train_tasks(self) -> list[Task]:
        return self._tasks(self.config.data.path, self.config.data.train_tasks)

    def eval_tasks(self) -> list[Task]:
        data = self.config.data
        return self._tasks(data.eval_path, data.eval_tasks) if data.eval_path else []

    def _tasks(self, path: str, n: int) -> list[Task]:
        return [self._task(record) for record in self._load(path, load_rl, n)]

    def _task(self, record: Record) -> Task:
        task, reward = record.task(), self.config.reward
        if reward.name == "checklist":
            return replace(task, goal=replace(task.goal, dependence=reward.dependence))
        return replace(task, goal=goal_of(record.dialogue(), task.recorded))

    def _load(self, path: str, load: Callable[..., Any], n: int) -> list[Any]:
        rows, problems = load(path, self.config.data.on_bad_row)
        for problem in problems[:SHOWN_PROBLEMS]:
            logger.warning("left out %s", problem)
        if problems:
            logger.warning("left out %d of %d rows of %s", len(problems), len(problems) + len(rows), path)
        if 0 < n < len(rows):
            logger.info("using the first %d of %d good rows of %s", n, len(rows), path)
        return rows[: n or None]


def goal_of(dialogue: list[Message], recorded: tuple[tuple[RecordedCall, ...], ...]) -> Goal:
    """What the reference dialogue did as a Goal: its calls, and in each answer the fields of responses it states.

    Such a field is compared with the response that the agent saw, recorded or rehearsed.
    """
    answers = [m.text for m in dialogue if m.role == "assistant" and not m.calls]
    turns, seen = [], []
    for number, (calls, answer) in enumerate(zip(recorded, answers, strict=True)):
        responses = [(r.call, parse_observation(r.response).value) for r in calls]
        seen += [Exchange(call, value, number, 0, Evidence.OBSERVED) for call, value in responses]
        says = tuple(says for call, value in responses for says in _facts(call, value, answer, seen))
        turns.append(TurnGoal((Branch(writes=tuple(call for call, _ in responses), says=says),)))
    return Goal(tuple(turns))


def _facts(call: ToolCall, response: Any, answer: str, seen: list[Exchange]) -> Iterator[Says]:
    """The fields of a response that the answer states."""
    for name, value in response.items() if isinstance(response, dict) else ():
        # True and null are written in too many ways, and one character stands in an answer by chance.
        is_fact = isinstance(value, str | int | float) and not isinstance(value, bool) and len(as_text(value)) > 1
        # Of a call that was made before, the first response counts, and that may say something else.
        if is_fact and contains(answer, as_text(value)) and resolve(Seen(call, name), seen) == value:
            yield Says(Seen(call, name))
