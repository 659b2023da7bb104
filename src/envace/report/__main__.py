"""Runs as one HTML file: curves, differing settings, and every trajectory. It opens from disk, without a network.

python -m envace.report runs/a [runs/b ...] [--out report.html]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from envace.console import add_options, command, conclude
from envace.report.page.build import write_page
from envace.report.page.runs import read_runs
from envace.tracking import logger

LARGE = 10_000_000


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m envace.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run_dir folders")
    parser.add_argument("--out", type=Path, help="file to write (default report.html in the first run)")
    add_options(parser)
    arguments = parser.parse_args()
    with command(arguments, interrupted="interrupted"):
        report(arguments.runs, arguments.out or arguments.runs[0] / "report.html")


def report(folders: list[Path], out: Path) -> None:
    runs = read_runs(folders)
    size = write_page(runs, out)
    count = sum(len(run.trajectories) for run in runs)
    if size > LARGE:
        logger.warning("the page is larger than %d MB and may open slowly: give fewer runs", LARGE // 1_000_000)
    for run in runs:
        for event in run.events:
            logger.warning("%s: %s", run.name, event)
    conclude({"report": f"{out}: {len(runs)} runs, {count} trajectories, {size / 1e6:.1f} MB"})


if __name__ == "__main__":
    main()
