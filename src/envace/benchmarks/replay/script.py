"""What a scripted endpoint is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from envace.types import ToolCall


@dataclass(frozen=True)
class Answer:
    """What an assistant says next: calls, or text that ends its turn."""

    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


# (messages, tools) of a request -> the answer. Raises ScriptError.
Script = Callable[[list[dict[str, Any]], list[dict[str, Any]]], Answer]


class ScriptError(Exception):
    """A request that no script, or more than one, fits."""


def silent(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Answer:
    """The null agent: it never calls a tool."""
    return Answer("I do nothing.")
