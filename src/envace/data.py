"""Where tasks come from, which of them are used, and the order in which they are drawn.

    python -m envace.data inspect PATH [--schema rl|sft] [--tokenizer FOLDER]

counts, measures and checks the rows of a CM2 data set; see `envace.cm2.inspect`.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from envace.chat import ChatFormat
from envace.cm2.source import CM2Source
from envace.custom.source import CustomSource
from envace.demo.source import DemoSource
from envace.episodes import opening
from envace.settings import Config
from envace.types import Executable, Task, Trajectory, UserError, content_hash

logger = logging.getLogger("envace")


class CountsCalls(Protocol):
    calls: Counter[str]

    def state_dict(self) -> dict[str, int]: ...

    def load_state_dict(self, state: dict[str, int]) -> None: ...


Dialogue = tuple[Task, list[dict[str, Any]]]  # a recorded one: what it is about, its messages


class Source(Protocol):
    """What training and evaluation need to know about a set of tasks."""

    @property
    def counter(self) -> CountsCalls: ...

    def build_embedded_model(self, path: Path, seed: int) -> None: ...

    def demonstrations(self) -> list[Dialogue]: ...

    def train_tasks(self) -> list[Task]: ...

    def eval_tasks(self) -> list[Task]: ...


@runtime_checkable
class ExecutableSource(Source, Protocol):
    """One that has a real environment too."""

    def executable(self, task: Task, purpose: str) -> Executable: ...

    def reaches_right_state(self, trajectory: Trajectory) -> bool | None:
        """None if the environment cannot tell its state. Raises ServiceFault if it breaks."""


SOURCES: dict[str, Callable[[Config], Source]] = {"demo": DemoSource, "cm2": CM2Source, "custom": CustomSource}


def open_source(config: Config) -> Source:
    return SOURCES[config.data.source](config)


def tasks_within(tasks: list[Task], chat: ChatFormat, limit: int) -> list[Task]:
    """The tasks whose prompt, tools included, has at most `limit` tokens; see `short_enough`."""
    return short_enough(tasks, lambda task: len(chat.prompt(opening(task), task.tools)), limit, "tasks")


def short_enough(items: list[Any], length: Callable[[Any], int], limit: int, what: str) -> list[Any]:
    """The items of at most `limit` tokens, in order; 0 is no limit. An item is left out whole, never cut to fit.

    what: the items in words. Raises UserError if none remains.
    """
    if limit == 0 or not items:
        return items
    kept = [item for item in items if length(item) <= limit]
    if not kept:
        raise UserError(f"none of {len(items)} {what} has at most {limit} tokens: raise the limit, or use shorter ones")
    if left_out := len(items) - len(kept):
        logger.info("left out %d of %d %s that are longer than %d tokens", left_out, len(items), what, limit)
    return kept


class Sampler:
    """Draws items without replacement, epoch after epoch, each epoch in its own seeded order.

    ids: of the items, so that a position in one data set is not taken for one in another.
    """

    def __init__(self, items: list[Any], seed: int, ids: Iterable[str] = ()):
        self.items = items
        self.seed = seed
        self.data = content_hash([len(items), *ids])
        self.drawn = 0
        self._epoch = -1
        self._order: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "data": self.data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError if the state is of other items."""
        if state["data"] != self.data:
            raise UserError("the checkpoint is of a run on other data: restore the files, or begin a new run")
        self.drawn = state["drawn"]

    def next(self, n: int) -> list[Any]:
        return [self._draw() for _ in range(n)]

    def _draw(self) -> Any:
        epoch, index = divmod(self.drawn, len(self.items))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self.items)))
            random.Random(f"{self.seed}-{epoch}").shuffle(self._order)
        self.drawn += 1
        return self.items[self._order[index]]


if __name__ == "__main__":
    from envace.cm2.inspect import main

    main()
