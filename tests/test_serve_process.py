"""`python -m envace.serve` as a process over the embedded model, untrained: what it writes is nonsense, but its own."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import OpenAI
from serving import TOOL, joined, raw, user

from envace.config import load_config
from envace.demo.source import DemoSource

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
WAIT = 900.0  # seconds after which something that should have happened has not
ADDRESS = re.compile(r"serving on (http://\S+)")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve") / "tiny"
    config = load_config(None, [f"model.path={folder}", "data.demonstrations=64"])
    DemoSource(config).build_embedded_model(folder, seed=0)
    return folder


@contextmanager
def process(*overrides, **environment):
    """(process, client); whatever it still has to say is read in the background."""
    command = [sys.executable, "-m", "envace.serve", "--config", "configs/demo.yaml", "serve.port=0", *overrides]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | environment
    started = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    kill = threading.Timer(WAIT, started.kill)
    kill.start()
    said = []
    try:
        url = None
        for line in started.stdout:
            said.append(line)
            if found := ADDRESS.search(line):
                url = found[1]
                break
        assert url, "".join(said)
        threading.Thread(target=lambda: said.extend(started.stdout), daemon=True).start()
        yield started, OpenAI(base_url=url, api_key="open sesame", timeout=WAIT, max_retries=0), said
    finally:
        kill.cancel()
        started.kill()
        started.wait()


def ask(client, messages, **options):
    return client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, **options)


def test_a_process_from_start_to_stop(model):
    rehearsal = ["rehearsal.mode=parallel", "rehearsal.n=2", "rehearsal.user_turns=1"]
    with process(f"model.path={model}", "serve.key_env=SERVE_KEY", *rehearsal, SERVE_KEY="open sesame") as served:
        server, client, said = served
        # Greedy: whole and streamed are the same. A seed: sampled twice the same.
        whole = ask(client, user("hello"), tools=[TOOL], temperature=0)
        streamed = joined(
            ask(client, user("hello"), tools=[TOOL], temperature=0, stream=True, stream_options={"include_usage": True})
        )
        assert streamed[0] == (whole.choices[0].message.content or "") and streamed[4] == whole.usage
        assert 0 < whole.usage.completion_tokens <= 12
        seeded = [ask(client, user("hello"), temperature=1, seed=s).choices[0].message.content for s in (1, 1, 2, 3)]
        assert seeded[0] == seeded[1] and len(set(seeded)) > 1

        def talk(name):
            messages, headers = [], []
            for turn in range(5):
                messages += user(f"{name} {turn}")
                reply = client.chat.completions.with_raw_response.create(
                    model="tiny", messages=messages, tools=[TOOL], max_tokens=12, temperature=0
                )
                headers.append(json.loads(reply.headers["x-rehearsal"])["cached"])
                message = reply.parse().choices[0].message
                messages.append({"role": "assistant", "content": message.content or ""})
            return headers, messages

        with ThreadPoolExecutor(16) as pool:
            for headers, messages in pool.map(talk, [f"c{i}" for i in range(16)]):
                assert headers == [False] + 4 * [True] and len(messages) == 10
            # SIGTERM: what is being answered is finished.
            last = pool.submit(ask, client, user("bye"), temperature=0)
            metrics, key = str(client.base_url).replace("/v1/", "/metrics"), {"Authorization": "Bearer open sesame"}
            while "in_flight 1.0" not in raw(metrics, headers=key)[1]:
                assert not last.done()
            server.send_signal(signal.SIGTERM)
            assert last.result(WAIT).choices[0].finish_reason in ("stop", "length")
        assert server.wait(WAIT) == 0
    assert "open sesame" not in "".join(said)
