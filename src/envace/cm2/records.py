"""CM2 rows as records: each is checked when loaded, and becomes a task or a dialogue when asked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from envace.checklist import Checklist
from envace.cm2.files import FileError, read_rows
from envace.cm2.rows import (
    BadRow,
    Message,
    Messages,
    Tools,
    chat_messages,
    each,
    extra_info,
    get,
    in_order,
    one_of,
    read_tools,
    read_variant,
    recorded_calls,
    rl_message,
    sft_messages,
    some,
    typed,
)
from envace.types import Task, UserError

OnBad = Literal["skip", "fail"]


class RowError(UserError):
    """A bad row where none is tolerated; the message names file, row, field and reason."""


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
class Record:
    """A CM2 RL row. `row` is what the file holds; JSON strings in it are parsed at each use.

    On a loaded record nothing raises; on another row the methods raise BadRow.
    """

    file: str
    number: int
    row: dict[str, Any]

    @property
    def id(self) -> str:
        return get(self.row, "uuid", str)

    def tools(self) -> Tools:
        return read_tools(extra_info(self.row).get("tools"), "extra_info.tools")

    def dialogue(self) -> list[Message]:
        """The whole reference dialogue."""
        messages = get(extra_info(self.row), "messages", list, "extra_info")
        return in_order(
            [rl_message(m, w) for m, w in each(messages, dict, "extra_info.messages")], "extra_info.messages"
        )

    def checklist(self) -> Checklist:
        """Raises BadRow also if a variant does not have one list of items per user turn."""
        where = "extra_info.interaction_kwargs"
        value = get(get(extra_info(self.row), "interaction_kwargs", dict, "extra_info"), "checklist_list", list, where)
        variants = some(value, list, f"{where}.checklist_list")
        n_turns = sum(m.role == "user" for m in self.dialogue())
        return Checklist(tuple(read_variant(variant, n_turns, w) for variant, w in variants))

    def messages(self, *, thinking: bool = True) -> Messages:
        """The reference dialogue as `envace.demonstrations.demonstration` takes it."""
        return chat_messages(self.dialogue(), thinking=thinking)

    def task(self) -> Task:
        """goal: the Checklist."""
        dialogue = self.dialogue()
        kind = "multi-turn" if sum(m.role == "user" for m in dialogue) > 1 else "single-turn"
        return _task(self.id, dialogue, self.tools(), kind, self.checklist())

    def check(self) -> None:
        """Raises BadRow at the first thing that is wrong."""
        row_id, extra = self.id, extra_info(self.row)
        get(self.row, "data_source", str)
        head = [rl_message(m, w) for m, w in each(get(self.row, "messages", list), dict, "messages")]
        dialogue = self.dialogue()
        if head != dialogue[: len(head)] or [m.role for m in head if m.role != "system"] != ["user"]:
            raise BadRow("messages", "not the start of extra_info.messages up to the first user message")
        name = get(get(extra, "interaction_kwargs", dict, "extra_info"), "name", str, "extra_info.interaction_kwargs")
        one_of(name, ("checklist",), "extra_info.interaction_kwargs.name")
        get(extra, "need_tools_kwargs", bool, "extra_info")
        if get(extra, "original_index", str, "extra_info") != row_id:
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
        return read_tools(self.row.get("tools"), "tools")

    def dialogue(self) -> list[Message]:
        messages = each(get(self.row, "messages", list), dict, "messages")
        return in_order([message for m, w in messages for message in sft_messages(m, w)], "messages")

    def messages(self, *, thinking: bool = True) -> Messages:
        """The dialogue as `envace.demonstrations.demonstration` takes it: one tool message per response."""
        return chat_messages(self.dialogue(), thinking=thinking)

    def task(self) -> Task:
        return _task(self.id, self.dialogue(), self.tools(), "sft")

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
            typed(row, dict, "row")
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


def _task(task_id: str, dialogue: list[Message], tools: Tools, kind: str, goal: Checklist | None = None) -> Task:
    system = dialogue[0].text if dialogue[0].role == "system" else ""
    user_turns = [m.text for m in dialogue if m.role == "user"]
    return Task(task_id, system, tools, user_turns, kind, goal, recorded=recorded_calls(dialogue))
