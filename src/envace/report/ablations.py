"""The comparison of variants: means over seeds, paired differences to EnvACE, what they say in words, and a figure.

Two kinds of 95% interval, about two questions:
- of a mean over seeds, Student's t: where the mean of further trainings would lie. One seed has none.
- of a difference to EnvACE, paired bootstrap over the tasks of the shared seeds: whether these trained policies differ
  on further tasks. It does not know how much another training would change, so the differences by seed stand beside it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from envace.config import versions
from envace.metrics import T_QUANTILES, bootstrap_ci, t_interval
from envace.tracking import without_nan

REFERENCE = "envace"
CLAIMS = {"grpo": 5.5, "per_role_policy": 1.2}  # the paper's gains of EnvACE over them on tau2-bench, in points
MOST_SEEDS = 1 + max(T_QUANTILES)
COLUMNS = {  # metric: (title, what a unit of the table is, decimals)
    "real_success": ("real success, %", 0.01, 1),
    "rehearsed_success": ("rehearsed success, %", 0.01, 1),
    "imagination_gap": ("imagination gap, points", 0.01, 1),
    "first_round_fidelity": ("fidelity in the first round, %", 0.01, 1),
    "sampled_tokens": ("sampled tokens, thousands", 1000, 0),
    "seconds": ("training, s", 1, 0),
    "env_calls": ("real calls in training", 1, 0),
}
Interval = tuple[float, float]


def summarise(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """{variant: its summary}, in the order of the results. results: what each run's result.json holds."""
    by_variant: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_variant.setdefault(result["variant"], []).append(result)
    reference = by_variant.get(REFERENCE, [])
    return {
        variant: {
            "seeds": [run["seed"] for run in runs],
            "steps": runs[0]["settings"]["training"]["rl.steps"],
            **{metric: _over_seeds([measures(run)[metric] for run in runs]) for metric in COLUMNS},
            "difference": None if variant == REFERENCE else difference(runs, reference),
        }
        for variant, runs in by_variant.items()
    }


def measures(run: dict[str, Any]) -> dict[str, float]:
    """The metrics of COLUMNS of one run. Numbers that are not finite are text in its file, which float reads."""
    found = run["evaluation"] | run["training"]
    found["first_round_fidelity"] = found["fidelity_by_round"].get("0", math.nan)
    return {metric: float(found[metric]) for metric in COLUMNS}


