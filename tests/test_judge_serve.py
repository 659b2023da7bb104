"""The judge client against a server it does not know: `transformers serve` with the untrained embedded model."""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from envace.checklist import REPLY, Item, Message, Question
from envace.config import load_config
from envace.demo.source import DemoSource
from envace.endpoints import probe
from envace.judge import Judge
from envace.settings import EndpointConfig

pytestmark = pytest.mark.slow

START_SECONDS, STOP_SECONDS = 120.0, 20.0
TAIL_CHARS = 2000
ADDRESS = re.compile(r"Uvicorn running on (http://\S+)")


@dataclass(frozen=True)
class Serving:
    """model: folder of the model and its name at the endpoint. log: file with what the server prints."""

    url: str
    model: str
    log: Path


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    config = load_config(None, [f"model.path={folder / 'model'}", "data.demonstrations=64"])
    DemoSource(config).build_embedded_model(folder / "model", seed=0)
    with serving(folder / "model", folder / "server.log") as server:
        yield server


@contextmanager
def serving(model, log):
    """A server in a process of its own, on the CPU and without the network, until the context is left."""
    # Port 0 takes a free one, which the server then prints; one chosen here could be gone when the server starts.
    options = ["--host", "127.0.0.1", "--port", "0", "--device", "cpu"]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(model), *options]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=os.environ | offline, stdout=stream, stderr=subprocess.STDOUT)
    try:
        yield Serving(f"{address(process, log)}/v1", str(model), log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def address(process, log):
    """What the server prints once the model is loaded and its port is open."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if found := ADDRESS.search(log.read_text()):
            return found[1]
        time.sleep(0.1)
    ended = f"ended with code {process.returncode}" if process.returncode is not None else "does not answer"
    raise RuntimeError(f"transformers serve {ended}: {log.read_text()[-TAIL_CHARS:]}")


def test_a_question_is_accepted_and_nonsense_is_no_verdict(served, caplog):
    question = Question(
        Item("C0", "Does it greet?", REPLY, "It greets.", (), (), False, (), 1.0),
        (),
        (Message("user", "hello"), Message("assistant", "hi")),
    )
    config = EndpointConfig(endpoints=[served.url], model=served.model, timeout=60.0, retries=1, max_tokens=8)
    with Judge(config) as judge:
        assert judge.submit([question]).result(timeout=150) == [None]
        metrics = {name.removeprefix("judge/"): value for name, value in judge.metrics().items()}
    assert served.log.read_text().count('"POST /v1/chat/completions HTTP/1.1" 200 OK') == 2
    assert (metrics["asked"], metrics["unknown"], metrics["refused"], metrics["requests"]) == (1, 1, 0, 2)
    assert {name for name, value in metrics.items() if name.startswith("retries_") and value} == {"retries_no_verdict"}
    assert metrics["prompt_tokens"] > 2 * 100 and 0 < metrics["completion_tokens"] <= 2 * config.max_tokens
    assert metrics["latency_seconds"] > 0
    assert "a reply without a verdict" in caplog.text


def test_it_lists_its_model(served):
    assert probe(EndpointConfig(endpoints=[served.url], model="other"), "judge") == {served.url: [served.model]}
