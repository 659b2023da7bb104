"""What a model wrote -> a chat completion, whole or in chunks, as OpenAI's API shapes them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from envace.chat import THINK_CLOSE, THINK_OPEN, parse_action
from envace.prompts import to_json
from envace.types import ToolCall


@dataclass(frozen=True)
class Reply:
    """finish_reason: "stop", "length" or "tool_calls". prompt_tokens: with the memory of rehearsals."""

    content: str
    thinking: str
    calls: list[ToolCall]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


def read_reply(
    text: str, *, is_cut: bool, offers_tools: bool, stop: tuple[str, ...], prompt_tokens: int, completion_tokens: int
) -> Reply:
    """What an output means. Calls that cannot be read, or must not be made, are text, as is all of a cut output.

    is_cut: the output reached its longest length. stop: it ends where one of these would begin.
    """
    if found := [place for s in stop if (place := text.find(s)) >= 0]:
        text, is_cut = text[: min(found)], False
    action = parse_action(text)
    content, thinking, calls = action.content, action.thinking, action.calls
    if action.error or is_cut or (calls and not offers_tools):
        calls, thinking, content = [], "", text.strip()
        if THINK_CLOSE in text or content.startswith(THINK_OPEN):
            thinking, _, content = content.removeprefix(THINK_OPEN).partition(THINK_CLOSE)
    reason = "length" if is_cut else "tool_calls" if calls else "stop"
    return Reply(content.strip(), thinking.strip(), calls, reason, prompt_tokens, completion_tokens)


def completion(reply: Reply, model: str) -> dict[str, Any]:
    """A chat.completion object. Ids of calls are unique."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if reply.calls else "")}
    if reply.thinking:
        message["reasoning_content"] = reply.thinking
    if reply.calls:
        message["tool_calls"] = [_call(call) for call in reply.calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}
    return {**_head("chat.completion", model), "choices": [choice], "usage": _usage(reply)}


def chunks(reply: Reply, model: str, *, include_usage: bool) -> Iterator[dict[str, Any]]:
    """The same as chat.completion.chunk objects: role, thinking, content, each call, finish reason, usage if wanted."""
    head = _head("chat.completion.chunk", model)
    if include_usage:
        head["usage"] = None

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]}

    yield chunk({"role": "assistant", "content": "" if not reply.calls else None})
    if reply.thinking:
        yield chunk({"reasoning_content": reply.thinking})
    if reply.content:
        yield chunk({"content": reply.content})
    for index, call in enumerate(reply.calls):
        shaped = _call(call)
        arguments = shaped["function"].pop("arguments")
        shaped["function"]["arguments"] = ""
        yield chunk({"tool_calls": [{"index": index, **shaped}]})
        yield chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
    yield chunk({}, reply.finish_reason)
    if include_usage:
        yield {**head, "choices": [], "usage": _usage(reply)}


def _head(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": to_json(call.arguments)}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
