"""A request's body -> ChatRequest, or an ApiError with status 400 that says which field is wrong."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from envace.chat import decode_json
from envace.serve.errors import ApiError, bad_request
from envace.types import Task, canonical_json

MAX_STOPS = 4
# A temperature below this divides logits to infinity; it is as good as greedy, but not asked for as such.
LEAST_TEMPERATURE = 0.01
ABSENT: tuple[Any, ...] = (None, False, 0, "", [], {})
# What would change the answer and is not done here is refused rather than ignored.
UNSUPPORTED = (
    *("logprobs", "top_logprobs", "logit_bias", "frequency_penalty", "presence_penalty"),
    *("functions", "function_call", "audio", "prediction", "web_search_options"),
)


@dataclass(frozen=True)
class ChatRequest:
    """What is asked for, in OpenAI's terms. None: the server decides.

    messages: content is text, a call's arguments are the JSON text of an object, responses come in order of the calls.
    offers_tools: whether calls may be made now; the tools belong to the conversation either way.
    conversation: what the client calls it, "" if nothing.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    offers_tools: bool
    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    stop: tuple[str, ...]
    seed: int | None
    stream: bool
    include_usage: bool
    conversation: str

    def task(self) -> Task | None:
        """How the conversation began, which is what a rehearsal knows of it; None without a user message.

        Its id is the same for all requests of a conversation and for no other.
        """
        system = self.messages[0]["content"] if self.messages[0]["role"] == "system" else ""
        user = next((m["content"] for m in self.messages if m["role"] == "user"), None)
        if user is None:
            return None
        beginning = canonical_json([self.conversation, system, self.tools, user])
        return Task(hashlib.sha256(beginning.encode()).hexdigest(), system, self.tools, [user])


def read_json(body: bytes) -> Any:
    """Strict: no NaN, no infinity, no deep nesting, nothing that is not Unicode."""
    try:
        text = body.decode()
        value, end = decode_json(text, 0)
    except ValueError as error:  # of decoding the bytes too
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise bad_request(f"the body cannot be read: {reason[:200]}", code="invalid_json") from None
    if text[end:].strip():
        raise bad_request("the body cannot be read: text behind the JSON value", code="invalid_json")
    return value


def parse_request(body: Any, *, model: str, conversation: str = "") -> ChatRequest:
    """model: the name that this server goes by. conversation: of the header; the field `user` adds to it."""
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    asked = _of_type(body, "model", str)
    if asked is not None and asked != model:
        raise ApiError(
            404, "there is no such model here; GET /v1/models lists it", param="model", code="model_not_found"
        )
    for name in UNSUPPORTED:
        if body.get(name) not in ABSENT:
            raise bad_request(f"{name} is not supported", name, "unsupported_parameter")
    if body.get("parallel_tool_calls") is False:
        raise bad_request("parallel_tool_calls cannot be switched off", "parallel_tool_calls", "unsupported_parameter")
    if (shape := _of_type(body, "response_format", dict)) and shape.get("type") != "text":
        raise bad_request("only the response format text is supported", "response_format", "unsupported_parameter")
    if _integer(body, "n", 1, 2**31) not in (None, 1):
        raise bad_request("only n=1 is supported", "n", "unsupported_parameter")
    tools = _tools(body)
    stream = bool(_of_type(body, "stream", bool))
    options = _of_type(body, "stream_options", dict) or {}
    if options and not stream:
        raise bad_request("stream_options needs stream=true", "stream_options")
    temperature = _number(body, "temperature", 0.0, 2.0)
    top_p = _number(body, "top_p", 0.0, 1.0)
    if top_p == 0:
        raise bad_request("top_p must be > 0", "top_p")
    max_tokens = _integer(body, "max_completion_tokens", 1, 2**31)
    return ChatRequest(
        messages=_messages(body),
        tools=tools,
        offers_tools=_tool_choice(body) == "auto" and bool(tools),
        temperature=max(temperature, LEAST_TEMPERATURE) if temperature else temperature,
        top_p=top_p,
        max_tokens=max_tokens or _integer(body, "max_tokens", 1, 2**31),
        stop=_stop(body),
        seed=_integer(body, "seed", -(2**63), 2**63 - 1),
        stream=stream,
        include_usage=bool(_of_type(options, "include_usage", bool)),
        conversation=f"{conversation}\n{_of_type(body, 'user', str) or ''}",
    )


