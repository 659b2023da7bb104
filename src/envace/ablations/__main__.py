"""Every variant in configs/ablations against EnvACE: training, evaluation in the real environment, one report.

    python -m envace.ablations [--quick] [--seeds 5] [--only envace,grpo]

Runs the same entry points as a user would and writes results.json, table.md and figure.png in runs/ablations after
every run. What is done is skipped and what was begun goes on from its checkpoint, so the same command continues after
an interruption. --quick runs every variant once for two steps in runs/ablations_quick: it shows that all of it works,
its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import logging
import sys

import evaluate
import train_rl
import train_sft
from envace.ablations.runs import (
    ROOTS,
    Run,
    WarmUp,
    is_done,
    plan,
    read_record,
    recorded,
    training_costs,
    write_record,
)
from envace.config import ConfigError
from envace.report.ablations import MOST_SEEDS, write_report
from envace.tracking import setup_logging
from envace.types import UserError

logger = logging.getLogger("envace")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envace.ablations", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every variant once, in minutes: a check, not a result")
    parser.add_argument("--seeds", type=int, help="repetitions of the core variants (default 5, with --quick 1)")
    parser.add_argument("--only", default="", metavar="A,B", help="these variants alone")
    arguments = parser.parse_args()
    seeds = arguments.seeds if arguments.seeds is not None else 1 if arguments.quick else 5
    if not 1 <= seeds <= MOST_SEEDS:
        parser.error(f"--seeds must be within 1 and {MOST_SEEDS}")
    setup_logging()
    try:
        runs = plan(seeds, quick=arguments.quick, only=tuple(filter(None, arguments.only.split(","))))
        carry_out(runs, arguments.quick)
    except ConfigError as error:
        parser.error(str(error))
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on from the last checkpoint")


def carry_out(runs: list[Run], quick: bool) -> None:
    root = ROOTS[quick]
    # All of them first: a changed setting shall stop the comparison before hours were spent on it.
    for run in dict.fromkeys((*runs, *recorded(quick))):
        for work in (run.warm_up, run):
            is_done(work)
    left = [run for run in runs if not is_done(run)]
    if len(left) < len(runs):
        logger.info("%d of %d runs were done before", len(runs) - len(left), len(runs))
    for number, run in enumerate(left, 1):
        logger.info("run %d of %d: %s, seed %d", number, len(left), run.variant, run.seed)
        warm_up(run.warm_up)
        train_and_evaluate(run)
        report(quick)
    if not left:
        report(quick)
    logger.info("report: %s, %s and %s", root / "results.json", root / "table.md", root / "figure.png")


def warm_up(work: WarmUp) -> None:
    if not is_done(work):
        train_sft.main(work.training)
        write_record(work)


def train_and_evaluate(run: Run) -> None:
    train_rl.main(run.training)
    evaluation = evaluate.main(run.evaluation)
    logger.info("%s, seed %d: real success %.3f", run.variant, run.seed, evaluation["real_success"])
    costs = training_costs(run.run_dir)
    write_record(run, variant=run.variant, seed=run.seed, training=costs, evaluation=evaluation)


def report(quick: bool) -> None:
    """Of all runs that are done, those of earlier calls included."""
    write_report([read_record(run) for run in recorded(quick)], ROOTS[quick], quick=quick)


if __name__ == "__main__":
    main()
