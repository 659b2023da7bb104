"""CM2 data (tool dialogues, for RL with checklists) -> tasks and demonstrations. Every row is checked when loaded.

    python -m envace.cm2 inspect PATH [--schema rl|sft] [--tokenizer FOLDER]

PATH is a .json (a list of rows), .jsonl or .parquet file, a folder of them, or a data set on the Hugging Face hub:
OWNER/NAME, or OWNER/NAME:PATTERN for some of its files. A bad row is a Problem: file, row (from 1), field and reason.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

from envace.chat import CALL_OPEN, THINK_CLOSE, THINK_OPEN, parse_action, parse_observation
from envace.checklist import Checklist, Item, Quote
from envace.prompts import to_json, tool_call_block
from envace.types import Task, ToolCall, UserError, first_line

FOCUS = ("assistant.tool_calls", "assistant.content.thinking", "assistant.content.user_visible_reply", "tool.content")
SUFFIXES = (".json", ".jsonl", ".parquet")
WEIGHT_TOLERANCE = 1e-6  # how far the weights of one turn may be from 1
KINDS = {
    str: "a string",
    list: "a list",
    dict: "an object",
    bool: "true or false",
    int: "an integer",
    float: "a number",
}
# How several responses to one assistant message are joined into one observation of an SFT row.
JOINT = re.compile(r"\n?</tool_response>\n?<tool_response>\n?")

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]
OnBad = Literal["skip", "fail"]


class FileError(UserError):
    """A path that is missing, of another kind, or cannot be read; the message says which and what to do."""


class RowError(UserError):
    """A bad row where none is tolerated; the message names file, row, field and reason."""


class BadRow(ValueError):
    """What is wrong with the row at hand; a reader turns it into a Problem."""

    def __init__(self, field: str, reason: str):
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason


@dataclass(frozen=True)
class Problem:
    """Why a row is not used. row: its number in the file from 1 (in .jsonl the line). field: such as a.b[2].c."""

    file: str
    row: int
    field: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}, {self.field}: {self.reason}"

    @property
    def kind(self) -> str:
        """Field and reason without the numbers and values that differ from row to row."""
        return re.sub(r"\d+", "#", re.sub(r"'.*'|\(.*\)", "...", f"{self.field}: {self.reason}"))


@dataclass(frozen=True)
class RecordedCall:
    """A call of the reference dialogue and the text of its response."""

    call: ToolCall
    response: str


@dataclass(frozen=True)
class Message:
    """One message, the same for both kinds of rows. thought: None if there is no think block. where: its field."""

    role: str
    text: str
    thought: str | None = None
    calls: tuple[ToolCall, ...] = ()
    where: str = field(default="", compare=False)


# Files


def read_rows(path: str | Path) -> Iterator[tuple[str, int, Any]]:
    """(file, row number from 1, row) for every row, exactly as written, before any check. Raises FileError."""
    readers = {".json": _json_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    for file in _files(str(path)):
        try:
            for number, row in readers[file.suffix](file):
                yield str(file), number, row
        except json.JSONDecodeError as error:
            hint = "; if each line is a row, name the file .jsonl" if error.msg == "Extra data" else ""
            reason = f"line {error.lineno}: not valid JSON, {error.msg} at column {error.colno}{hint}"
            raise FileError(f"{file}, {reason}") from None
        except UnicodeDecodeError as error:
            raise FileError(f"{file}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
        except RecursionError:
            raise FileError(f"{file}: JSON is nested too deeply") from None
        except OSError as error:
            raise FileError(f"{file} cannot be read: {error.strerror or first_line(error)}") from None


# JSON is read by the json module: Arrow, on which `datasets` is built, gives all objects of a column the same keys and
# so adds nulls to whatever lacks one. A parquet file holds such columns anyway, and JSON strings pass through unharmed.


def _json_rows(file: Path) -> Iterator[tuple[int, Any]]:
    rows = json.loads(file.read_text(encoding="utf-8-sig"))
    if not isinstance(rows, list):
        raise FileError(f"{file} holds one JSON value that is no list: put the rows in [...], or name it .jsonl")
    yield from enumerate(rows, start=1)


def _jsonl_rows(file: Path) -> Iterator[tuple[int, Any]]:
    # Not splitlines(): a JSON string may hold other line separators as they are.
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                reason = f"line {number}: not valid JSON, {error.msg} at column {error.colno}"
                raise FileError(f"{file}, {reason}") from None


def _parquet_rows(file: Path) -> Iterator[tuple[int, Any]]:
    import datasets  # slow to import, and only parquet needs it

    try:
        # Streamed: nothing is copied to a cache, in which a file that changed could go unnoticed.
        rows = datasets.load_dataset("parquet", data_files=[str(file)], split="train", streaming=True)
        # No field is ever null, so a null stands for a key that the row did not have.
        yield from ((number, _without_nulls(row)) for number, row in enumerate(rows, start=1))
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise FileError(f"{file} cannot be read as parquet: {first_line(error)}") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _files(path: str) -> list[Path]:
    local, pattern = Path(path), "*"
    if local.is_file():
        if local.suffix not in SUFFIXES:
            raise FileError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}, or a folder of such files")
        return [local]
    if not local.exists():
        hub = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?::(.+))?", path)
        if not hub or local.suffix in SUFFIXES and not hub[2]:
            raise FileError(f"{path} is missing: give a file, a folder, or OWNER/NAME of a data set on the hub")
        pattern = hub[2] or pattern
        local = _download(hub[1], pattern)
    inside = {file: file.relative_to(local) for file in sorted(local.rglob("*")) if file.suffix in SUFFIXES}
    files = [
        f for f, name in inside.items() if fnmatch(name.as_posix(), pattern) and not name.as_posix().startswith(".")
    ]
    if not files:
        raise FileError(f"{path} holds no file that ends in {', '.join(SUFFIXES)}")
    return files


def _download(name: str, pattern: str) -> Path:
    from huggingface_hub import snapshot_download  # only data sets on the hub need it

    # The files themselves, so that they are read like local ones; `datasets` would pass JSON files through Arrow.
    wanted = [f"*{suffix}" for suffix in SUFFIXES] if pattern == "*" else [pattern]
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=wanted))
    except (OSError, ValueError, RuntimeError) as error:
        reason = f"no such file or folder here, and the hub does not give the data set ({first_line(error)})"
        raise FileError(f"{name}: {reason}; check the path, the name and the network") from None


# Reading one row. Each function returns what it read, or raises BadRow with the field and the reason.


def _typed(value: Any, kind: type, where: str) -> Any:
    # To Python, true is an integer and an integer is no float.
    fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    if not fits or isinstance(value, float) and not math.isfinite(value):
        found = "null" if value is None else next((KINDS[k] for k in (bool, *KINDS) if isinstance(value, k)), "a value")
        raise BadRow(where, f"{found} where {KINDS[kind]} is expected" if found != KINDS[kind] else "not finite")
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadRow(where, "holds a character that is not valid Unicode") from None
    return value


def _get(parent: dict[str, Any], key: str, kind: type, inside: str = "") -> Any:
    where = f"{inside}.{key}" if inside else key
    if key not in parent:
        raise BadRow(where, "missing")
    return _typed(parent[key], kind, where)


def _each(values: list[Any], kind: type, where: str) -> list[tuple[Any, str]]:
    """Each value with its own field."""
    return [(_typed(value, kind, f"{where}[{i}]"), f"{where}[{i}]") for i, value in enumerate(values)]


def _some(values: list[Any], kind: type, where: str) -> list[tuple[Any, str]]:
    if not values:
        raise BadRow(where, "empty")
    return _each(values, kind, where)


def _text(parent: dict[str, Any], key: str, inside: str) -> str:
    value = _get(parent, key, str, inside)
    if not value.strip():
        raise BadRow(f"{inside}.{key}", "empty")
    return value


def _one_of(value: str, allowed: tuple[str, ...], where: str) -> str:
    if value not in allowed:
        raise BadRow(where, f"{value!r} is none of {', '.join(allowed)}")
    return value


def _extra(row: dict[str, Any]) -> dict[str, Any]:
    return _get(row, "extra_info", dict)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _parse_json(text: str, where: str) -> Any:
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse_constant)
        to_json(value).encode()
    except UnicodeEncodeError:
        raise BadRow(where, "holds a character that is not valid Unicode") from None
    except (ValueError, RecursionError) as error:
        raise BadRow(where, f"not valid JSON ({first_line(error)})") from None
    return value


def _read_tools(value: Any, where: str) -> Tools:
    if value is None:
        raise BadRow(where, "missing")
    tools = _typed(_parse_json(value, where) if isinstance(value, str) else value, list, where)
    names: set[str] = set()
    for tool, inside in _each(tools, dict, where):
        _one_of(_get(tool, "type", str, inside), ("function",), f"{inside}.type")
        function, inside = _get(tool, "function", dict, inside), f"{inside}.function"
        name = _text(function, "name", inside)
        if name in names:
            raise BadRow(f"{inside}.name", f"{name!r} is the name of two tools")
        names.add(name)
        for key, kind in (("description", str), ("parameters", dict)):
            if key in function:
                _get(function, key, kind, inside)
    return tools


def _rl_message(message: dict[str, Any], where: str) -> Message:
    role = _one_of(_get(message, "role", str, where), ("system", "user", "assistant", "tool"), f"{where}.role")
    content = _get(message, "content", str, where)
    written = _each(_typed(message.get("tool_calls", []), list, f"{where}.tool_calls"), dict, f"{where}.tool_calls")
    if role != "assistant":
        if written:
            raise BadRow(f"{where}.tool_calls", f"calls by the {role}")
        return Message(role, content, where=where)
    thought, text = _split_thought(content, f"{where}.content")
    read = Message(role, text, thought, tuple(_read_call(call, inside) for call, inside in written), where)
    # The calls are found again in the text, by the parser that also reads what the policy writes.
    action = parse_action(assistant_text(read))
    if action.error or action.calls != list(read.calls):
        raise BadRow(f"{where}.content", f"would not be read as its {len(read.calls)} calls ({action.error})")
    return _not_empty(read)


def _read_call(call: dict[str, Any], where: str) -> ToolCall:
    _get(call, "id", str, where)
    _one_of(_get(call, "type", str, where), ("function",), f"{where}.type")
    function, where = _get(call, "function", dict, where), f"{where}.function"
    name, arguments = _text(function, "name", where), _get(function, "arguments", str, where)
    return ToolCall(name, _typed(_parse_json(arguments, f"{where}.arguments"), dict, f"{where}.arguments"))


def _sft_messages(message: dict[str, Any], where: str) -> list[Message]:
    role = _one_of(_get(message, "role", str, where), ("system", "user", "assistant", "observation"), f"{where}.role")
    content = _get(message, "content", str, where)
    if role == "observation":
        return [Message("tool", text, where=where) for text in JOINT.split(content)]
    if role != "assistant":
        return [Message(role, content, where=where)]
    thought, text = _split_thought(content, f"{where}.content")
    action = parse_action(text)
    if action.error:
        raise BadRow(f"{where}.content", f"a call that cannot be read ({action.error})")
    if action.calls:
        text = text.partition(CALL_OPEN)[0].strip()
        if text != action.content:
            raise BadRow(f"{where}.content", "text after a call")
    return [_not_empty(Message(role, text, thought, tuple(action.calls), where))]


def _not_empty(message: Message) -> Message:
    if not message.calls and not message.text.strip():
        raise BadRow(f"{message.where}.content", "neither a call nor an answer")
    return message


def _split_thought(content: str, where: str) -> tuple[str | None, str]:
    """(thought, what is visible) without the line breaks between them; the thought is None without a think block."""
    tags = re.findall(f"{THINK_OPEN}|{THINK_CLOSE}", content)
    if not tags:
        return None, content
    if tags != [THINK_OPEN, THINK_CLOSE] or not content.lstrip().startswith(THINK_OPEN):
        raise BadRow(where, "think tags other than one block at the start")
    thought, _, visible = content.lstrip().removeprefix(THINK_OPEN).partition(THINK_CLOSE)
    return thought.strip("\n"), visible.lstrip("\n")


def _in_order(messages: list[Message], where: str) -> list[Message]:
    allowed, open_calls = ("system", "user"), 0
    for message in messages:
        if message.role not in allowed:
            missing = f" ({open_calls} responses are missing)" if open_calls else ""
            raise BadRow(message.where, f"{message.role} message in the place of {' or '.join(allowed)}{missing}")
        if message.role == "assistant":
            open_calls = len(message.calls)
            allowed = ("tool",) if open_calls else ("user",)
        elif message.role == "tool":
            open_calls -= 1
            allowed = ("tool",) if open_calls else ("assistant",)
        else:
            allowed = ("user",) if message.role == "system" else ("assistant",)
    if not messages or messages[-1].role != "assistant" or messages[-1].calls:
        raise BadRow(where, "does not end on an assistant message without calls")
    return messages


def _read_variant(variant: list[Any], n_turns: int, where: str) -> tuple[tuple[Item, ...], ...]:
    if len(variant) != n_turns:
        raise BadRow(where, f"{len(variant)} lists of items for {n_turns} user turns")
    return tuple(_read_items(items, inside) for items, inside in _each(variant, list, where))


def _read_items(values: list[Any], where: str) -> tuple[Item, ...]:
    items = [_read_item(value, inside) for value, inside in _some(values, dict, where)]
    total = math.fsum(item.weight for item in items)
    if abs(total - 1) > WEIGHT_TOLERANCE:
        raise BadRow(where, f"weights sum to {total:g}, not 1")
    ids = [item.id for item in items]
    for i, item in enumerate(items):
        if item.id in ids[:i]:
            raise BadRow(f"{where}[{i}].id", f"{item.id!r} is the id of two items")
        if unknown := set(item.dependence) - set(ids):
            raise BadRow(f"{where}[{i}].dependence", f"{min(unknown)!r} is the id of no item in this turn")
    settled: set[str] = set()
    while ready := {item.id for item in items if settled.issuperset(item.dependence)} - settled:
        settled |= ready
    if len(settled) < len(items):
        raise BadRow(where, f"{min(set(ids) - settled)!r} depends on itself")
    return tuple(items)


def _read_item(value: dict[str, Any], where: str) -> Item:
    def strings(key: str) -> tuple[str, ...]:
        return tuple(text for text, _ in _each(_get(value, key, list, where), str, f"{where}.{key}"))

    weight = float(_get(value, "weight", float, where))
    if weight < 0:
        raise BadRow(f"{where}.weight", f"{weight:g} is negative")
    return Item(
        id=_text(value, "id", where),
        question=_text(value, "question", where),
        focus_on=_one_of(_get(value, "focus_on", str, where), FOCUS, f"{where}.focus_on"),
        pass_condition=_text(value, "pass_condition", where),
        failure_examples=strings("failure_examples"),
        evidence=tuple(_read_quote(*v) for v in _each(_get(value, "evidence", list, where), dict, f"{where}.evidence")),
        required_for_next_turn=_get(value, "required_for_next_turn", bool, where),
        dependence=strings("dependence"),
        weight=weight,
    )


def _read_quote(value: dict[str, Any], where: str) -> Quote:
    turn, step = _get(value, "turn", int, where), _get(value, "step", int, where)
    if min(turn, step) < 0:
        raise BadRow(where, "a negative turn or step")
    source = _one_of(_get(value, "from", str, where), (*FOCUS, "user.content"), f"{where}.from")
    return Quote(turn, step, source, _get(value, "snippet", str, where))


# What is made of a row


def assistant_text(message: Message, *, thinking: bool = True) -> str:
    """An assistant message as Qwen3's template writes it in the running turn, without <|im_end|>.

    Arguments are written anew, so that escapes in the record become literal characters.
    """
    thought = f"{THINK_OPEN}\n{message.thought}\n{THINK_CLOSE}\n\n" if thinking and message.thought is not None else ""
    return thought + "\n".join([*filter(None, [message.text]), *map(tool_call_block, message.calls)])


def chat_messages(dialogue: list[Message], *, thinking: bool = True) -> Messages:
    """[{"role": ..., "content": ...}] with calls inline. An empty system message is left out, as in an episode.

    thinking: with False think blocks are left out, in every turn alike.
    """
    return [
        {"role": m.role, "content": assistant_text(m, thinking=thinking) if m.role == "assistant" else m.text}
        for m in dialogue
        if m.role != "system" or m.text
    ]


def _prompt(messages: Messages) -> Messages:
    return messages[: [m["role"] for m in messages].index("user") + 1]


def recorded_calls(dialogue: list[Message]) -> tuple[tuple[RecordedCall, ...], ...]:
    """[turn][call] in the order of the dialogue, which must be in order."""
    turns: list[list[RecordedCall]] = []
    for i, message in enumerate(dialogue):
        if message.role == "user":
            turns.append([])
        for k, call in enumerate(message.calls, start=1):
            turns[-1].append(RecordedCall(call, dialogue[i + k].text))
    return tuple(map(tuple, turns))


# Records


@dataclass(frozen=True)
class Record:
    """A CM2 RL row. `row` is what the file holds; JSON strings in it are parsed at each use.

    On a loaded record nothing raises; on another row the methods raise BadRow.
    """

    file: str
    number: int
    row: dict[str, Any]

    @property
    def id(self) -> str:
        return _get(self.row, "uuid", str)

    def tools(self) -> Tools:
        return _read_tools(_extra(self.row).get("tools"), "extra_info.tools")

    def dialogue(self) -> list[Message]:
        """The whole reference dialogue."""
        messages = _get(_extra(self.row), "messages", list, "extra_info")
        return _in_order(
            [_rl_message(m, w) for m, w in _each(messages, dict, "extra_info.messages")], "extra_info.messages"
        )

    def checklist(self) -> Checklist:
        """Raises BadRow also if a variant does not have one list of items per user turn."""
        where = "extra_info.interaction_kwargs"
        value = _get(_get(_extra(self.row), "interaction_kwargs", dict, "extra_info"), "checklist_list", list, where)
        variants = _some(value, list, f"{where}.checklist_list")
        n_turns = sum(m.role == "user" for m in self.dialogue())
        return Checklist(tuple(_read_variant(variant, n_turns, w) for variant, w in variants))

    def messages(self, *, thinking: bool = True) -> Messages:
        """The reference dialogue as `envace.data.demonstration` takes it."""
        return chat_messages(self.dialogue(), thinking=thinking)

    def measured(self) -> tuple[Messages, Tools]:
        """What a length limit counts: the prompt up to the first user message, and the tools."""
        return _prompt(self.messages()), self.tools()

    def task(self) -> Task:
        """goal: the Checklist. world: the recorded calls, world[turn] in order, for an environment to reuse."""
        dialogue = self.dialogue()
        kind = "multi-turn" if sum(m.role == "user" for m in dialogue) > 1 else "single-turn"
        return _task(self.id, dialogue, self.tools(), kind, self.checklist(), recorded_calls(dialogue))

    def check(self) -> None:
        """Raises BadRow at the first thing that is wrong."""
        row_id, extra = self.id, _extra(self.row)
        _get(self.row, "data_source", str)
        head = [_rl_message(m, w) for m, w in _each(_get(self.row, "messages", list), dict, "messages")]
        dialogue = self.dialogue()
        if head != dialogue[: len(head)] or [m.role for m in head if m.role != "system"] != ["user"]:
            raise BadRow("messages", "not the start of extra_info.messages up to the first user message")
        name = _get(_get(extra, "interaction_kwargs", dict, "extra_info"), "name", str, "extra_info.interaction_kwargs")
        _one_of(name, ("checklist",), "extra_info.interaction_kwargs.name")
        _get(extra, "need_tools_kwargs", bool, "extra_info")
        if _get(extra, "original_index", str, "extra_info") != row_id:
            raise BadRow("extra_info.original_index", "differs from uuid")
        self.tools()
        self.checklist()


@dataclass(frozen=True)
class SFTRow:
    """A CM2 row for SFT: calls stand inline in the assistant's text. Otherwise like Record."""

    file: str
    number: int
    row: dict[str, Any]

    @property
    def id(self) -> str:
        return f"{Path(self.file).name}-{self.number}"

    def tools(self) -> Tools:
        return _read_tools(self.row.get("tools"), "tools")

    def dialogue(self) -> list[Message]:
        messages = _each(_get(self.row, "messages", list), dict, "messages")
        return _in_order([message for m, w in messages for message in _sft_messages(m, w)], "messages")

    def messages(self, *, thinking: bool = True) -> Messages:
        """The dialogue as `envace.data.demonstration` takes it: one tool message per response."""
        return chat_messages(self.dialogue(), thinking=thinking)

    def measured(self) -> tuple[Messages, Tools]:
        """What a length limit counts: the whole dialogue, and the tools."""
        return self.messages(), self.tools()

    def task(self) -> Task:
        return _task(self.id, self.dialogue(), self.tools(), "sft", None, None)

    def check(self) -> None:
        """Raises BadRow at the first thing that is wrong."""
        self.dialogue()
        self.tools()


