"""What envace.serve adds to a request over another server: the same request to that server, directly and through it.

    python bench/gateway_overhead.py [REQUESTS]

The server behind answers at once. Medians of alternating requests, one at a time.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

from openai import OpenAI

from envace.benchmarks.served import listening, serving
from envace.config import load_config

WARM_UP = 10
MESSAGES = [{"role": "user", "content": "Where is my order? " * 100}]
PARAMETERS = {"type": "object", "properties": {"order_id": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": f"tool_{k}", "description": "A tool. " * 20, "parameters": PARAMETERS}}
    for k in range(20)
]


def main() -> None:
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    replay = [sys.executable, "-u", "-m", "envace.benchmarks.replay", "bfcl", "--mode", "null"]
    with tempfile.TemporaryDirectory() as name, listening(replay, Path(name) / "replay.log") as url:
        overrides = ["model.path=", f"serve.backend={url}/v1", "serve.backend_model=replay"]
        with serving(load_config(None, overrides), Path(name) / "gateway", "", []) as gateway:
            clients = {
                where: OpenAI(base_url=f"{at}/v1", api_key="none")
                for where, at in (("directly", url), ("through the gateway", gateway.url))
            }
            seconds: dict[str, list[float]] = {where: [] for where in clients}
            for k in range(WARM_UP + requests):
                for where, client in clients.items():
                    started = time.perf_counter()
                    client.chat.completions.create(model="replay", messages=MESSAGES, tools=TOOLS)
                    if k >= WARM_UP:
                        seconds[where].append(time.perf_counter() - started)
    for where, found in seconds.items():
        print(f"{where}: median {1000 * median(found):.1f} ms, 95 % below {1000 * quantiles(found, n=20)[-1]:.1f} ms")
    added = median(seconds["through the gateway"]) - median(seconds["directly"])
    print(f"added: {1000 * added:.1f} ms")


if __name__ == "__main__":
    main()
