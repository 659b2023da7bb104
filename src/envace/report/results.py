"""The results.json files of benchmark runs, read for tables and figures: which row they are, and how whole they are."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from envace.benchmarks import finmcp, vita
from envace.benchmarks.bfcl import AGENTIC, IRRELEVANCE, LIVE, MULTI_TURN, NON_LIVE, NULL_OVERALL
from envace.benchmarks.sizes import FINMCP_TASKS, TASKS, known_tasks
from envace.benchmarks.tau2 import NULL_RIGHT
from envace.metrics import t_interval
from envace.report.published import NO_REHEARSAL, Rehearsal
from envace.types import UserError

BENCHMARKS = ("bfcl", "tau2", "vita", "finmcp")
STEP = re.compile(r"step-(\d+)")  # the folder of an exported checkpoint
MANY = 5  # parts that are missing are named up to here, else counted


@dataclass(frozen=True)
class Measure:
    """A column: one number of one benchmark.

    score: its name in a trial's `overall`. parts: that it is made of. floor: what an agent that does nothing gets.
    """

    title: str
    benchmark: str
    score: str
    parts: tuple[str, ...]
    floor: float
    decimals: int = 1


TAU2_MACRO = 100 * fmean(right / tasks for right, tasks in NULL_RIGHT.values())
TAU2_WEIGHTED = 100 * sum(right for right, _ in NULL_RIGHT.values()) / sum(tasks for _, tasks in NULL_RIGHT.values())

BFCL = Measure("BFCL-v4", "bfcl", "overall", (*NON_LIVE, *LIVE, *IRRELEVANCE, *MULTI_TURN, *AGENTIC), NULL_OVERALL, 2)
BFCL_MULTI_TURN = Measure("BFCL multi-turn", "bfcl", "multi_turn", MULTI_TURN, 0.0)
TAU2 = Measure("τ²-bench", "tau2", "macro", tuple(NULL_RIGHT), TAU2_MACRO)
VITA = Measure("VitaBench", "vita", "macro", vita.PARTS, 0.0)
FINMCP = {
    mean: {
        name: Measure(f"{name.upper()}, {mean}", "finmcp", f"{name}_{mean}", finmcp.PARTS, 0.0, 2)
        for name in ("tp", "tr", "tf1")
    }
    for mean in ("micro", "macro")
}


@dataclass(frozen=True)
class Result:
    """One results.json.

    row: what its line in a table is called. series, step: of an exported checkpoint the training and its step, else
    the row and None.
    """

    path: Path
    benchmark: str
    row: str
    series: str
    step: int | None
    rehearsal: Rehearsal
    record: dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """values: in percent, a trial each. tasks: of each trial; empty of what combines several benchmarks.

    flaws: why it is not the whole benchmark; empty if it is.
    """

    values: tuple[float, ...]
    tasks: tuple[int, ...] = ()
    flaws: tuple[str, ...] = ()

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        return t_interval(list(self.values))


def read_results(runs: Iterable[Path], names: dict[Path, str]) -> list[Result]:
    """Every <run>/<benchmark>/results.json. names: what a run's model is called, in place of its own name.

    Raises UserError for a run without results, two that would be the same cell, and a name for what is no run.
    """
    runs = list(dict.fromkeys(runs))
    if unknown := [run for run in names if run not in runs]:
        raise UserError(f"--name {unknown[0]}=...: that is none of the runs; they are {', '.join(map(str, runs))}")
    results = []
    for run in runs:
        found = [run / benchmark / "results.json" for benchmark in BENCHMARKS]
        if not (found := [path for path in found if path.exists()]):
            raise UserError(f"{run} has no results such as bfcl/results.json: name the run_dir of evaluate.py")
        results += [read_result(path, names.get(run)) for path in found]
    seen: dict[tuple[str, str, Rehearsal], Path] = {}
    for result in results:
        other = seen.setdefault((result.benchmark, result.row, result.rehearsal), result.path)
        if other is not result.path:
            raise UserError(f"{other} and {result.path} are both {result.row!r}: tell them apart with --name RUN=NAME")
    return results


def read_result(path: Path, name: str | None) -> Result:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        own, folder = record["model"]["name"], Path(record["model"].get("path", ""))
        rehearsal = rehearsal_of(record["rehearsal"])
        trials = [checked_trial(trial) for trial in record["trials"]]
        _ = record["tasks_per_part"], record["harness"]["version"], record["judge"]
        if record["benchmark"] != path.parent.name:
            raise ValueError(f"it is of {record['benchmark']}")
        if not isinstance(own, str):
            raise ValueError("its model has no name")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no result of a benchmark ({error}): make it again with evaluate.py") from None
    if not trials:
        raise UserError(f"{path} has no trials: make it again with bench.trials >= 1")
    if match := STEP.fullmatch(own):
        # <training>/exports/step-000010: such names say nothing without the training.
        series = name or (folder.parent.parent.name if folder.parent.name == "exports" else "") or "training"
        row = f"{series}, step {int(match[1])}"
        return Result(path, record["benchmark"], row, series, int(match[1]), rehearsal, record)
    return Result(path, record["benchmark"], name or own, name or own, None, rehearsal, record)


def checked_trial(trial: dict[str, Any]) -> dict[str, Any]:
    """Raises what `read_result` makes one line of if it lacks something, or if a score is no finite number."""
    _ = trial["missing"]
    parts = list(trial["parts"].values())
    _ = [(part["tasks"], part["faults"], part["details"]) for part in parts]
    scores = [*trial["overall"].values(), *(part["score"] for part in parts if part["score"] is not None)]
    if not all(isinstance(score, int | float) and math.isfinite(score) for score in scores):
        raise ValueError("a score is no number")
    return trial


def rehearsal_of(settings: dict[str, Any]) -> Rehearsal:
    """What else is set than mode, number and rehearser makes another way to rehearse of it."""
    if settings["mode"] == "none" or settings["n"] == 0:
        return NO_REHEARSAL
    more = [", of another task"] if settings["shuffle"] else []
    more += [f", {settings[key]}" for key, usual in (("verify", "none"), ("select", "all")) if settings[key] != usual]
    by = Path(settings["path"]).name if settings["path"] else "itself"
    return Rehearsal(settings["mode"] + "".join(more), settings["n"], by)


def measured(result: Result, measure: Measure) -> Measured | None:
    """What a run says about a column; None if it is another benchmark's or no trial has it."""
    trials = result.record["trials"]
    scored = [trial for trial in trials if measure.score in trial["overall"]]
    if result.benchmark != measure.benchmark or not scored:
        return None
    values = tuple(float(trial["overall"][measure.score]) for trial in scored)
    tasks = tuple(sum(part["tasks"] for part in parts_of(trial, measure).values()) for trial in scored)
    return Measured(values, tasks, tuple(flaws(result, measure, len(scored))))


