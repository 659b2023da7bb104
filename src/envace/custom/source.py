"""A custom environment as a source of demonstrations, tasks and real environments."""

from __future__ import annotations

import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

from envace.custom.dialogue import Dialogue, work_rightly
from envace.custom.environment import load_environment
from envace.custom.tools import Session
from envace.demo.desk import CallCounter
from envace.demo.model import build_model
from envace.rewards import Goal
from envace.schemas import call_error
from envace.settings import Config
from envace.types import ServiceFault, Task, ToolCall, Trajectory, UserError, canonical_json

VOCABULARY_DIALOGUES = 512  # the tokenizer of the embedded model is made from so many
logger = logging.getLogger("envace")


class CustomSource:
    """What training and evaluation want to know of the environment in the folder data.path.

    counter: calls that were executed, by purpose.
    Raises UserError for an environment that cannot be loaded or used.
    """

    def __init__(self, config: Config):
        self.config = config.data
        self.counter = CallCounter()
        self.environment = load_environment(config.data.path)

    def build_embedded_model(self, path: Path, seed: int) -> None:
        """Tokenizer and untrained tiny model as a Hugging Face folder; the same settings give the same files."""
        recorded = self._demonstrations(min(VOCABULARY_DIALOGUES, self.config.demonstrations))
        build_model(path, [(task.tools, messages) for task, messages in recorded], seed=seed)

    def demonstrations(self) -> list[tuple[Task, list[dict[str, Any]]]]:
        """Dialogues of the expert with the real environment, for SFT: (task, messages)."""
        return self._demonstrations(self.config.demonstrations)

    def _demonstrations(self, n: int) -> list[tuple[Task, list[dict[str, Any]]]]:
        rng = random.Random(f"expert-{self.config.seed}")
        tasks = self._tasks(n, held_out=False)
        return [(task, self.demonstrate(task, rng).messages) for task in tasks]

    def demonstrate(self, task: Task, rng: random.Random) -> Dialogue:
        """One dialogue of the expert. Raises UserError if the environment breaks or a turn is left unanswered."""
        dialogue = Dialogue(task, self.executable(task, "demonstrations"))
        try:
            self.environment.expert(dialogue, rng)
        except ServiceFault as fault:
            raise UserError(f"task {task.id}: the expert met a broken environment: {fault}") from fault
        if len(dialogue.answers) < len(task.user_turns):
            raise UserError(f"task {task.id}: the expert leaves the user's turn {len(dialogue.answers) + 1} unanswered")
        return dialogue

    def train_tasks(self) -> list[Task]:
        return self._tasks(self.config.train_tasks, held_out=False)

    def eval_tasks(self) -> list[Task]:
        return self._tasks(self.config.eval_tasks, held_out=True)

    def _tasks(self, n: int, *, held_out: bool) -> list[Task]:
        what = "held-out" if held_out else "training"
        tasks = self.environment.make_tasks(n, self.config.seed, held_out=held_out)
        if not 0 < len(tasks) <= n:
            raise UserError(f"make_tasks was asked for {n} {what} tasks and gave {len(tasks)}: it may give fewer, or 1")
        if len(tasks) < n:
            logger.info("there are %d %s tasks, %d were asked for", len(tasks), what, n)
        repeated = [task_id for task_id, times in Counter(task.id for task in tasks).items() if times > 1]
        if repeated:
            raise UserError(f"make_tasks gave two {what} tasks with the id {repeated[0]}: each has its own")
        for task in tasks:
            _check(task)
        return tasks

    def executable(self, task: Task, purpose: str) -> Counted:
        """A fresh real environment for one episode; `purpose` is what its calls are counted under."""
        return Counted(self.environment.tools.open(task.world), task.tools, self.counter, purpose)

    def reaches_right_state(self, trajectory: Trajectory) -> bool | None:
        """Whether the calls of a trajectory leave a fresh world in the state of right work. Reported, never rewarded.

        None if the environment cannot tell its state. Raises ServiceFault if it breaks.
        """
        reached, right = (self.executable(trajectory.task, "final state") for _ in range(2))
        for exchange in trajectory.executed:
            reached.execute(exchange.call)
        work_rightly(Dialogue(trajectory.task, right))
        states = reached.session.state(), right.session.state()
        return None if None in states else canonical_json(states[0]) == canonical_json(states[1])


class Counted:
    """A session whose calls are counted, and answered with an error where they do not fit the tool's schema."""

    def __init__(self, session: Session, tools: list[dict[str, Any]], counter: CallCounter, purpose: str):
        self.session = session
        self._tools = tools
        self._counter = counter
        self._purpose = purpose

    def execute(self, call: ToolCall) -> Any:
        self._counter.calls[self._purpose] += 1
        error = call_error(self._tools, call)
        return self.session.execute(call) if error is None else error


def _check(task: Task) -> None:
    """Raises UserError for a task that cannot be played or judged."""
    if not task.user_turns or not task.tools:
        raise UserError(f"task {task.id}: it needs tools and at least one user turn")
    if not isinstance(task.goal, Goal) or len(task.goal.turns) != len(task.user_turns):
        raise UserError(f"task {task.id}: its goal must be an envace.rewards.Goal with one TurnGoal per user turn")
