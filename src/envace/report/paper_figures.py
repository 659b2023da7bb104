"""Figures 3 to 6 of the paper: the published points that are known, and our own runs.

Published points are black crosses and pluses that no line joins. Ours have filled marks, hollow where a run is partial,
with 95 % intervals over trials, and stand a little to the right of what is published; each line has a mark of its own,
so that nothing hangs on colour. The dotted line is the floor, what an agent that does nothing gets, where that is more
than nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from envace.report.published import FIGURE_3, FIGURE_5, NO_REHEARSAL, TABLE_1, TABLE_3
from envace.report.render import printable
from envace.report.results import BFCL, BFCL_MULTI_TURN, TAU2, VITA, Measure, Measured, Result, measured

VARIANT = re.compile(r"(EnvACE|GRPO|Per-role)-(\d+(?:\.\d+)?)B")  # a row with such a name is in Figures 3 and 4
VARIANTS = ("GRPO", "Per-role", "EnvACE")
MARKS = "os^Dv<>p"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # Okabe and Ito's
LONGEST = 28  # characters of a name in a legend
Points = list[tuple[float, Measured]]


def draw_all(results: list[Result], folder: Path) -> list[Path]:
    paths = []
    for number, draw in ((3, variants), (4, scaling), (5, dynamics), (6, budget)):
        paths.append(folder / f"figure{number}.png")
        draw(results).savefig(paths[-1], dpi=150)
    return paths


def variants(results: list[Result]) -> Figure:
    """Figure 3: tau2-bench by training variant and size."""
    printed = {name: row["tau2"] for name, row in TABLE_1.items() if VARIANT.fullmatch(name)} | FIGURE_3
    named = by_variant(results)
    sizes = sorted({size for _, size in [*map(split, printed), *named]})
    places = {(variant, size): 4 * i + j for i, size in enumerate(sizes) for j, variant in enumerate(VARIANTS)}
    figure, [axes] = panels([TAU2], width=2.6 + 2.2 * len(sizes))
    plot_published(axes, {places[split(name)]: value for name, value in printed.items()})
    mine = [(places[key] + 0.2, found) for key, runs in named.items() for found in measures_of(runs, TAU2)]
    plot_ours(axes, mine, "ours", 0, joined=False)
    axes.set_xticks(list(places.values()), [f"{variant}\n{size:g}B" for variant, size in places])
    axes.set_xlim(-0.7, max(places.values()) + 0.9)
    return with_legend(figure)


def scaling(results: list[Result]) -> Figure:
    """Figure 4: EnvACE over the size of the model."""
    named = {size: runs for (variant, size), runs in by_variant(results).items() if variant == "EnvACE"}
    printed = {split(name)[1]: row for name, row in TABLE_1.items() if name.startswith("EnvACE-")}
    figure, axes = panels([BFCL, TAU2], width=8.4)
    sizes = sorted({*printed, *named})
    for each, (key, measure) in zip(axes, (("bfcl", BFCL), ("tau2", TAU2)), strict=True):
        plot_published(each, {size: row[key] for size, row in printed.items()})
        mine = [(1.05 * size, found) for size, runs in named.items() for found in measures_of(runs, measure)]
        plot_ours(each, mine, "ours", 0)
        each.set_xscale("log")
        each.set_xticks(sizes, [f"{size:g}B" for size in sizes])
        each.set_xticks([], minor=True)
        each.set_xlim(min(sizes) / 1.2, max(sizes) * 1.2)
        each.set_xlabel("parameters of the model")
    return with_legend(figure)


def dynamics(results: list[Result]) -> Figure:
    """Figure 5: over RL steps, from exported checkpoints; tau2-bench as in the paper, and whatever else was run."""
    steps = [result for result in plain(results) if result.step is not None]
    more = [measure for measure in (BFCL, BFCL_MULTI_TURN, VITA) if any(measures_of(steps, measure))]
    figure, axes = panels([TAU2, *more], width=5.4 + 3.4 * len(more))
    plot_published(axes[0], FIGURE_5)
    for each, measure in zip(axes, [TAU2, *more], strict=True):
        for number, series in enumerate(dict.fromkeys(result.series for result in steps)):
            mine = [result for result in steps if result.series == series]
            found = [(result.step, measured(result, measure)) for result in mine]
            points: Points = [(step, one) for step, one in found if step is not None and one is not None]
            plot_ours(each, points, series, number)
        each.set_xlabel("RL step")
        each.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return with_legend(figure)


def budget(results: list[Result]) -> Figure:
    """Figure 6: multi-turn BFCL over the number of rehearsals, of models that rehearse by themselves."""
    figure, [axes] = panels([BFCL_MULTI_TURN], width=6.8)
    plot_published(axes, {0: TABLE_3[NO_REHEARSAL]["multi_turn"]}, "published, none", "1")
    for mode, mark in (("parallel", "x"), ("sequential", "+")):
        ways = [way for way in TABLE_3 if way.mode == mode and way.by == "itself"]
        plot_published(axes, {way.n: TABLE_3[way]["multi_turn"] for way in ways}, f"published, {mode}", mark)
    found = [(result, one) for result in results if (one := measured(result, BFCL_MULTI_TURN))]
    lines = dict.fromkeys((r.row, r.rehearsal.mode) for r, _ in found if r.rehearsal.by == "itself")
    for number, (row, mode) in enumerate(lines):
        mine = [(r.rehearsal, one) for r, one in found if r.row == row]
        mine = [(way, one) for way, one in mine if way == NO_REHEARSAL or (way.mode, way.by) == (mode, "itself")]
        points = [(way.n + 0.1 * (number + 1), one) for way, one in mine]
        plot_ours(axes, points, f"{row}, {mode}", number)
    axes.set_xlabel("rehearsals of a task")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(-0.4, axes.get_xlim()[1] + 0.3)
    return with_legend(figure)


def plain(results: list[Result]) -> list[Result]:
    return [result for result in results if result.rehearsal == NO_REHEARSAL]


def split(name: str) -> tuple[str, float]:
    """(variant, size): EnvACE-1.7B is ("EnvACE", 1.7)."""
    variant, _, size = name.rpartition("-")
    return variant, float(size.removesuffix("B"))


def by_variant(results: list[Result]) -> dict[tuple[str, float], list[Result]]:
    """The runs that Figures 3 and 4 are about, by their names."""
    named: dict[tuple[str, float], list[Result]] = {}
    for result in plain(results):
        if VARIANT.fullmatch(result.row):
            named.setdefault(split(result.row), []).append(result)
    return named


def measures_of(results: Iterable[Result], measure: Measure) -> list[Measured]:
    return [found for result in results if (found := measured(result, measure))]


def panels(measures: list[Measure], width: float) -> tuple[Figure, list[Axes]]:
    """One a measure."""
    figure = Figure(figsize=(width, 3.6), layout="constrained")
    axes = list(figure.subplots(1, len(measures), squeeze=False)[0])
    for each, measure in zip(axes, measures, strict=True):
        if measure.floor:
            each.axhline(measure.floor, color="#666666", linewidth=1, linestyle=":", zorder=1, label="floor")
        each.set_title(f"{measure.title}, %", loc="left", fontsize=10.5)
        each.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plot_published(axes: Axes, points: Mapping[float, float | None], label: str = "published", mark: str = "x") -> None:
    """What is not known is left out."""
    known = {x: value for x, value in points.items() if value is not None}
    style: dict[str, Any] = {"color": "black", "markersize": 8, "markeredgewidth": 1.8, "linestyle": ""}
    axes.plot(list(known), list(known.values()), mark, label=label, **style)


def plot_ours(axes: Axes, points: Points, label: str, number: int, *, joined: bool = True) -> None:
    """number: of the line, which gives it its mark and colour."""
    points = sorted(points, key=lambda point: point[0])
    style: dict[str, Any] = {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKS[number % len(MARKS)],
        "linestyle": "",
    }
    label = printable(label)
    label = label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"
    if joined and len(points) > 1:
        axes.plot([x for x, _ in points], [found.mean for _, found in points], color=style["color"], linewidth=1)
    for is_partial in (False, True):
        shown = [(x, found) for x, found in points if bool(found.flaws) is is_partial]
        if not shown:
            continue
        bars = [found.mean - found.interval[0] if found.interval else 0.0 for _, found in shown]
        fill = {"markerfacecolor": "white"} if is_partial else {}
        name = f"{label}{' (partial)' if is_partial else ''}".replace("$", "\\$")  # no mathematics in a name
        xs, means = [x for x, _ in shown], [found.mean for _, found in shown]
        axes.errorbar(xs, means, yerr=bars, capsize=3, markersize=5.5, label=name, zorder=3, **style | fill)


def with_legend(figure: Figure) -> Figure:
    """One for all panels, beside them; a label that several have stands there once."""
    found: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    style: dict[str, Any] = {"frameon": False, "fontsize": 9, "title_fontsize": 9, "alignment": "left"}
    figure.legend(found.values(), found.keys(), loc="outside right upper", title="bars: 95% over trials", **style)
    return figure
