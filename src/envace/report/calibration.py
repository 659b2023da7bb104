"""A calibration plot: how often predictions are right, over how sure they are."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

COLOUR = "#0072B2"


def draw(bins: list[dict[str, float]], out_png: str | Path) -> None:
    """bins: of `envace.metrics.reliability_bins`, at least one. The number beside a point is how many it stands for."""
    figure = Figure(figsize=(4, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 100], [0, 100], "--", color="#888888", linewidth=0.8, label="calibrated")
    confidence, accuracy = ([100 * entry[name] for entry in bins] for name in ("confidence", "accuracy"))
    axes.plot(confidence, accuracy, "o-", color=COLOUR, markersize=4, label="predictions")
    for x, y, entry in zip(confidence, accuracy, bins, strict=True):
        axes.annotate(str(entry["count"]), (x, y), (4, -10), textcoords="offset points", fontsize=8, color="#666666")
    axes.set_title("Right predictions of risky calls, %", loc="left", fontsize=10.5)
    axes.set_xlabel("confidence, %")
    axes.set_xlim(0, 104)
    axes.set_ylim(-4, 104)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper left", fontsize=8)
    figure.savefig(out_png, dpi=150)
