"""Does private rehearsal help? Modes x numbers of rehearsals x who rehearses, on the embedded world (Table 3, Fig. 6).

    python -m envace.tts [--numbers 0,2,8] [--modes parallel,sequential] [--tasks 100] [--samples 4] [--seed 0]

Trains with configs/rehearsal.yaml where runs/tts has no model yet (SFT, then RL in rehearsal; some twenty minutes),
then evaluates the RL model with each way to rehearse, by itself and by the model that only SFT has trained. Writes
results.json, table.md and figure.png in runs/tts/seed<k>; rows that are done are not made again.

A control is in the table: rehearsals whose memories go to another task. What helps there too is not what they say.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import evaluate
import train_rl
import train_sft
from envace.config import load_config, settings_of
from envace.console import add_options, command, conclude
from envace.records import is_done, read_record, write_record
from envace.report.tts import write_report
from envace.settings import Config

CONFIG = "configs/rehearsal.yaml"
ROOTS = {False: Path("runs/tts"), True: Path("runs/tts_quick")}
QUICK = (
    *("data.demonstrations=128", "data.rehearsals=128", "data.train_tasks=32", "data.eval_tasks=8", "eval.tasks=4"),
    *("sft.steps=60", "sft.batch_size=8", "rl.steps=2", "rl.prompts_per_step=4", "rl.group_size=4"),
)
Mode = Literal["parallel", "sequential", "candidates"]
MODES: dict[str, Mode] = {mode: mode for mode in get_args(Mode)}
ALONE = 5  # tasks that are run one at a time, for the latency
logger = logging.getLogger("envace")


@dataclass(frozen=True)
class Row:
    """One way to rehearse. rehearser: "rl", the model that executes, or "sft", the one it was trained from."""

    mode: Mode
    n: int
    rehearser: str = "rl"
    shuffle: bool = False

    @property
    def name(self) -> str:
        return f"{self.mode}-{self.n}-{self.rehearser}{'-shuffled' if self.shuffle else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envace.tts", description=__doc__.splitlines()[0])
    parser.add_argument("--numbers", default="0,2,8", metavar="N,N", help="rehearsals of a task (default 0,2,8)")
    parser.add_argument("--modes", default="parallel,sequential", metavar="A,B", help=f"of {', '.join(MODES)}")
    parser.add_argument("--tasks", type=int, default=100, help="held-out tasks (default 100)")
    parser.add_argument("--samples", type=int, default=4, help="runs of each task (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the model, its training and the runs (default 0)")
    parser.add_argument("--quick", action="store_true", help="in minutes, with models that can do nothing: a check")
    add_options(parser)
    arguments = parser.parse_args()
    try:
        rows = rows_of(arguments.modes.split(","), [int(n) for n in arguments.numbers.split(",")])
    except ValueError as error:
        parser.error(str(error))
    with command(arguments, interrupted="interrupted: the same command goes on with the row that it was at"):
        tasks, samples = (4, 2) if arguments.quick else (arguments.tasks, arguments.samples)
        sweep(rows, tasks, samples, arguments.seed, quick=arguments.quick)


def rows_of(modes: list[str], numbers: list[int]) -> list[Row]:
    """No rehearsal first; then each mode and number, by the RL model and, but for candidates, by the SFT model.

    Raises ValueError for what there is not.
    """
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise ValueError(f"there is no mode {unknown[0]!r}: choose from {', '.join(MODES)}")
    if min(numbers) < 0:
        raise ValueError("--numbers must be >= 0")
    some = [n for n in numbers if n]
    rows = [Row("parallel", 0)]
    for mode in modes:
        rows += [Row(MODES[mode], n) for n in some]
        rows += [Row(MODES[mode], n, "sft") for n in some if mode != "candidates"]
    control = [Row("parallel", some[0], shuffle=True)] if some and "parallel" in modes else []
    return rows + control


def sweep(rows: list[Row], tasks: int, samples: int, seed: int, *, quick: bool) -> None:
    """Train where there is no model, then make each row that is not done. Raises ConfigError, UserError."""
    root = ROOTS[quick] / f"seed{seed}"
    common = [f"seed={seed}", f"data.seed={seed}", "checkpoint.resume=true", *(QUICK if quick else ())]
    sizes = [f"eval.tasks={tasks}", f"eval.samples={samples}"]  # checked before anything is trained
    load_config(CONFIG, [*common, *sizes, "model.path="])
    base = load_config(CONFIG, [*common, f"run_dir={root}", f"model.path={root / 'base'}"])
    train(base, root)
    done = []
    for row in rows:
        config = of_row(base, row, root, tasks, samples)
        alone = of_row(base, row, root, min(ALONE, tasks), 1, alone=True)
        settings = {"together": settings_of(config), "alone": settings_of(alone)}
        record = Path(config.run_dir) / "record.json"
        if not is_done(record, settings):
            found = {"together": evaluate.main(config), "alone": evaluate.main(alone)}
            write_record(
                record, settings, mode=row.mode, n=row.n, rehearser=row.rehearser, shuffle=row.shuffle, **found
            )
            logger.info("%s: real success %.3f", row.name, found["together"]["real_success"])
        done.append(read_record(record))
        write_report(done, root, quick=quick)
    conclude({"report": f"{root / 'results.json'}, {root / 'table.md'} and {root / 'figure.png'}"})


def train(base: Config, root: Path) -> None:
    """SFT and RL, where they are not there yet."""
    training = replace(base, checkpoint=replace(base.checkpoint, every=10))
    if not (root / "sft").exists():
        train_sft.main(replace(training, checkpoint=replace(base.checkpoint, every=100)))
    if not (root / "rl").exists():
        train_rl.main(replace(training, model=replace(base.model, path=str(root / "sft"))))


def of_row(base: Config, row: Row, root: Path, tasks: int, samples: int, *, alone: bool = False) -> Config:
    """alone: one run at a time, for what a single user waits."""
    path = str(root / "sft") if row.rehearser == "sft" else ""
    return replace(
        base,
        model=replace(base.model, path=str(root / "rl")),
        rehearsal=replace(base.rehearsal, mode=row.mode, n=row.n, path=path, shuffle=row.shuffle),
        rollout=replace(base.rollout, batch_size=1 if alone else base.rollout.batch_size),
        eval=replace(base.eval, tasks=tasks, samples=samples),
        run_dir=str(root / row.name / ("alone" if alone else "")),
    )


if __name__ == "__main__":
    main()
