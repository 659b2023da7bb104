"""Serve a checkpoint, or another server's model, as an OpenAI-compatible endpoint; rehearsal inside if it is set.

    python -m envace.serve --config configs/demo.yaml model.path=FOLDER rehearsal.mode=parallel [key=value ...]

SIGTERM or SIGINT stops it: no new request is taken, those that are being answered are finished, and the exit code is 0.
A second one does not wait for them.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import math
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from envace.chat import ChatFormat
from envace.console import run
from envace.keys import secret
from envace.serve.app import create_app
from envace.serve.engine import Engine
from envace.serve.guard import GuardedEngine
from envace.serve.local import LocalEngine
from envace.serve.metrics import Metrics
from envace.serve.remote import RemoteEngine
from envace.settings import Config, ModelConfig
from envace.team import evaluation_team, rehearsing_team
from envace.types import UserError, first_line

logger = logging.getLogger("envace")

# Longer than clients keep an idle connection: a server that hangs up just as it is used again loses a request.
KEEP_ALIVE_SECONDS = 75


def main(config: Config) -> None:
    if config.rehearsal.mode == "candidates":
        raise UserError("rehearsal.mode=candidates has no memory to keep: serve knows none, parallel and sequential")
    key = secret(config.serve.key_env, "serve.key_env")
    with bound(config.serve.host, config.serve.port) as listening:
        if not is_loopback(config.serve.host) and not key:
            logger.warning("serve.host=%s lets everyone in: set serve.key_env", config.serve.host)
        metrics = Metrics()
        engine = open_engine(config, metrics)
        if config.serve.only_offered_calls:
            engine = GuardedEngine(engine, config.serve.also_callable, metrics.refused_calls.inc)
        app = create_app(engine, config, key=key, metrics=metrics)
        asyncio.run(serve(app, listening, config.serve.timeout))
    logger.info("stopped")


def open_engine(config: Config, metrics: Metrics) -> Engine:
    if config.serve.backend:
        chat = None
        if config.rehearsal.mode != "none":
            chat = ChatFormat(_tokenizer(config.model), thinking=config.rollout.thinking)
        key = secret(config.serve.backend_key_env, "serve.backend_key_env")
        return RemoteEngine(config, chat, key, metrics.retries.inc)
    team = evaluation_team(config)
    rehearsing = team if config.rehearsal.mode == "none" else rehearsing_team(team, config)
    return LocalEngine(config, team, rehearsing, metrics.batches.observe)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bound(host: str, port: int) -> socket.socket:
    """It refuses connections until the server listens, once the model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind, protocol)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
    except OSError as error:
        advice = "take another port, or end what uses this one" if error.errno == errno.EADDRINUSE else "correct them"
        raise UserError(
            f"serve.host={host} serve.port={port}: {error.strerror or first_line(error)}: {advice}"
        ) from error
    return opened


async def serve(app: FastAPI, listening: socket.socket, timeout: float) -> None:
    """Until a signal; then as long as requests are being answered, at most `timeout` seconds."""
    server = Server(app, timeout)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    await server.serve([listening])


class Server(uvicorn.Server):
    """Stops with exit code 0: uvicorn's own ends the process by the signal that it was sent."""

    def __init__(self, app: FastAPI, timeout: float):
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=math.ceil(timeout) + 1,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or []:
            host, port = listening.getsockname()[:2]
            logger.info("serving on http://%s:%d/v1", f"[{host}]" if ":" in host else host, port)


def _tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise UserError(
            f"model.path {model.path!r} has no tokenizer that can be loaded ({first_line(error)}); rehearsal over "
            "serve.backend needs that of its model"
        ) from error


if __name__ == "__main__":
    run(main, __doc__)