def difference(runs: list[dict[str, Any]], reference: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Real success minus the reference's over the tasks of the seeds that both have; those of one seed are the same.

    None if there is no such seed, or if the reference was trained for another number of steps.
    """
    pairs = [(run, other) for run in runs for other in reference if run["seed"] == other["seed"]]
    if not pairs or any(_steps(run) != _steps(other) for run, other in pairs):
        return None
    by_seed, ours, theirs = {}, [], []
    for run, other in pairs:
        tasks = zip(run["evaluation"]["success_by_task"], other["evaluation"]["success_by_task"], strict=True)
        known = [(a, b) for a, b in tasks if a is not None and b is not None]
        by_seed[run["seed"]] = fmean(a - b for a, b in known) if known else math.nan
        ours += [a for a, _ in known]
        theirs += [b for _, b in known]
    if not ours:
        return None
    low, high = bootstrap_ci(ours, theirs)
    return {
        "mean": fmean(ours) - fmean(theirs),
        "interval": [low, high],
        "significant": low > 0 or high < 0,
        "by_seed": by_seed,
        "seeds_interval": t_interval(list(by_seed.values())),
    }


def statement(variant: str, summary: dict[str, dict[str, Any]]) -> str:
    """Whether EnvACE beats a variant, next to what the paper says; one line."""
    paper = f"the paper reports {CLAIMS[variant]:+.1f} points on tau2-bench"
    found = summary.get(variant, {}).get("difference")
    if found is None:
        return f"EnvACE against {variant}: not measured; {paper}."
    verdict = "not significant"
    if found["significant"]:
        verdict = "better, significant" if found["mean"] < 0 else "worse, significant"
    by_seed = ", ".join(_points(-value) for value in found["by_seed"].values())
    over_seeds = f", their mean within {_negated(found['seeds_interval'])}" if found["seeds_interval"] else ""
    return (
        f"EnvACE against {variant}: {verdict} over tasks: {_points(-found['mean'])} points of real success "
        f"{_negated(found['interval'])}, by seed {by_seed}{over_seeds}; {paper}."
    )


def _negated(interval: Interval) -> str:
    low, high = reversed(interval)
    return f"[{_points(-low)}, {_points(-high)}]"


def table(summary: dict[str, dict[str, Any]], notes: list[str]) -> str:
    """Markdown: what EnvACE beats, a row a variant, and how to read it."""
    titles = ["variant", "seeds", "RL steps", *(title for title, _, _ in COLUMNS.values())]
    lines = [[*titles, "real success against EnvACE, points"], ["---", *["---:"] * len(titles)]]
    for variant, row in summary.items():
        cells = [variant, str(len(row["seeds"])), str(row["steps"]), *(_cell(row, metric) for metric in COLUMNS)]
        lines.append([*cells, _difference_cell(variant, row)])
    text = [
        *(f"- {statement(variant, summary)}" for variant in CLAIMS),
        "",
        *(f"| {' | '.join(line)} |" for line in lines),
        "",
        *notes,
        "In brackets: 95% intervals. Over seeds by Student's t; [-] is one seed, which has none. Of a difference by a "
        "paired bootstrap over the tasks of the shared seeds, * where it excludes 0: it says whether these policies "
        "differ on further tasks, not what another training would give. A variant that was trained for another number "
        "of steps than EnvACE is not compared with it. Sampled tokens are those of the trained policies; a simulator's "
        "are not counted.",
    ]
    return "\n".join(text) + "\n"


def write_report(results: list[dict[str, Any]], root: Path, *, quick: bool = False) -> None:
    """results.json, table.md and figure.png in `root`."""
    summary = summarise(results)
    settings = [run["settings"]["evaluation"] for run in results]
    tasks = ", ".join(str(n) for n in sorted({run["evaluation"]["tasks"] for run in results}))
    samples = ", ".join(str(n) for n in sorted({s["eval.samples"] for s in settings}))
    at_once = ", ".join(str(n) for n in sorted({run["jobs"] for run in results}))
    notes = [
        f"{tasks} held-out tasks a seed, {samples} sampled runs of each. Trained with {at_once} runs at a time, which "
        "share the cores.",
        "",
    ]
    if quick:
        notes = ["**A quick check that every variant runs: hardly trained, hardly measured. No result.**", "", *notes]
    report = {
        "statements": {variant: statement(variant, summary) for variant in CLAIMS},
        "variants": summary,
        "versions": versions(),
    }
    (root / "results.json").write_text(
        json.dumps(without_nan(report), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    (root / "table.md").write_text(table(summary, notes), encoding="utf-8")
    draw(summary, root / "figure.png")


def draw(summary: dict[str, dict[str, Any]], out_png: Path) -> None:
    """Two panels with a row a variant: real and rehearsed success, and the difference in real success to EnvACE."""
    rows = list(summary)
    figure = Figure(figsize=(12, 1.6 + 0.34 * len(rows)), layout="constrained")
    success, differences = figure.subplots(1, 2, sharey=True)
    for metric, label, colour, shift in (
        ("real_success", "real", "#0072B2", -0.12),
        ("rehearsed_success", "rehearsed", "#D55E00", 0.12),
    ):
        found = {row: summary[row][metric] for row in rows}
        _dots(success, rows, {r: (f["mean"], f["interval"]) for r, f in found.items()}, colour, shift, label)
    found = {row: summary[row]["difference"] for row in rows if summary[row]["difference"]}
    _dots(differences, rows, {r: (f["mean"], f["interval"]) for r, f in found.items()}, "#0072B2", 0.0, None)
    differences.axvline(0, color="#666666", linewidth=0.8, zorder=1)
    success.set_yticks(range(len(rows)), [_label(row, summary[row]) for row in rows])
    success.invert_yaxis()
    success.set_title("Held-out success, % (95% over seeds)", loc="left", fontsize=10.5)
    success.set_xlim(-2, 102)
    success.legend(frameon=False, loc="best")
    differences.set_title("Real success against EnvACE, points (95% over tasks)", loc="left", fontsize=10.5)
    # A few points of noise must not fill the panel.
    differences.set_xlim(min(-10, differences.get_xlim()[0]), max(10, differences.get_xlim()[1]))
    for axes in (success, differences):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.savefig(out_png, dpi=150)


def _dots(
    axes: Axes,
    rows: list[str],
    found: dict[str, tuple[float, Interval | None]],
    colour: str,
    shift: float,
    label: str | None,
) -> None:
    """A dot a row at 100 times its mean, with its interval as a line; a mean of NaN leaves its row empty."""
    heights = [rows.index(row) + shift for row in found]
    axes.plot([100 * mean for mean, _ in found.values()], heights, "o", color=colour, markersize=5, label=label)
    for height, (_, interval) in zip(heights, found.values(), strict=True):
        if interval is not None:
            axes.plot([100 * bound for bound in interval], [height] * 2, color=colour, linewidth=1.6)


def _over_seeds(values: list[float]) -> dict[str, Any]:
    return {"mean": fmean(values), "interval": t_interval(values), "values": values}


def _steps(run: dict[str, Any]) -> int:
    return run["settings"]["training"]["rl.steps"]


def _cell(row: dict[str, Any], metric: str) -> str:
    _, unit, decimals = COLUMNS[metric]
    found = row[metric]
    if found["interval"] is None:
        return f"{found['mean'] / unit:.{decimals}f} [-]"
    low, high = (bound / unit for bound in found["interval"])
    return f"{found['mean'] / unit:.{decimals}f} [{low:.{decimals}f}, {high:.{decimals}f}]"


def _difference_cell(variant: str, row: dict[str, Any]) -> str:
    if (found := row["difference"]) is None:
        return "" if variant == REFERENCE else "not compared"
    interval = ", ".join(map(_points, found["interval"]))
    return f"{_points(found['mean'])} [{interval}]{'*' if found['significant'] else ''}"


def _label(variant: str, row: dict[str, Any]) -> str:
    seeds = len(row["seeds"])
    return f"{variant} ({seeds} {'seed' if seeds == 1 else 'seeds'}, {row['steps']} steps)"


def _points(share: float) -> str:
    """A difference of shares in signed points; what rounds to zero has no minus."""
    return f"{round(100 * share, 1) + 0.0:+.1f}"
