"""What private rehearsal is worth: ways to rehearse, paired with none, as a table and over their number as a figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from envace.config import versions
from envace.metrics import bootstrap_ci
from envace.tracking import without_nan

STYLES: dict[
    tuple[str, str], dict[str, Any]
] = {  # (mode, rehearser): colours of Okabe and Ito's palette, and a mark that needs no colour
    ("parallel", "rl"): {"color": "#0072B2", "marker": "o"},
    ("parallel", "sft"): {"color": "#56B4E9", "marker": "o", "linestyle": "--"},
    ("sequential", "rl"): {"color": "#D55E00", "marker": "s"},
    ("sequential", "sft"): {"color": "#E69F00", "marker": "s", "linestyle": "--"},
    ("candidates", "rl"): {"color": "#009E73", "marker": "^"},
}
SPREAD = 0.08  # in rehearsals
EXECUTION = {"failed_calls": "failed calls", "recovery_rounds": "recovery rounds", "void_writes": "void writes"}


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a record, in their order. The first one is the run without rehearsal that the others are compared with.

    difference: real success minus that without rehearsal, paired by task, with a 95% bootstrap interval.
    """
    reference = records[0]["together"]["success_by_task"]
    rows = []
    for record in records:
        found = record["together"]
        pairs = zip(found["success_by_task"], reference, strict=True)
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        low, high = bootstrap_ci([a for a, _ in known], [b for _, b in known])
        rows.append(
            {
                **{key: record[key] for key in ("mode", "n", "rehearser", "shuffle")},
                **{key: found[key] for key in ("real_success", "ci", "right_final_state", "execution")},
                "difference": sum(a - b for a, b in known) / len(known),
                "difference_ci": [low, high],
                "significant": low > 0 or high < 0,
                "rehearsal": found["rehearsal"],
                "tokens": sum(found["cost"]["tokens_per_run"].values()),
                "seconds_alone": sum(record["alone"]["cost"]["seconds_per_run"].values()),
            }
        )
    return rows


def statement(row: dict[str, Any]) -> str:
    """Whether one way to rehearse helps; one line."""
    low, high = row["difference_ci"]
    verdict = "no significant difference"
    if row["significant"]:
        verdict = "helps" if row["difference"] > 0 else "harms"
    return f"{_label(row)}: {verdict}, {_points(row['difference'])} points [{_points(low)}, {_points(high)}]."


def table(rows: list[dict[str, Any]], notes: list[str]) -> str:
    titles = ["rehearsal", "N", "by", "real success, %", "against none, points", "tokens a run", "s a run alone"]
    titles += [f"{title} a run" for title in EXECUTION.values()]
    titles += ["own verdict right, %", "rehearsed success, %"]
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)]]
    for row in rows:
        low, high = row["ci"]
        cells = [f"{row['mode']}{', of another task' if row['shuffle'] else ''}" if row["n"] else "none"]
        cells += [str(row["n"]), row["rehearser"] if row["n"] else ""]
        cells += [f"{100 * row['real_success']:.1f} [{100 * low:.1f}, {100 * high:.1f}]", _difference(row)]
        cells += [f"{row['tokens']:.0f}", f"{row['seconds_alone']:.1f}"]
        cells += [f"{row['execution'][name]:.2f}" for name in EXECUTION]
        cells += [_percent(row["rehearsal"][name]) for name in ("verdict_accuracy", "rehearsed_success")]
        lines.append(cells)
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *notes]) + "\n"


def write_report(records: list[dict[str, Any]], root: Path, *, quick: bool = False) -> None:
    """results.json, table.md and figure.png in `root`."""
    rows = summarise(records)
    first = records[0]["together"]
    notes = [
        *(f"- {statement(row)}" for row in rows if row["n"]),
        "",
        f"{first['tasks']} held-out tasks, {first['samples']} runs of each, by the RL model. In brackets: 95% "
        "bootstrap intervals over tasks; differences are paired by task, * where the interval excludes 0. `by`: who "
        "rehearses. Tokens are sampled ones, of rehearsals and execution. Seconds are those of one run at a time.",
    ]
    if quick:
        notes.insert(0, "**A quick check that it runs: the models can do nothing. No result.**\n")
    report = {"rows": rows, "statements": [statement(row) for row in rows if row["n"]], "versions": versions()}
    text = json.dumps(without_nan(report), indent=2, ensure_ascii=False)
    (root / "results.json").write_text(text + "\n", encoding="utf-8")
    (root / "table.md").write_text(table(rows, notes), encoding="utf-8")
    draw(rows, root / "figure.png")


def draw(rows: list[dict[str, Any]], out_png: Path) -> None:
    """Real success over the number of rehearsals, a line for each mode and rehearser, all from the point without."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for place, ((mode, rehearser), style) in enumerate(STYLES.items()):
        aside = SPREAD * (place - (len(STYLES) - 1) / 2)  # so that intervals stand beside each other
        mine = [r for r in rows if (r["mode"], r["rehearser"]) == (mode, rehearser) and r["n"] and not r["shuffle"]]
        if not mine:
            continue
        line = sorted([rows[0], *mine], key=lambda row: row["n"])
        means = [100 * row["real_success"] for row in line]
        bounds = [[abs(100 * row["ci"][i] - mean) for row, mean in zip(line, means, strict=True)] for i in (0, 1)]
        axes.errorbar(
            [row["n"] + aside for row in line],
            means,
            yerr=bounds,
            capsize=3,
            label=f"{mode}, by {rehearser}",
            **style,
        )
    axes.set_xlabel("Rehearsals of a task")
    axes.set_title("Real success, % (95% over tasks)", loc="left", fontsize=10.5)
    axes.set_xticks(sorted({row["n"] for row in rows}))
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if len(rows) > 1:
        axes.legend(frameon=False)
    figure.savefig(out_png, dpi=150)


def _label(row: dict[str, Any]) -> str:
    control = ", memories of another task" if row["shuffle"] else ""
    return f"{row['mode']} N={row['n']} by {row['rehearser']}{control}"


def _difference(row: dict[str, Any]) -> str:
    if not row["n"]:
        return ""
    interval = ", ".join(map(_points, row["difference_ci"]))
    return f"{_points(row['difference'])} [{interval}]{'*' if row['significant'] else ''}"


def _points(share: float) -> str:
    """A difference of shares in signed points; what rounds to zero has no minus."""
    return f"{round(100 * share, 1) + 0.0:+.1f}"


def _percent(share: float | str) -> str:
    """Numbers that are not finite are text in a record."""
    return f"{100 * float(share):.0f}" if float(share) == float(share) else ""
