"""CM2 rows: read as they are, refused with a reason, and laid out in the very tokens of the chat template."""

import copy
import functools
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from envace.chat import ChatFormat, parse_action, parse_observation
from envace.checklist import FOCUS_ON
from envace.cm2.files import FileError, read_rows
from envace.cm2.inspect import report
from envace.cm2.records import RowError, load_rl, load_sft
from envace.cm2.rows import Message, assistant_text, chat_messages
from envace.cm2.source import goal_of
from envace.demo.desk import TOOLS
from envace.demonstrations import demonstration
from envace.rewards import REWARDS
from envace.types import Evidence, Exchange, RecordedCall, Role, ToolCall, Trajectory

pytestmark = pytest.mark.slow  # all together, though each alone is quick

DATA = Path(__file__).parent / "data"
RL, SFT = DATA / "cm2_rl.json", DATA / "cm2_sft.json"
RL_ROWS, SFT_ROWS = (json.loads(path.read_text(encoding="utf-8")) for path in (RL, SFT))
# Reading the vocabulary takes a moment.
chat_format = functools.cache(ChatFormat)


def write(path, rows):
    """The rows in the format that the suffix names."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    else:
        path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def rl_row(uuid):
    return copy.deepcopy(next(row for row in RL_ROWS if row["uuid"] == uuid))


def with_value(row, path, value):
    """A copy of `row` in which the value at `path` is another, or with `...` is gone."""
    row = copy.deepcopy(row)
    parent = functools.reduce(lambda at, key: at[key], path[:-1], row)
    if value is ...:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return row


# The shipped rows


def test_every_shipped_row_is_good():
    records, problems = load_rl(RL, on_bad="fail")
    assert len(records) == len(RL_ROWS) >= 24 and not problems
    rows, problems = load_sft(SFT, on_bad="fail")
    assert len(rows) == len(SFT_ROWS) == 12 and not problems


def test_the_shipped_records_cover_the_schema():
    records, _ = load_rl(RL)
    dialogues = [r.dialogue() for r in records]
    roles = ["".join(m.role[0] for m in d) for d in dialogues]
    assert {r.count("u") for r in roles} == {1, 2, 3}
    assert any("tt" in r for r in roles) and any(r[0] == "u" for r in roles) and any(r[0] == "s" for r in roles)
    items = [i for r in records for variant in r.checklist().variants for turn in variant for i in turn]
    assert {i.focus_on for i in items} == set(FOCUS_ON)
    assert {i.required_for_next_turn for i in items} == {True, False} and any(i.dependence for i in items)
    assert {len(r.checklist().variants) for r in records} == {1, 2}
    assert any(isinstance(v, dict) for d in dialogues for m in d for c in m.calls for v in c.arguments.values())


# Nothing is added to a row


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
@pytest.mark.parametrize(("load", "rows"), [(load_rl, RL_ROWS), (load_sft, SFT_ROWS)])
def test_rows_with_other_keys_come_back_exactly(tmp_path, suffix, load, rows):
    if suffix == ".parquet":
        # A column has one type: tools are JSON strings in every row and the free field `index` an integer.
        rows = [r for r in rows if r.get("uuid") not in ("code-0015", "cater-0005")]
    path = write(tmp_path / f"rows{suffix}", rows)
    back = [row for _, _, row in read_rows(path)]
    assert back == rows
    assert [json.dumps(row, sort_keys=True) for row in back] == [json.dumps(row, sort_keys=True) for row in rows]
    records, problems = load(path)
    assert [record.row for record in records] == rows and not problems
    assert load is load_sft or len({tuple(tool["function"]) for r in records for tool in r.tools()}) > 1


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_tools_and_arguments_keep_their_own_keys_and_literal_characters(tmp_path, suffix):
    rows = [rl_row("zh-0004"), rl_row("cater-0005"), rl_row("hotel-0023")]
    rows[1]["extra_info"]["index"] = 5
    records, _ = load_rl(write(tmp_path / f"rows{suffix}", rows))
    assert records[0].tools()[0]["function"]["description"] == "查询天气 <b>实时</b> 🌦"
    assert records[2].tools()[0] == {
        "type": "function",
        "function": {"name": "ring_porter", "parameters": {"type": "object", "properties": {}}},
    }
    for record, row in zip(records, rows, strict=True):
        assert json.dumps(record.tools(), ensure_ascii=False) == row["extra_info"]["tools"]
        written = [c["function"] for m in row["extra_info"]["messages"] for c in m["tool_calls"]]
        calls = [call for m in record.dialogue() for call in m.calls]
        assert [(c.name, c.arguments) for c in calls] == [(w["name"], json.loads(w["arguments"])) for w in written]
    # A null that the row itself holds stays.
    assert records[1].dialogue()[2].calls[0].arguments["deliver"]["contact"] == {"name": "Ines", "phone": None}


def test_several_files_are_read_in_order_of_their_names(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "README.md").write_text("not data")
    write(tmp_path / "b.json", RL_ROWS[:2])
    write(tmp_path / "c.parquet", RL_ROWS[2:4])
    write(tmp_path / "part" / "a.jsonl", RL_ROWS[4:6])
    assert [r.id for r in load_rl(tmp_path)[0]] == [row["uuid"] for row in RL_ROWS[:6]]


def test_a_data_set_on_the_hub_is_read_like_a_folder(tmp_path, monkeypatch):
    (tmp_path / "rl").mkdir()
    write(tmp_path / "rl" / "train.json", RL_ROWS[:2])
    write(tmp_path / "sft.json", SFT_ROWS)
    asked = []

    def snapshot_download(name, *, repo_type, allow_patterns):
        asked.append((name, repo_type, allow_patterns))
        if name == "owner/none":
            raise OSError("404\nand more")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert len(load_rl("owner/name:rl/*.json")[0]) == 2
    assert len(load_rl("owner/name")[1]) == 12
    assert asked[0] == ("owner/name", "dataset", ["rl/*.json"])
    with pytest.raises(FileError, match=r"^owner/none: no such file or folder here, and the hub .*\(404\)"):
        load_rl("owner/none")


# What cannot be read at all


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.csv", b"", r"a\.csv: expected a file that ends in \.json, \.jsonl, \.parquet"),
        ("a.json", b'[{"uuid": 1},\n {"uuid" 2}]', r"a\.json, line 2: not valid JSON, Expecting ':' .* at column 10"),
        ("a.json", b'{"a": 1}\n{"a": 2}', r"a\.json, line 2: .*Extra data at column 1; .*name the file \.jsonl"),
        ("a.json", b'{"a": 1}', r"a\.json holds one JSON value that is no list"),
        ("a.json", b"[" * 200_000, r"a\.json: JSON is nested too deeply"),
        ("a.jsonl", b'{"a": 1}\n\n{"a": \n', r"a\.jsonl, line 3: not valid JSON"),
        ("a.json", b'["\xff"]', r"a\.json: not UTF-8 at byte 2"),
        ("a.parquet", b"PAR1 no", r"a\.parquet cannot be read as parquet: \w+"),
        ("a.json", b"[]", r"a\.json holds no rows"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path, name, content, error):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FileError, match=error) as raised:
        load_rl(tmp_path / name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("path", ["/no/such", "no/such.json", "./no/such", "a/b/c"])
def test_a_missing_path_is_one_clear_line(path):
    with pytest.raises(FileError, match=f"^{path} is missing: give a file, a folder, or OWNER/NAME"):
        load_rl(path)


def test_an_empty_folder_is_one_clear_line(tmp_path):
    with pytest.raises(FileError, match=r"holds no file that ends in \.json, \.jsonl, \.parquet"):
        load_rl(tmp_path)


# Bad rows

X = "extra_info"
M, K = (X, "messages"), (X, "interaction_kwargs", "checklist_list")
CALL = (*M, 2, "tool_calls", 0)
FIELD = "extra_info.messages"
LISTS = "extra_info.interaction_kwargs.checklist_list"
ITEM = f"{LISTS}[0][0][1]"
TOOL = {"type": "function", "function": {"name": "f"}}
LIB = rl_row("lib-0001")  # system, user, call, tool, call, tool, answer; three items
TALK, ITEMS = LIB[X]["messages"], LIB[X]["interaction_kwargs"]["checklist_list"][0][0]
NEEDS_EACH_OTHER = [ITEMS[0] | {"dependence": ["C1"]}, *ITEMS[1:]]

BAD_RL = [  # where, new value, field of the problem, its reason
    (("uuid",), ..., "uuid", "missing"),
    (("uuid",), 7, "uuid", "an integer where a string is expected"),
    (("uuid",), "a\ud800", "uuid", "holds a character that is not valid Unicode"),
    (("data_source",), ..., "data_source", "missing"),
    (("messages",), ..., "messages", "missing"),
    (("messages", 1, "content"), "Another?", "messages", "not the start of extra_info.messages"),
    (("messages",), TALK[:3], "messages", "not the start of extra_info.messages"),
    (("messages",), TALK[:1], "messages", "not the start of extra_info.messages"),
    ((X,), None, "extra_info", "null where an object is expected"),
    ((X, "need_tools_kwargs"), 1, "extra_info.need_tools_kwargs", "an integer where true or false is expected"),
    ((X, "original_index"), "other", "extra_info.original_index", "differs from uuid"),
    ((X, "interaction_kwargs", "name"), "x", "extra_info.interaction_kwargs.name", "'x' is none of checklist"),
    ((X, "tools"), ..., "extra_info.tools", "missing"),
    ((X, "tools"), "[{", "extra_info.tools", r"not valid JSON \(Expecting property name"),
    ((X, "tools"), "[NaN]", "extra_info.tools", r"not valid JSON \(NaN\)"),
    ((X, "tools"), '["\\ud800"]', "extra_info.tools", "not valid Unicode"),
    ((X, "tools"), "{}", "extra_info.tools", "an object where a list is expected"),
    ((X, "tools"), [1], "extra_info.tools[0]", "an integer where an object is expected"),
    ((X, "tools"), [TOOL | {"type": "x"}], "extra_info.tools[0].type", "'x' is none of function"),
    ((X, "tools"), [TOOL, TOOL], "extra_info.tools[1].function.name", "'f' is the name of two tools"),
    ((X, "tools"), [{"type": "function"}], "extra_info.tools[0].function", "missing"),
    ((X, "tools", 0, "function", "parameters"), "", "extra_info.tools[0].function.parameters", "an object is expected"),
    ((X, "tools", 0, "function", "description"), 1, "extra_info.tools[0].function.description", "a string is expected"),
    (M, [], FIELD, "does not end on an assistant message"),
    ((*M, 0, "role"), "developer", f"{FIELD}[0].role", "'developer' is none of system, user, assistant, tool"),
    ((*M, 0), TALK[2], f"{FIELD}[0]", "assistant message in the place of system or user"),
    ((*M, 1), ..., f"{FIELD}[1]", "assistant message in the place of user"),
    ((*M, 3), ..., f"{FIELD}[3]", r"assistant message in the place of tool \(1 responses are missing\)"),
    (M, [*TALK[:4], *TALK[3:]], f"{FIELD}[4]", "tool message in the place of assistant"),
    (M, TALK[:-1], FIELD, "does not end on an assistant message without calls"),
    (M, [*TALK, TALK[1]], FIELD, "does not end on an assistant message without calls"),
    (M, [*TALK, TALK[-1]], f"{FIELD}[7]", "assistant message in the place of user"),
    ((*M, 2, "content"), None, f"{FIELD}[2].content", "null where a string is expected"),
    ((*M, 2, "content"), "<think>\na", f"{FIELD}[2].content", "think tags other than one block"),
    ((*M, 2, "content"), "a <think>b</think>", f"{FIELD}[2].content", "think tags other than one block"),
    ((*M, 2, "content"), "<tool_call>{}</tool_call>", f"{FIELD}[2].content", "would not be read as its 1 calls"),
    ((*M, 6, "content"), "<think>\nb\n</think>", f"{FIELD}[6].content", "neither a call nor an answer"),
    ((*M, 6, "content"), "a</tool_call>", f"{FIELD}[6].content", "would not be read as its 0 calls"),
    ((*M, 2, "tool_calls"), None, f"{FIELD}[2].tool_calls", "null where a list is expected"),
    ((*M, 1, "tool_calls"), TALK[2]["tool_calls"], f"{FIELD}[1].tool_calls", "calls by the user"),
    ((*CALL, "id"), ..., f"{FIELD}[2].tool_calls[0].id", "missing"),
    ((*CALL, "type"), "x", f"{FIELD}[2].tool_calls[0].type", "'x' is none of function"),
    ((*CALL, "function", "name"), "", f"{FIELD}[2].tool_calls[0].function.name", "empty"),
    ((*CALL, "function", "arguments"), {}, f"{FIELD}[2].tool_calls[0].function.arguments", "a string is expected"),
    ((*CALL, "function", "arguments"), "{'a': 1}", f"{FIELD}[2].tool_calls[0].function.arguments", "not valid JSON"),
    ((*CALL, "function", "arguments"), "[1]", f"{FIELD}[2].tool_calls[0].function.arguments", "a list where an object"),
    (K, [], LISTS, "empty"),
    ((*K, 0), {}, f"{LISTS}[0]", "an object where a list is expected"),
    ((*K, 0), [ITEMS, ITEMS], f"{LISTS}[0]", "2 lists of items for 1 user turns"),
    ((*K, 0, 0), [], f"{LISTS}[0][0]", "empty"),
    ((*K, 0, 0, 1, "weight"), 0.40001, f"{LISTS}[0][0]", "weights sum to 1.00001, not 1"),
    ((*K, 0, 0, 1, "weight"), "0.4", f"{ITEM}.weight", "a string where a number is expected"),
    ((*K, 0, 0, 1, "weight"), True, f"{ITEM}.weight", "true or false where a number is expected"),
    ((*K, 0, 0, 1, "weight"), float("nan"), f"{ITEM}.weight", "not finite"),
    ((*K, 0, 0, 1, "weight"), -0.4, f"{ITEM}.weight", "-0.4 is negative"),
    ((*K, 0, 0, 1, "id"), "C0", f"{ITEM}.id", "'C0' is the id of two items"),
    ((*K, 0, 0, 1, "question"), " ", f"{ITEM}.question", "empty"),
    ((*K, 0, 0, 1, "pass_condition"), ..., f"{ITEM}.pass_condition", "missing"),
    ((*K, 0, 0, 1, "focus_on"), "tool", f"{ITEM}.focus_on", "'tool' is none of assistant.tool_calls, "),
    ((*K, 0, 0, 1, "failure_examples"), [1], f"{ITEM}.failure_examples[0]", "an integer where a string is expected"),
    ((*K, 0, 0, 1, "required_for_next_turn"), "true", f"{ITEM}.required_for_next_turn", "true or false is expected"),
    ((*K, 0, 0, 1, "dependence"), ["C9"], f"{ITEM}.dependence", "'C9' is the id of no item in this turn"),
    ((*K, 0, 0, 1, "dependence"), ["C1"], f"{LISTS}[0][0]", "'C1' depends on itself"),
    ((*K, 0, 0), NEEDS_EACH_OTHER, f"{LISTS}[0][0]", "'C0' depends on itself"),
    ((*K, 0, 0, 1, "evidence"), ..., f"{ITEM}.evidence", "missing"),
    ((*K, 0, 0, 1, "evidence", 0, "turn"), True, f"{ITEM}.evidence[0].turn", "true or false where an integer"),
    ((*K, 0, 0, 1, "evidence", 0, "step"), -1, f"{ITEM}.evidence[0]", "a negative turn or step"),
    ((*K, 0, 0, 1, "evidence", 0, "from"), "me", f"{ITEM}.evidence[0].from", "'me' is none of"),
]


def problem_of(load, path, good, bad):
    """The problem of the bad row behind a good one."""
    records, problems = load(write(path, [good, bad]))
    assert len(records) == 1
    [problem] = problems
    assert (problem.file, problem.row) == (str(path), 2)
    with pytest.raises(RowError) as raised:
        load(path, on_bad="fail")
    assert str(raised.value) == f"{problem}; correct or remove the row, or skip bad rows"
    return problem


@pytest.mark.parametrize(("where", "value", "field", "reason"), BAD_RL)
def test_a_bad_record_is_told_by_field_and_reason(tmp_path, where, value, field, reason):
    row = LIB
    if where[:3] == (X, "tools", 0):
        row = with_value(LIB, (X, "tools"), json.loads(LIB[X]["tools"]))
    problem = problem_of(load_rl, tmp_path / "rl.json", RL_ROWS[1], with_value(row, where, value))
    assert problem.field == field
    assert re.search(reason, problem.reason), problem.reason


CALLING, ANSWERING = SFT_ROWS[1]["messages"][1]["content"], SFT_ROWS[1]["messages"][3]["content"]
JOINED = SFT_ROWS[1]["messages"][2]["content"]

BAD_SFT = [  # SFT_ROWS[1]: user, two calls, their joint observation, answer
    (("tools",), ..., "tools", "missing"),
    (("tools",), "", "tools", "not valid JSON"),
    (("messages",), ..., "messages", "missing"),
    (("messages", 0), "hi", "messages[0]", "a string where an object is expected"),
    (("messages", 2, "role"), "tool", "messages[2].role", "'tool' is none of system, user, assistant, observation"),
    (("messages", 2, "content"), "{}", "messages[3]", r"in the place of tool \(1 responses are missing\)"),
    (
        ("messages", 2, "content"),
        f"{JOINED}\n</tool_response>\n<tool_response>\n{{}}",
        "messages[2]",
        "tool message in",
    ),
    (("messages", 1, "content"), f"{CALLING}\nand?", "messages[1].content", "text after a call"),
    (("messages", 1, "content"), CALLING[:-15], "messages[1].content", "a call that cannot be read"),
    (("messages", 1, "content"), CALLING[8:], "messages[1].content", "think tags other than one block"),
    (("messages", 3, "content"), "", "messages[3].content", "neither a call nor an answer"),
    (("messages", 3), ..., "messages", "does not end on an assistant message without calls"),
]


@pytest.mark.parametrize(("where", "value", "field", "reason"), BAD_SFT)
def test_a_bad_sft_row_is_told_by_field_and_reason(tmp_path, where, value, field, reason):
    problem = problem_of(load_sft, tmp_path / "sft.jsonl", SFT_ROWS[0], with_value(SFT_ROWS[1], where, value))
    assert problem.field == field
    assert re.search(reason, problem.reason), problem.reason


def test_an_id_is_used_once_even_in_two_files(tmp_path):
    write(tmp_path / "a.json", RL_ROWS[:2])
    write(tmp_path / "b.json", RL_ROWS[1:3])
    records, [problem] = load_rl(tmp_path)
    assert [r.id for r in records] == [row["uuid"] for row in RL_ROWS[:3]]
    assert str(problem) == f"{tmp_path / 'b.json'}, row 1, uuid: used before ({tmp_path / 'a.json'}, row 2)"


@pytest.mark.parametrize("on_bad", ["skip", "fail"])
def test_all_rows_bad_is_fatal(on_bad):
    with pytest.raises(RowError, match=r"cm2_sft\.json, row 1, uuid: missing"):
        load_rl(SFT, on_bad)
    with pytest.raises(
        RowError, match=r"^all 26 rows of .*cm2_rl\.json are bad; the first: .*; is this the right file\?$"
    ):
        load_sft(RL)


def test_good_rows_around_bad_ones_stay_in_order(tmp_path):
    rows = [*RL_ROWS[:2], 3, *RL_ROWS[2:4], {}]
    records, problems = load_rl(write(tmp_path / "rows.jsonl", rows))
    assert [r.id for r in records] == [row["uuid"] for row in RL_ROWS[:4]]
    assert [(p.row, p.field, p.reason) for p in problems] == [
        (3, "row", "an integer where an object is expected"),
        (6, "uuid", "missing"),
    ]
    with pytest.raises(ValueError, match="on_bad='stop'"):
        load_rl(RL, "stop")


# Tasks and dialogues


def test_a_record_becomes_a_task():
    record = next(r for r in load_rl(RL)[0] if r.id == "stock-0022")
    task = record.task()
    assert (task.id, task.system, task.kind) == ("stock-0022", "You watch prices.", "multi-turn")
    assert task.user_turns == ["What is BRNT at?", "And now?", "How far is it below 75?"]
    assert task.tools == record.tools() and task.goal == record.checklist()
    quote = ToolCall("quote", {"ticker": "BRNT"})
    assert [[(r.call, json.loads(r.response)["price"]) for r in turn] for turn in task.recorded] == [
        [(quote, 71.2)],
        [(quote, 70.85)],
        [],
    ]
    assert task.world is None  # nothing can be executed
    [variant] = task.goal.variants
    assert [len(turn) for turn in variant] == [2, 2, 1]
    assert variant[1][1].dependence == ("C0",) and variant[1][1].evidence[0].turn == 1
    assert variant[0][0].required_for_next_turn and not variant[0][1].required_for_next_turn


def test_an_sft_row_becomes_a_task_with_the_calls_of_its_text():
    row = load_sft(SFT)[0][1]
    task = row.task()
    assert (task.id, task.kind, task.goal, task.world) == ("cm2_sft.json-2", "sft", None, None)
    [turn] = task.recorded
    assert [r.call for r in turn] == parse_action(CALLING).calls
    assert [json.loads(r.response) for r in turn] == [{"minutes": [11]}, {"minutes": [6]}]


def test_a_task_without_a_system_message_has_an_empty_one():
    record = next(r for r in load_rl(RL)[0] if r.id == "parcel-0003")
    assert record.task().system == "" and record.messages()[0]["role"] == "user"
    empty = Message("system", ""), Message("user", "q"), Message("assistant", "a")
    assert [m["role"] for m in chat_messages(list(empty))] == ["user", "assistant"]


def test_an_observation_is_split_into_the_responses_that_it_joins():
    messages = load_sft(SFT)[0][1].messages()
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [json.loads(m["content"]) for m in messages[2:4]] == [{"minutes": [11]}, {"minutes": [6]}]


def test_sft_text_in_the_format_of_the_template_is_unchanged():
    for record, row in zip(load_sft(SFT)[0], SFT_ROWS, strict=True):
        written = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert [m["content"] for m in record.messages() if m["role"] == "assistant"] == written


def test_escaped_arguments_become_literal_characters():
    row = rl_row("geo-0011")
    assert "\\u00fc" in row[X]["messages"][1]["tool_calls"][0]["function"]["arguments"]
    record = next(r for r in load_rl(RL)[0] if r.id == "geo-0011")
    assert '{"place": "Zürich"}' in record.messages()[1]["content"]


def test_what_the_policy_would_be_read_as_is_what_was_recorded():
    for record in load_rl(RL)[0] + load_sft(SFT)[0]:
        for thinking in (True, False):
            for message in (m for m in record.dialogue() if m.role == "assistant"):
                action = parse_action(assistant_text(message, thinking=thinking))
                assert (action.calls, action.error) == (list(message.calls), None)
                assert action.content == message.text.strip()


# The same ids as one rendering by the template


def stream(tokenizer, record, messages):
    return demonstration(record.task(), messages, chat_format(tokenizer)).sequences[0]


def rendered(tokenizer, messages, tools, **settings):
    text = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **settings)
    return tokenizer(text, add_special_tokens=False).input_ids


def structured(dialogue, *, thinking_from=0):
    """The dialogue as the template's own authors would pass it: calls as objects, thoughts before `thinking_from` gone.

    Without thought and calls a message is plain text, so this shares nothing with `assistant_text`.
    """
    messages = []
    for i, m in enumerate(dialogue):
        thought = f"<think>\n{m.thought}\n</think>\n\n" if m.thought is not None and i >= thinking_from else ""
        calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in m.calls]
        messages.append({"role": m.role, "content": thought + m.text} | ({"tool_calls": calls} if calls else {}))
    return messages


def last_user(dialogue):
    return max(i for i, m in enumerate(dialogue) if m.role == "user")


def all_rows():
    return load_rl(RL)[0] + load_sft(SFT)[0]


def test_qwen3_single_turns_equal_one_rendering(qwen3_tokenizer):
    compared = 0
    for record in all_rows():
        dialogue = record.dialogue()
        if last_user(dialogue) > 1 or dialogue[-1].thought is None:
            continue  # the template gives a last message without thought an empty one
        ids = [*stream(qwen3_tokenizer, record, record.messages()).ids, *qwen3_tokenizer("\n").input_ids]
        assert ids == rendered(qwen3_tokenizer, structured(dialogue), record.tools()), record.id
        assert ids == rendered(qwen3_tokenizer, record.messages(), record.tools()), record.id
        compared += 1
    assert compared >= 20


def test_qwen3_multi_turns_equal_one_rendering_but_for_earlier_thoughts(qwen3_tokenizer):
    """The stream keeps all thinking, the template only that of the running turn: without the rest they are equal."""
    compared = 0
    for record in all_rows():
        dialogue, start = record.dialogue(), last_user(record.dialogue())
        if start <= 1 or dialogue[-1].thought is None:
            continue
        whole = rendered(qwen3_tokenizer, structured(dialogue), record.tools())
        newline = qwen3_tokenizer("\n").input_ids
        assert [*stream(qwen3_tokenizer, record, record.messages()).ids, *newline] != whole
        forgetful = structured(dialogue, thinking_from=start)
        assert rendered(qwen3_tokenizer, forgetful, record.tools()) == whole
        texts = [
            assistant_text(m, thinking=i >= start) if m.role == "assistant" else m.text for i, m in enumerate(dialogue)
        ]
        messages = [{"role": m.role, "content": text} for m, text in zip(dialogue, texts, strict=True)]
        assert [*stream(qwen3_tokenizer, record, messages).ids, *newline] == whole, record.id
        compared += 1
    assert compared >= 8


def test_qwen3_rows_without_thinking_equal_one_rendering_up_to_the_last_answer(qwen3_tokenizer):
    for record in all_rows():
        sequence = stream(qwen3_tokenizer, record, record.messages(thinking=False))
        plain = structured(record.dialogue(), thinking_from=len(record.dialogue()))
        before = rendered(qwen3_tokenizer, plain[:-1], record.tools(), add_generation_prompt=True)
        answer = qwen3_tokenizer(plain[-1]["content"] + "<|im_end|>").input_ids
        assert sequence.ids == [*before, *answer], record.id


def test_a_tool_without_description_and_parameters_is_given_as_it_is(tmp_path, qwen3_tokenizer):
    tools = [{"type": "function", "function": {"name": "f"}}, *json.loads(LIB[X]["tools"])]
    [record], _ = load_rl(write(tmp_path / "rl.json", [with_value(LIB, (X, "tools"), tools)]))
    text = qwen3_tokenizer.decode(stream(qwen3_tokenizer, record, record.messages()).ids)
    assert '{"type": "function", "function": {"name": "f"}}\n{"type": "function"' in text


def test_demo_template_keeps_all_thinking(demo_tokenizer):
    for record in all_rows():
        ids = [*stream(demo_tokenizer, record, record.messages()).ids, *demo_tokenizer("\n").input_ids]
        assert ids == rendered(demo_tokenizer, record.messages(), record.tools()), record.id


def tool_lines(tokenizer, tools):
    """What the demo's template says of each tool."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": "q"}], tools, tokenize=False)
    return text.partition("<tools>\n")[2].partition("\n</tools>")[0].split("\n")