# Loading


def load_rl(path: str | Path, on_bad: OnBad = "skip") -> tuple[list[Record], list[Problem]]:
    """The good RL records at `path`, in order, and what is wrong with the others.

    Raises RowError at the first bad row if on_bad is "fail", and if no row is good; FileError for the path.
    """
    return _load(path, Record, on_bad)


def load_sft(path: str | Path, on_bad: OnBad = "skip") -> tuple[list[SFTRow], list[Problem]]:
    """As `load_rl`, for SFT rows."""
    return _load(path, SFTRow, on_bad)


def _load(path: str | Path, kind: type, on_bad: OnBad) -> tuple[list[Any], list[Problem]]:
    if on_bad not in ("skip", "fail"):
        raise ValueError(f"on_bad={on_bad!r}: expected skip or fail")
    records, problems = [], []
    first_with: dict[str, str] = {}
    for file, number, row in read_rows(path):
        record = kind(file, number, row)
        try:
            _typed(row, dict, "row")
            record.check()
            place = f"{file}, row {number}"
            if first_with.setdefault(record.id, place) != place and kind is Record:
                raise BadRow("uuid", f"used before ({first_with[record.id]})")
            records.append(record)
        except BadRow as error:
            problems.append(Problem(file, number, error.field, error.reason))
            if on_bad == "fail":
                raise RowError(f"{problems[0]}; correct or remove the row, or skip bad rows") from None
    if problems and not records:
        raise RowError(f"all {len(problems)} rows of {path} are bad; the first: {problems[0]}; is this the right file?")
    if not records:
        raise FileError(f"{path} holds no rows")
    return records, problems


