"""The memory of each conversation: rehearsed at its first request, found by the later ones."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from envace.serve.engine import Prepared
from envace.types import Task

Rehearse = Callable[[Task], Awaitable[Prepared]]


@dataclass
class _Pending:
    """A rehearsal under way. waiting: requests that want its memory."""

    work: asyncio.Task[Prepared]
    waiting: int = 0


class Conversations:
    """Memories by the id of a conversation's task, the least recently used forgotten beyond `size`.

    Requests that arrive while a conversation is rehearsed wait for that rehearsal. It is given up when none of them
    waits any longer; one that fails is not remembered.
    """

    def __init__(self, rehearse: Rehearse, size: int):
        self.rehearse = rehearse
        self.size = size
        self._memories: OrderedDict[str, Prepared] = OrderedDict()
        self._pending: dict[str, _Pending] = {}

    async def memory(self, task: Task) -> tuple[Prepared, bool]:
        """(memory, whether it was there already or being rehearsed for another request)"""
        if task.id in self._memories:
            self._memories.move_to_end(task.id)
            return self._memories[task.id], True
        is_shared = task.id in self._pending
        if not is_shared:
            self._pending[task.id] = _Pending(asyncio.create_task(self._rehearse(task)))
        pending = self._pending[task.id]
        pending.waiting += 1
        try:
            return await asyncio.shield(pending.work), is_shared
        finally:
            pending.waiting -= 1
            if not pending.waiting and not pending.work.done():
                pending.work.cancel()
                # The next request starts afresh instead of waiting for what ends without a memory.
                self._forget(task.id, pending)

    async def _rehearse(self, task: Task) -> Prepared:
        pending = self._pending[task.id]
        try:
            memory = await self.rehearse(task)
            self._memories[task.id] = memory
            if len(self._memories) > self.size:
                self._memories.popitem(last=False)
            return memory
        finally:
            self._forget(task.id, pending)

    def _forget(self, key: str, pending: _Pending) -> None:
        if self._pending.get(key) is pending:
            del self._pending[key]
