"""Evaluate a policy on held-out tasks: sampled runs in the real and in the rehearsed world, and one greedy real run.

    python evaluate.py --config configs/demo.yaml model.path=FOLDER eval.samples=4 [key=value ...]

Writes <run_dir>/evaluation.json: real success with a 95% bootstrap interval over tasks, greedy success, right final
states, rehearsed success with its interval, imagination gap, rehearsal fidelity by round, real success by number of
rounds (with the number of runs), success by kind, and the success of every task.
With rehearsal.mode=parallel, sequential or candidates: private rehearsals, then one real execution of each run; the
file then has real success with its interval, what failed on the way, what the rehearsals were worth and what they cost.
Data without an executable environment (CM2) has rehearsed runs only, and the interval is of rehearsed success.
With benchmark=bfcl, tau2, vita or finmcp: that official harness instead; see `envace.benchmarks.runs`.
With a gate (gate.mode) also how true its predictions were in the sampled real runs, and <run_dir>/calibration.png.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envace.benchmarks.runs import evaluate_benchmark
from envace.committed import rehearse_and_execute, results_of
from envace.console import run
from envace.data import ExecutableSource, Source, open_source, tasks_within
from envace.evaluation import (
    assign_rewards,
    by_kind,
    evaluate_team,
    interval,
    success,
    success_by_rounds,
    success_by_task,
    unfold,
)
from envace.gate import check_risks
from envace.metrics import prediction_metrics
from envace.report import calibration
from envace.services import Services
from envace.settings import Config, SamplingConfig
from envace.team import Team, evaluation_team, rehearsing_team
from envace.tracking import Tracker, places, without_nan
from envace.types import Task, Trajectory, UserError


def main(config: Config) -> dict[str, Any]:
    if config.benchmark != "none":
        return evaluate_benchmark(config)
    with Services(config) as services:
        team = evaluation_team(config)
        policy = team.lead
        source = open_source(config)
        with Tracker(
            config.run_dir, config, name="evaluation", total_steps=1, decode=policy.decode, enabled=policy.is_main
        ) as tracker:
            how = evaluate if config.rehearsal.mode == "none" else evaluate_with_rehearsal
            results = how(team, config, source, services, tracker)
            tracker.log(0, {f"eval/{key}": value for key, value in results.items() if isinstance(value, float)})
    if policy.is_main:
        path = Path(config.run_dir) / "evaluation.json"
        draw_calibration(results, path.with_name("calibration.png"))
        path.write_text(json.dumps(without_nan(results), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return results


def held_out(team: Team, config: Config, source: Source) -> list[Task]:
    tasks = tasks_within(source.eval_tasks(), team.lead.chat, config.data.max_prompt_tokens)
    if not tasks:
        raise UserError("there are no held-out tasks: set data.eval_path")
    check_risks(config.gate, tasks)
    return tasks[: config.eval.tasks or None]


def evaluate_with_rehearsal(
    team: Team, config: Config, source: Source, services: Services, tracker: Tracker
) -> dict[str, Any]:
    """Private rehearsals, then one real execution of each run; see `envace.committed`."""
    if not isinstance(source, ExecutableSource):
        raise UserError("rehearsal.mode prepares a real execution, and this data has no executable environment")
    tasks = held_out(team, config, source)
    rehearsing = rehearsing_team(team, config)
    with tracker.progress(len(tasks) * config.eval.samples, "execute") as bar:
        runs = rehearse_and_execute(team, rehearsing, tasks, config, source, services, on_done=bar.update)
    imagined = [rehearsal.trajectory for rehearsal in runs.rehearsals]
    tracker.trajectories(0, "rehearsal", imagined, executions=runs.executions)
    tracker.trajectories(0, "committed", runs.trajectories, executions=[*range(len(runs.trajectories))])
    return {
        "model": config.model.path,
        "tasks": len(tasks),
        "samples": config.eval.samples,
        **results_of(runs, config, source, team.lead.chat.encode),
        **({"gate": predicted(runs.trajectories)} if config.gate.mode != "none" else {}),
    }


def evaluate(team: Team, config: Config, source: Source, services: Services, tracker: Tracker) -> dict[str, Any]:
    policy = team.lead
    tasks = held_out(team, config, source)
    samples = config.eval.samples
    is_executable = isinstance(source, ExecutableSource)
    with tracker.progress(len(tasks) * (2 * samples + 1 if is_executable else samples), "evaluate") as bar:
        metrics, unfolded = evaluate_team(team, tasks, config, source, services, on_done=bar.update)
        if is_executable:
            unfolded["greedy"] = greedy_runs(team, tasks, config, source, services, on_done=bar.update)
    for name, trajectories in unfolded.items():
        tracker.trajectories(0, f"eval-{name}", trajectories)
    service_metrics = services.end_step(policy.sum_over_ranks)
    # What is not called rehearsed is about real runs, where there are any.
    runs = unfolded["real" if is_executable else "rehearsed"]
    by_task = success_by_task(runs, samples)
    return {
        "model": config.model.path,
        "tasks": len(tasks),
        "samples": samples,
        "unknown_rewards": sum(t.reward is None for t in runs),
        "ci": interval(by_task),
        "rehearsed_success": metrics["eval/rehearsed_success"],
        "rehearsed_reward": metrics["eval/rehearsed_reward"],
        **(real_results(metrics, unfolded, samples) if is_executable else {}),
        **({"gate": predicted(unfolded["real"])} if config.gate.mode != "none" else {}),
        **service_metrics,
        "by_kind": by_kind(runs),
        "success_by_task": by_task,
    }


def predicted(trajectories: list[Trajectory]) -> dict[str, Any]:
    return prediction_metrics([prediction for trajectory in trajectories for prediction in trajectory.predictions])


def draw_calibration(results: dict[str, Any], out_png: Path) -> None:
    """A picture of an earlier evaluation does not stay where there is nothing to draw."""
    out_png.unlink(missing_ok=True)
    if bins := results.get("gate", {}).get("bins"):
        calibration.draw(bins, out_png)


def real_results(metrics: dict[str, float], unfolded: dict[str, list[Trajectory]], samples: int) -> dict[str, Any]:
    return {
        "real_success": metrics["eval/real_success"],
        "greedy": success(unfolded["greedy"]),
        "right_final_state": metrics["eval/right_final_state"],
        "rehearsed_ci": interval(success_by_task(unfolded["rehearsed"], samples)),
        "imagination_gap": metrics["eval/imagination_gap"],
        "fidelity_by_round": {
            key.removeprefix("fidelity/round_"): share for key, share in metrics.items() if key.startswith("fidelity/")
        },
        "success_by_rounds": success_by_rounds(unfolded["real"]),
    }


def greedy_runs(
    team: Team,
    tasks: list[Task],
    config: Config,
    source: Source,
    services: Services,
    on_done: Callable[[int], object],
) -> list[Trajectory]:
    """One run of each task in the real environment, without sampling."""
    trajectories, _ = unfold(
        team,
        tasks,
        config,
        source,
        services,
        environment="real",
        purpose="evaluation",
        sampling=SamplingConfig(temperature=0.0),
        samples=1,
        on_done=on_done,
    )
    assign_rewards(trajectories, config.reward.name)
    return team.lead.gather(trajectories)


def summary(config: Config, results: dict[str, Any]) -> dict[str, str]:
    """Of a benchmark its own report has been said."""
    if config.benchmark != "none":
        return {}
    found = places(config, "evaluation", results=Path(config.run_dir) / "evaluation.json")
    names = [name for name in ("real_success", "rehearsed_success", "imagination_gap") if name in results]
    numbers = [f"{name.replace('_', ' ')} {results[name]:.3f}" for name in names]
    low, high = results["ci"]
    numbers[0] += f" [{low:.3f}, {high:.3f}]"
    return {"evaluation": ", ".join(numbers)} | found | {"next": f"make report RUNS={config.run_dir}"}


if __name__ == "__main__":
    run(main, __doc__, summary)
