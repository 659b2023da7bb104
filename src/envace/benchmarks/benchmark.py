"""What a benchmark is here: an adapter that starts the official harness in its own environment and reads its scores.

The harness runs as a process of its own, talks to the model over HTTP alone, and is not changed. Nothing of it is
imported.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from envace.interrupts import end
from envace.settings import Config
from envace.types import UserError

logger = logging.getLogger("envace")

# Of this process's environment a harness gets only what a program needs to run, and so no key that is not meant for it.
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "NO_PROXY", "no_proxy")
STOP_SECONDS = 30.0  # until a process that was asked to end is killed
STAMP = "installed.json"  # in the folder of a harness; a set-up writes it last
LAST_LINES = 3  # of a harness's log that are shown when it fails


@dataclass(frozen=True)
class Trial:
    """One run of every task. What `folder` holds from before is gone on with.

    endpoint: base URL of the model's server, which wants no key. seed: for a harness that takes one.
    """

    folder: Path
    endpoint: str
    model: str
    seed: int
    config: Config


@dataclass(frozen=True)
class Part:
    """What one category or domain came to.

    score: in percent, as the harness has it; None if no task was scored. tasks: that were scored.
    faults: tasks that the infrastructure ended, not the model: they are in no score.
    null: what an agent that does nothing scores, where that is known; the floor to read a score against.
    """

    score: float | None
    tasks: int
    faults: int = 0
    null: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """overall: the benchmark's aggregates by name, in percent. missing: parts they want that have no score."""

    parts: dict[str, Part]
    overall: dict[str, float]
    missing: list[str] = field(default_factory=list)


class Benchmark(Protocol):
    """parts: all there are. default_parts: those that need nothing from outside.

    served_as: the name that the harness asks for; "" if it takes any.
    """

    name: str
    served_as: str
    parts: tuple[str, ...]
    default_parts: tuple[str, ...]

    def version(self, home: Path) -> str:
        """Of the harness below `home`. Raises UserError if it is not set up."""

    def tools(self, home: Path) -> list[str] | None:
        """Names of tools that the harness executes even where a request does not offer them.

        None: it takes any call as data, and answers one to an unknown tool itself, so none is held back from it.
        """

    def run(self, trial: Trial, parts: tuple[str, ...]) -> Outcome:
        """Raises UserError if the harness cannot do its work."""


def environment(more: Mapping[str, str]) -> dict[str, str]:
    return {name: os.environ[name] for name in PASSED_ON if name in os.environ} | dict(more)


def drop_unfinished(path: Path) -> None:
    """Drop a last line that was being written when a run was cut off, so that what it stood for is done again."""
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        logger.warning("%s: the last line is not whole, so that task is run again", path)
        path.write_text(whole, encoding="utf-8")


def is_set_up(home: Path, name: str) -> bool:
    """Whether the set-up of a harness came to its end."""
    return (home / name / STAMP).exists()


def run_harness(command: list[str], log: Path, more: Mapping[str, str], folder: Path) -> None:
    """Run a command of the harness to its end, its words appended to `log`. Raises UserError if it fails.

    more: added to its environment. folder: where it runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment(more), cwd=folder
        )
        try:
            status = process.wait()
        except BaseException:
            end(process, STOP_SECONDS)
            raise
    if status:
        raise UserError(f"{Path(command[0]).name} ended with status {status}; {log} ends with: {ending(log)}")


def ending(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " | ".join(line.strip() for line in lines[-LAST_LINES:]) or "nothing"
