"""Seconds and memory of a piece of work, in a process of its own. Standard library alone, as peers import it too."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MARK = "measured: "  # begins the line that `read` looks for; libraries print what they like before it


@contextmanager
def seconds() -> Iterator[dict[str, float]]:
    """{"cpu_s", "wall_s"} of the block, all threads of this process together, once it ends."""
    found: dict[str, float] = {}
    wall, cpu = time.perf_counter(), time.process_time()
    yield found
    found |= {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}


def peak_mib() -> float:
    """The most memory this process has held so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 2**20 if sys.platform == "darwin" else most / 2**10


def tell(found: dict[str, Any]) -> None:
    """Hand numbers to the process that has started this one."""
    sys.stdout.write(MARK + json.dumps(found) + "\n")


def read(output: str) -> dict[str, Any]:
    """What `tell` has said. Raises ValueError if it said nothing."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    if not lines:
        raise ValueError(f"no numbers in the output, which ends with {output[-300:]!r}")
    return json.loads(lines[-1].removeprefix(MARK))
