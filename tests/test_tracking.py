"""Tracking: what the files hold can be read back, nothing hostile breaks a line, and a full disk is one clear error."""

import io
import json
import logging
import math
import os
import re
import sys

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from envace.config import load_config, versions
from envace.console import setup_logging
from envace.demo.desk import CallCounter, Desk
from envace.environments import Real
from envace.episodes import drive
from envace.tracking import Tracker, TrackingError
from envace.types import (
    CallStatus,
    Decision,
    Evidence,
    Prediction,
    Role,
    Segment,
    Sequence,
    Status,
    Task,
    ToolCall,
    Trajectory,
    content_hash,
)

CONFIG = load_config(None, ["model.path=some/model", "seed=3"])
HOSTILE = 'a\nb\r\u2028\0"}\\ </script> {"step": 1} \ud800 | \x1b[31m é 漢'


@pytest.fixture(autouse=True)
def console():
    """Entry points set logging up once; tests leave it as it was."""
    logger = logging.getLogger("envace")
    before = logger.handlers, logger.level, logger.propagate
    setup_logging()
    yield
    logger.handlers, logger.level, logger.propagate = before


class CodePoints:
    """A chat format with a token a character, so that any text survives decoding."""

    def response(self, text):
        return [ord(character) for character in text]


def decode(ids):
    return "".join(map(chr, ids))


def tracker(run_dir, **settings):
    return Tracker(run_dir, CONFIG, **{"name": "rl", "total_steps": 20, "decode": decode} | settings)


def read_lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def untimed(text):
    """Console lines with the same time left in all of them."""
    return re.sub(r"\d+:\d\d left", "00:00 left", text)


def segment(role, text, evidence, **settings):
    return Segment(role, [ord(character) for character in text], evidence, **settings)


def trajectory(*segments, task_id="t1", user_turns=("Hello",), **settings):
    task = Task(task_id, "", [], list(user_turns), kind="cancel")
    return Trajectory(task, "g1", [Sequence(list(segments))], **settings)


# Metrics


def test_metrics_come_back_from_jsonl_and_tensorboard(tmp_path):
    with tracker(tmp_path) as rl:
        rl.log(0, {"reward/mean": 0.5, "loss/policy": torch.tensor(0.25)})
        rl.log(1, {"reward/mean": 0.75, "lr": 1e-6})
    first, second = read_lines(tmp_path / "metrics.jsonl")
    assert first.pop("time") <= second.pop("time")
    assert first == {"stage": "rl", "step": 0, "reward/mean": 0.5, "loss/policy": 0.25}
    assert second == {"stage": "rl", "step": 1, "reward/mean": 0.75, "lr": 1e-6}
    board = EventAccumulator(str(tmp_path / "tensorboard" / "rl")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("reward/mean")] == [(0, 0.5), (1, 0.75)]


def test_a_number_that_is_not_finite_stays_visible_everywhere(tmp_path, capsys):
    with tracker(tmp_path, headline={"loss/policy": "loss/policy"}) as rl:
        rl.log(0, {"loss/policy": math.nan, "grad_norm": math.inf, "low": -math.inf})
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=pytest.fail)
    assert (record["loss/policy"], record["grad_norm"], record["low"]) == ("NaN", "Infinity", "-Infinity")
    assert math.isnan(float(record["loss/policy"])) and float(record["low"]) == -math.inf
    assert untimed(capsys.readouterr().out) == "rl 1/20  00:00 left  loss/policy nan\n"
    board = EventAccumulator(str(tmp_path / "tensorboard" / "rl")).Reload()
    assert math.isnan(board.Scalars("loss/policy")[0].value)


def test_stages_append_and_a_repeated_stage_replaces_itself(tmp_path):
    for name, steps in (("sft", [0]), ("rl", [0, 1]), ("rl", [1, 2])):
        with tracker(tmp_path, name=name) as stage:
            for step in steps:
                stage.log(step, {"lr": 1.0})
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [(line["stage"], line["step"]) for line in lines] == [("sft", 0), ("rl", 1), ("rl", 2)]
    assert {path.name for path in (tmp_path / "tensorboard").iterdir()} == {"sft", "rl"}


