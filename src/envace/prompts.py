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


def to_json(value: Any) -> str:
    """JSON with literal characters: no backslash-u escapes, so all paths see the same tokens."""
    return json.dumps(value, ensure_ascii=False)
