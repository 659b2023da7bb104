"""Prove an integration end to end: gold actions and doing nothing score what they must, through harness and HTTP.

    python -m envace.benchmarks.verify bfcl [--tasks 5] [--home .bench] [--out runs/bench-verify]

The path is that of an evaluation: official harness -> envace.serve -> the scripted endpoint in the model's place, and
of the user and the judge where there are any. Ends with status 1 if a score is not the expected one. With --tasks only
the first tasks of each part are run; what doing nothing scores on them is not checked where only the whole is known.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envace.benchmarks import finmcp, tau2
from envace.benchmarks.bfcl import IRRELEVANCE, MULTI_TURN
from envace.benchmarks.replay.finmcp import DEMO
from envace.benchmarks.replay.vita import SCRIPTED
from envace.benchmarks.runs import BENCHMARKS, evaluate_benchmark
from envace.benchmarks.served import listening
from envace.benchmarks.sizes import TASKS
from envace.config import load_config
from envace.console import add_options, command
from envace.interrupts import sigterm_interrupts

logger = logging.getLogger("envace")

# Tasks that the oracle fails, as their gold answer does not pass the official scorer; all others must be right.
WRONG_GOLD = {
    "bfcl": {"live_simple": 2, "live_multiple": 2},
    # delivery: four expect an order of theirs under the id of another one, two a product that the store does not have.
    # instore: a product and a shop that are not there, a table where none is booked, a time without seconds, and a
    # reservation as unpaid, which none ever is. All in English.
    "vita": {"delivery": 6, "instore": 5},
}
BFCL_SINGLE = ("simple_python", "multiple", "parallel", "parallel_multiple")
BFCL_LIVE = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_relevance")
# Parts that one oracle can play: their requests tell their tasks apart.
GROUPS: Mapping[str, list[tuple[str, ...]]] = {
    "bfcl": [*((part,) for part in MULTI_TURN), (*BFCL_SINGLE, *BFCL_LIVE), IRRELEVANCE],
    "tau2": [tau2.PARTS],
    "vita": [SCRIPTED],
    "finmcp": [finmcp.PARTS],
}
DEMO_TASKS = 2  # in each part of what finmcp's repository shows
JUDGES = {"tau2": tau2.JUDGE, "vita": "judge"}  # by which name a harness asks for its judge; these have a user, too


@dataclass(frozen=True)
class Check:
    mode: str
    part: str
    right: float
    tasks: int
    expected: float
    faults: int = 0
    wanted: int = 0  # how many tasks there must be

    @property
    def holds(self) -> bool:
        return abs(self.right - self.expected) < 1e-6 and not self.faults and self.tasks == self.wanted


def verify(benchmark: str, mode: str, parts: tuple[str, ...], tasks: int, home: Path, out: Path) -> list[Check]:
    """Scores of `parts` with the scripted endpoint in the model's place. Raises UserError, ConfigError.

    Always anew: what an earlier verification left in `out` was made with a server that is gone.
    """
    shutil.rmtree(out / benchmark, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-u", "-m", "envace.benchmarks.replay", benchmark, "--mode"]
    with ExitStack() as servers:
        known = ["--parts", ",".join(parts), "--home", str(home)]
        url = servers.enter_context(listening([*command, mode, *known], out / "replay.log"))
        settings = {
            "benchmark": benchmark,
            "model.path": "",
            "serve.backend": f"{url}/v1",
            "serve.backend_model": "replay",
            "bench.home": home,
            "bench.parts": f"[{','.join(parts)}]",
            "bench.tasks": tasks,
            "bench.trials": 1,
            "run_dir": out,
            **own_settings(benchmark, home),
        }
        if name := JUDGES.get(benchmark):
            judge = servers.enter_context(listening([*command, "judge", "--name", name, *known], out / "judge.log"))
            settings |= {"bench.user.url": f"{url}/v1", "bench.user.model": "replay"}
            settings |= {"bench.judge.url": f"{judge}/v1", "bench.judge.model": name}
        results = evaluate_benchmark(load_config(None, [f"{key}={value}" for key, value in settings.items()]))
    return [
        check(benchmark, mode, name, part, tasks)
        for name, part in results["trials"][0]["parts"].items()
        if mode == "oracle" or part["null"] is not None
    ]


def own_settings(benchmark: str, home: Path) -> dict[str, Any]:
    """Which tasks, where there is a choice: those that every copy of a repository has."""
    own: dict[str, dict[str, Any]] = {
        "vita": {"bench.language": "english"},
        "finmcp": {"bench.data": home / DEMO},
    }
    return own.get(benchmark, {})


def groups(benchmark: str, mode: str) -> list[tuple[str, ...]]:
    """Who does nothing need not know the task."""
    return GROUPS[benchmark] if mode == "oracle" else [tuple(part for parts in GROUPS[benchmark] for part in parts)]


def check(benchmark: str, mode: str, name: str, part: dict[str, Any], tasks: int) -> Check:
    """part: as in a trial's record. A few tasks are all expected to be right: gold that is wrong comes later on."""
    wrong = 0 if tasks else WRONG_GOLD.get(benchmark, {}).get(name, 0)
    expected = part["tasks"] - wrong if mode == "oracle" else part["tasks"] * part["null"] / 100
    size = DEMO_TASKS if benchmark == "finmcp" else TASKS[benchmark][name]
    right = part["tasks"] * (part["score"] or 0) / 100
    return Check(mode, name, right, part["tasks"], expected, part["faults"], min(tasks or size, size))


def report(checks: list[Check]) -> str:
    head = ("mode", "part", "right", "expected", "tasks", "of", "faults", "as expected")
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    rows += [
        (c.mode, c.part, *(f"{number:g}" for number in (c.right, c.expected, c.tasks, c.wanted, c.faults)), verdict)
        for c in checks
        for verdict in ["yes" if c.holds else "NO"]
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envace.benchmarks.verify", description=__doc__.splitlines()[0])
    parser.add_argument("benchmark", choices=GROUPS)
    parser.add_argument("--tasks", type=int, default=0, help="the first N of each part; 0 (default) takes all")
    parser.add_argument("--home", type=Path, default=Path(".bench"), help="where the harnesses are (default .bench)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-verify"), help="default runs/bench-verify")
    add_options(parser)
    arguments = parser.parse_args()
    checks: list[Check] = []
    with command(arguments, interrupted="interrupted: the same command begins anew"):
        BENCHMARKS[arguments.benchmark].version(arguments.home)
        with sigterm_interrupts():  # also while a scripted server starts
            for mode in ("oracle", "null"):
                for parts in groups(arguments.benchmark, mode):
                    out = arguments.out / mode / parts[0]
                    checks += verify(arguments.benchmark, mode, parts, arguments.tasks, arguments.home, out)
    print(report(checks))
    sys.exit(any(not c.holds for c in checks))


if __name__ == "__main__":
    main()
