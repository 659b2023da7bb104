"""Tables 1, 2 and 3 of the paper: each published number, and beside it what our own runs came to.

A cell without a run is empty, and nothing of ours is filled in from the paper. A run of fewer tasks, without some of
the parts, or with tasks that the infrastructure ended is shown with a † and the reason below; no Overall and no
gain is made of it. Runs with rehearsal are in Table 3 alone.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from typing import Any

from envace.report.published import MAIN, NO_REHEARSAL, NOTES, TABLE_1, TABLE_2, TABLE_3, Rehearsal, Scores
from envace.report.render import Cell, Table
from envace.report.results import (
    BFCL,
    BFCL_MULTI_TURN,
    FINMCP,
    TAU2,
    TAU2_WEIGHTED,
    VITA,
    Measure,
    Measured,
    Result,
    difference,
    mean_of,
    measured,
    missing_parts,
)

PARTIAL = "†"
FLOOR = "floor: an agent that does nothing"
TABLE_1_MEASURES = {"bfcl": BFCL, "tau2": TAU2, "vita": VITA}
TABLE_3_MEASURES = {"tau2": TAU2, "multi_turn": BFCL_MULTI_TURN}
HOW_TO_READ = (
    "paper: as published. ours: mean over trials in percent [95 % interval by Student's t, - for a single trial], "
    "trials × tasks. The interval says how much further trials of the same model would differ, nothing about other "
    "tasks. † is not the whole benchmark, and nothing is calculated from it."
)
PAIRED = (
    "Overall and gain pair trial k of one run with trial k of the others; where they have different numbers of trials "
    "there is no interval."
)
ON_TAU2 = (
    "τ²-bench is the plain mean over its three domains; whether the paper weights them by tasks is not known. "
    f"Weighted, the floor is {TAU2_WEIGHTED:.1f}."
)
ON_FINMCP = (
    "FinMCP-Bench: in our runs a call gets the response that is on record in its dialogue, or none; the published ones "
    "may have asked the vendor's live tools. Whether those are micro or macro means is not known."
)


class Notes:
    """The notes of one table, each with a letter, in the order in which they are needed."""

    def __init__(self, number: int):
        self.number = number
        self.lettered: list[tuple[str, str]] = []
        self.partial: dict[str, list[str]] = {}

    def published(self, row: str | Rehearsal, column: str) -> str:
        """The letter for a published cell; "" if there is nothing to say."""
        if (text := NOTES.get((self.number, row, column))) is None:
            return ""
        self.lettered.append((string.ascii_lowercase[len(self.lettered)], text))
        return self.lettered[-1][0]

    def ours(self, row: str, measure: Measure, found: Measured | None) -> str:
        if found is None or not found.flaws:
            return ""
        self.partial.setdefault(f"{measure.title} {'; '.join(found.flaws)}", []).append(row)
        return PARTIAL

    def all(self) -> list[tuple[str, str]]:
        partial = [(PARTIAL, f"{what}: {', '.join(rows)}.") for what, rows in self.partial.items()]
        return [*self.lettered, *partial, ("", HOW_TO_READ)]


def tables(results: list[Result]) -> list[Table]:
    return [table_1(results), table_2(results), table_3(results), own_runs(results)]


def table_1(results: list[Result]) -> Table:
    notes, plain = Notes(1), without_rehearsal(results, ("bfcl", "tau2", "vita"))
    rows = []
    for name in rows_of(TABLE_1, (result.row for result in plain)):
        mine = {key: find(plain, name, measure) for key, measure in TABLE_1_MEASURES.items()}
        cells, printed = [Cell(name)], TABLE_1.get(name, {})
        for key, measure in TABLE_1_MEASURES.items():
            cells.append(paper(printed, key, measure.decimals, notes.published(name, key)))
            cells.append(Cell(shown(mine[key], measure.decimals), notes.ours(name, measure, mine[key])))
        cells.append(paper(printed, "overall", 2, notes.published(name, "overall")))
        rows.append([*cells, Cell(shown(mean_of(list(mine.values())), 2))])
    measures = list(TABLE_1_MEASURES.values())
    return Table(
        "Table 1",
        "Success in percent; Overall is the mean of the three",
        ["model", *in_pairs([measure.title for measure in measures] + ["Overall"])],
        [floor_row([(measure.floor, measure.decimals) for measure in measures]), *rows],
        [*notes.all(), ("", PAIRED), ("", ON_TAU2), *without_score(plain, measures)],
    )


def table_2(results: list[Result]) -> Table:
    """Both means of ours, as which of them is published is not known."""
    notes, plain = Notes(2), without_rehearsal(results, ("finmcp",))
    names, rows = ("tp", "tr", "tf1"), []
    for row in rows_of(TABLE_2, (result.row for result in plain)):
        cells, printed = [Cell(row)], TABLE_2.get(row, {})
        for name in names:
            cells.append(paper(printed, name, 2, notes.published(row, name)))
            for measures in FINMCP.values():
                found = find(plain, row, measures[name])
                cells.append(Cell(shown(found, 2), notes.ours(row, measures[name], found)))
        rows.append(cells)
    titles = [f"{name.upper()}, {whose}" for name in names for whose in ("paper", *(f"ours {mean}" for mean in FINMCP))]
    floor = [Cell(""), Cell("0.00"), Cell("0.00")] * len(names)
    used = [measure for measures in FINMCP.values() for measure in measures.values()]
    return Table(
        "Table 2",
        "FinMCP-Bench: precision, recall and F1 of tool names in percent",
        ["model", *titles],
        [[Cell(FLOOR), *floor], *rows],
        [*notes.all(), ("", ON_FINMCP), *without_score(plain, used)],
    )


def table_3(results: list[Result]) -> Table:
    notes = Notes(3)
    mine = [result for result in results if result.benchmark in ("bfcl", "tau2")]
    # A model that was never rehearsed with has its numbers in Table 1.
    rehearsed = {result.row for result in mine if result.rehearsal != NO_REHEARSAL} | {MAIN}
    mine = [result for result in mine if result.row in rehearsed]
    published = {(MAIN, rehearsal): scores for rehearsal, scores in TABLE_3.items()}
    rows = []
    ours = sorted({(result.row, result.rehearsal) for result in mine})
    for name, rehearsal in rows_of(published, ours):
        printed = published.get((name, rehearsal), {})
        cells = [Cell(name), Cell(rehearsal.mode), Cell(str(rehearsal.n)), Cell(rehearsal.by)]
        found = {key: find(mine, name, measure, rehearsal) for key, measure in TABLE_3_MEASURES.items()}
        label = f"{name} ({described(rehearsal)})"
        for key, measure in TABLE_3_MEASURES.items():
            cells.append(paper(printed, key, 1, notes.published(rehearsal, key) if printed else ""))
            cells.append(Cell(shown(found[key], 1), notes.ours(label, measure, found[key])))
        overall = mean_of(list(found.values()))
        cells.append(paper(printed, "overall", 1, notes.published(rehearsal, "overall") if printed else ""))
        cells.append(Cell(shown(overall, 1)))
        cells.append(paper(printed, "delta", 1, notes.published(rehearsal, "delta") if printed else "", sign="+"))
        rows.append([*cells, Cell(gain(mine, name, rehearsal, overall))])
    measures = list(TABLE_3_MEASURES.values())
    titles = [*in_pairs([measure.title for measure in measures] + ["Overall"]), *in_pairs(["gain"])]
    floor, *more = floor_row([(measure.floor, 1) for measure in measures])
    return Table(
        "Table 3",
        "Private rehearsal at test time; Overall is the mean of the two, gain that over no rehearsal",
        ["model", "rehearsal", "N", "by", *titles],
        [[floor, Cell(""), Cell(""), Cell(""), *more, Cell(""), Cell("")], *rows],
        [*notes.all(), ("", PAIRED), ("", ON_TAU2), *without_score(mine, measures)],
    )


def gain(results: list[Result], name: str, rehearsal: Rehearsal, overall: Measured | None) -> str:
    if rehearsal == NO_REHEARSAL:
        return ""
    reference = mean_of([find(results, name, measure) for measure in TABLE_3_MEASURES.values()])
    return shown(difference(overall, reference), 1, sign="+")


def own_runs(results: list[Result]) -> Table:
    """Every part and aggregate of every run, with its floor where the harness's adapter knows it."""
    titles = ["run", "model", "rehearsal", "part", "score", "faults", "floor"]
    titles += ["harness", "user", "judge", "tasks a part"]
    rows = []
    for result in results:
        record = result.record
        about = [str(result.path.parent), result.row, described(result.rehearsal)]
        harness = f"{record['harness']['name']} {record['harness']['version']}"
        partners = [record[name]["model"] if record[name] else "" for name in ("user", "judge")]
        for part, score, faults, floor in run_lines(record):
            cells = [*about, part, score, faults, floor, harness, *partners, str(record["tasks_per_part"])]
            rows.append([Cell(cell) for cell in cells])
    note = "Every part and aggregate of the runs above and of those that are in no table. faults: tasks that the "
    note += "infrastructure ended, over all trials; they are in no score. score: as above."
    return Table("Runs", "What was run", titles, rows, [("", note)])


