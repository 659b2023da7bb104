"""One row -> messages, tools and checklist items. A reader returns what it read, or raises BadRow with the reason."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from envace.chat import CALL_OPEN, THINK_CLOSE, THINK_OPEN, parse_action
from envace.checklist import FOCUS_ON, Item, Quote
from envace.prompts import to_json, tool_call_block
from envace.types import RecordedCall, ToolCall, first_line

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


class BadRow(ValueError):
    """What is wrong with the row at hand; a reader turns it into a Problem."""

    def __init__(self, field: str, reason: str):
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason


@dataclass(frozen=True)
class Message:
    """One message, the same for both kinds of rows. thought: None if there is no think block. where: its field."""

    role: str
    text: str
    thought: str | None = None
    calls: tuple[ToolCall, ...] = ()
    where: str = field(default="", compare=False)


# The readers


def typed(value: Any, kind: type, where: str) -> Any:
    """The value, if it is of this kind."""
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


def get(parent: dict[str, Any], key: str, kind: type, inside: str = "") -> Any:
    where = f"{inside}.{key}" if inside else key
    if key not in parent:
        raise BadRow(where, "missing")
    return typed(parent[key], kind, where)


def each(values: list[Any], kind: type, where: str) -> list[tuple[Any, str]]:
    """Each value with its own field."""
    return [(typed(value, kind, f"{where}[{i}]"), f"{where}[{i}]") for i, value in enumerate(values)]


def some(values: list[Any], kind: type, where: str) -> list[tuple[Any, str]]:
    """As `each`, of at least one value."""
    if not values:
        raise BadRow(where, "empty")
    return each(values, kind, where)


def _text(parent: dict[str, Any], key: str, inside: str) -> str:
    value = get(parent, key, str, inside)
    if not value.strip():
        raise BadRow(f"{inside}.{key}", "empty")
    return value


def one_of(value: str, allowed: tuple[str, ...], where: str) -> str:
    if value not in allowed:
        raise BadRow(where, f"{value!r} is none of {', '.join(allowed)}")
    return value


def extra_info(row: dict[str, Any]) -> dict[str, Any]:
    return get(row, "extra_info", dict)


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


def read_tools(value: Any, where: str) -> Tools:
    if value is None:
        raise BadRow(where, "missing")
    tools = typed(_parse_json(value, where) if isinstance(value, str) else value, list, where)
    names: set[str] = set()
    for tool, inside in each(tools, dict, where):
        one_of(get(tool, "type", str, inside), ("function",), f"{inside}.type")
        function, inside = get(tool, "function", dict, inside), f"{inside}.function"
        name = _text(function, "name", inside)
        if name in names:
            raise BadRow(f"{inside}.name", f"{name!r} is the name of two tools")
        names.add(name)
        for key, kind in (("description", str), ("parameters", dict)):
            if key in function:
                get(function, key, kind, inside)
    return tools


def rl_message(message: dict[str, Any], where: str) -> Message:
    role = one_of(get(message, "role", str, where), ("system", "user", "assistant", "tool"), f"{where}.role")
    content = get(message, "content", str, where)
    written = each(typed(message.get("tool_calls", []), list, f"{where}.tool_calls"), dict, f"{where}.tool_calls")
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
    get(call, "id", str, where)
    one_of(get(call, "type", str, where), ("function",), f"{where}.type")
    function, where = get(call, "function", dict, where), f"{where}.function"
    name, arguments = _text(function, "name", where), get(function, "arguments", str, where)
    return ToolCall(name, typed(_parse_json(arguments, f"{where}.arguments"), dict, f"{where}.arguments"))


def sft_messages(message: dict[str, Any], where: str) -> list[Message]:
    """An observation gives one message per response that it joins."""
    role = one_of(get(message, "role", str, where), ("system", "user", "assistant", "observation"), f"{where}.role")
    content = get(message, "content", str, where)
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


def in_order(messages: list[Message], where: str) -> list[Message]:
    """The messages, if each stands in its place and every call has its response."""
    allowed: tuple[str, ...] = ("system", "user")
    open_calls = 0
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


def read_variant(variant: list[Any], n_turns: int, where: str) -> tuple[tuple[Item, ...], ...]:
    if len(variant) != n_turns:
        raise BadRow(where, f"{len(variant)} lists of items for {n_turns} user turns")
    return tuple(_read_items(items, inside) for items, inside in each(variant, list, where))


def _read_items(values: list[Any], where: str) -> tuple[Item, ...]:
    items = [_read_item(value, inside) for value, inside in some(values, dict, where)]
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
        return tuple(text for text, _ in each(get(value, key, list, where), str, f"{where}.{key}"))

    weight = float(get(value, "weight", float, where))
    if weight < 0:
        raise BadRow(f"{where}.weight", f"{weight:g} is negative")
    return Item(
        id=_text(value, "id", where),
        question=_text(value, "question", where),
        focus_on=one_of(get(value, "focus_on", str, where), FOCUS_ON, f"{where}.focus_on"),
        pass_condition=_text(value, "pass_condition", where),
        failure_examples=strings("failure_examples"),
        evidence=tuple(_read_quote(*v) for v in each(get(value, "evidence", list, where), dict, f"{where}.evidence")),
        required_for_next_turn=get(value, "required_for_next_turn", bool, where),
        dependence=strings("dependence"),
        weight=weight,
    )


def _read_quote(value: dict[str, Any], where: str) -> Quote:
    turn, step = get(value, "turn", int, where), get(value, "step", int, where)
    if min(turn, step) < 0:
        raise BadRow(where, "a negative turn or step")
    source = one_of(get(value, "from", str, where), (*FOCUS_ON, "user.content"), f"{where}.from")
    return Quote(turn, step, source, get(value, "snippet", str, where))


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


def prompt_of(messages: Messages) -> Messages:
    """Up to the first user message."""
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
