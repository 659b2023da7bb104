"""The embedded world as a source of demonstrations, tasks, rewards and real environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from envace.demo.demonstrations import make_demonstrations, right_final_state
from envace.demo.desk import CallCounter, Desk
from envace.demo.model import build_model
from envace.demo.rehearsals import make_rehearsals
from envace.demo.tasks import make_tasks
from envace.settings import Config
from envace.types import Task, Trajectory


class DemoSource:
    """Everything that training and evaluation want to know about the service desk.

    counter: calls that its executable environments really ran, by purpose.
    """

    def __init__(self, config: Config):
        self.config = config.data
        self.counter = CallCounter()

    def build_embedded_model(self, path: Path, seed: int) -> None:
        """Tokenizer and untrained tiny model as a Hugging Face folder; the same settings give the same files."""
        recorded = make_demonstrations(min(512, self.config.demonstrations), self.config.seed, self.counter)
        recorded += make_rehearsals(min(512, self.config.rehearsals), self.config.seed, self.counter)
        build_model(path, [(task.tools, messages) for task, messages in recorded], seed=seed)

    def demonstrations(self) -> list[tuple[Task, list[dict[str, Any]]]]:
        """Recorded dialogues for SFT: (task, messages)."""
        recorded = make_demonstrations(self.config.demonstrations, self.config.seed, self.counter)
        return recorded + make_rehearsals(self.config.rehearsals, self.config.seed, self.counter)

    def train_tasks(self) -> list[Task]:
        return make_tasks(self.config.train_tasks, self.config.seed, held_out=False)

    def eval_tasks(self) -> list[Task]:
        return make_tasks(self.config.eval_tasks, self.config.seed, held_out=True)

    def executable(self, task: Task, purpose: str) -> Desk:
        """A fresh real environment for one episode; `purpose` is what its calls are counted under."""
        return Desk(task.world, self.counter, purpose)

    def reaches_right_state(self, trajectory: Trajectory) -> bool:
        """Whether the calls of a trajectory leave a fresh desk in the state of right work. Reported, never rewarded."""
        desk = self.executable(trajectory.task, "final state")
        for exchange in trajectory.executed:
            desk.execute(exchange.call)
        return desk.state == right_final_state(trajectory.task, self.counter)
