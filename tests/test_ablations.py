"""The ablations: what each file changes, which runs are made in which order, what is not made twice, and the report."""

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

import evaluate
import train_rl
import train_sft
from envace.ablations import __main__ as runner
from envace.ablations.runs import (
    COMPARED,
    CORE,
    REMEDIES,
    ROOTS,
    Run,
    WarmUp,
    is_done,
    plan,
    recorded,
    training_costs,
    variants,
    with_warm_ups,
)
from envace.chat import ChatFormat
from envace.checkpoints import latest
from envace.config import ConfigError, load_config, settings_of
from envace.demo.demonstrations import make_demonstrations
from envace.demo.desk import CallCounter
from envace.demo.model import build_tokenizer
from envace.demonstrations import demonstration
from envace.records import write_record
from envace.report import ablations as report
from envace.report.ablations import difference, statement, summarise, t_interval, table, write_report
from envace.types import UserError

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"

# What the files change: (file it inherits from, {key: (before, after)}).
DIFFERENCES = {
    "act_only": ("../demo.yaml", {"rl.role_weights": ({"act": 1, "rehearse": 1}, {"act": 1, "rehearse": 0})}),
    "baseline_over_trajectories": ("../demo.yaml", {"rl.baseline_over": ("outputs", "trajectories")}),
    "constant_response": ("../demo.yaml", {"rollout.environment": ("rehearsed", "constant")}),
    "envace": ("../demo.yaml", {}),
    "grpo": (
        "../demo.yaml",
        {
            "rollout.environment": ("rehearsed", "simulated"),
            "simulator.path": ("", "runs/demo/sft"),
            "simulator.sampling.temperature": (0.6, 1.0),
            "simulator.sampling.top_p": (0.8, 1.0),
        },
    ),
    "grpo_real": ("../demo.yaml", {"rollout.environment": ("rehearsed", "real")}),
    "mixed_10": (
        "../demo.yaml",
        {"rollout.environment": ("rehearsed", "mixed"), "rollout.mixture": ({}, {"rehearsed": 0.9, "real": 0.1})},
    ),
    "no_kl": ("../demo.yaml", {"rl.kl_coef": (0.01, 0.0)}),
    "no_sft": ("../demo.yaml", {}),  # demo.yaml itself names the model that SFT starts from
    "no_std": ("../demo.yaml", {"rl.normalize_std": (True, False)}),
    "per_role_lora": ("per_role_policy.yaml", {"policy.lora.r": (0, 16)}),
    "per_role_policy": ("../demo.yaml", {"rl.team": ("shared", "per_role")}),
    "rehearse_only": ("../demo.yaml", {"rl.role_weights": ({"act": 1, "rehearse": 1}, {"act": 0, "rehearse": 1})}),
    "separate_view": (
        "../demo.yaml",
        {"rollout.view": ("shared", "separate"), "rollout.max_new_tokens": (48, 64)},
    ),
    "shared_baseline": ("../demo.yaml", {"rl.baseline": ("rolewise", "shared")}),
    "verifier_filter": ("../demo.yaml", {"rl.keep": ("all", "consistent")}),
}


def test_every_file_is_in_the_table():
    assert {path.stem for path in (CONFIGS / "ablations").iterdir()} == DIFFERENCES.keys()


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_file_changes_what_its_name_says_and_nothing_else(name):
    path = CONFIGS / "ablations" / f"{name}.yaml"
    base, expected = DIFFERENCES[name]
    assert f"\ninherits: {base}\n" in path.read_text()
    before, after = (settings_of(load_config(str(file), [])) for file in (path.parent / base, path))
    assert {key: (before[key], after[key]) for key in after if before[key] != after[key]} == expected


