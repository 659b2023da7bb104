"""Every prompt in one place. Plain strings and functions from data to messages; no tokens here."""

from __future__ import annotations

import json
from typing import Any

from envace.types import ToolCall

REHEARSE_SYSTEM = """You are the environment behind the tools below. Given a conversation and one pending tool call, \
write what that tool would return.
Check the call first: is the tool in the list, do its arguments fit the schema? If not, return an error object.
Otherwise return a result that is consistent with the conversation and with every earlier result. Give no hints and no \
explanation.
Answer with one JSON object or array inside <execution_result> and </execution_result>."""


def rehearse_messages(
    tools: list[dict[str, Any]], history: list[dict[str, Any]], call: ToolCall
) -> list[dict[str, Any]]:
    """The chat in which REHEARSE answers `call` in view `separate`.

    Departs from the released prompt: no recorded calls of the reference dialogue are shown, so nothing from the future
    can leak. The history is every message but the system prompt, which speaks to ACT.
    """
    lines = [f"{m['role']}: {m['content']}" for m in history if m["role"] != "system"]
    return [
        {"role": "system", "content": REHEARSE_SYSTEM},
        {
            "role": "user",
            "content": "\n".join(
                [
                    "# Tools",
                    *[to_json(tool["function"]) for tool in tools],
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


def to_json(value: Any) -> str:
    """JSON with literal characters: no backslash-u escapes, so all paths see the same tokens."""
    return json.dumps(value, ensure_ascii=False)
