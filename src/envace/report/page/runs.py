"""What runs left in their folders, as a report page shows it.

Whatever cannot be read is said on the page (`Run.events`) and never dropped in silence: a run may still be written to.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from envace.metrics import gap_growth, is_reward_hacking
from envace.types import UserError, first_line

WINDOW = 3  # evaluations in a row, as in evaluation.GapWatch
TOLERATED_GAP = 0.1
NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # as tracking.without_nan writes them


@dataclass
class Run:
    """name: unique on the page. metrics: lines of metrics.jsonl. settings: {stage: {dotted key: value}}, resolved.

    versions: {stage: {library: version}}. events: what a reader should know, one line each.
    trajectories: lines of trajectories.jsonl.
    """

    name: str
    metrics: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    trajectories: list[dict[str, Any]] = field(default_factory=list)


def read_runs(folders: list[Path]) -> list[Run]:
    """Raises UserError for a folder that is none, or that cannot be read."""
    names = unique_names(folders)
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def unique_names(folders: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell the folders apart. Raises UserError for a folder given twice."""
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        raise UserError("a run was given twice: name each folder once")
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def read_run(folder: Path, name: str) -> Run:
    """Raises UserError."""
    if not folder.is_dir():
        raise UserError(f"no such run: {folder} is no folder; give the run_dir of a training or an evaluation")
    run = Run(name)
    try:
        run.metrics = list(json_lines(folder / "metrics.jsonl", run.events, is_metrics))
        run.trajectories = list(json_lines(folder / "trajectories.jsonl", run.events, is_trajectory))
        for file in sorted(folder.glob("*.config.yaml")):
            run.settings[file.name.removesuffix(".config.yaml")] = dict(flat(read_yaml(file)))
        for file in sorted(folder.glob("*.versions.json")):
            run.versions[file.name.removesuffix(".versions.json")] = dict(flat(read_yaml(file)))
    except OSError as error:
        raise UserError(f"cannot read {error.filename or folder}: {error.strerror or error}") from error
    if not run.metrics and not run.trajectories:
        run.events.append("nothing was recorded yet: no metrics and no trajectories")
    run.events += warnings(run.metrics)
    return run


def is_of_a_step(record: Any) -> bool:
    return isinstance(record, dict) and isinstance(record.get("stage"), str) and type(record.get("step")) is int


def is_metrics(record: Any) -> bool:
    """Whether all of it are numbers, or the words that `without_nan` writes for some."""
    return is_of_a_step(record) and all(
        is_number(value) or value in NOT_FINITE for key, value in record.items() if key != "stage"
    )


def is_number(value: Any) -> bool:
    """One that a float can hold."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def is_trajectory(record: Any) -> bool:
    segments = record.get("segments") if is_of_a_step(record) else None
    turns = record.get("user_turns", []) if is_of_a_step(record) else None
    return (
        isinstance(segments, list)
        and isinstance(turns, list)
        and all(
            isinstance(segment, dict)
            and isinstance(segment.get("role"), str)
            and isinstance(segment.get("text", ""), str)
            for segment in segments
        )
    )


def json_lines(file: Path, events: list[str], is_record: Callable[[Any], bool]) -> Iterator[dict[str, Any]]:
    """The records of a file, none if there is no file. A line that is none is counted in `events`; the last one may
    be cut while the run still writes it."""
    if not file.exists():
        return
    broken: list[int] = []
    with file.open(encoding="utf-8", errors="surrogateescape", newline="\n") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith("\n"):
                events.append(f"{file.name}: the last line is cut and was left out; the run may still be writing it")
                break
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if is_record(record):
                yield record
            else:
                broken.append(number)
    if broken:
        first = ", ".join(map(str, broken[:5]))
        events.append(f"{file.name}: {len(broken)} lines are no records and were left out (line {first})")


def read_yaml(file: Path) -> Any:
    """JSON is YAML. What JSON has no word for, such as a date, becomes text. Raises UserError."""
    try:
        value = yaml.safe_load(file.read_text(encoding="utf-8"))
        return json.loads(json.dumps(value, default=str))
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read ({first_line(error)}): restore or delete it") from error


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested mappings; an empty one is a value."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flat(item, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, value


def warnings(metrics: list[dict[str, Any]]) -> list[str]:
    """What the numbers of a run warn of, by the rules of the training itself."""
    stages = defaultdict(list)
    for record in metrics:
        stages[record["stage"]].append(record)
    return [event for stage, records in stages.items() for event in stage_warnings(stage, records)]


def stage_warnings(stage: str, records: list[dict[str, Any]]) -> Iterator[str]:
    evaluated = [r for r in records if {"eval/real_success", "eval/rehearsed_success"} <= r.keys()]
    for last in range(WINDOW, len(evaluated) + 1):
        window = evaluated[last - WINDOW : last]
        rehearsed, real = ([float(r[f"eval/{k}_success"]) for r in window] for k in ("rehearsed", "real"))
        growth = gap_growth(rehearsed, real)
        where = f"{stage} step {window[-1]['step']}: in {WINDOW} evaluations the gap grew by {100 * growth:.1f} points"
        if is_reward_hacking(rehearsed, real):
            yield f"{where} (reward hacking? rehearsed success rose, real success did not)"
        elif growth > TOLERATED_GAP:
            yield where
    skipped = [r["step"] for r in records if float(r.get("skipped", 0)) > 0]
    if skipped:
        yield f"{stage}: {len(skipped)} updates had no finite gradient and were skipped, first at step {skipped[0]}"
    unknown = [r["step"] for r in records if float(r.get("reward/unknown_share", 0)) > 0]
    if unknown:
        yield f"{stage}: some rewards are unknown in {len(unknown)} steps, first at step {unknown[0]}"
    infinite = sorted({k for r in records for k, v in r.items() if k.startswith("loss/") and is_not_finite(v)})
    if infinite:
        yield f"{stage}: not finite at times: {', '.join(infinite)}"


def is_not_finite(value: float | str) -> bool:
    return not math.isfinite(float(value))
