"""Whether the endpoint grows: conversations with tools and rehearsals, one after another, for a minute.

    python bench/serve_soak.py [seconds] [clients]

Builds the embedded model (untrained), serves it in a process of its own and talks to it from several threads: every
third request streams, every tenth client leaves early, every conversation is a new one, so the cache of memories is
full after a while and forgets. Prints the resident memory over time; it has settled if the last third grows by less
than 2 % over the second.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import fmean

import openai
import psutil

from envace.config import load_config
from envace.demo.source import DemoSource

SETTINGS = ("rehearsal.mode=parallel", "rehearsal.n=2", "rehearsal.user_turns=1", "serve.cache=32", "serve.port=0")
TURNS, MAX_TOKENS = 5, 8
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def main(seconds: float, clients: int) -> None:
    os.environ.setdefault("NO_PROXY", "127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        config = load_config(None, [f"model.path={model}", "data.demonstrations=64"])
        DemoSource(config).build_embedded_model(model, seed=0)
        command = [
            sys.executable,
            "-m",
            "envace.serve",
            "--config",
            "configs/demo.yaml",
            f"model.path={model}",
            *SETTINGS,
        ]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            url = next(found[1] for line in server.stdout if (found := re.search(r"serving on (http://\S+)", line)))
            soak(url, psutil.Process(server.pid), seconds, clients)
        finally:
            server.terminate()
            print(f"exit code {server.wait()}")


def soak(url: str, server: psutil.Process, seconds: float, clients: int) -> None:
    ends = time.monotonic() + seconds
    numbers, counts = itertools.count(), {"replies": 0, "left early": 0}
    threads = [threading.Thread(target=talk, args=(url, ends, numbers, counts)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    samples = []
    while (left := ends - time.monotonic()) > 0:
        time.sleep(min(1.0, left))
        samples.append(server.memory_info().rss / 2**20)
    for thread in threads:
        thread.join()
    third = len(samples) // 3
    begin, middle, end = (fmean(samples[i * third : (i + 1) * third]) for i in range(3))
    print(f"{counts['replies']} replies in {seconds:g} s, {counts['left early']} clients left early")
    print(
        f"resident memory by thirds: {begin:.1f}, {middle:.1f}, {end:.1f} MiB; last over second {end / middle - 1:+.2%}"
    )


def talk(url: str, ends: float, numbers: itertools.count, counts: dict[str, int]) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120.0)
    while time.monotonic() < ends:
        number = next(numbers)
        messages = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"conversation {number}, turn {turn}"})
            options = {"model": "tiny", "messages": messages, "tools": [TOOL], "max_tokens": MAX_TOKENS}
            try:
                if number % 10 == 9:
                    client.with_options(timeout=0.05).chat.completions.create(**options)
                elif turn % 3 == 2:
                    text = "".join(
                        c.choices[0].delta.content or "" for c in client.chat.completions.create(**options, stream=True)
                    )
                else:
                    text = client.chat.completions.create(**options).choices[0].message.content or ""
            except openai.APITimeoutError:
                counts["left early"] += 1
                break
            counts["replies"] += 1
            messages.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    main(float((sys.argv[1:] + ["60"])[0]), int((sys.argv[2:] + ["8"])[0]))
