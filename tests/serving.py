"""For tests of `envace.serve`: models whose outputs a test writes, a server in a thread, and what clients do."""

import asyncio
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager, nullcontext

import torch
from openai import OpenAI

from envace.config import load_config
from envace.serve.__main__ import Server, bound
from envace.serve.app import create_app
from envace.serve.local import LocalEngine
from envace.serve.metrics import Metrics
from envace.team import Team
from envace.types import Completion, Role

os.environ.setdefault("NO_PROXY", "127.0.0.1")
WAIT = 60.0  # seconds after which something that should have happened has not
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}},
}
LAST_BLOCK = re.compile(r"<\|im_start\|>user\n((?:(?!<\|im_start\|>).)*)<\|im_end\|>\n<\|im_start\|>assistant\n$", re.S)
RESPONSE = re.compile(r"<tool_response>\n(.*)\n</tool_response>", re.S)
REHEARSAL = ("rehearsal.mode=parallel", "rehearsal.n=2", "rehearsal.user_turns=1")


def until(holds: Callable[[], bool]) -> None:
    """For what no event tells."""
    deadline = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class ScriptedPolicy:
    """Stands for a Policy. write: the text of a prompt, tags included -> the text of the output behind it.

    prompts: what was generated, a list for each batch.
    """

    name = "scripted"

    def __init__(self, chat, write: Callable[[str], str]):
        self.chat = chat
        self.write = write
        self.model = torch.nn.Identity()
        self.prompts: list[list[str]] = []

    @contextmanager
    def generating(self, sampling):
        yield self._generate

    def own_randomness(self):
        return nullcontext()

    def _generate(self, requests):
        prompts = [self.chat.tokenizer.decode(r.sequence.ids, skip_special_tokens=False) for r in requests]
        self.prompts.append(prompts)
        return [self._complete(r, self.write(prompt)) for r, prompt in zip(requests, prompts, strict=True)]

    def _complete(self, request, text):
        in_slot = self.chat.response_end in request.stop_ids
        ids = self.chat.response(text) if in_slot else self.chat.output(text)
        reason = "stop" if len(ids) <= request.max_new_tokens else "length"
        ids = ids[: request.max_new_tokens]
        return Completion(ids, [0.0] * len(ids), reason)


def team_of(policy) -> Team:
    return Team({Role.ACT: policy, Role.REHEARSE: policy}, [], {})


def settings(*overrides: str):
    return load_config(None, ["model.path=models/tiny", "serve.port=0", "serve.timeout=60", *overrides])


class Running:
    """A server that listens. url: of its API."""

    def __init__(self, url: str, server: Server, metrics: Metrics, thread: threading.Thread):
        self.url = url
        self.server = server
        self.metrics = metrics
        self.thread = thread

    def client(self, **options) -> OpenAI:
        return OpenAI(base_url=self.url, **{"api_key": "none", "max_retries": 0, "timeout": WAIT} | options)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@contextmanager
def running(engine_of: Callable[[Metrics], object], config, *, key: str = ""):
    """A server in a thread until the context is left; it must then stop by itself."""
    is_up = threading.Event()

    class Announced(Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            is_up.set()

    metrics = Metrics()
    with bound("127.0.0.1", 0) as listening:
        server = Announced(create_app(engine_of(metrics), config, key=key, metrics=metrics), config.serve.timeout)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
        thread.start()
        assert is_up.wait(WAIT)
        try:
            yield Running(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", server, metrics, thread)
        finally:
            server.should_exit = True
            thread.join(WAIT)
        assert not thread.is_alive()


@contextmanager
def running_scripted(chat, write, *overrides, key="", engine=LocalEngine):
    """(server, policy) over a scripted model."""
    config, policy = settings(*overrides), ScriptedPolicy(chat, write)
    team = team_of(policy)
    with running(lambda m: engine(config, team, team, m.batches.observe), config, key=key) as server:
        yield server, policy


class Blocked:
    """A model that writes nothing until it may. begun: it has been asked."""

    def __init__(self):
        self.begun, self.may_write = threading.Event(), threading.Event()

    def __call__(self, prompt):
        self.begun.set()
        assert self.may_write.wait(WAIT)
        return "ok"


def call(**arguments):
    return f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': arguments})}\n</tool_call>"


def echo(prompt):
    """Looks up what the user says, then says what it found; judges every rehearsal good."""
    said = LAST_BLOCK.search(prompt)
    if said is None:  # in the slot of a response
        return '{"found": "imagined"}'
    if found := RESPONSE.search(said[1]):
        return f"echo {found[1]}"
    return "good" if said[1].startswith("This was a rehearsal") else call(q=said[1])


def says(text):
    return lambda prompt: text


def user(text="hello"):
    return [{"role": "user", "content": text}]


def ask(client, messages=None, **options):
    return client.chat.completions.create(model="tiny", messages=messages or user(), **options)


def joined(stream):
    """(content, thinking, [(id, name, arguments)], finish reason, usage) of a stream."""
    content, thinking, calls, reason, usage = "", "", {}, None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            content += choice.delta.content or ""
            thinking += (choice.delta.model_extra or {}).get("reasoning_content", "")
            for part in choice.delta.tool_calls or []:
                known = calls.setdefault(part.index, [part.id, "", ""])
                known[1] += part.function.name or ""
                known[2] += part.function.arguments or ""
    return content, thinking, [tuple(calls[i]) for i in sorted(calls)], reason, usage


def raw(url, body=None, headers=None, method=None):
    """(status, JSON or text) of a request that the official client would not send."""
    request = urllib.request.Request(url, body, headers or {}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=WAIT) as response:
            status, text = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


def post(server, body, **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return raw(f"{server.url}/chat/completions", data, {"Content-Type": "application/json", **headers})


def assert_is_error(reply, status, code=None):
    assert reply[0] == status, reply
    error = reply[1]["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    assert code is None or error["code"] == code