def test_the_tools_of_the_demo_read_as_they_always_did(demo_tokenizer):
    assert tool_lines(demo_tokenizer, TOOLS) == [
        '{"name": "get_order", "arguments": {"order_id": "string"}}',
        '{"name": "get_customer", "arguments": {"customer_id": "string"}}',
        '{"name": "cancel_order", "arguments": {"order_id": "string"}}',
        '{"name": "refund_order", "arguments": {"order_id": "string", "amount": "integer"}}',
        '{"name": "move_order", "arguments": {"order_id": "string", "day": "string"}}',
        '{"name": "open_ticket", "arguments": {"order_id": "string", "topic": ["damage", "delivery", "other"]}}',
    ]


ODD_PARAMETERS = [  # of a tool, and what the demo's template makes of it
    (..., {}),
    ({}, {}),
    ({"type": "object"}, {}),
    ({"properties": {}}, {}),
    ({"properties": None}, {}),
    ({"properties": {"a": {}, "b": True, "c": {"anyOf": [{"type": "string"}]}}}, {"a": "any", "b": "any", "c": "any"}),
    ({"properties": {"a": {"type": ["string", "null"]}}}, {"a": ["string", "null"]}),
    ({"properties": {"a": {"type": "integer", "enum": [1, None, "<b> & 'é'"]}}}, {"a": [1, None, "<b> & 'é'"]}),
    ({"properties": {'"<é>\\\n': {"type": "string"}}}, {'"<é>\\\n': "string"}),
    ({"properties": {"items": {"type": "array"}, "type": {"type": "object"}}}, {"items": "array", "type": "object"}),
]