def _task(task_id: str, dialogue: list[Message], tools: Tools, kind: str, goal: Any, world: Any) -> Task:
    system = dialogue[0].text if dialogue[0].role == "system" else ""
    return Task(task_id, system, tools, [m.text for m in dialogue if m.role == "user"], kind, goal, world)


def within(record: Record | SFTRow, count_tokens: Callable[[Messages, Tools], int], limit: int) -> bool:
    """Whether what `record.measured()` gives has at most `limit` tokens. Nothing is ever cut to fit."""
    return count_tokens(*record.measured()) <= limit


def keep_within(
    records: list[Any], count_tokens: Callable[[Messages, Tools], int], limit: int
) -> tuple[list[Any], int]:
    """(the records within `limit`, in order; how many were left out)."""
    kept = [record for record in records if within(record, count_tokens, limit)]
    return kept, len(records) - len(kept)


# Inspection


@dataclass(frozen=True)
class TokenCounter:
    """Token counts in one chat format. chat: an envace.chat.ChatFormat."""

    chat: Any

    def prompt(self, messages: Messages, tools: Tools) -> int:
        """Up to where the assistant writes, as the tokenizer's own template renders it."""
        return len(self.chat.prompt(messages, tools))

    def dialogue(self, record: Record | SFTRow) -> int:
        """The whole training sequence of view `shared`, with all thinking."""
        from envace.data import demonstration  # here, so that envace.data may import this module

        return len(demonstration(record.task(), record.messages(), self.chat).sequences[0])


