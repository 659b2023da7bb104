"""The processes that make the runs. Apart from the command: a process that is spawned cannot import a __main__."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context

import torch

import evaluate
import train_rl
import train_sft
from envace.ablations.runs import Run, WarmUp, training_costs
from envace.console import setup_logging
from envace.records import write_record


def workers(jobs: int) -> Executor:
    """A process a run: what one leaves in memory or in torch's random state does not reach the next."""
    return ProcessPoolExecutor(
        jobs,
        mp_context=get_context("spawn"),
        initializer=set_up_worker,
        initargs=(max(1, (os.cpu_count() or 1) // jobs),),
        max_tasks_per_child=1,
    )


def set_up_worker(threads: int) -> None:
    # Ctrl-C reaches every process of the terminal; a worker waits for SIGTERM, upon which it saves a checkpoint.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    setup_logging()


def do(work: Run | WarmUp, jobs: int) -> str:
    """One piece of work, in a worker; what the entry points say goes to its file. Returns a line about the outcome."""
    work.run_dir.mkdir(parents=True, exist_ok=True)
    with work.console.open("a", buffering=1, encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        if isinstance(work, WarmUp):
            train_sft.main(work.training)
            write_record(work.record, work.settings())
            return "done"
        train_rl.main(work.training)
        evaluation = evaluate.main(work.evaluation)
        found = {"variant": work.variant, "seed": work.seed, "jobs": jobs, "evaluation": evaluation}
        write_record(work.record, work.settings(), **found, training=training_costs(work.run_dir))
        return f"real success {evaluation['real_success']:.3f}"
