"""Where this code stands: against TRL's GRPOTrainer, and against itself done the plain way.

    python -m bench [step kv layout logprobs judging rehearsal driver] [--repetitions 5] [--model FOLDER]

The variants of a case do the same work. They take turns, each time in a process of their own, and medians are compared.
Writes results.json, with every measurement, and table.md; cases that are not run again keep what they had.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.measure import read
from bench.tables import TABLES, Runs, render
from envace.config import versions
from envace.console import add_options, command
from envace.types import UserError

logger = logging.getLogger("envace")

TRL = ".bench/trl/bin/python"
OUT = Path("runs/bench")
STEPS = "2"  # of `step` in one process, besides the first


@dataclass(frozen=True)
class Variant:
    """A module of this folder with arguments. once: its numbers do not change, so it is not repeated."""

    module: str
    arguments: Sequence[str] = ()
    python: str = sys.executable
    once: bool = False


def cases(model: str) -> dict[str, dict[str, Variant]]:
    """model: a trained model of the embedded world."""
    shared = str(OUT / "model")
    return {
        "step": {
            f"{name}, {threads} threads": Variant(module, (STEPS, threads, shared, *more), python)
            for threads in ("1", "2")
            for name, module, python, *more in (
                ("trl", "bench.peers.trl_step", TRL),  # first, as it makes the model
                ("ours", "bench.cases.step", sys.executable, "dynamic"),
                ("ours, compiled", "bench.cases.step", sys.executable, "static"),
            )
        },
        "kv": {name: Variant("bench.cases.kv", (name,)) for name in ("kept", "prefilled")},
        "layout": {name: Variant("bench.cases.layout", (name,)) for name in ("sequence", "outputs")}
        | {"equal": Variant("bench.cases.layout", ("equal",), once=True)},
        "logprobs": {name: Variant("bench.cases.logprobs", (name,)) for name in ("chunks", "whole")},
        "judging": {name: Variant("bench.cases.judging", (name,)) for name in ("none", "judged")},
        "rehearsal": {f"N={n}": Variant("bench.cases.rehearsal", (model, n)) for n in ("1", "2", "8")},
        "driver": {"rollout": Variant("bench.cases.driver", (model,))},
    }


def run(name: str, variants: dict[str, Variant], repetitions: int) -> Runs:
    """Raises UserError."""
    runs: Runs = {label: [] for label in variants}
    for repetition in range(repetitions):
        for label, variant in variants.items():
            if repetition and variant.once:
                continue
            runs[label].append(measure(variant))
            logger.info("%s, %s: %d of %d", name, label, repetition + 1, 1 if variant.once else repetitions)
    return runs


def measure(variant: Variant) -> dict:
    if not Path(variant.python).exists():
        raise UserError(f"{variant.python} is not there: run `make bench-setup-trl`, or name other cases")
    command = [variant.python, "-m", variant.module, *variant.arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise UserError(f"`{' '.join(command)}` failed: {last[0]}")
    return read(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(TABLES)}; none: all of them")
    parser.add_argument("--repetitions", type=int, default=5, help="of every variant (default 5)")
    parser.add_argument("--model", default="runs/demo/seed0/rl/rl", help="of the embedded world (default: make demo's)")
    add_options(parser)
    arguments = parser.parse_args()
    known = cases(arguments.model)
    if unknown := set(arguments.cases) - set(known):
        parser.error(f"there is no case {', '.join(sorted(unknown))}")
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / "results.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    with command(arguments, interrupted="interrupted: whole cases are written"):
        for name in arguments.cases or known:
            results[name] = {"versions": versions(), "runs": run(name, known[name], arguments.repetitions)}
            path.write_text(json.dumps(results, indent=1), encoding="utf-8")
    table = render({name: result["runs"] for name, result in results.items()})
    (OUT / "table.md").write_text(table, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