def describe(records: list[Any], problems: list[Problem], counter: TokenCounter | None = None) -> str:
    """Counts, lengths and the first problem of each kind, in lines of at most 100 columns."""
    lines = [("rows", f"{len(records)} ok, {len(problems)} bad")]
    lines += [*_dialogue_lines(records), *_length_lines(records, counter)]
    turns = [turn for r in records if isinstance(r, Record) for variant in r.checklist().variants for turn in variant]
    if turns:
        lines += [("checklist variants", _spread([len(r.checklist().variants) for r in records]))]
        lines += _checklist_lines(turns)
    text = "\n".join(fill(f"{name:<30}{value}", 100, subsequent_indent=" " * 30) for name, value in lines)
    kinds: dict[str, list[Problem]] = {}
    for problem in problems:
        kinds.setdefault(problem.kind, []).append(problem)
    first = [fill(f"{len(same)} like {same[0]}", 100, subsequent_indent="    ") for same in kinds.values()]
    return "\n".join([text, *(["", "problems, the first of each kind:", *first] if first else [])])


def _dialogue_lines(records: list[Any]) -> Iterator[tuple[str, str]]:
    dialogues = [record.dialogue() for record in records]
    offered = [[tool["function"]["name"] for tool in record.tools()] for record in records]
    calls = [[call.name for m in dialogue for call in m.calls] for dialogue in dialogues]
    parallel = [len(m.calls) for dialogue in dialogues for m in dialogue if len(m.calls) > 1]
    responses = [m.text for dialogue in dialogues for m in dialogue if m.role == "tool"]
    unknown = sum(name not in names for made, names in zip(calls, offered, strict=True) for name in made)
    free = sum(parse_observation(text).error is not None for text in responses)
    turns = Counter(sum(m.role == "user" for m in dialogue) for dialogue in dialogues)
    yield "user turns", ", ".join(f"{n}: {count}" for n, count in sorted(turns.items())) + "  (turns: rows)"
    yield "with a system message", _share(sum(d[0].role == "system" for d in dialogues), len(dialogues))
    yield "assistant messages", _spread([sum(m.role == "assistant" for m in d) for d in dialogues])
    yield "calls", f"{_spread([len(made) for made in calls])}; {sum(map(len, calls))} in all"
    yield "parallel calls", f"{len(parallel)} messages with more than one call, at most {max(parallel, default=1)}"
    yield "tools offered", f"{_spread(list(map(len, offered)))}; {len({n for names in offered for n in names})} names"
    yield "calls of tools not offered", _share(unknown, sum(map(len, calls)))
    yield "responses not JSON {} or []", _share(free, len(responses)) + ", which REHEARSE could not write"


