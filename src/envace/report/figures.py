"""A learning curve from metrics.jsonl, and the results table from the report of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Curve = dict[int, float]  # step -> value


class Panel(NamedTuple):
    title: str
    metrics: list[str]
    low: float  # the axis reaches at least from low to high
    high: float
    unit: float = 1.0  # what the tick labels count in


PANELS = [
    Panel("Training reward", ["reward/mean"], 0.0, 1.0),
    Panel("Held-out success, %", ["eval/rehearsed_success", "eval/real_success"], 0.0, 1.0, 0.01),
    # A few points of noise must not fill the panel.
    Panel("Imagination gap (rehearsed − real), points", ["eval/imagination_gap"], -0.1, 0.1, 0.01),
]
STYLES = {  # colours of Okabe and Ito's palette, told apart with any colour vision
    "reward/mean": {"color": "#009E73"},
    "eval/rehearsed_success": {"color": "#D55E00", "linestyle": "--", "label": "rehearsed"},
    "eval/real_success": {"color": "#0072B2", "label": "real"},
    "eval/imagination_gap": {"color": "#000000"},
}


def learning_curve(metrics: str | Path | Sequence[str | Path], out_png: str | Path, *, stage: str = "rl") -> None:
    """Draw reward, held-out success and imagination gap over the steps of a stage.

    metrics: a metrics.jsonl, or one for each seed: then the seeds are thin lines and their mean is bold, over the steps
        that all of them have. A NaN is a gap in its line and in the mean.
    Raises ValueError if a file has no line of the stage.
    """
    paths = [metrics] if isinstance(metrics, str | Path) else metrics
    seeds = [_read_curves(Path(path), stage) for path in paths]
    figure = Figure(figsize=(11, 3.3), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(PANELS), sharex=True), PANELS, strict=True):
        for metric in panel.metrics:
            if curves := [seed[metric] for seed in seeds if metric in seed]:
                _draw(axes, curves, STYLES[metric])
        _finish(axes, panel)
    note = f" (thin: {len(seeds)} seeds, bold: their mean)" if len(seeds) > 1 else ""
    figure.supxlabel(f"{stage.upper()} step{note}", fontsize=10)
    figure.savefig(out_png, dpi=150)


def _read_curves(path: Path, stage: str) -> dict[str, Curve]:
    """{metric: curve} of the lines of a stage. A step that occurs twice counts as it was last."""
    curves: dict[str, Curve] = {}
    with path.open(encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            if record.pop("stage") == stage:
                step = record.pop("step")
                for metric, value in record.items():
                    curves.setdefault(metric, {})[step] = float(value)
    if not curves:
        raise ValueError(f"{path} has no metrics of stage {stage!r}")
    return curves


def _draw(axes: Axes, curves: list[Curve], style: dict[str, str]) -> None:
    def plot(curve: Curve, **settings: Any) -> None:
        axes.plot(*zip(*sorted(curve.items()), strict=True), **settings)

    if len(curves) > 1:
        for curve in curves:
            plot(curve, **style | {"linewidth": 0.8, "alpha": 0.5, "label": None})
    common = set.intersection(*map(set, curves))
    marker = "o" if len(common) <= 20 else ""
    plot({s: fmean(curve[s] for curve in curves) for s in common}, linewidth=2.2, marker=marker, markersize=4, **style)


def _finish(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title, loc="left", fontsize=10.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    if not axes.get_lines():
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="#666666")
        return
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, panel.low), max(high, panel.high))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, position: f"{value / panel.unit:.4g}")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    if panel.low < 0:
        axes.axhline(0, color="#666666", linewidth=0.8, zorder=1)
    if len(panel.metrics) > 1:
        axes.legend(frameon=False, loc="best", handlelength=3)


def markdown_table(report: dict[str, Any], out_md: str | Path) -> None:
    """Write the results of a report as Markdown tables: a row for each seed and, if there are several, for their mean.

    report: one run, or {"seeds": [...], "runs": [one run for each seed]}. A run has `seeds` (a list of one), `sft` and
        `rl` (each real_success, greedy, ci), `gain.ci`, `rl.rehearsed_success`, `rl.fidelity_by_round`, `controls`,
        `env_calls_in_training`, `seconds` and `peak_rss_gb`. Success and fidelity are shares, a ci is [low, high].
    """
    runs = [_sections(run) for run in report.get("runs", [report])]
    tables = []
    for title in runs[0]:
        rows = dict(zip(report["seeds"], (run[title] for run in runs), strict=True))
        tables.append(f"**{title}**\n\n{_table(rows)}\n")
    Path(out_md).write_text("\n".join(tables), encoding="utf-8")


def _sections(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{title: {column: number, or interval}}."""
    sft, rl, gain = run["sft"], run["rl"], run["rl"]["real_success"] - run["sft"]["real_success"]
    success = {"SFT": sft["real_success"], "SFT 95% CI": sft["ci"], "RL": rl["real_success"], "RL 95% CI": rl["ci"]}
    success |= {"gain": gain, "gain 95% CI": run["gain"]["ci"], "SFT greedy": sft["greedy"], "RL greedy": rl["greedy"]}
    fidelity = {f"round {number}": share for number, share in rl["fidelity_by_round"].items()}
    seconds = {f"{stage}, s": value for stage, value in run["seconds"].items()}
    return {
        "Success on held-out tasks, %": _percent(success | {"RL rehearsed": rl["rehearsed_success"]}),
        "Controls: success on held-out tasks, %": _percent(run["controls"]),
        "Rehearsal fidelity after RL, % of fields by round": _percent(fidelity),
        "Cost": {"real calls in training": run["env_calls_in_training"], **seconds, "peak GB": run["peak_rss_gb"]},
    }


def _percent(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: [100 * v for v in x] if isinstance(x, list | tuple) else 100 * x for name, x in columns.items()}


def _table(rows: dict[Any, dict[str, Any]]) -> str:
    """A column that a seed lacks stays empty. A mean is over all seeds or not given; an interval has none."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    if len(rows) > 1:
        everywhere = [c for c in columns if all(isinstance(row.get(c), int | float) for row in rows.values())]
        rows = rows | {"mean": {c: fmean(row[c] for row in rows.values()) for c in everywhere}}
    lines = [["seed", *columns], ["---:"] * (1 + len(columns))]
    lines += [[str(label), *(_cell(row.get(column)) for column in columns)] for label, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_cell, value))}]"
    return "" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)
