"""Only calls that a program may safely spell out as code leave the server.

Some harnesses write a call as Python, name(key=value), and evaluate it. A model's reply is data: here its calls must
name a tool that the request offers, or one that is known besides, and hold arguments with plain names and JSON values,
or the whole reply is text.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable, Set
from typing import Any

from envace.chat import decode_json
from envace.prompts import to_json
from envace.serve.engine import Chunks, Engine, Prepared
from envace.serve.errors import backend_error, bad_request
from envace.serve.requests import ChatRequest
from envace.types import Task


class GuardedEngine:
    """Another engine whose replies are checked. on_refusal: called for each reply that became text.

    also: names of tools that may be called though a request does not offer them.
    """

    def __init__(self, engine: Engine, also: Iterable[str] = (), on_refusal: Callable[[], object] = lambda: None):
        self.engine = engine
        self.also = frozenset(also)
        self.on_refusal = on_refusal
        self.model = engine.model

    async def complete(self, request: ChatRequest, memory: str) -> dict[str, Any]:
        reply = await self.engine.complete(request, memory)
        for choice in reply["choices"]:
            message = choice.get("message") if isinstance(choice, dict) else None
            if not isinstance(message, dict):
                raise backend_error("the backend's reply is no chat completion")
            calls = message.get("tool_calls")
            if calls and not are_plain(calls, self._callable(request)):
                self.on_refusal()
                said = message.get("content") if isinstance(message.get("content"), str) else ""
                message["content"] = "\n".join(part for part in (said, to_json(calls)) if part)
                del message["tool_calls"]
                choice["finish_reason"] = "stop"
        return reply

    async def stream(self, request: ChatRequest, memory: str) -> Chunks:
        raise bad_request("a checked reply cannot be streamed", "stream", "unsupported_parameter")

    async def rehearse(self, task: Task) -> Prepared:
        return await self.engine.rehearse(task)

    async def close(self) -> None:
        await self.engine.close()

    def _callable(self, request: ChatRequest) -> frozenset[str]:
        offered = request.tools if request.offers_tools else []
        return self.also | {tool["function"]["name"] for tool in offered}


def are_plain(calls: Any, names: Set[str]) -> bool:
    """Whether each call is to one of the tools named and has arguments with plain names.

    calls: as in a chat completion, of whatever kind a backend has sent.
    """
    return isinstance(calls, list) and all(_is_plain(call, names) for call in calls)


def _is_plain(call: Any, names: Set[str]) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return False
    name = function.get("name")
    if not isinstance(name, str) or name not in names:
        return False
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments, end = decode_json(arguments, 0)
        except ValueError:
            return False
        if function["arguments"][end:].strip():
            return False
    return isinstance(arguments, dict) and all(key.isidentifier() and not keyword.iskeyword(key) for key in arguments)