def test_settings_and_versions_stand_beside_the_metrics(tmp_path):
    tracker(tmp_path / "new" / "folder").close()
    path = tmp_path / "new" / "folder" / "rl.config.yaml"
    assert yaml.safe_load(path.read_text())["seed"] == 3
    assert load_config(str(path), []) == CONFIG
    assert json.loads((path.parent / "rl.versions.json").read_text()) == versions()


# Console


def test_the_console_shows_the_headline_metrics_a_step_has(tmp_path, capsys):
    with tracker(tmp_path, headline={"reward": "reward/mean", "real": "eval/real_success"}) as rl:
        rl.log(0, {"reward/mean": 0.123456, "lr": 1e-6})
        rl.log(1, {"lr": 1e-6})
        rl.log(2, {"eval/real_success": 1.0, "reward/mean": 3e-5})
    assert untimed(capsys.readouterr().out).splitlines() == [
        "rl 1/20  00:00 left  reward 0.1235",
        "rl 3/20  00:00 left  reward 3e-05  real 1",
    ]


@pytest.mark.parametrize("length", range(1, 12))
def test_a_console_line_fits_and_is_cut_between_metrics(tmp_path, capsys, length):
    names = tuple(f"{letter * length}/{number}" for number, letter in enumerate("abcdefghijklm"))
    with tracker(tmp_path, headline=dict(zip(names, names, strict=True))) as rl:
        rl.log(0, dict.fromkeys(names, 0.5))
    line = untimed(capsys.readouterr().out).removesuffix("\n")
    whole = "  ".join(["rl 1/20", "00:00 left", *(f"{name} 0.5" for name in names)])
    kept = line.removesuffix("  ...")
    assert len(line) <= 100
    assert kept == whole if kept == line else whole.startswith(f"{kept}  ")
    if kept != line:
        left_out = whole[len(kept) :].split("  ")[1]
        assert len(f"{kept}  {left_out}  ...") > 100


def test_setting_logging_up_twice_prints_once(tmp_path, capsys):
    setup_logging()
    logging.getLogger("envace").info("once")
    assert capsys.readouterr().out == "once\n"


def test_a_closed_pipe_is_told_once_and_does_not_end_the_training(tmp_path, monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as closed, tracker(tmp_path, headline={"lr": "lr"}) as rl:
        monkeypatch.setattr(sys, "stdout", closed)
        for step in range(3):
            rl.log(step, {"lr": 1.0})
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 3
    said = "stdout cannot be written (Broken pipe): log lines are not shown from here on\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("line", ['{"stage": "rl"}', "[1}", '{"a": "\udcff"}', "[" * 100_000 + "}"])
def test_a_damaged_line_stops_a_resume_with_its_number_and_nothing_is_lost(tmp_path, line):
    with tracker(tmp_path) as rl:
        rl.log(0, {"lr": 1.0})
    file = tmp_path / "metrics.jsonl"
    damaged = file.read_bytes() + line.encode(errors="surrogateescape") + b"\n"
    file.write_bytes(damaged)
    with pytest.raises(TrackingError, match=r"metrics.jsonl, line 2 is damaged \(.*: repair or delete that line, or"):
        tracker(tmp_path, first_step=1)
    assert file.read_bytes() == damaged


# Progress


def test_without_a_terminal_progress_is_about_ten_lines(tmp_path, capsys):
    with tracker(tmp_path) as rl:
        assert list(rl.progress([*range(100)], "evaluate")) == [*range(100)]
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"evaluate {n}/100" for n in range(0, 101, 10)]
    assert printed.err == ""


def test_progress_by_hand_reaches_its_end(tmp_path, capsys):
    with tracker(tmp_path) as rl, rl.progress(24, "evaluate") as bar:
        for _ in range(3):
            bar.update(8)
    done = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert done == [f"evaluate {n}/24" for n in (0, 8, 16, 24)]


