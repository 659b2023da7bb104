"""TensorBoard: the files say what metrics.jsonl says, each step once even after a crash; hostile text is text."""

import html
import json
import re
import time
from html.parser import HTMLParser

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.text import text_plugin
from tensorboard.util import tensor_util

from envace.board import FIRST_TRAJECTORIES, TEXT_CHARS, as_code
from envace.config import load_config, settings_of
from envace.tracking import Tracker
from envace.types import Evidence, Role, Segment, Sequence, Status, Task, Trajectory

CONFIG = load_config(None, ["model.path=some/model", "rl.lr=3e-4", "sft.roles=[act]"])
HOSTILE = [
    "<script>alert(1)</script>",
    "</code></pre><img src=x onerror=alert(1)>",
    "```\n# heading\n```\n\n\n<b>bold</b>",
    "\n\nno longer indented\n\n* item\n\n| a | b |\n|---|---|\n| 1 | 2 |",
    "\r<script>\x0b<i>\x0c<b>\x1c\x85\u2028\u2029<u>",
    "\x1b[31mred\x1b[0m \u202egnp.exe \u200b \0 \x02wzxhzdk:0\x03",
    "[link](javascript:alert(1)) &lt;b&gt; &amp;",
    "<!-- comment --> <?php ?> <![CDATA[ x ]]>",
    "\ud800 lone",
    "\t\ttab",
]


def decode(ids):
    return "".join(map(chr, ids))


def tracker(run_dir, **settings):
    defaults = {"name": "rl", "total_steps": 6, "decode": decode, "headline": {"real": "eval/real_success"}}
    return Tracker(run_dir, CONFIG, **defaults | settings)


def trajectory(text, task="t1"):
    segment = Segment(Role.ACT, [ord(character) for character in text], Evidence.CLAIMED)
    return Trajectory(Task(task, "", [], ["Hello"]), "g1", [Sequence([segment])], reward=0.5, status=Status.PARSE_ERROR)


def board(run_dir, **settings):
    everything = {"size_guidance": {"scalars": 0, "tensors": 0}}
    return EventAccumulator(str(run_dir / "tensorboard" / "rl"), **everything | settings).Reload()


def scalars(read, tag="lr"):
    return [(event.step, event.value) for event in read.Scalars(tag)]


def texts(read, tag):
    return [(event.step, tensor_util.make_ndarray(event.tensor_proto)) for event in read.Tensors(f"{tag}/text_summary")]


def test_the_scalars_are_those_of_metrics_jsonl(tmp_path):
    with tracker(tmp_path) as rl:
        for step in range(4):
            rl.log(
                step, {"lr": 0.5**step, "reward/mean": step / 8} | ({"eval/real_success": 0.25} if step == 3 else {})
            )
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    read = board(tmp_path)
    logged = {key for record in records for key in record} - {"stage", "step", "time"}
    assert set(read.Tags()["scalars"]) == logged
    for key in logged:
        assert scalars(read, key) == [(record["step"], record[key]) for record in records if key in record]


# A crash and a resumption


def crashed(run_dir):
    """Steps 0 to 3 were recorded, a checkpoint exists of 2, and half an event was being written."""
    rl = tracker(run_dir)
    for step in range(4):
        rl.log(step, {"lr": float(step)})
        rl.trajectories(step, "train", [trajectory(f"first {step}")])
    rl.close(complete=False)
    [file] = (run_dir / "tensorboard" / "rl").iterdir()
    with file.open("ab") as stream:
        stream.write(b"\x18\0\0\0\0\0\0\0half")
    time.sleep(1.1)  # the names of event files count seconds


def test_after_a_crash_every_step_is_there_once_and_in_order(tmp_path):
    crashed(tmp_path)
    with tracker(tmp_path, first_step=2) as rl:
        for step in range(2, 6):
            rl.log(step, {"lr": 10.0 + step})
            rl.trajectories(step, "train", [trajectory(f"second {step}")])
    expected = [(0, 0.0), (1, 1.0), (2, 12.0), (3, 13.0), (4, 14.0), (5, 15.0)]
    for purge in (True, False):  # the files are right, whatever a reader does about restarts
        read = board(tmp_path, purge_orphaned_data=purge)
        assert scalars(read) == expected
        assert [step for step, _ in texts(read, "train/0")] == [0, 1, 2, 3, 4, 5]
    assert "second 2" in str(texts(read, "train/0")[2][1])


def test_without_forgetting_the_steps_would_be_there_twice(tmp_path, monkeypatch):
    crashed(tmp_path)
    monkeypatch.setattr("envace.board.forget", lambda *_: None)
    with tracker(tmp_path, first_step=2) as rl:
        rl.log(2, {"lr": 12.0})
    assert [step for step, _ in scalars(board(tmp_path, purge_orphaned_data=False))].count(2) == 2