def _length_lines(records: list[Any], counter: TokenCounter | None) -> Iterator[tuple[str, str]]:
    def characters(messages: Messages, tools: Tools) -> int:
        return sum(len(m["content"]) for m in messages) + len(to_json(tools))

    dialogues = [(record.messages(), record.tools()) for record in records]
    prompts = [(_prompt(messages), tools) for messages, tools in dialogues]
    yield "prompt, characters", _spread([characters(*prompt) for prompt in prompts])
    yield "dialogue, characters", _spread([characters(*dialogue) for dialogue in dialogues])
    if counter is not None:
        yield "prompt, tokens", _spread([counter.prompt(*prompt) for prompt in prompts])
        yield "dialogue, tokens", _spread([counter.dialogue(r) for r in records])


def _checklist_lines(turns: list[tuple[Item, ...]]) -> Iterator[tuple[str, str]]:
    items = [item for turn in turns for item in turn]
    yield "items per turn", f"{_spread(list(map(len, turns)))}; {len(items)} in all"
    for focus in FOCUS:
        yield f"on {focus.removeprefix('assistant.')}", _share(sum(i.focus_on == focus for i in items), len(items))
    yield "required for next turn", _share(sum(i.required_for_next_turn for i in items), len(items))
    yield "with dependence", _share(sum(bool(i.dependence) for i in items), len(items))


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / max(whole, 1):.0f}%)"


