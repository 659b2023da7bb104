"""Asks a language model whether checklist items are met: a question has a verdict, or it is unknown and never False.

    with Judge(config) as judge:
        pending = judge.submit(questions)   # a Future: pending.done(), pending.result()
        verdicts = await judge.verdicts(questions)  # the same from a coroutine
        metrics = judge.end_step()

Judging overlaps whatever the caller does. How the model is reached, and what happens while it cannot be, is described
in `envace.endpoints`. A question that was answered before is not asked again, and identical ones are asked once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from envace.checklist import VERDICT_SCHEMA, Question, Verdict, judge_messages
from envace.endpoints import ChatClient
from envace.outage import EndpointError
from envace.settings import EndpointConfig
from envace.types import content_hash
from envace.verdicts import VerdictCache, read_verdict

RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": VERDICT_SCHEMA}}


class Judge:
    """Asks questions and counts. All its methods may be called from any thread.

    Raises EndpointError for settings that cannot work: no endpoint, an unset key variable, a cache that cannot be read.
    """

    def __init__(self, config: EndpointConfig):
        self.config = config
        self._pending: dict[str, asyncio.Task[Verdict]] = {}
        self._client = ChatClient(config, "judge", wanted="verdict")
        try:
            self._cache = VerdictCache(config.cache)
        except EndpointError:
            self._client.close()
            raise

    def submit(self, questions: Sequence[Question]) -> Future[list[Verdict]]:
        """Start judging in the background. The result has a verdict per question, in order; None is unknown.

        The future raises EndpointError if an endpoint refuses the key or does not know the model, or if the cache
        cannot be written; EndpointOutage if no endpoint could be reached for too long.
        """
        return self._client.submit(self._verdicts(list(questions)))

    async def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """The same for coroutines, of any event loop."""
        return await asyncio.wrap_future(self.submit(questions))

    def metrics(self, total: Callable[[float], float] = float) -> dict[str, float]:
        """Counts since the last `end_step`, as "judge/..."; see `ChatClient.metrics`."""
        return self._client.metrics(total)

    def end_step(self, total: Callable[[float], float] = float) -> dict[str, float]:
        """The metrics of the step that ends; see `ChatClient.end_step`. Raises EndpointOutage."""
        return self._client.end_step(total)

    def close(self) -> None:
        """Give up what is still being asked. A closed judge cannot be used again."""
        self._client.close()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # From here on everything runs in the client's thread.

    async def _verdicts(self, questions: list[Question]) -> list[Verdict]:
        return await asyncio.gather(*(self._verdict(question) for question in questions))

    async def _verdict(self, question: Question) -> Verdict:
        request = self._request(question)
        key = content_hash(request)
        verdict = self._cache.get(key)
        # Shielded: whoever gives up must not take the answer from others that ask the same.
        if verdict is None and key not in self._pending:
            task = asyncio.create_task(self._ask(request, key))
            self._pending[key] = task
            task.add_done_callback(lambda _: self._pending.pop(key))
            return await asyncio.shield(task)
        self._client.count("asked")
        if verdict is None:
            verdict = await asyncio.shield(self._pending[key])
        self._client.count("unknown" if verdict is None else "cached")
        return verdict

    async def _ask(self, request: dict[str, Any], key: str) -> Verdict:
        verdict = await self._client.ask(request, key, read_verdict)
        if verdict is not None:
            self._cache.add(key, verdict)
        return verdict

    def _request(self, question: Question) -> dict[str, Any]:
        return {
            "model": self.config.model,
            "messages": judge_messages(question),
            "temperature": self.config.temperature,
            "top_p": self.config.top_p,
            "max_tokens": self.config.max_tokens,
            "response_format": RESPONSE_FORMAT,
        }
