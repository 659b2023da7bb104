"""What N private rehearsals of one task cost, generated together.

    python -m bench.cases.rehearsal MODEL_FOLDER N

Mode parallel, greedy, so that all N are the same work, on held-out tasks of the embedded world.
"""

from __future__ import annotations

import sys

import torch

from bench.measure import peak_mib, seconds, tell
from envace.committed import rehearser_of
from envace.config import load_config
from envace.data import open_source
from envace.episodes import drive
from envace.settings import SamplingConfig
from envace.team import evaluation_team
from envace.types import Task

TASKS = 5


def main() -> None:
    torch.set_num_threads(1)
    settings = [f"model.path={sys.argv[1]}", "rehearsal.mode=parallel", f"rehearsal.n={int(sys.argv[2])}"]
    config = load_config("configs/rehearsal.yaml", settings)
    team, tasks = evaluation_team(config), open_source(config).eval_tasks()[: 1 + TASKS]

    def rehearse(task: Task) -> None:
        with team.generating(SamplingConfig(temperature=0.0)) as generate:
            drive(rehearser_of(config, team.lead.chat, config.model.path).prepare(task), generate)

    rehearse(tasks[0])
    with seconds() as found:
        for task in tasks[1:]:
            rehearse(task)
    tell({**found, "peak_mib": peak_mib()})


if __name__ == "__main__":
    main()
