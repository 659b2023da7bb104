"""The comparison of ways to rehearse: which rows there are, what is not made twice, and what the report says."""

import json
import math
from pathlib import Path

import pytest

import evaluate
import train_rl
import train_sft
from envace.report import tts as report
from envace.report.tts import statement, summarise, table, write_report
from envace.tts import __main__ as runner
from envace.tts.__main__ import ROOTS, Row, rows_of, sweep
from envace.types import UserError

ROOT = Path(__file__).parent.parent


def test_each_mode_number_and_rehearser_once_with_a_row_without_and_a_control():
    rows = rows_of(["parallel", "candidates"], [0, 2, 8])
    assert [row.name for row in rows] == [
        "parallel-0-rl",
        "parallel-2-rl",
        "parallel-8-rl",
        "parallel-2-sft",
        "parallel-8-sft",
        "candidates-2-rl",
        "candidates-8-rl",
        "parallel-2-rl-shuffled",
    ]
    # The row without rehearsal is always there, as all others are compared with it.
    assert [row.name for row in rows_of(["sequential"], [4])] == [
        "parallel-0-rl",
        "sequential-4-rl",
        "sequential-4-sft",
    ]
    assert rows_of(["parallel"], [0]) == [Row("parallel", 0)]
    with pytest.raises(ValueError, match="no mode 'paralel': choose from parallel"):
        rows_of(["paralel"], [2])
    with pytest.raises(ValueError, match=">= 0"):
        rows_of(["parallel"], [-1])


