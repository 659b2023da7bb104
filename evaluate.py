"""Evaluate a policy on held-out tasks: sampled runs in the real and in the rehearsed world, and one greedy real run.

    python evaluate.py --config configs/demo.yaml model.path=FOLDER eval.samples=4 [key=value ...]

Writes <run_dir>/evaluation.json: real success with a 95% bootstrap interval over tasks, greedy success, right final
states, rehearsed success, imagination gap, rehearsal fidelity by round, success by kind, and the success of every task.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from envace.config import Config, SamplingConfig
from envace.data import Source, open_source
from envace.evaluation import assign_rewards, evaluate_policy, success, success_by_task, unfold
from envace.metrics import bootstrap_ci
from envace.policy import Policy
from envace.tracking import Tracker, run
from envace.types import Trajectory


def main(config: Config) -> dict[str, Any]:
    policy = Policy(config.model, config.policy, thinking=config.rollout.thinking, seed=config.seed)
    source = open_source(config.data)
    with Tracker(
        config.run_dir, config, name="evaluation", total_steps=1, decode=policy.decode, enabled=policy.is_main
    ) as tracker:
        results = evaluate(policy, config, source, tracker)
        tracker.log(0, {f"eval/{key}": value for key, value in results.items() if isinstance(value, float)})
    if policy.is_main:
        path = Path(config.run_dir) / "evaluation.json"
        path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return results


def evaluate(policy: Policy, config: Config, source: Source, tracker: Tracker) -> dict[str, Any]:
    tasks = source.eval_tasks()[: config.eval.tasks or None]
    samples = config.eval.samples
    with tracker.progress(len(tasks) * (2 * samples + 1), "evaluate") as bar:
        metrics, unfolded = evaluate_policy(policy, tasks, config, source, on_done=bar.update)
        greedy, _ = unfold(
            policy,
            tasks,
            config,
            source,
            environment="real",
            purpose="evaluation",
            sampling=SamplingConfig(temperature=0.0),
            samples=1,
            on_done=bar.update,
        )
    assign_rewards(greedy, source)
    unfolded["greedy"] = policy.gather(greedy)
    for name, trajectories in unfolded.items():
        tracker.trajectories(0, f"eval-{name}", trajectories)
    by_task = success_by_task(unfolded["real"], samples)
    known = [value for value in by_task if value is not None]
    return {
        "model": config.model.path,
        "tasks": len(tasks),
        "samples": samples,
        "unknown_rewards": sum(t.reward is None for t in unfolded["real"]),
        "real_success": metrics["eval/real_success"],
        "ci": bootstrap_ci(known) if known else [float("nan")] * 2,
        "greedy": success(unfolded["greedy"]),
        "right_final_state": metrics["eval/right_final_state"],
        "rehearsed_success": metrics["eval/rehearsed_success"],
        "imagination_gap": metrics["eval/imagination_gap"],
        "fidelity_by_round": {
            key.removeprefix("fidelity/round_"): share for key, share in metrics.items() if key.startswith("fidelity/")
        },
        "by_kind": by_kind(unfolded["real"]),
        "success_by_task": by_task,
    }


def by_kind(trajectories: list[Trajectory]) -> dict[str, float]:
    kinds = defaultdict(list)
    for trajectory in trajectories:
        kinds[trajectory.task.kind].append(trajectory)
    return {kind: success(group) for kind, group in sorted(kinds.items())}


if __name__ == "__main__":
    run(main, __doc__)
