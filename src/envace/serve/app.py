"""The HTTP side: /v1/chat/completions, /v1/models, /health, /metrics.

Every request has one deadline. Its work runs beside a watch on the connection, and is cancelled when the client leaves
or the deadline passes; the engine then frees what it holds.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from envace.serve.conversations import Conversations
from envace.serve.engine import Engine, Prepared
from envace.serve.errors import ApiError, json_response, timed_out
from envace.serve.metrics import Metrics
from envace.serve.requests import ChatRequest, parse_request, read_json
from envace.settings import Config

logger = logging.getLogger("envace")

UNWATCHED = ("/health", "/metrics")  # paths that are not counted
DRAIN_BYTES, DRAIN_SECONDS = 64 * 2**20, 5.0  # of a refused body, read so that the client sees the answer
CLIENT_LEFT = 499
DONE = b"data: [DONE]\n\n"


class ClientLeft(Exception):
    """Nobody is there to be answered."""


def create_app(engine: Engine, config: Config, *, key: str = "", metrics: Metrics | None = None) -> FastAPI:
    """key: what clients must send as bearer token; "" lets everyone in. The engine is closed with the app."""
    metrics = metrics or Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Gate, key=key, metrics=metrics)
    app.add_exception_handler(HTTPException, _no_such_path)
    started = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        return json_response({"status": "ok"})

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> Response:
        model = {"id": engine.model, "object": "model", "created": started, "owned_by": "envace"}
        return json_response({"object": "list", "data": [model]})

    app.router.routes.append(Route("/v1/chat/completions", ChatCompletions(engine, config, metrics), methods=["POST"]))
    return app


async def _no_such_path(_: object, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    said = {404: "there is no such path", 405: "this path does not know the method"}.get(status, "refused")
    return ApiError(status, said, code="not_found" if status == 404 else None).response()


class Gate:
    """Around everything: who may enter, what is counted, and that every failure is answered in one shape."""

    def __init__(self, app: ASGIApp, key: str, metrics: Metrics):
        self.app = app
        self.key = key.encode()
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["path"] in UNWATCHED:
            await self._answer(scope, receive, send, uuid.uuid4().hex)
            return
        started = time.monotonic()
        with self.metrics.in_flight.track_inprogress():
            status = await self._answer(scope, receive, send, uuid.uuid4().hex)
        self.metrics.requests.labels(str(status)).inc()
        self.metrics.latency.observe(time.monotonic() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> int:
        """The status that the client got."""
        status = 0
        is_read = False

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        async def watched_receive() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body", False)
            return message

        try:
            if scope["path"] != "/health" and not self._is_allowed(Headers(scope=scope)):
                raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            await self.app(scope, watched_receive, watched_send)
        except ClientLeft:
            return CLIENT_LEFT
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("request %s failed", request_id)
                error = ApiError(500, f"something went wrong here; request {request_id}", type="server_error")
            if status:  # too late for another answer: the connection is cut
                return status
            if not is_read:
                await _drain(watched_receive)
            await error.response()(scope, watched_receive, watched_send)
        return status

    def _is_allowed(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode(), self.key)
        return not self.key or (scheme.lower() == "bearer" and is_right)


async def _drain(receive: Receive) -> None:
    """Read the rest of a body and forget it: a client that still sends would miss an answer behind which we hang up."""
    dropped = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while dropped < DRAIN_BYTES:
                message = await receive()
                dropped += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


class ChatCompletions:
    """POST /v1/chat/completions as an ASGI application."""

    def __init__(self, engine: Engine, config: Config, metrics: Metrics):
        self.engine = engine
        self.settings = config.serve
        self.rehearsal = config.rehearsal
        self.metrics = metrics
        self.conversations = Conversations(engine.rehearse, config.serve.cache)
        self.in_hand = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.in_hand >= self.settings.max_queue:
            raise ApiError(
                503,
                "too many requests are waiting",
                type="server_error",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.in_hand += 1
        try:
            deadline = asyncio.get_running_loop().time() + self.settings.timeout
            headers = Headers(scope=scope)
            try:
                async with asyncio.timeout_at(deadline):
                    body = await read_body(headers, receive, self.settings.max_body_bytes)
            except TimeoutError:
                raise ApiError(408, "the body did not arrive in time", code="timeout") from None
            conversation = headers.get("x-conversation-id", "")
            request = parse_request(read_json(body), model=self.engine.model, conversation=conversation)
            await unless_client_leaves(receive, self._answer(request, deadline, scope, receive, send))
        finally:
            self.in_hand -= 1

    async def _answer(self, request: ChatRequest, deadline: float, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False
        try:
            async with asyncio.timeout_at(deadline):
                memory, headers = await self._memory(request)
                if not request.stream:
                    reply = await self.engine.complete(request, memory)
                    self.metrics.used(reply.get("usage"))
                    await json_response(reply, headers=headers)(scope, receive, send)
                    return
                async with aclosing(await self.engine.stream(request, memory)) as chunks:
                    # With the first chunk the generator has begun, so that closing it frees what it holds.
                    chunk = await anext(chunks, None)
                    await send(_event_stream(headers))
                    has_started = True
                    while chunk is not None:
                        self.metrics.used(chunk.get("usage"))
                        await _send_event(send, chunk)
                        chunk = await anext(chunks, None)
                await send({"type": "http.response.body", "body": DONE, "more_body": False})
        except Exception as error:
            if isinstance(error, TimeoutError):
                error = timed_out()
            if not has_started:
                raise error
            # The status is sent, so the stream itself says what happened.
            if not isinstance(error, ApiError):
                logger.exception("a stream failed")
                error = ApiError(500, "something went wrong here", type="server_error")
            await _send_event(send, error.body)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _memory(self, request: ChatRequest) -> tuple[str, dict[str, str]]:
        """(what was rehearsed, the header that tells of it)"""
        task = request.task()
        if self.rehearsal.mode == "none" or task is None:
            return "", {}
        memory, is_cached = await self.conversations.memory(task)
        self.metrics.rehearsed(memory, is_cached=is_cached)
        return memory.text, {"X-Rehearsal": json.dumps(self._summary(memory, is_cached), separators=(",", ":"))}

    def _summary(self, memory: Prepared, is_cached: bool) -> dict[str, Any]:
        return {
            "mode": self.rehearsal.mode,
            "n": memory.n,
            "memory_tokens": memory.tokens,
            "sampled_tokens": memory.sampled_tokens,
            "cached": is_cached,
        }


async def read_body(headers: Headers, receive: Receive, most: int) -> bytes:
    """Raises ApiError as soon as it is known to be too long."""
    too_long = ApiError(413, f"the body may have at most {most} bytes", code="request_too_large")
    said = headers.get("content-length", "")
    if said.isdecimal() and int(said) > most:
        raise too_long
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > most:
            raise too_long
        if not message.get("more_body", False):
            return bytes(body)


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end, or cancels it and raises ClientLeft when the connection is gone."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.create_task(work), asyncio.create_task(left())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def _event_stream(headers: dict[str, str]) -> Message:
    """How a stream begins."""
    said = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers}
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(name.lower().encode(), value.encode()) for name, value in said.items()],
    }


async def _send_event(send: Send, value: dict[str, Any]) -> None:
    data = f"data: {json.dumps(value)}\n\n".encode()
    await send({"type": "http.response.body", "body": data, "more_body": True})