def test_on_a_terminal_a_bar_stands_below_the_log(tmp_path, capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with tracker(tmp_path, headline={"lr": "lr"}) as rl:
        for step in rl.progress(range(2), "train"):
            rl.log(step, {"lr": 1.0})
    assert "train:" in terminal.getvalue()
    assert untimed(capsys.readouterr().out) == "rl 1/20  00:00 left  lr 1\nrl 2/20  00:00 left  lr 1\n"
    assert terminal.getvalue().endswith("\r")  # the finished bar is gone


# Trajectories


def test_every_segment_tells_who_wrote_it_on_what_evidence(tmp_path):
    rehearsed = {"model": "some/model", "prompt_hash": content_hash([1, 2])}
    written = trajectory(
        segment(Role.CONTEXT, "prompt", Evidence.GIVEN),
        segment(Role.ACT, "call", Evidence.CLAIMED, finish_reason="stop"),
        segment(Role.REHEARSE, '{"ok": 1}', Evidence.REHEARSED, finish_reason="parse_error", provenance=rehearsed),
        reward=0.0,
        reward_parts={"finished": 0.0},
        status=Status.PARSE_ERROR,
        reason="rehearse: no JSON",
    )
    written.sequences.append(Sequence([segment(Role.CONTEXT, "second", Evidence.SIMULATED)]))
    call = ToolCall("refund", {"n": 1})
    written.predictions = [Prediction(call, 0, 0, 0, "high", CallStatus.UNKNOWN, 0.5, None, {}, Decision.BLOCKED)]
    with tracker(tmp_path) as rl:
        rl.trajectories(7, "train", [written])
    [record] = read_lines(tmp_path / "trajectories.jsonl")
    segments = record.pop("segments")
    assert record == {
        "stage": "rl",
        "step": 7,
        "split": "train",
        "task": "t1",
        "kind": "cancel",
        "group_id": "g1",
        "status": "parse_error",
        "reason": "rehearse: no JSON",
        "reward": 0.0,
        "reward_parts": {"finished": 0.0},
        "verdicts": [],
        "predictions": [
            {
                "call": {"name": "refund", "arguments": {"n": 1}},
                **{"exchange": 0, "turn": 0, "round": 0, "risk": "high", "status": "unknown", "confidence": 0.5},
                **{"response": None, "change": {}, "decision": "blocked", "happened": None, "agreement": None},
            }
        ],
        "user_turns": ["Hello"],
    }
    names = ("sequence", "role", "evidence", "tokens", "finish_reason", "provenance", "text")
    assert [tuple(s[name] for name in names) for s in segments] == [
        (0, "context", "given", 6, None, {}, "prompt"),
        (0, "act", "claimed", 4, "stop", {}, "call"),
        (0, "rehearse", "rehearsed", 9, "parse_error", rehearsed, '{"ok": 1}'),
        (1, "context", "simulated", 6, None, {}, "second"),
    ]


def test_the_hash_of_an_observed_payload_can_be_checked_from_the_file(tmp_path):
    seen = trajectory()
    desk = Desk({"customer": "K10", "orders": {}, "customers": {}}, CallCounter(), "evaluation")
    drive(Real(desk).respond(seen, ToolCall("get_order", {"order_id": "Ü"}), CodePoints(), None), generate=None)
    with tracker(tmp_path) as rl:
        rl.trajectories(0, "eval-real", [seen])
    [record] = read_lines(tmp_path / "trajectories.jsonl")
    [observed] = record["segments"]
    assert observed["evidence"] == "observed" and json.loads(observed["text"]) == {"error": "unknown_id"}
    assert observed["provenance"] == {"payload_hash": content_hash(observed["text"])}


def test_hostile_text_stays_inside_its_line(tmp_path):
    hostile = trajectory(
        segment(Role.ACT, HOSTILE, Evidence.CLAIMED), task_id=HOSTILE, user_turns=[HOSTILE], reason=HOSTILE
    )
    with tracker(tmp_path) as rl:
        rl.trajectories(0, "train", [hostile, hostile])
    first, second = read_lines(tmp_path / "trajectories.jsonl")
    assert first == second
    assert first["task"] == first["reason"] == first["user_turns"][0] == first["segments"][0]["text"] == HOSTILE


def test_an_unknown_reward_is_null_and_not_zero(tmp_path):
    with tracker(tmp_path) as rl:
        rl.trajectories(0, "train", [trajectory(reward=None, status=Status.FAULT), trajectory(reward=math.nan)])
    unknown, broken = read_lines(tmp_path / "trajectories.jsonl")
    assert unknown["reward"] is None and unknown["status"] == "fault"
    assert broken["reward"] == "NaN"


def test_limit_and_missing_decoder(tmp_path):
    several = [trajectory(segment(Role.ACT, "x", Evidence.CLAIMED), task_id=f"t{i}") for i in range(5)]
    with tracker(tmp_path, decode=None) as rl:
        rl.trajectories(0, "train", several, limit=2)
        rl.trajectories(1, "train", several)
    records = read_lines(tmp_path / "trajectories.jsonl")
    assert [record["task"] for record in records] == ["t0", "t1", "t0", "t1", "t2", "t3", "t4"]
    assert "text" not in records[0]["segments"][0]


def test_outputs_have_their_advantages_and_the_first_trajectories_their_tokens(tmp_path):
    def made():
        act = segment(Role.ACT, "ab", Evidence.CLAIMED, logprobs=[-0.5, -0.25])
        given = segment(Role.CONTEXT, "?", Evidence.GIVEN)
        return trajectory(given, act, segment(Role.REHEARSE, "c", Evidence.REHEARSED, logprobs=[-1.0]))

    count = CONFIG.record_tokens
    with tracker(tmp_path) as rl:
        updated = [[-0.4, -0.3], []] * count  # REHEARSE is not trained
        several = [made() for _ in range(count + 1)]
        rl.trajectories(0, "train", several, advantages=torch.arange(2.0 * len(several)), updated_logprobs=updated)
        rl.trajectories(0, "eval-real", [made()])
    *recorded, later, evaluated = (record["segments"] for record in read_lines(tmp_path / "trajectories.jsonl"))
    assert len(recorded) == count
    for number, (given, act, rehearse) in enumerate(recorded):
        assert not {"advantage", "logprobs", "token_texts"} & given.keys()
        assert (act["advantage"], rehearse["advantage"]) == (2 * number, 2 * number + 1)
        assert (act["token_texts"], act["logprobs"]) == (["a", "b"], [-0.5, -0.25])
        assert act["updated_logprobs"] == [-0.4, -0.3] and "updated_logprobs" not in rehearse
    assert later[1]["advantage"] == 2 * count and "logprobs" not in later[1]
    assert "advantage" not in evaluated[1] and evaluated[2]["logprobs"] == [-1.0]


# Errors and ranks


def test_a_disk_that_is_full_is_one_clear_error(tmp_path):
    rl = tracker(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(TrackingError, match=r"cannot write .*metrics.jsonl: No space left on device"):
        rl.log(0, {"lr": 1.0})
    rl.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TrackingError, match=r"cannot write .*file"):
        tracker(tmp_path / "file" / "run")


def test_a_disabled_tracker_leaves_no_trace(tmp_path, capsys):
    with tracker(tmp_path / "run", enabled=False, headline={"lr": "lr"}) as rank:
        rank.log(0, {"lr": 1.0})
        rank.trajectories(0, "train", [trajectory()])
        assert list(rank.progress(range(3), "work")) == [0, 1, 2]
        with rank.progress(3, "work") as bar:
            bar.update(3)
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr() == ("", "")


def test_half_a_line_left_by_a_killed_run_does_not_lock_the_folder(tmp_path):
    with tracker(tmp_path, name="sft") as stage:
        stage.log(0, {"lr": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "st')
    with tracker(tmp_path, name="rl") as stage:
        stage.log(0, {"lr": 2.0})
    assert [(line["stage"], line["step"]) for line in read_lines(tmp_path / "metrics.jsonl")] == [("sft", 0), ("rl", 0)]