def test_the_demo_template_takes_any_tool(demo_tokenizer):
    for record in all_rows():
        lines = tool_lines(demo_tokenizer, record.tools()) if record.tools() else []
        assert [json.loads(line)["name"] for line in lines] == [tool["function"]["name"] for tool in record.tools()]
    for parameters, arguments in ODD_PARAMETERS:
        function = {"name": 'f"<'} | ({} if parameters is ... else {"parameters": parameters})
        [line] = tool_lines(demo_tokenizer, [{"type": "function", "function": function}])
        assert line == json.dumps({"name": 'f"<', "arguments": arguments}, ensure_ascii=False)


def is_json_object_or_array(text):
    try:
        return isinstance(json.loads(text), dict | list)
    except ValueError:
        return False


def test_text_is_literal_and_every_message_has_its_role(tokenizer):
    left_out = []
    for record in all_rows():
        sequence, dialogue = stream(tokenizer, record, record.messages()), record.dialogue()
        assert "\\u" not in tokenizer.decode(sequence.ids)
        outputs = [s.role for s in sequence.segments if s.role is not Role.CONTEXT]
        responses = [m.text for m in dialogue if m.role == "tool"]
        left_out += (unwritten := [text for text in responses if not is_json_object_or_array(text)])
        written = {"assistant": Role.ACT, "tool": Role.REHEARSE}
        assert outputs == [written[m.role] for m in dialogue if m.role in written and m.text not in unwritten]
        separate = demonstration(record.task(), record.messages(), chat_format(tokenizer), separate=True)
        assert len(separate.sequences) == 1 + len(responses) - len(unwritten)
    assert len(left_out) == 2