def evaluation(by_task, tokens=10.0, seconds=1.0, verdict_accuracy=0.5):
    return {
        "tasks": len(by_task),
        "samples": 4,
        "real_success": sum(x for x in by_task if x is not None) / max(1, sum(x is not None for x in by_task)),
        "ci": [0.0, 1.0],
        "right_final_state": 0.5,
        "execution": {"failed_calls": 1.5, "recovery_rounds": 0.25, "void_writes": 0.125, "rounds": 2.0},
        "rehearsal": {"verdict_accuracy": verdict_accuracy, "rehearsed_success": 0.75},
        "cost": {
            "tokens_per_run": {"rehearsal": tokens, "execution": 5.0},
            "seconds_per_run": {"rehearsal": seconds, "execution": 0.5},
        },
        "success_by_task": by_task,
    }


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The stages that were run, with stubs in their place: (stage, config)."""
    stages = []
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)

    def train(stage):
        def main(config):
            stages.append((stage, config))
            (Path(config.run_dir) / stage).mkdir(parents=True)

        return main

    def evaluated(config):
        stages.append(("eval", config))
        Path(config.run_dir).mkdir(parents=True, exist_ok=True)
        return evaluation([1.0, 0.5, None, 0.0])

    monkeypatch.setattr(train_sft, "main", train("sft"))
    monkeypatch.setattr(train_rl, "main", train("rl"))
    monkeypatch.setattr(evaluate, "main", evaluated)
    monkeypatch.setattr(report, "draw", lambda rows, path: path.write_bytes(b""))
    return stages


def test_the_rl_model_executes_and_a_row_says_who_rehearses(made):
    sweep(rows_of(["parallel"], [0, 2]), 4, 3, 7, quick=False)
    assert [stage for stage, _ in made] == ["sft", "rl", *["eval"] * 8]
    root = ROOTS[False] / "seed7"
    (_, sft), (_, rl), *evaluations = made
    assert sft.data.rehearsals > 0 and sft.model.path == str(root / "base") and rl.model.path == str(root / "sft")
    assert {config.model.path for _, config in evaluations} == {str(root / "rl")} and sft.seed == sft.data.seed == 7
    together, alone = evaluations[::2], evaluations[1::2]
    ways = [(c.rehearsal.mode, c.rehearsal.n, c.rehearsal.path, c.rehearsal.shuffle) for _, c in together]
    assert ways == [
        ("parallel", 0, "", False),
        ("parallel", 2, "", False),
        ("parallel", 2, str(root / "sft"), False),
        ("parallel", 2, "", True),
    ]
    assert {(c.eval.tasks, c.eval.samples) for _, c in together} == {(4, 3)}
    assert {(c.eval.samples, c.rollout.batch_size) for _, c in alone} == {(1, 1)}
    assert len({c.run_dir for _, c in evaluations}) == 8


def test_what_is_done_is_not_done_again_and_other_settings_are_refused(made):
    rows = rows_of(["parallel"], [0, 2])
    sweep(rows[:2], 4, 3, 0, quick=False)
    made.clear()
    sweep(rows, 4, 3, 0, quick=False)
    assert [stage for stage, _ in made] == ["eval"] * 4  # no training, and the two new rows
    assert len(json.loads((ROOTS[False] / "seed0" / "results.json").read_text())["rows"]) == 4
    with pytest.raises(UserError, match="together eval.samples=3, now it is 2"):
        sweep(rows, 4, 2, 0, quick=False)


def record(row, by_task, **rest):
    together = evaluation(by_task, **rest)
    alone = evaluation(by_task[:1], seconds=3.0)
    return {"mode": row.mode, "n": row.n, "rehearser": row.rehearser, "shuffle": row.shuffle} | {
        "together": together,
        "alone": alone,
    }


def test_a_difference_is_paired_with_the_run_without_rehearsal():
    none = record(Row("parallel", 0), [0.0, 0.5, 1.0, None], verdict_accuracy="NaN")
    better = record(Row("parallel", 2), [0.25, 0.75, None, 1.0])
    first, second = summarise([none, better])
    assert first["difference"] == 0 and first["difference_ci"] == [0, 0] and not first["significant"]
    assert second["difference"] == pytest.approx(0.25) and second["difference_ci"] == pytest.approx([0.25, 0.25])
    assert second["significant"] and second["tokens"] == 15 and second["seconds_alone"] == 3.5


@pytest.mark.parametrize(
    ("by_task", "said"),
    [
        ([0.5] * 8, "parallel N=2 by rl: helps, +25.0 points [+25.0, +25.0]."),
        ([0.0] * 8, "parallel N=2 by rl: harms, -25.0 points [-25.0, -25.0]."),
        ([0.25] * 8, "parallel N=2 by rl: no significant difference, +0.0 points [+0.0, +0.0]."),
        ([1.0, 0.0] + [0.25] * 6, "parallel N=2 by rl: no significant difference, +6.2 points"),
    ],
)
def test_help_is_claimed_only_where_the_interval_shows_it(by_task, said):
    _, row = summarise([record(Row("parallel", 0), [0.25] * 8), record(Row("parallel", 2), by_task)])
    assert statement(row).startswith(said)


def test_golden_table(tmp_path):
    rows = [record(Row("parallel", 0), [0.25] * 4, verdict_accuracy="NaN"), record(Row("parallel", 2), [0.5] * 4)]
    rows.append(record(Row("parallel", 2, shuffle=True), [0.25] * 4))
    lines = table(summarise(rows), []).splitlines()
    assert lines[2].startswith("| none | 0 |  | 25.0 [0.0, 100.0] |  | 15 | 3.5 | 1.50 | 0.25 | 0.12 |  |")
    assert lines[3].startswith("| parallel | 2 | rl | 50.0 [0.0, 100.0] | +25.0 [+25.0, +25.0]* | 15 |")
    assert lines[4].startswith("| parallel, of another task | 2 | rl |")
    write_report(rows, tmp_path)
    found = json.loads((tmp_path / "results.json").read_text(), parse_constant=lambda c: math.inf / 0)
    assert len(found["rows"]) == 3 and len(found["statements"]) == 2
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "4 held-out tasks, 4 runs of each" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--modes", "nope"], "there is no mode 'nope'"),
        (["--numbers", "-1"], "--numbers must be >= 0"),
        (["--numbers", "two"], "invalid literal"),
        (["--tasks", "100000"], "eval.tasks=100000"),
    ],
)
def test_a_mistake_on_the_command_line_is_said_in_one_line(made, monkeypatch, capsys, arguments, said):
    monkeypatch.setattr("sys.argv", ["tts", *arguments])
    monkeypatch.setattr("envace.console.setup_logging", lambda **_: None)
    with pytest.raises(SystemExit) as caught:
        runner.main()
    assert caught.value.code == 2 and said in capsys.readouterr().err and made == []


@pytest.mark.slow
def test_the_quick_check_in_earnest(tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    sweep(rows_of(["sequential", "candidates"], [0, 1]), 4, 2, 0, quick=True)
    rows = json.loads((ROOTS[True] / "seed0" / "results.json").read_text())["rows"]
    assert [(row["mode"], row["n"], row["rehearser"]) for row in rows] == [
        ("parallel", 0, "rl"),
        ("sequential", 1, "rl"),
        ("sequential", 1, "sft"),
        ("candidates", 1, "rl"),
    ]
    assert rows[1]["tokens"] > rows[0]["tokens"] > 0