def parts_of(trial: dict[str, Any], measure: Measure) -> dict[str, dict[str, Any]]:
    return {name: part for name, part in trial["parts"].items() if name in measure.parts}


def flaws(result: Result, measure: Measure, scored: int) -> Iterable[str]:
    trials = result.record["trials"]
    if (limit := result.record["tasks_per_part"]) != "all":
        yield f"only the first {limit} tasks of each part"
    if missing := missing_parts(result, measure):
        is_named = len(missing) <= MANY
        yield f"without {', '.join(missing) if is_named else f'{len(missing)} of {len(measure.parts)} parts'}"
    elif limit == "all" and (few := tasks_seen(result, measure)) < (whole := tasks_there_are(measure)):
        yield f"{few} of {whole} tasks"
    if faults := sum(part["faults"] for trial in trials for part in parts_of(trial, measure).values()):
        yield f"{faults} tasks ended by faults"
    if scored < len(trials):
        yield f"{scored} of {len(trials)} trials"


def tasks_there_are(measure: Measure) -> int:
    """In the parts whose number of tasks is known."""
    return FINMCP_TASKS if measure.benchmark == "finmcp" else known_tasks(measure.benchmark, measure.parts)


def tasks_seen(result: Result, measure: Measure) -> int:
    """Of those, in the trial that has fewest; tasks that ended by a fault are another flaw."""
    is_known = TASKS.get(measure.benchmark, dict.fromkeys(measure.parts)).keys()
    return min(
        sum(part["tasks"] + part["faults"] for name, part in parts_of(trial, measure).items() if name in is_known)
        for trial in result.record["trials"]
    )


def missing_parts(result: Result, measure: Measure) -> list[str]:
    """Those that some trial does not have."""
    return [
        part
        for part in measure.parts
        if any(
            part in trial["missing"] or part not in trial["parts"] or trial["parts"][part]["score"] is None
            for trial in result.record["trials"]
        )
    ]


def mean_of(columns: list[Measured | None]) -> Measured | None:
    """The mean of whole columns; None if one is missing or partial.

    Trial k of one goes with trial k of the others: they are independent, so any pairing does. Where one has more trials
    than another there is no pairing, and so no interval.
    """
    whole = [column for column in columns if column and not column.flaws]
    if len(whole) < len(columns):
        return None
    return _combined(whole, fmean)


def difference(ours: Measured | None, reference: Measured | None) -> Measured | None:
    """ours - reference, trial by trial as in `mean_of`; None if one is missing."""
    if ours is None or reference is None:
        return None
    return _combined([ours, reference], lambda pair: pair[0] - pair[1])


def _combined(columns: list[Measured], how: Callable[[Sequence[float]], float]) -> Measured:
    if len({len(column.values) for column in columns}) > 1:
        return Measured((how([column.mean for column in columns]),))
    return Measured(tuple(how(values) for values in zip(*(column.values for column in columns), strict=True)))
