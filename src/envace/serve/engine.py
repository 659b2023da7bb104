"""What stands behind the endpoint: a model in this process or another server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from envace.chat import ChatFormat
from envace.rehearsal import Memory
from envace.serve.requests import ChatRequest
from envace.types import Task

Chunks = AsyncGenerator[dict[str, Any], None]


@dataclass(frozen=True)
class Prepared:
    """What is kept of a conversation's rehearsals. text: for the end of the system message; "" says nothing.

    n: rehearsals. tokens: of the text. sampled_tokens: what the rehearsals cost, evaluations included.
    """

    text: str
    n: int
    tokens: int
    sampled_tokens: int


def prepared(memory: Memory, chat: ChatFormat) -> Prepared:
    outputs = [output for r in memory.rehearsals for output in r.trajectory.outputs()]
    return Prepared(
        memory.text, len(memory.rehearsals), len(chat.encode(memory.text)), sum(len(output.ids) for output in outputs)
    )


class Engine(Protocol):
    """All methods run in the server's event loop; cancelling one frees its work. They raise ApiError.

    model: the name that clients know. memory: the text of what was prepared, "" if there is none.
    """

    model: str

    async def complete(self, request: ChatRequest, memory: str) -> dict[str, Any]:
        """A chat.completion object."""

    async def stream(self, request: ChatRequest, memory: str) -> Chunks:
        """Its chunks."""

    async def rehearse(self, task: Task) -> Prepared:
        """Never called where the settings have no rehearsal."""

    async def close(self) -> None:
        """Give up what is under way. No further call is made."""