def _of_type(body: dict[str, Any], name: str, kind: type) -> Any:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise bad_request(f"{name} must be of type {kind.__name__}", name)
    return value


def _number(body: dict[str, Any], name: str, least: float, most: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise bad_request(f"{name} must be a number from {least:g} to {most:g}", name)
    return float(value)


def _integer(body: dict[str, Any], name: str, least: int, most: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise bad_request(f"{name} must be a whole number from {least} to {most}", name)
    return value


def _stop(body: dict[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise bad_request(f"stop must be a text or a list of at most {MAX_STOPS} texts", "stop")
    return tuple(stops)


def _tool_choice(body: dict[str, Any]) -> str:
    choice = body.get("tool_choice")
    if choice is None:
        return "auto"
    if choice not in ("auto", "none"):
        raise bad_request("tool_choice may be auto or none", "tool_choice", "unsupported_parameter")
    return choice


def _tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    tools = _of_type(body, "tools", list) or []
    names = set()
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise bad_request(f"{where} must be of type function", where)
        function = tool["function"]
        name = function.get("name")
        if not isinstance(name, str) or not name or name in names:
            raise bad_request(f"{where}.function.name must be a text of its own", where)
        _of_type(function, "description", str)
        _of_type(function, "parameters", dict)
        names.add(name)
    return tools


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Only what is known of each message, with tool messages in the order of the calls that they answer."""
    messages = _of_type(body, "messages", list)
    if not messages:
        raise bad_request("messages must hold at least one message", "messages")
    read: list[dict[str, Any]] = []
    order: dict[str, int] = {}  # by id, of the calls that may be answered here
    responses: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in READERS:
            raise bad_request(f"{where} must be an object with a role: {', '.join(READERS)}", where)
        message = READERS[role](message, where)
        if role == "tool":
            if message["tool_call_id"] not in order:
                raise bad_request(f"{where}.tool_call_id names no call of the assistant message before it", where)
            responses.append(message)
            continue
        read += _in_order(responses, order)
        responses, order = [], {call["id"]: k for k, call in enumerate(message.get("tool_calls", []))}
        read.append(message)
    return read + _in_order(responses, order)


def _in_order(responses: list[dict[str, Any]], order: dict[str, int]) -> list[dict[str, Any]]:
    return sorted(responses, key=lambda m: order[m["tool_call_id"]])


def _text(message: dict[str, Any], where: str) -> str:
    content = message.get("content")
    if isinstance(content, list):
        parts: list[Any] = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str):
        raise bad_request(f"{where}.content must be text", where)
    return content


def _system(message: dict[str, Any], where: str) -> dict[str, Any]:
    return {"role": "system", "content": _text(message, where)}


def _user(message: dict[str, Any], where: str) -> dict[str, Any]:
    return {"role": "user", "content": _text(message, where)}


def _tool(message: dict[str, Any], where: str) -> dict[str, Any]:
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str):
        raise bad_request(f"{where}.tool_call_id must be a text", where)
    return {"role": "tool", "tool_call_id": call_id, "content": _text(message, where)}


def _assistant(message: dict[str, Any], where: str) -> dict[str, Any]:
    calls = _of_type(message, "tool_calls", list) or []
    is_silent = message.get("content") is None and calls
    read: dict[str, Any] = {"role": "assistant", "content": "" if is_silent else _text(message, where)}
    if thinking := _of_type(message, "reasoning_content", str):
        read["reasoning_content"] = thinking
    if calls:
        read["tool_calls"] = [_call(call, f"{where}.tool_calls[{k}]") for k, call in enumerate(calls)]
    return read


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(call.get("id"), str):
        raise bad_request(f"{where} must have an id and a function", where)
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name or not isinstance(arguments, str):
        raise bad_request(f"{where}.function must have a name, and arguments as JSON text", where)
    try:
        value, end = decode_json(arguments or "{}", 0)
    except ValueError:
        value, end = None, 0
    if not isinstance(value, dict) or arguments[end:].strip():
        raise bad_request(f"{where}.function.arguments must be the JSON text of an object", where)
    return {"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}


READERS = {"system": _system, "developer": _system, "user": _user, "assistant": _assistant, "tool": _tool}


def for_template(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as chat templates want them: arguments are objects."""
    return [
        {
            **message,
            "tool_calls": [
                {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ],
        }
        if "tool_calls" in message
        else message
        for message in messages
    ]