# Inspection


def inspect(*arguments):
    command = [sys.executable, "-m", "envace.data", "inspect", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_inspect_counts_and_shows_the_first_problem_of_each_kind(tmp_path):
    bad = [with_value(row, ("data_source",), ...) for row in RL_ROWS[:3]]
    bad += [with_value(LIB, (*K, 0, 0, 1, "weight"), w) for w in (0.5, 0.6)]
    path = write(tmp_path / "rows.json", [*RL_ROWS, *bad])
    text = report(str(path))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == f"{path}: CM2 RL rows"
    assert "rows 26 ok, 5 bad" in lines and "user turns 1: 18, 2: 6, 3: 2 (turns: rows)" in lines
    assert "parallel calls 8 messages with more than one call, at most 3" in lines
    assert "with dependence 36 of 82 (44%)" in lines
    assert "responses not JSON {} or [] 1 of 51 (2%), which REHEARSE could not write" in lines
    shown = " ".join(" ".join(lines).partition("problems, the first of each kind: ")[2].split())
    assert shown.count(" like ") == 2
    assert f"3 like {path}, row 27, data_source: missing" in shown
    assert f"2 like {path}, row 30, {LISTS}[0][0]: weights sum to 1.1, not 1" in shown
    assert max(map(len, text.splitlines()[1:])) <= 100


def test_inspect_tells_the_schemas_apart_and_counts_tokens(tmp_path, demo_tokenizer):
    demo_tokenizer.save_pretrained(tmp_path / "tokenizer")
    for path, kind in ((RL, "RL"), (SFT, "SFT")):
        text = report(str(path), tokenizer=str(tmp_path / "tokenizer"))
        assert f"CM2 {kind} rows" in text and "prompt, tokens" in text and ("with dependence" in text) == (kind == "RL")
        longest = max(
            len(stream(demo_tokenizer, r, r.messages())) for r in (load_rl if kind == "RL" else load_sft)(path)[0]
        )
        assert re.search(rf"dialogue, tokens .* max {longest}$", text, re.MULTILINE)
    with pytest.raises(FileError, match="no tokenizer at .*none"):
        report(str(RL), tokenizer=str(tmp_path / "none"))


def test_inspect_runs_from_the_command_line():
    done = inspect(SFT)
    assert done.returncode == 0 and "12 ok, 0 bad" in done.stdout
    failed = inspect(RL, "--schema", "sft")
    assert failed.returncode == 1 and failed.stderr.startswith("error: all 26 rows of ")
    assert len(failed.stderr.splitlines()) == 1


# What the reference dialogue did, as a goal


def reference_of(record):
    """The reference dialogue as a finished trajectory."""
    task, dialogue = record.task(), record.dialogue()
    trajectory = Trajectory(replace(task, goal=goal_of(dialogue, task.recorded)), "g")
    for turn, calls in enumerate(task.recorded):
        for number, recorded in enumerate(calls):
            value = parse_observation(recorded.response).value
            trajectory.exchanges.append(Exchange(recorded.call, value, turn, number, Evidence.OBSERVED))
    trajectory.answers = [m.text for m in dialogue if m.role == "assistant" and not m.calls]
    return trajectory


@pytest.mark.parametrize("record", load_rl(RL)[0], ids=lambda record: record.id)
def test_the_reference_dialogue_reaches_its_own_goal(record):
    reference = reference_of(record)
    assert [REWARDS[name](reference)[0] for name in ("goal", "gold_calls", "answer_facts")] == [1.0] * 3
    if reference.exchanges:
        lost = replace(reference, exchanges=reference.exchanges[1:])
        assert REWARDS["gold_calls"](lost)[0] == 0.0


def test_facts_are_what_an_answer_states_of_a_response():
    call, again = ToolCall("f", {"x": 1}), ToolCall("f", {"x": 2})
    response = '{"state": "done", "left": 12, "zero": 0, "ok": true, "none": null, "unsaid": "blue"}'
    recorded = (
        (RecordedCall(call, '{"state": "open"}'), RecordedCall(call, response), RecordedCall(again, "no JSON")),
    )
    dialogue = [Message("user", "?"), Message("assistant", "It is done: 12 left, 0 ok true open.")]
    [turn] = goal_of(dialogue, recorded).turns
    [branch] = turn.branches
    assert branch.writes == (call, call, again)
    # Of the second response to one call only what the first one did not say; one character is no fact.
    assert [says.value.field for says in branch.says] == ["state", "left"]
    assert [says.value.call for says in branch.says] == [call, call]
