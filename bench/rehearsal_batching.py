"""What N private rehearsals of one task cost, generated together, against one.

    python bench/rehearsal_batching.py MODEL_FOLDER

Mode parallel, greedy, so that all N are the same work; medians of alternating repetitions on held-out tasks of the
embedded world.
"""

from __future__ import annotations

import sys
import time
from statistics import median

from envace.committed import rehearser_of
from envace.config import load_config
from envace.data import open_source
from envace.episodes import drive
from envace.settings import SamplingConfig
from envace.team import evaluation_team

NUMBERS = (1, 2, 8)
REPETITIONS = 5
TASKS = 5


def main() -> None:
    config = load_config("configs/rehearsal.yaml", [f"model.path={sys.argv[1]}", "rehearsal.mode=parallel"])
    team, tasks = evaluation_team(config), open_source(config).eval_tasks()[:TASKS]
    seconds: dict[int, list[float]] = {n: [] for n in NUMBERS}
    for _ in range(REPETITIONS):
        for task in tasks:
            for n in NUMBERS:
                config.rehearsal.n = n
                started = time.perf_counter()
                with team.generating(SamplingConfig(temperature=0.0)) as generate:
                    drive(rehearser_of(config, team.lead.chat, config.model.path).prepare(task), generate)
                seconds[n].append(time.perf_counter() - started)
    for n in NUMBERS:
        print(f"N={n}: {median(seconds[n]):.3f} s a task, {median(seconds[n]) / median(seconds[1]):.2f} times N=1")


if __name__ == "__main__":
    main()