def test_a_stage_that_begins_anew_leaves_nothing_of_the_old_one(tmp_path):
    crashed(tmp_path)
    foreign = tmp_path / "tensorboard" / "rl" / "notes.txt"
    foreign.write_text("mine")
    with tracker(tmp_path) as rl:
        rl.log(0, {"lr": 7.0})
    assert scalars(board(tmp_path)) == [(0, 7.0)] and foreign.read_text() == "mine"
    assert "train/0/text_summary" not in board(tmp_path).Tags()["tensors"]


# HParams


def hparams(read, tag):
    return metadata.parse_session_start_info_plugin_data(read.SummaryMetadata(tag).plugin_data.content)


def test_hparams_hold_every_setting_and_name_the_metrics(tmp_path):
    with tracker(tmp_path) as rl:
        rl.log(0, {"lr": 1.0})
    read = board(tmp_path)
    shown = hparams(read, metadata.SESSION_START_INFO_TAG).hparams
    settings = settings_of(CONFIG)
    assert set(shown) == set(settings)
    assert shown["rl.lr"].number_value == 3e-4 and shown["model.path"].string_value == "some/model"
    assert shown["sft.roles"].string_value == "['act']"
    content = read.SummaryMetadata(metadata.EXPERIMENT_TAG).plugin_data.content
    named = {info.name.tag for info in metadata.parse_experiment_plugin_data(content).metric_infos}
    assert named == {"lr", "eval/real_success"}


@pytest.mark.parametrize("fails", [False, True])
def test_only_a_stage_that_came_to_its_end_is_called_done(tmp_path, fails):
    rl = tracker(tmp_path)
    rl.log(0, {"lr": 1.0})
    rl.__exit__(*((RuntimeError, None, None) if fails else (None, None, None)))
    read = board(tmp_path)
    assert (metadata.SESSION_END_INFO_TAG in read.PluginTagToContent("hparams")) is not fails


# Text


class Seen(HTMLParser):
    """The tags of a page, and the text inside its code."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.code, self.elsewhere, self.inside = [], "", "", 0
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        assert not attributes
        self.inside += tag == "code"

    def handle_endtag(self, tag):
        self.inside -= tag == "code"

    def handle_data(self, data):
        if self.inside:
            self.code += data
        else:
            self.elsewhere += data.strip()


def rendered(run_dir, tag="train/0"):
    """As TensorBoard's own text plugin shows it."""
    [(_, value)] = texts(board(run_dir), tag)
    return text_plugin.text_array_to_html(value, enable_markdown=True)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_shown_and_does_nothing(tmp_path, text):
    with tracker(tmp_path) as rl:
        rl.trajectories(0, "train", [trajectory(text, task=text)])
    page = Seen(rendered(tmp_path))
    assert page.tags == ["table", "tbody", "tr", "td", "pre", "code"] and page.elsewhere == ""
    # Line ends and blank lines aside, all of it is there; what cannot be seen is there as an escape.
    visible = re.sub(r"\s", "", as_code(text))
    assert re.sub(r"\s", "", page.code).count(visible) == 2
    assert not re.search("[\0\x1b\u202e\u200b\u2028\x85]", page.code)


def test_unindented_the_same_text_would_do_something():
    """The negative control: the renderer does take Markdown for what it is."""
    import numpy as np

    page = text_plugin.text_array_to_html(np.array([b"# heading\n\n* item"]), enable_markdown=True)
    assert "<h1>" in page and "<li>" in page


def test_escapes_keep_what_can_be_seen():
    assert as_code("a é 漢 😀 |<b>\n\x1b[0m") == "    a é 漢 😀 |<b>\n    \\x1b[0m"
    assert html.escape("<b>") not in as_code("<b>")


def test_text_is_bounded_and_says_so(tmp_path):
    with tracker(tmp_path) as rl:
        rl.trajectories(0, "train", [trajectory("begin" + "x" * 1_000_000 + "end")] * 10)
    read = board(tmp_path)
    assert len([tag for tag in read.Tags()["tensors"] if tag.startswith("train/")]) == FIRST_TRAJECTORIES
    [(_, value)] = texts(read, "train/0")
    shown = value[0].decode()
    assert len(shown) < TEXT_CHARS + 500
    assert "begin" in shown and shown.endswith("end") and "more characters: see trajectories.jsonl" in shown


def test_without_a_decoder_there_is_no_text(tmp_path):
    with tracker(tmp_path, decode=None) as rl:
        rl.trajectories(0, "train", [trajectory("x")])
    assert "train/0/text_summary" not in board(tmp_path).Tags()["tensors"]