def run_lines(record: dict[str, Any]) -> Iterable[tuple[str, str, str, str]]:
    """(part or aggregate, score, faults, floor)."""
    trials = record["trials"]
    for part in dict.fromkeys(part for trial in trials for part in trial["parts"]):
        found = [trial["parts"][part] for trial in trials if part in trial["parts"]]
        scored = [one for one in found if one["score"] is not None]
        cell = Measured(tuple(float(one["score"]) for one in scored), tuple(one["tasks"] for one in scored))
        floor = found[0]["null"]
        faults = sum(one["faults"] for one in found)
        yield part, shown(cell, 2) if scored else "", str(faults), "" if floor is None else f"{floor:.1f}"
    for name in dict.fromkeys(name for trial in trials for name in trial["overall"]):
        values = tuple(float(trial["overall"][name]) for trial in trials if name in trial["overall"])
        yield f"all: {name}", shown(Measured(values), 2), "", ""


def rows_of(published: Iterable[Any], ours: Iterable[Any]) -> list[Any]:
    """The published rows in their order, then those that only we have."""
    return list(dict.fromkeys([*published, *ours]))


def without_rehearsal(results: list[Result], benchmarks: tuple[str, ...]) -> list[Result]:
    return [result for result in results if result.rehearsal == NO_REHEARSAL and result.benchmark in benchmarks]