@pytest.mark.parametrize("name", ["envace", "separate_view"])
def test_every_output_that_sft_teaches_fits_the_longest_output_of_a_rollout(name):
    config = load_config(str(CONFIGS / "ablations" / f"{name}.yaml"), [])
    recorded = make_demonstrations(512, 0, CallCounter())
    chat = ChatFormat(build_tokenizer((task.tools, messages) for task, messages in recorded))
    separate = config.rollout.view == "separate"
    taught = [demonstration(task, messages, chat, separate=separate) for task, messages in recorded]
    lengths = [len(output.ids) for trajectory in taught for output in trajectory.outputs()]
    assert config.rollout.max_new_tokens / 2 < max(lengths) <= config.rollout.max_new_tokens


# The runner, with stubs in place of training and evaluation


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the configs, in which the command is called."""
    shutil.copytree(CONFIGS, tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def made(folder, monkeypatch):
    """The stages that were run, in their order: (stage, its config)."""
    stages = []

    def stub(stage, result):
        def main(config):
            stages.append((stage, config))
            return result(config)

        return main

    def train(config):
        steps = [
            {"stage": "rl", "step": step, "rollout/sampled_tokens": 100.0, "time/rollout": 2.0, "time/update": 1.0}
            | {"env_calls/training": 0.0, "time/eval": 50.0}
            for step in range(config.rl.steps)
        ]
        write_lines(Path(config.run_dir), steps)

    # What would take most of the time of these tests.
    monkeypatch.setattr(report, "bootstrap_ci", lambda ours, theirs: (0.0, 0.0))
    monkeypatch.setattr(report, "draw", lambda summary, path: path.write_bytes(b""))
    monkeypatch.setattr(report, "versions", dict)
    monkeypatch.setattr(train_sft, "main", stub("sft", lambda config: None))
    monkeypatch.setattr(train_rl, "main", stub("rl", train))
    monkeypatch.setattr(evaluate, "main", stub("eval", lambda config: evaluation([1.0, 0.5, None, 0.0])))
    return stages


class Inline(Executor):
    """Does what is submitted at once and in this process, where the stubs are."""

    def submit(self, call, *arguments):
        future = Future()
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)
        return future


def carry_out(runs, quick):
    runner.carry_out(runs, quick, Inline(), 1)


def write_lines(run_dir, records):
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def evaluation(by_task, rehearsed=0.75, fidelity=0.5):
    known = [value for value in by_task if value is not None]
    real = sum(known) / len(known) if known else math.nan
    return {
        "tasks": len(by_task),
        "real_success": real,
        "rehearsed_success": rehearsed,
        "imagination_gap": rehearsed - real,
        "fidelity_by_round": {"0": fidelity, "1": math.nan},
        "success_by_task": by_task,
    }


def folders(stages, stage):
    return [config.run_dir for name, config in stages if name == stage]


def test_the_core_comes_seed_by_seed_and_then_every_other_variant_once():
    runs = [(run.variant, run.seed) for run in plan(2)]
    others = sorted(DIFFERENCES.keys() - set(COMPARED), key=lambda variant: (variant != "separate_view", variant))
    compared = [(variant, seed) for group in (CORE, REMEDIES) for seed in (0, 1) for variant in group]
    assert runs == [*compared, *((v, 0) for v in others)]
    assert CORE == ("envace", "grpo", "per_role_policy", "shared_baseline", "constant_response")
    assert [(run.variant, run.seed) for run in plan(2, only=("no_kl", "grpo"))] == [
        ("grpo", 0),
        ("grpo", 1),
        ("no_kl", 0),
    ]
    with pytest.raises(ConfigError, match="no variant 'gpro': choose from envace, grpo, "):
        plan(1, only=("gpro",))


def test_each_seed_has_one_warm_up_and_the_separate_view_its_own(made):
    carry_out(plan(2), quick=False)
    root = "runs/ablations"
    assert folders(made, "sft") == [f"{root}/sft/seed0", f"{root}/sft/seed1", f"{root}/sft_separate/seed0"]
    assert folders(made, "rl") == folders(made, "eval") == [f"{root}/{r.variant}/seed{r.seed}" for r in plan(2)]
    # Training comes right before its evaluation.
    assert [stage for stage, _ in made if stage != "sft"] == ["rl", "eval"] * len(plan(2))
    for _, config in made:
        assert config.seed == config.data.seed == int(config.run_dir[-1]) and config.checkpoint.resume
    views = {config.run_dir: config.rollout.view for stage, config in made if stage == "sft"}
    assert views == {
        f"{root}/sft/seed0": "shared",
        f"{root}/sft/seed1": "shared",
        f"{root}/sft_separate/seed0": "separate",
    }
    bases = {config.model.path for stage, config in made if stage == "sft"}
    assert bases == {f"{root}/sft/seed0/base", f"{root}/sft/seed1/base"}


def test_where_a_variant_starts_and_what_is_evaluated(made):
    carry_out(plan(1), quick=False)
    root = "runs/ablations"
    training = {Path(c.run_dir).parent.name: c for stage, c in made if stage == "rl"}
    evaluated = {Path(c.run_dir).parent.name: c for stage, c in made if stage == "eval"}
    starts = {"no_sft": f"{root}/sft/seed0/base", "separate_view": f"{root}/sft_separate/seed0/sft"}
    for variant in DIFFERENCES:
        config, run_dir = training[variant], f"{root}/{variant}/seed0"
        assert config.model.path == starts.get(variant, f"{root}/sft/seed0/sft")
        assert config.rl.steps == (30 if variant in COMPARED else 10)
        assert config.checkpoint.every == 10
        assert config.simulator.path == (f"{root}/sft/seed0/sft" if variant == "grpo" else "")
        config = evaluated[variant]
        assert (config.model.path, config.eval.samples, config.eval.tasks) == (f"{run_dir}/rl", 2, 0)
        two = variant.startswith("per_role")
        assert config.model.rehearse_path == (f"{run_dir}/rl_rehearse" if two else "")
        assert config.rl.team == ("per_role" if two else "shared")


def test_quick_runs_everything_in_a_folder_of_its_own(made):
    carry_out(plan(1, quick=True), quick=True)
    assert all(config.run_dir.startswith("runs/ablations_quick/") for _, config in made)
    assert len(folders(made, "rl")) == len(DIFFERENCES)
    for _, config in made:
        assert config.rl.steps == 2 and config.sft.steps <= 60 and config.data.eval_tasks <= 10
    text = (ROOTS[True] / "table.md").read_text()
    assert "No result" in text and "8 held-out" not in text and "4 held-out tasks a seed, 2 sampled runs" in text


@pytest.mark.parametrize("stage", ["sft", "rl", "eval"])
def test_after_an_interruption_the_same_command_goes_on_with_that_run(made, monkeypatch, stage):
    module = {"sft": train_sft, "rl": train_rl, "eval": evaluate}[stage]
    works, left = module.main, iter([True, True, False] if stage != "sft" else [True, False])

    def fails_once(config):
        if not next(left, True):
            raise KeyboardInterrupt
        return works(config)

    monkeypatch.setattr(module, "main", fails_once)
    with pytest.raises(KeyboardInterrupt):
        carry_out(plan(2, only=CORE), quick=False)
    before = len(recorded(False))
    assert before == (5 if stage == "sft" else 2)
    made.clear()
    carry_out(plan(2, only=CORE), quick=False)
    assert folders(made, "rl") == [str(run.run_dir) for run in plan(2, only=CORE)[before:]]
    assert len(recorded(False)) == 10


def test_what_is_done_is_not_done_again_and_the_report_has_all_of_it(made, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("envace"), "propagate", True)
    caplog.set_level(logging.INFO, "envace")
    carry_out(plan(1, only=("grpo",)), quick=False)
    carry_out(plan(1, only=("envace",)), quick=False)
    assert [row.split(" | ")[0] for row in (ROOTS[False] / "table.md").read_text().splitlines() if row[:2] == "| "][
        2:
    ] == [
        "| envace",
        "| grpo",
    ]
    made.clear()
    (ROOTS[False] / "table.md").unlink()
    carry_out(plan(1, only=("envace", "grpo")), quick=False)
    assert made == [] and "2 of 2 runs were done before" in caplog.text
    assert {path.name for path in ROOTS[False].iterdir() if path.is_file()} == {
        "results.json",
        "table.md",
        "figure.png",
    }


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "ablations/no_kl.yaml",
            "kl_coef: 0.0",
            "kl_coef: 0.5",
            "no_kl/seed0/result.json .*rl.kl_coef=0.0, now it is 0.5",
        ),
        ("demo.yaml", "group_size: 8", "group_size: 4", "no_kl/seed0/result.json .*rl.group_size=8, now it is 4"),
        ("demo.yaml", "  lr: 3e-3", "  lr: 1e-3", "sft/seed0/done.json .*training sft.lr=0.003, now it is 0.001"),
        ("demo.yaml", "eval_tasks: 300", "eval_tasks: 200", "no_kl/.* data.eval_tasks=300, now it is 200"),
    ],
)
def test_results_of_other_settings_are_refused_before_anything_is_run(made, folder, file, old, new, message):
    carry_out(plan(1, only=("no_kl",)), quick=False)
    path = folder / "configs" / file
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    made.clear()
    with pytest.raises(UserError, match=message) as caught:
        # Refused even if the changed run is not asked for: it would stand in the same table.
        carry_out(plan(1, only=("envace",)), quick=False)
    assert made == [] and "\n" not in str(caught.value) and "delete runs/ablations/" in str(caught.value)


def test_a_setting_that_came_since_had_its_default_then(made, folder):
    [run] = plan(1, only=("envace",))
    carry_out([run], quick=False)
    record = json.loads(run.record.read_text())
    assert record["settings"]["training"].pop("rl.keep") == "all"
    run.record.write_text(json.dumps(record))
    assert is_done(run)
    path = folder / "configs" / "ablations" / "envace.yaml"
    path.write_text(path.read_text() + "rl: {keep: consistent}\n")
    with pytest.raises(UserError, match="rl.keep=all, now it is consistent"):
        is_done(plan(1, only=("envace",))[0])


def test_a_record_is_whole_or_absent_and_strict_json(made, monkeypatch):
    [run] = plan(1, only=("envace",))
    run.run_dir.mkdir(parents=True)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_record(run.record, run.settings(), evaluation=evaluation([1.0]))
    assert not is_done(run) and recorded(False) == []
    monkeypatch.undo()


def test_nan_in_a_result_survives_the_file(made):
    carry_out(plan(1, only=("envace",)), quick=False)

    def refuse(constant):
        raise AssertionError(constant)

    for path in (plan(1)[0].record, ROOTS[False] / "results.json"):
        json.loads(path.read_text(), parse_constant=refuse)


@pytest.mark.slow
def test_the_quick_check_in_earnest(folder):
    runs = plan(1, quick=True, only=("envace", "per_role_policy", "mixed_10"))
    carry_out(runs, quick=True)
    report = json.loads((ROOTS[True] / "results.json").read_text())["variants"]
    assert list(report) == ["envace", "per_role_policy", "mixed_10"]
    for variant, row in report.items():
        assert row["steps"] == 2 and row["sampled_tokens"]["mean"] > 0 and row["seconds"]["mean"] > 0
        assert variant == "mixed_10" or row["env_calls"]["mean"] == 0
    assert (ROOTS[True] / "figure.png").stat().st_size > 10_000
    times = [run.record.stat().st_mtime_ns for run in runs]
    carry_out(runs, quick=True)
    assert [run.record.stat().st_mtime_ns for run in runs] == times


def test_what_training_took_is_summed_over_its_steps(tmp_path):
    step = {"stage": "rl", "rollout/sampled_tokens": 100.0, "time/rollout": 2.0, "time/update": 0.5, "time/eval": 9.0}
    other = {"stage": "evaluation", "step": 0, "eval/real_success": 0.5}
    write_lines(tmp_path, [step | {"env_calls/training": 3.0}, step | {"env_calls/training": 7.0}, other])
    assert training_costs(tmp_path) == {"sampled_tokens": 200, "seconds": 5, "env_calls": 7}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--seeds", "11"], 2, "--seeds must be within 1 and 10"),
        (["--seeds", "0"], 2, "--seeds must be within 1 and 10"),
        (["--only", "nope"], 2, "there is no variant 'nope'"),
    ],
)
def test_a_mistake_on_the_command_line_is_said_in_one_line(made, monkeypatch, capsys, arguments, code, said):
    monkeypatch.setattr("sys.argv", ["ablations", *arguments])
    monkeypatch.setattr("envace.console.setup_logging", lambda **_: None)
    with pytest.raises(SystemExit) as caught:
        runner.main()
    assert caught.value.code == code and said in capsys.readouterr().err and made == []


def test_the_command_ends_with_one_line_on_an_error_and_makes_five_seeds_by_default(made, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["ablations", "--only", "envace"])
    monkeypatch.setattr("envace.console.setup_logging", lambda **_: None)
    monkeypatch.setattr(runner, "workers", lambda jobs: Inline())
    runner.main()
    assert folders(made, "rl") == [f"runs/ablations/envace/seed{seed}" for seed in range(5)]
    shutil.rmtree("runs/ablations/envace/seed3")

    def fail(config):
        raise UserError("it went wrong")

    monkeypatch.setattr(train_rl, "main", fail)
    with pytest.raises(SystemExit) as caught:
        runner.main()
    assert caught.value.code == 1 and capsys.readouterr().err == "error: envace, seed 3: it went wrong\n"


# Several at a time


def test_at_most_so_many_run_at_a_time_and_none_before_its_warm_up(made, monkeypatch):
    running, most, order, lock = set(), 0, [], threading.Lock()
    does = runner.do

    def watched(work, jobs):
        nonlocal most
        with lock:
            assert all(map(is_done, work.needs))
            running.add(work)
            order.append(work)
            most = max(most, len(running))
        time.sleep(0.02)
        try:
            # Redirected output is of the whole process, so threads take turns.
            with lock:
                return does(work, jobs)
        finally:
            with lock:
                running.remove(work)

    monkeypatch.setattr(runner, "do", watched)
    runs = plan(2, only=("envace", "grpo", "separate_view"))
    with ThreadPoolExecutor(4) as pool:
        runner.carry_out(runs, False, pool, 3)
    assert most == 3 and len(order) == len(set(order))
    assert set(order) == set(with_warm_ups(runs)) and {run for run in order if isinstance(run, Run)} == set(runs)
    # While the first warm-up runs, nothing of its seed can: the one of the next seed does not wait for it.
    assert [work.name for work in order[:2]] == ["SFT for view shared, seed 0", "SFT for view shared, seed 1"]


def test_when_one_fails_those_that_run_end_and_no_other_starts(made, monkeypatch):
    started = []

    def do(work, jobs):
        started.append(work.name)
        if isinstance(work, WarmUp):
            return does(work, jobs)
        if work.variant == "envace":
            raise UserError("it went wrong")
        time.sleep(0.1)
        return does(work, jobs)

    does = runner.do
    monkeypatch.setattr(runner, "do", do)
    with pytest.raises(UserError, match="^envace, seed 0: it went wrong$"), ThreadPoolExecutor(2) as pool:
        runner.carry_out(plan(1, only=CORE), False, pool, 2)
    assert started == ["SFT for view shared, seed 0", "envace, seed 0", "grpo, seed 0"]
    assert [run.variant for run in recorded(False)] == ["grpo"]


def test_a_process_that_was_killed_is_one_clear_line():
    future = Future()
    future.set_exception(BrokenProcessPool("abruptly"))
    with pytest.raises(UserError, match="^envace, seed 0: its process was killed, .*--jobs 1$"):
        runner.finish(future, Run("envace", 0))


@pytest.mark.slow
@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_saves_where_each_run_is(folder, asked):
    if signal.getsignal(asked) is signal.SIG_IGN:
        pytest.skip("the shell that started the tests ignores Ctrl-C, and so does every process of theirs")
    command = [sys.executable, "-m", "envace.ablations", "--quick", "--only", "envace"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    sft = ROOTS[True] / "sft" / "seed0"
    while not (sft / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(asked)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert error.splitlines() == ["interrupted: the same command goes on from the last checkpoint"]
    console = (sft / "console.log").read_text()
    assert "SIGTERM: stopped after step" in console and not (sft / "done.json").exists()
    config = WarmUp(0, "shared", True).training
    assert latest(Path(config.run_dir) / "checkpoints" / "sft") is not None  # what the same command goes on from


# The report


def result(variant, seed, by_task, *, steps=30, tokens=1000.0, **rest):
    return {
        "variant": variant,
        "seed": seed,
        "jobs": 1,
        "settings": {"training": {"rl.steps": steps}, "evaluation": {"eval.samples": 2}},
        "training": {"sampled_tokens": tokens, "seconds": 60.0, "env_calls": 0.0},
        "evaluation": evaluation(by_task, **rest),
    }


def test_golden_numbers_of_the_t_interval():
    # scipy.stats.t.interval(0.95, n - 1, mean, sem)
    assert t_interval([0.5, 0.6, 0.7]) == pytest.approx((0.35159, 0.84841), abs=1e-4)
    assert t_interval([0.5, 0.7]) == pytest.approx((0.6 - 1.27062, 0.6 + 1.27062), abs=1e-4)
    assert t_interval([float(n) for n in range(10)]) == pytest.approx((2.33415, 6.66585), abs=1e-3)
    assert t_interval([0.25] * 5) == (0.25, 0.25)
    assert t_interval([0.5]) is None
    assert all(math.isnan(bound) for bound in t_interval([0.5, math.nan]))


def test_golden_numbers_of_a_summary():
    summary = summarise(
        [
            result("envace", 0, [1.0, 1.0, 0.0, 0.0], rehearsed=0.75, tokens=1000.0),
            result("envace", 1, [1.0, 1.0, 1.0, 0.0], rehearsed=0.75, tokens=3000.0),
            result("grpo", 1, [1.0, 0.5, 0.5, None], rehearsed=0.5),
            result("no_kl", 0, [0.0] * 4, steps=10, fidelity="NaN"),
        ]
    )
    assert list(summary) == ["envace", "grpo", "no_kl"]
    envace, grpo, no_kl = summary.values()
    assert envace["seeds"] == [0, 1] and envace["steps"] == 30 and envace["difference"] is None
    assert envace["real_success"]["mean"] == 0.625 and envace["real_success"]["values"] == [0.5, 0.75]
    assert envace["real_success"]["interval"] == pytest.approx((0.625 - 12.706 / 8, 0.625 + 12.706 / 8))
    assert envace["imagination_gap"]["values"] == [0.25, 0.0] and envace["sampled_tokens"]["mean"] == 2000
    assert grpo["real_success"]["interval"] is None and grpo["first_round_fidelity"]["mean"] == 0.5
    # Over the tasks that are known in both of the one seed that both have: 0, -0.5, -0.5.
    assert grpo["difference"]["mean"] == pytest.approx(-1 / 3) and grpo["difference"]["by_seed"] == {1: -1 / 3}
    assert grpo["difference"]["interval"] == [-0.5, 0.0] and not grpo["difference"]["significant"]
    # Ten steps are not compared with thirty, and what was not measured is not hidden.
    assert no_kl["difference"] is None and math.isnan(no_kl["first_round_fidelity"]["mean"])


def against(ours, theirs):
    """The summary's entry of a variant `grpo` with success `ours` on 40 tasks, EnvACE's being `theirs`."""
    runs = [result("grpo", 0, ours * 20)], [result("envace", 0, theirs * 20)]
    return {"grpo": {"difference": difference(*runs)}}


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (
            [0.5, 0.25],
            [0.75, 0.5],
            "better, significant over tasks: +25.0 points of real success [+25.0, +25.0], by seed +25.0;",
        ),
        (
            [0.75, 0.5],
            [0.5, 0.25],
            "worse, significant over tasks: -25.0 points of real success [-25.0, -25.0], by seed -25.0;",
        ),
        (
            [0.75, 0.5],
            [0.75, 0.5],
            "not significant over tasks: +0.0 points of real success [+0.0, +0.0], by seed +0.0;",
        ),
    ],
)
def test_the_sentence_for_a_win_a_loss_and_a_tie(ours, theirs, expected):
    text = statement("grpo", against(ours, theirs))
    assert text == f"EnvACE against grpo: {expected} the paper reports +5.5 points on tau2-bench."


def test_a_difference_within_chance_is_not_significant_whichever_way_it_points():
    for ours, theirs in (([1.0, 0.0], [0.0, 0.9]), ([0.0, 0.9], [1.0, 0.0])):
        found = against(ours, theirs)
        assert not found["grpo"]["difference"]["significant"]
        assert statement("grpo", found).startswith("EnvACE against grpo: not significant over tasks: ")


def test_what_was_not_run_is_said_to_be_not_measured():
    text = statement("per_role_policy", summarise([result("envace", 0, [1.0])]))
    assert text == "EnvACE against per_role_policy: not measured; the paper reports +1.2 points on tau2-bench."
    # Other seeds have other tasks.
    assert difference([result("grpo", 1, [1.0])], [result("envace", 0, [1.0])]) is None
    assert difference([result("grpo", 0, [None])], [result("envace", 0, [1.0])]) is None


def test_a_difference_pairs_tasks_of_the_same_seed_and_refuses_other_tasks():
    ours = [result("grpo", seed, [1.0, 0.0]) for seed in (0, 1)]
    theirs = [result("envace", 0, [0.0, 0.0]), result("envace", 1, [1.0, 1.0]), result("envace", 2, [0.0, 0.0])]
    found = difference(ours, theirs)
    assert found["by_seed"] == {0: 0.5, 1: -0.5} and found["mean"] == 0
    assert found["seeds_interval"] == pytest.approx((-12.706 / 2, 12.706 / 2))
    assert "by seed -50.0, +50.0, their mean within [-635.3, +635.3]; the paper" in statement(
        "grpo", {"grpo": {"difference": found}}
    )
    with pytest.raises(ValueError):
        difference([result("grpo", 0, [1.0])], [result("envace", 0, [1.0, 1.0])])


def test_the_table_marks_significance_and_shows_a_lone_seed_as_one():
    results = [result("envace", seed, [0.5, 0.25 + seed / 4] * 20) for seed in (0, 1)]
    results += [result("grpo", 0, [0.25, 0.0] * 20), result("no_kl", 0, [0.5, 0.5] * 20, steps=10)]
    rows = [line for line in table(summarise(results), ["a note"]).splitlines() if line.startswith("| ")]
    cells = {row.split(" | ")[0].removeprefix("| "): row.strip("|").split(" | ")[1:] for row in rows[2:]}
    assert cells["envace"] == [
        *("2", "30", "43.8 [-35.7, 123.2]", "75.0 [75.0, 75.0]", "31.2 [-48.2, 110.7]", "50.0 [50.0, 50.0]"),
        *("1 [1, 1]", "60 [60, 60]", "0 [0, 0]", " "),
    ]
    assert cells["grpo"][:3] == ["1", "30", "12.5 [-]"]
    assert cells["grpo"][-1].strip() == "-25.0 [-25.0, -25.0]*" and cells["no_kl"][-1].strip() == "not compared"


def test_the_report_is_three_files(tmp_path):
    results = [result("envace", seed, [0.5, 0.25]) for seed in (0, 1)] + [result("no_kl", 0, [0.5, 0.5], steps=10)]
    write_report(results, tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["variants"]["envace"]["real_success"]["mean"] == 0.375
    assert found["statements"]["grpo"].startswith("EnvACE against grpo: not measured")
    assert (tmp_path / "table.md").read_text().startswith("- EnvACE against grpo: not measured")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_core_comes_first_in_every_list(folder):
    assert variants()[:8] == list(COMPARED) and sorted(variants()) == sorted(DIFFERENCES)
    assert Run("envace", 3).run_dir == Path("runs/ablations/envace/seed3")
