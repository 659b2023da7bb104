"""A figure of what training changed: success over its steps, and errors over the rounds of an episode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

REAL, REHEARSED, FIDELITY = "#0072B2", "#D55E00", "#009E73"


def draw(report: dict[str, Any], out_png: str | Path) -> None:
    """report: `curve`, entries with step, real_success, ci, rehearsed_success and rehearsed_ci; `last`, of the last
    model, fidelity_by_round {round: share} and success_by_rounds {rounds: (success, number of runs)}.
    """
    figure = Figure(figsize=(11, 3.5), layout="constrained")
    over_steps, by_round, by_length = figure.subplots(1, 3)
    steps = [entry["step"] for entry in report["curve"]]
    for name, interval, label, colour in (
        ("real_success", "ci", "real", REAL),
        ("rehearsed_success", "rehearsed_ci", "rehearsed", REHEARSED),
    ):
        over_steps.plot(steps, [100 * e[name] for e in report["curve"]], "o-", color=colour, label=label, markersize=4)
        low, high = zip(*(e[interval] for e in report["curve"]), strict=True)
        over_steps.fill_between(steps, _percent(low), _percent(high), color=colour, alpha=0.15, linewidth=0)
    over_steps.legend(frameon=False, loc="best")
    _finish(over_steps, "Held-out success, % (95% over tasks)", "RL step")

    # The first round of calls is number 0 in the records.
    fidelity = {int(number) + 1: share for number, share in report["last"]["fidelity_by_round"].items()}
    by_round.plot(list(fidelity), _percent(fidelity.values()), "o-", color=FIDELITY, markersize=4)
    _finish(by_round, "Rehearsal fidelity, % of fields", f"round of calls, after step {steps[-1]}")

    success = {int(rounds): found for rounds, found in report["last"]["success_by_rounds"].items()}
    by_length.bar(list(success), _percent(share for share, _ in success.values()), color=REAL, width=0.6)
    for rounds, (share, count) in success.items():
        by_length.annotate(str(count), (rounds, 100 * share), ha="center", va="bottom", fontsize=8, color="#666666")
    _finish(by_length, "Real success, % (above: runs)", f"rounds in the run, after step {steps[-1]}")
    figure.savefig(out_png, dpi=150)


def _percent(shares: Any) -> list[float]:
    return [100 * share for share in shares]


def _finish(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.set_xlabel(below)
    # Room for the numbers above full bars.
    axes.set_ylim(0, 108)
    axes.set_yticks(range(0, 101, 20))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
