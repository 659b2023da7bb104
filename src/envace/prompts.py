"""Every prompt in one place. Plain strings and functions from data to messages; no tokens here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from envace.types import RecordedCall, ToolCall

REHEARSE_SYSTEM = """You are the environment behind the tools below. Given a conversation and one pending tool call, \
write what that tool would return.
Check the call first: is the tool in the list, do its arguments fit the schema? If not, return an error object.
Otherwise return a result that is consistent with the conversation and with every earlier result. Give no hints and no \
explanation.
Answer with one JSON object or array inside <execution_result> and </execution_result>."""


EVALUATE = """This was a rehearsal: every tool result was imagined. Was it right? Begin with the word good or bad, \
then say what went wrong and how to fix it."""

USER_SYSTEM = """You are the user in the conversation below. Write only what the user says next, in the user's words. \
If the user has everything that was asked for, write nothing but DONE."""
USER_DONE = "DONE"

MEMORY_HEADER = "\n\n# Rehearsed beforehand (imagined, nothing was observed)"


def rehearse_messages(
    tools: list[dict[str, Any]], history: list[dict[str, Any]], call: ToolCall, known: Iterable[RecordedCall] = ()
) -> list[dict[str, Any]]:
    """The chat in which REHEARSE answers `call` in view `separate`.

    The history is every message but the system prompt, which speaks to ACT.
    known: recorded calls to be consistent with. Departs from the released prompt, which shows all those of the
    reference dialogue, also of later turns and the pending one: here the caller gives those of earlier turns at most.
    """
    lines = [f"{m['role']}: {m['content']}" for m in history if m["role"] != "system"]
    examples = [
        to_json({"name": r.call.name, "arguments": r.call.arguments}) + " -> " + r.response
        for r in known
        if r.call.key() != call.key()
    ]
    return [
        {"role": "system", "content": REHEARSE_SYSTEM},
        {
            "role": "user",
            "content": "\n".join(
                [
                    "# Tools",
                    *[to_json(tool["function"]) for tool in tools],
                    *(["# Recorded results", *examples] if examples else []),
                    "# Conversation",
                    *lines,
                    "# Pending call",
                    to_json({"name": call.name, "arguments": call.arguments}),
                ]
            ),
        },
    ]


def user_messages(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat in which the policy imagines the next user turn in view `separate`."""
    lines = [f"{m['role']}: {m['content']}" for m in history if m["role"] != "system"]
    return [{"role": "system", "content": USER_SYSTEM}, {"role": "user", "content": "\n".join(lines)}]


def rehearsal_note(times: int, events: list[str], evaluation: str) -> str:
    """What a memory says of `times` rehearsals that went alike, on one line."""
    return " ".join(f"- {times}x {' ; '.join(events) or 'no call'}: {evaluation}".splitlines())


def broken_off(reason: str) -> str:
    """The evaluation of a rehearsal that did not come to an answer."""
    return f"bad. It broke off: {reason}"


def call_text(call: ToolCall) -> str:
    """A call on one line."""
    return f"{call.name} {to_json(call.arguments)}"


def execution_result(text: str) -> str:
    """The REHEARSE output of view `separate` around a response `text`."""
    return f"<execution_result>\n{text}\n</execution_result>"


def tool_call_block(call: ToolCall) -> str:
    """One call as ACT writes it."""
    return f"<tool_call>\n{to_json({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"


def malformed_call_error(error: str) -> dict[str, str]:
    """What a real environment answers when ACT's text asks for a call that cannot be read."""
    return {"error": "malformed_call", "message": error}


def unusable_call_error(code: str, error: str) -> dict[str, Any]:
    """What a call gets that its tool's schema does not allow. Checklists take the key for a failed call."""
    return {"error_tool_call": {"code": code, "message": error}}


def not_recorded_error() -> dict[str, str]:
    """What a call gets in an environment of recorded responses that has none for it."""
    return {"error": "not_recorded", "message": "there is no recorded response to this call"}


def not_executed_error(decision: str, predicted: str) -> dict[str, str]:
    """What ACT is told of a call that was held back."""
    return {"error": "not_executed", "message": f"the call was {decision}; predicted: {predicted}"}


def to_json(value: Any) -> str:
    """JSON with literal characters: no backslash-u escapes, so all paths see the same tokens."""
    return json.dumps(value, ensure_ascii=False)