def find(results: list[Result], row: str, measure: Measure, rehearsal: Rehearsal = NO_REHEARSAL) -> Measured | None:
    wanted = (measure.benchmark, row, rehearsal)
    found = [result for result in results if (result.benchmark, result.row, result.rehearsal) == wanted]
    return measured(found[0], measure) if found else None


def without_score(results: list[Result], measures: list[Measure]) -> list[tuple[str, str]]:
    """A run that a column wants and that has no score for it leaves its cell empty, and this says so."""
    return [
        (
            "",
            f"{result.path}: no {measure.title} without {', '.join(missing_parts(result, measure))}: an empty cell.",
        )
        for result in results
        for measure in measures
        if measure.benchmark == result.benchmark and measured(result, measure) is None
    ]


def in_pairs(titles: list[str]) -> list[str]:
    return [f"{title}, {whose}" for title in titles for whose in ("paper", "ours")]


def floor_row(floors: list[tuple[float, int]]) -> list[Cell]:
    """With the mean of the floors as Overall's."""
    overall = sum(floor for floor, _ in floors) / len(floors)
    shown_floors = [f"{floor:.{decimals}f}" for floor, decimals in [*floors, (overall, max(d for _, d in floors))]]
    return [Cell(FLOOR), *(cell for text in shown_floors for cell in (Cell(""), Cell(text)))]


def paper(printed: Scores, column: str, decimals: int, marks: str, *, sign: str = "") -> Cell:
    value = printed.get(column)
    return Cell("" if value is None else f"{value:{sign}.{decimals}f}", marks)


def shown(found: Measured | None, decimals: int, *, sign: str = "") -> str:
    """mean [low, high], trials × tasks."""
    if found is None:
        return ""
    # What rounds to zero has no minus.
    mean, *bounds = (round(value, decimals) + 0.0 for value in (found.mean, *(found.interval or ())))
    text = f"{mean:{sign}.{decimals}f} [{', '.join(f'{bound:{sign}.{decimals}f}' for bound in bounds) or '-'}]"
    if not found.tasks:
        return text
    fewest, most = min(found.tasks), max(found.tasks)
    return f"{text}, {len(found.values)} × {fewest if fewest == most else f'{fewest}–{most}'}"


def described(rehearsal: Rehearsal) -> str:
    return "none" if rehearsal == NO_REHEARSAL else f"{rehearsal.mode} N={rehearsal.n} by {rehearsal.by}"
