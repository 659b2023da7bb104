"""docs/troubleshooting.md: the lines that it shows are those of the program, and the tests that it names exist."""

import ast
import re
from datetime import timedelta
from pathlib import Path

import pytest

from envace.chat import ChatFormat
from envace.config import load_config
from envace.data import short_enough
from envace.elastic import ended_by
from envace.failures import explained, in_memory
from envace.launch import processes_per_node
from envace.outage import Outage
from envace.policy import Policy
from envace.settings import EndpointConfig, ModelConfig
from envace.types import UserError

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith(("| what you see", "|---"))
]
LEAST = 20


def test_the_table_is_whole():
    assert len(ROWS) >= LEAST and {len(row) for row in ROWS} == {4}
    lines = [row[0] for row in ROWS]
    assert len(set(lines)) == len(lines)
    assert all(line.startswith("`") and line.endswith("`") and all(row) for line, *row in map(tuple, ROWS))


def strings_of(path):
    """Every text in a file; what is filled in shows as …. Texts that stand next to each other are one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


SOURCE = [text for path in [*ROOT.glob("*.py"), *ROOT.glob("src/**/*.py")] for text in strings_of(path)]


def words_of(line):
    return [part.strip(" ():;,") for part in line.strip("`").split("…") if re.search(r"[a-z]{2}", part)]


def unknown(line):
    return [part for part in words_of(line) if not any(part in text for text in SOURCE)]


@pytest.mark.parametrize("where", sorted({row[3] for row in ROWS}))
def test_the_test_of_a_line_exists(where):
    file, name = where.split("::")
    nodes = ast.walk(ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8")))
    assert name in [node.name for node in nodes if isinstance(node, ast.FunctionDef)]


# Some of the lines are made here from their cause; of the others the words are looked up in the source


class NoTemplate:
    name_or_path = "some/tokenizer"
    chat_template = None

    def get_vocab(self):
        return dict.fromkeys(
            ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"], 1
        )


def out_of_memory(phase):
    with in_memory(phase):
        raise MemoryError


def down():
    outage = Outage(EndpointConfig(endpoints=["http://a/v1"]), "judge", "verdict")
    outage.failed("http://a/v1", 0.0, "refused")
    outage.check(timedelta(hours=1).total_seconds())


CAUSES = {
    "no NVIDIA GPU found": lambda: processes_per_node(
        load_config(None, ["model.path=x", "policy.deepspeed=configs/deepspeed/zero3.json"]), 0, None
    ),
    "out of memory while": lambda: out_of_memory("load"),
    "out of memory in a rollout": lambda: out_of_memory("rollout"),
    "out of memory in an update": lambda: out_of_memory("update"),
    "unknown key": lambda: load_config(None, ["rl.lrr=1"]),
    "expected …": lambda: load_config(None, ["rl.steps=many"]),
    "none of …": lambda: short_enough(["long"], len, 1, "tasks"),
    "is no folder": lambda: Policy(ModelConfig(path="./none")),
    "has no chat template": lambda: ChatFormat(NoTemplate()),
    "down for": down,
}


@pytest.mark.parametrize("line", [row[0] for row in ROWS if not any(words in row[0] for words in CAUSES)])
def test_the_words_of_a_line_are_those_of_the_program(line):
    assert words_of(line) and unknown(line) == []


def test_words_that_the_program_does_not_say_would_be_found():
    assert unknown("`error … no such words are ever said … is no folder`") == ["no such words are ever said"]


@pytest.mark.parametrize("words", CAUSES)
def test_a_line_is_what_is_shown(words):
    [line] = [row[0].strip("`") for row in ROWS if words in row[0]]
    with pytest.raises(Exception) as caught:
        CAUSES[words]()
    said = explained(caught.value)
    assert "\n" not in said
    assert re.match(".+".join(map(re.escape, line.split("…"))), said), said


def test_a_killed_process_is_shown_so():
    [line] = [row[0].strip("`") for row in ROWS if "was ended by" in row[0]]
    assert re.match(".+".join(map(re.escape, line.split("…"))), ended_by(1, 9))


def test_what_is_no_failure_of_the_user_has_no_line():
    assert explained(KeyError("a bug")) is None and explained(UserError("a line")) == "a line"
