"""The whole loop on the embedded world: build, SFT, RL in rehearsal, evaluation, controls, report.

    python -m envace.demo --seeds 1

Runs the same entry points as a user would (train_sft.py, evaluate.py, train_rl.py of this repository) and writes
runs/demo/report.json, table.md and curve.png.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from transformers import AutoTokenizer

import evaluate
import train_rl
import train_sft
from envace.chat import ChatFormat
from envace.config import ConfigError, load_config, versions
from envace.console import add_options, command, conclude
from envace.demo.agents import call_at_random, do_nothing
from envace.demo.source import DemoSource
from envace.environments import Real
from envace.episodes import rollout
from envace.evaluation import assign_rewards, known_pairs, limits_of, success
from envace.metrics import bootstrap_ci
from envace.report.figures import learning_curve, markdown_table
from envace.settings import Config
from envace.types import Generate, Result

CONFIG = "configs/demo.yaml"
SET_HERE = ("seed=", "data.seed=", "model.", "eval.samples=")
logger = logging.getLogger("envace")


class Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, stage: str, function: Callable[..., Result], *arguments: Any) -> Result:
        started = time.perf_counter()
        result = function(*arguments)
        self.seconds[stage] += time.perf_counter() - started
        return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envace.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, help="independent repetitions (default 1)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"settings that win over {CONFIG}")
    add_options(parser)
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error("--seeds must be at least 1")
    with command(arguments, interrupted="interrupted: the reports of whole seeds are written"):
        conclude(carry_out(arguments.seeds, arguments.overrides))


def carry_out(seeds: int, overrides: list[str]) -> dict[str, str]:
    """Every seed; returns what is said at the end. Raises ConfigError, UserError."""
    root = Path(load_config(CONFIG, overrides).run_dir)
    if taken := [o for o in overrides if o.startswith(SET_HERE)]:
        raise ConfigError(f"{taken[0]} is set by the demo itself: leave it out")
    runs = []
    for seed in range(seeds):
        runs.append(run_seed(seed, root / f"seed{seed}", overrides))
        # Written after every seed: what is done is there even if a later seed is interrupted.
        write_report(runs, root)
    before, after = (mean(run[stage]["real_success"] for run in runs) for stage in ("sft", "rl"))
    last = root / f"seed{seeds - 1}" / "rl"
    return {
        "real success": f"{before:.3f} after SFT, {after:.3f} after RL in rehearsal",
        "report": f"{root / 'report.json'}, {root / 'table.md'} and {root / 'curve.png'}",
        "weights": str(last / "rl"),
        "metrics": str(last / "metrics.jsonl"),
        "trajectories": str(last / "trajectories.jsonl"),
        "TensorBoard": f"tensorboard --logdir {root}",
        "config": str(last / "rl.config.yaml"),
        "next": 'change src/envace/advantages.py, say, then make demo ARGS="run_dir=runs/changed" and make report '
        f'RUNS="{last} runs/changed/{last.relative_to(root)}" OUT=compare.html',
    }


def run_seed(seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Every stage once. Returns the part of report.json that belongs to this seed."""
    logger.info("seed %d: %s", seed, folder)
    shutil.rmtree(folder, ignore_errors=True)
    clock = Clock()

    def config(stage: str, model: Path, *extra: str) -> Config:
        settings = [
            f"seed={seed}",
            f"data.seed={seed}",
            f"run_dir={folder / stage}",
            f"model.path={model}",
        ]
        return load_config(CONFIG, [*overrides, *settings, *extra])

    def evaluated(stage: str, model: Path, title: str) -> dict[str, Any]:
        results = clock.timed("eval", evaluate.main, config(stage, model, "eval.samples=4", "eval.tasks=0"))
        logger.info("%s: real success %.3f, greedy %.3f", title, results["real_success"], results["greedy"])
        return results

    start = config("sft", folder / "base")
    sft = clock.timed("sft", train_sft.main, start)
    before = evaluated("sft", sft, "after SFT")

    rl = clock.timed("rl", train_rl.main, config("rl", sft))
    after = evaluated("rl", rl, "after RL in rehearsal")

    # The same budget with {"ok": true} in place of REHEARSE.
    blind = config("constant", sft, "rollout.environment=constant", "eval.every=0", "eval.tasks=1")
    constant = evaluated("constant", clock.timed("control", train_rl.main, blind), "after RL on a constant response")

    controls = {
        "nothing": scripted_success(start, do_nothing),
        "random": scripted_success(start, lambda chat: call_at_random(chat, seed)),
        "constant_response": constant["real_success"],
        "constant_response_greedy": constant["greedy"],
    }
    paired = known_pairs(after["success_by_task"], before["success_by_task"])
    return {
        "seeds": [seed],
        "sft": before,
        "rl": after,
        "gain": {
            "real_success": after["real_success"] - before["real_success"],
            "ci": bootstrap_ci(*paired),
            "greedy": after["greedy"] - before["greedy"],
        },
        "controls": controls,
        "env_calls_in_training": calls_in_training(folder / "rl"),
        "seconds": {stage: round(seconds, 1) for stage, seconds in clock.seconds.items()},
        # Linux counts kilobytes.
        "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def scripted_success(config: Config, agent: Callable[[ChatFormat], Generate]) -> float:
    """Real success of a scripted agent on the held-out tasks."""
    source = DemoSource(config)
    chat = ChatFormat(AutoTokenizer.from_pretrained(config.model.path))
    trajectories = rollout(
        source.eval_tasks(),
        agent(chat),
        lambda task: Real(source.executable(task, "evaluation")),
        chat,
        limits_of(config),
    )
    assign_rewards(trajectories, config.reward.name)
    return success(trajectories)


def calls_in_training(folder: Path) -> int:
    """What the environment itself counted under the purpose "training", as the RL stage logged it last."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    counted = [record["env_calls/training"] for record in map(json.loads, lines) if "env_calls/training" in record]
    return int(counted[-1])


def write_report(runs: list[dict[str, Any]], root: Path) -> None:
    """One seed: its report as it is. Several: the means, and every seed under `runs`."""
    report = runs[0] if len(runs) == 1 else {**combined(runs), "runs": runs}
    report = {**report, "versions": versions()}
    (root / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    markdown_table(report, root / "table.md")
    learning_curve([root / f"seed{run['seeds'][0]}" / "rl" / "metrics.jsonl" for run in runs], root / "curve.png")


def combined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds, and intervals over the tasks of all seeds together. What has no mean stays under `runs`."""

    def merge(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            shared = [key for key in values[0] if all(key in v for v in values)]
            merged = {key: merge([v[key] for v in values]) for key in shared}
            return {key: value for key, value in merged.items() if value is not None} or None
        return mean(values) if isinstance(values[0], int | float) else None

    before, after = ([x for run in runs for x in run[stage]["success_by_task"]] for stage in ("sft", "rl"))
    after, before = known_pairs(after, before)
    merged = merge(runs)
    merged["sft"]["ci"], merged["rl"]["ci"] = bootstrap_ci(before), bootstrap_ci(after)
    merged["gain"]["ci"] = bootstrap_ci(after, before)
    merged["seeds"] = [run["seeds"][0] for run in runs]
    merged["peak_rss_gb"] = max(run["peak_rss_gb"] for run in runs)
    return merged


if __name__ == "__main__":
    main()