def _spread(values: list[int]) -> str:
    """Percentiles by nearest rank: each is a value that occurs."""
    ranked = sorted(values)
    at = {f"p{p}": ranked[max(0, math.ceil(p / 100 * len(ranked)) - 1)] for p in (10, 50, 90, 99)}
    return f"min {ranked[0]}  " + "  ".join(f"{k} {v}" for k, v in at.items()) + f"  max {ranked[-1]}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envace.cm2", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    inspect = commands.add_parser("inspect", help="count, measure and check the rows of a data set")
    inspect.add_argument("path", help="file, folder, or OWNER/NAME[:PATTERN] on the Hugging Face hub")
    inspect.add_argument("--schema", choices=("rl", "sft"), help="of the rows; by default as the first row looks")
    inspect.add_argument("--tokenizer", help="folder of a tokenizer: lengths in tokens too")
    arguments = parser.parse_args()
    try:
        print(report(arguments.path, arguments.schema, arguments.tokenizer))
    except UserError as error:
        sys.exit(f"error: {error}")


def report(path: str, schema: str | None = None, tokenizer: str | None = None) -> str:
    """The text of `inspect`. schema: "rl", "sft", or None for what the first row looks like. Raises UserError."""
    if schema is None:
        first = next((row for _, _, row in read_rows(path)), None)
        schema = "rl" if isinstance(first, dict) and "extra_info" in first else "sft"
    records, problems = {"rl": load_rl, "sft": load_sft}[schema](path)
    counter = None
    if tokenizer is not None:
        from transformers import AutoTokenizer  # slow to import, and only token counts need it

        from envace.chat import ChatFormat

        try:
            counter = TokenCounter(ChatFormat(AutoTokenizer.from_pretrained(tokenizer)))
        except (OSError, ValueError) as error:
            raise FileError(f"no tokenizer at {tokenizer}: {first_line(error)}") from None
    return f"{path}: CM2 {schema.upper()} rows\n" + describe(records, problems, counter)


if __name__ == "__main__":
    main()
