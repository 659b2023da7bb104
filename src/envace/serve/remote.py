"""Another OpenAI-compatible server (vLLM, SGLang) as the engine.

A request is passed on to its /chat/completions, the memory added to the system message. Rehearsals run over its
/completions, which takes and continues token ids: the same Rehearser as over a local checkpoint. Prompts are ids rather
than text, as text would turn tags that a user has spelled out into tokens.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from openai import APIConnectionError, APIError, APIStatusError, APITimeoutError, AsyncOpenAI

from envace.chat import ChatFormat, decode_json
from envace.committed import rehearser_of
from envace.episodes import opening
from envace.serve.engine import Chunks, Prepared, prepared
from envace.serve.errors import ApiError, backend_error, bad_request, timed_out
from envace.serve.local import checked_prompt
from envace.serve.requests import ChatRequest
from envace.settings import Config
from envace.types import Completion, Request, Result, Steps, Task, Wait, first_line

logger = logging.getLogger("envace")

MESSAGE_CHARS = 300  # of what the backend says about a request


class RemoteEngine:
    """chat: the format of the backend's model, needed to rehearse. key: of the backend, "" if it wants none.

    on_retry: called before a request is sent once more.
    """

    def __init__(
        self, config: Config, chat: ChatFormat | None, key: str = "", on_retry: Callable[[], object] = lambda: None
    ):
        self.config = config
        self.on_retry = on_retry
        self._chat = chat
        self.model = config.serve.name or config.serve.backend_model
        self.key = key
        # The deadline of a request is the server's; a failure is the client's to know of at once.
        self.client = AsyncOpenAI(
            api_key=key or "none", base_url=config.serve.backend, timeout=config.serve.timeout, max_retries=0
        )

    @property
    def chat(self) -> ChatFormat:
        if self._chat is None:
            raise ValueError("to rehearse, the chat format of the backend's model is needed")
        return self._chat

    async def complete(self, request: ChatRequest, memory: str) -> dict[str, Any]:
        create = self.client.chat.completions.with_raw_response.create
        reply = await self._asked(lambda: create(**self._passed_on(request, memory)))
        choice = _first_choice(reply)
        if not isinstance(choice.get("message"), dict):
            raise backend_error("the backend's reply is no chat completion")
        return {**reply, "model": self.model}

    async def stream(self, request: ChatRequest, memory: str) -> Chunks:
        arguments = self._passed_on(request, memory) | {"stream": True}
        if request.include_usage:
            arguments["stream_options"] = {"include_usage": True}
        events = await self._sent(lambda: self.client.chat.completions.create(**arguments))

        async def passed_on() -> Chunks:
            is_whole = False
            try:
                async for event in events:
                    chunk = event.model_dump(exclude_unset=True, warnings=False)
                    choices = chunk.get("choices") or []
                    is_whole = is_whole or any(choice.get("finish_reason") for choice in choices)
                    yield {**chunk, "model": self.model}
            except APIError as error:
                raise self._failure(error) from None
            except Exception as error:  # a line may break, and an event be unreadable, in many ways
                raise backend_error("the backend broke off its reply") from error
            finally:
                await events.close()
            if not is_whole:
                raise backend_error("the backend broke off its reply")

        return passed_on()

    async def rehearse(self, task: Task) -> Prepared:
        rehearser = rehearser_of(self.config, self.chat, self.model)
        checked_prompt(self.chat, opening(task), task.tools, "", self.config)
        return prepared(await drive_concurrently(rehearser.prepare(task), self._continue), self.chat)

    async def close(self) -> None:
        await self.client.close()

    def _passed_on(self, request: ChatRequest, memory: str) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "stop": list(request.stop),
            "seed": request.seed,
            "tools": request.tools,
            "tool_choice": None if request.offers_tools or not request.tools else "none",
        }
        longest = self.config.serve.max_new_tokens
        if not self.config.rollout.thinking:  # as vLLM and SGLang hand it to the chat template
            settings["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
        return {
            "model": self.config.serve.backend_model,
            "messages": with_memory(request.messages, memory),
            "max_tokens": min(request.max_tokens or longest, longest),
            **{name: value for name, value in settings.items() if value not in (None, [])},
        }

    async def _continue(self, request: Request) -> Completion:
        """What the backend writes behind the ids of a sequence."""
        sampling = self.config.rehearsal.sampling
        reply = await self._asked(
            lambda: self.client.completions.with_raw_response.create(
                model=self.config.serve.backend_model,
                prompt=request.sequence.ids,
                max_tokens=request.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                extra_body={
                    "stop_token_ids": sorted(request.stop_ids),
                    "skip_special_tokens": False,
                    "spaces_between_special_tokens": False,
                    **({"top_k": sampling.top_k} if sampling.top_k else {}),
                },
            )
        )
        choice = _first_choice(reply)
        text, reason = choice.get("text"), choice.get("finish_reason")
        if not isinstance(text, str) or reason not in ("stop", "length"):
            raise backend_error("the backend's reply is no completion")
        ids = self.chat.encode(text)
        if reason == "stop":
            ids = self._with_stop(ids, choice, request)
        return Completion(ids, [math.nan] * len(ids), reason)

    def _with_stop(self, ids: list[int], choice: dict[str, Any], request: Request) -> list[int]:
        """The stop token is part of the sequence but not of the text: vLLM and SGLang say it beside that, each its way.

        Where neither does, it was the model's end of text.
        """
        if ids and ids[-1] in request.stop_ids:
            return ids
        named = [choice.get("stop_reason"), choice.get("matched_stop")]
        stop = next((token for token in named if isinstance(token, int) and token in request.stop_ids), None)
        return [*ids, self.chat.turn_end if stop is None else stop]

    async def _asked(self, ask: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
        response = await self._sent(ask)
        try:
            value, _ = decode_json(response.text, 0)
        except ValueError:
            raise backend_error("the backend's reply is no JSON") from None
        if not isinstance(value, dict):
            raise backend_error("the backend's reply is no JSON object")
        return value

    async def _sent(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Once more if the line breaks, as the backend may have hung up on an idle connection just as it was used."""
        try:
            try:
                return await ask()
            except APIConnectionError as error:
                if isinstance(error, APITimeoutError):
                    raise
                logger.warning("the line to the backend broke (%s): asking once more", first_line(error))
                self.on_retry()
                return await ask()
        except APIError as error:
            raise self._failure(error) from None

    def _failure(self, error: APIError) -> ApiError:
        """What a client is told. Only where the request itself is refused does the backend have a say in it."""
        if isinstance(error, APITimeoutError):
            return timed_out()
        if isinstance(error, APIConnectionError):
            return backend_error("the backend cannot be reached", "backend_unavailable")
        if not isinstance(error, APIStatusError):
            return backend_error("the backend broke off its reply")
        if error.status_code in (400, 422):
            said = error.body if isinstance(error.body, dict) else {}
            message = str(said.get("message") or "the backend refuses the request")
            message = message.replace(self.key, "***") if self.key else message
            code = said.get("code")
            return bad_request(message[:MESSAGE_CHARS], code=code if isinstance(code, str) else None)
        if error.status_code == 429:
            wait = error.response.headers.get("retry-after", "")
            headers = {"Retry-After": wait if wait.isdecimal() else "1"}
            return ApiError(
                429, "the backend is busy", type="rate_limit_error", code="rate_limit_exceeded", headers=headers
            )
        return backend_error(f"the backend answered with status {error.status_code}")


async def drive_concurrently(steps: Steps[Result], generate: Callable[[Request], Awaitable[Completion]]) -> Result:
    """Run a coroutine of an episode to its end; the requests of each step are answered at the same time."""
    completions = None
    while True:
        try:
            requests = steps.send(completions)
        except StopIteration as stop:
            return stop.value
        if isinstance(requests, Wait):
            raise TypeError("a rehearsal waits for no service")
        asked = [asyncio.ensure_future(generate(request)) for request in requests]
        try:
            completions = await asyncio.gather(*asked)
        finally:
            for request in asked:
                request.cancel()


def with_memory(messages: list[dict[str, Any]], memory: str) -> list[dict[str, Any]]:
    """The memory at the end of the first system message, which is added if there is none."""
    if not memory:
        return messages
    system, others = "", messages
    if messages[0]["role"] == "system":
        system, others = messages[0]["content"], messages[1:]
    return [{"role": "system", "content": system + memory}, *others]


def _first_choice(reply: dict[str, Any]) -> dict[str, Any]:
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise backend_error("the backend's reply has no choice")
    return choices[0]
