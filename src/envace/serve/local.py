"""A checkpoint in this process as the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from envace.chat import ChatFormat
from envace.committed import rehearser_of
from envace.episodes import opening
from envace.serve.batches import BatchWorker, Kind
from envace.serve.engine import Chunks, Prepared, prepared
from envace.serve.errors import bad_request
from envace.serve.replies import Reply, chunks, completion, read_reply
from envace.serve.requests import ChatRequest, for_template
from envace.settings import Config, SamplingConfig
from envace.team import Team
from envace.types import Evidence, Request, Role, Segment, Sequence, Steps, Task


class LocalEngine:
    """team: who answers. rehearsing: who rehearses for it, the same one unless rehearsal.path names another."""

    def __init__(
        self, config: Config, team: Team, rehearsing: Team, on_batch: Callable[[int], object] = lambda n: None
    ):
        self.config = config
        self.team = team
        self.rehearsing = rehearsing
        self.model = config.serve.name or Path(config.model.path).name
        self.chat = team.lead.chat
        self.rehearser = rehearser_of(config, rehearsing.lead.chat, rehearsing.writers[Role.REHEARSE].name)
        self.worker = BatchWorker(config.rollout.batch_size, on_batch)

    async def complete(self, request: ChatRequest, memory: str) -> dict[str, Any]:
        return completion(await self._reply(request, memory), self.model)

    async def stream(self, request: ChatRequest, memory: str) -> Chunks:
        """An output is read when it is whole, as calls and thinking show only then: the chunks come all at once."""
        reply = await self._reply(request, memory)

        async def written() -> Chunks:
            for chunk in chunks(reply, self.model, include_usage=request.include_usage):
                yield chunk

        return written()

    async def rehearse(self, task: Task) -> Prepared:
        kind = Kind(self.rehearsing, self.config.rehearsal.sampling)
        return await self.worker.run(kind, self._prepare(task), rows=max(self.config.rehearsal.n, 1))

    async def close(self) -> None:
        await self.worker.close()

    async def _reply(self, request: ChatRequest, memory: str) -> Reply:
        default = self.config.eval.sampling
        sampling = replace(
            default,
            temperature=default.temperature if request.temperature is None else request.temperature,
            top_p=default.top_p if request.top_p is None else request.top_p,
        )
        # Greedy is greedy whatever else is asked for.
        kind = Kind(self.team, sampling, request.seed) if sampling.temperature else Kind(self.team, SamplingConfig(0.0))
        return await self.worker.run(kind, self._answer(request, memory))

    # In the worker's thread, as one tokenizer is not for several.

    def _answer(self, request: ChatRequest, memory: str) -> Steps[Reply]:
        tools = request.tools if request.offers_tools else []
        prompt = checked_prompt(self.chat, for_template(request.messages), tools, memory, self.config)
        stream = Sequence([Segment(Role.CONTEXT, prompt, Evidence.GIVEN)])
        longest = self.config.serve.max_new_tokens
        try:
            [written] = yield [
                Request(stream, Role.ACT, self.chat.act_stops, min(request.max_tokens or longest, longest))
            ]
        finally:
            stream.open = False
        return read_reply(
            self.chat.turn_text(written.ids),
            is_cut=written.finish_reason == "length",
            offers_tools=request.offers_tools,
            stop=request.stop,
            prompt_tokens=len(prompt),
            completion_tokens=len(written.ids),
        )

    def _prepare(self, task: Task) -> Steps[Prepared]:
        checked_prompt(self.rehearser.chat, opening(task), task.tools, "", self.config)
        memory = yield from self.rehearser.prepare(task)
        return prepared(memory, self.rehearser.chat)


def checked_prompt(
    chat: ChatFormat, messages: list[dict[str, Any]], tools: list[dict[str, Any]], memory: str, config: Config
) -> list[int]:
    """The ids of the prompt. Raises ApiError if the model cannot be shown this, or if it is too long."""
    try:
        parts = chat.prompt_around(memory, messages, tools) if memory else [chat.prompt(messages, tools)]
    except Exception as error:  # the template is code of the checkpoint, and schemas from clients hold anything
        raise bad_request("the chat template of the model cannot show these messages and tools", "messages") from error
    prompt = [i for part in parts for i in part]
    if len(prompt) >= (most := config.rollout.max_context_tokens):
        raise bad_request(
            f"the prompt has {len(prompt)} tokens, and fewer than {most} fit", "messages", "context_length_exceeded"
        )
    return prompt
