"""Every variant in configs/ablations against EnvACE: training, evaluation in the real environment, one report.

    python -m envace.ablations [--quick] [--seeds 5] [--only envace,grpo] [--jobs 2]

Runs the same entry points as a user would, `jobs` at a time, and writes results.json, table.md and figure.png in
runs/ablations after every run. What is done is skipped and what was begun goes on from its checkpoint, so the same
command continues after an interruption. --quick runs every variant once for two steps in runs/ablations_quick: it shows
that all of it works, its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import logging
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children

from envace.ablations.runs import ROOTS, Run, WarmUp, is_done, plan, recorded, with_warm_ups
from envace.ablations.workers import do, workers
from envace.console import add_options, command, conclude
from envace.interrupts import sigterm_interrupts
from envace.records import read_record
from envace.report.ablations import MOST_SEEDS, write_report
from envace.types import UserError

logger = logging.getLogger("envace")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envace.ablations", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every variant once, in minutes: a check, not a result")
    parser.add_argument("--seeds", type=int, help="repetitions of the core variants (default 5, with --quick 1)")
    parser.add_argument("--only", default="", metavar="A,B", help="these variants alone")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, which share the cores (default 2)")
    add_options(parser)
    arguments = parser.parse_args()
    seeds = arguments.seeds if arguments.seeds is not None else 1 if arguments.quick else 5
    if not 1 <= seeds <= MOST_SEEDS:
        parser.error(f"--seeds must be within 1 and {MOST_SEEDS}")
    if arguments.jobs < 1:
        parser.error("--jobs must be at least 1")
    with command(arguments, interrupted="interrupted: the same command goes on from the last checkpoint"):
        runs = plan(seeds, quick=arguments.quick, only=tuple(filter(None, arguments.only.split(","))))
        with sigterm_interrupts(), workers(arguments.jobs) as pool:
            carry_out(runs, arguments.quick, pool, arguments.jobs)


def carry_out(runs: list[Run], quick: bool, pool: Executor, jobs: int) -> None:
    """What of `runs` is not done. Raises UserError, naming the run, when one fails; those that run are left to end."""
    root = ROOTS[quick]
    # All of them first: a changed setting shall stop the comparison before hours were spent on it.
    done = {work for work in with_warm_ups([*runs, *recorded(quick)]) if is_done(work)}
    left = [work for work in with_warm_ups(runs) if work not in done]
    if before := done.intersection(runs):
        logger.info("%d of %d runs were done before", len(before), len(runs))
    running: dict[Future[str], Run | WarmUp] = {}
    try:
        while left or running:
            while len(running) < jobs and (ready := [work for work in left if done.issuperset(work.needs)]):
                left.remove(ready[0])
                running[pool.submit(do, ready[0], jobs)] = ready[0]
                logger.info("%s: started, %d more to start; see %s", ready[0].name, len(left), ready[0].console)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                work = running.pop(future)
                logger.info("%s: %s", work.name, finish(future, work))
                done.add(work)
                report(quick)
    except KeyboardInterrupt:
        for worker in active_children():
            worker.terminate()
        raise
    report(quick)
    conclude({"report": f"{root / 'results.json'}, {root / 'table.md'} and {root / 'figure.png'}"})


def finish(future: Future[str], work: Run | WarmUp) -> str:
    try:
        return future.result()
    except UserError as error:
        raise UserError(f"{work.name}: {error}") from error
    except BrokenProcessPool as error:
        raise UserError(f"{work.name}: its process was killed, maybe for want of memory; try --jobs 1") from error


def report(quick: bool) -> None:
    """Of all runs that are done, those of earlier calls included."""
    if records := [read_record(run.record) for run in recorded(quick)]:
        write_report(records, ROOTS[quick], quick=quick)


if __name__ == "__main__":
    main()
