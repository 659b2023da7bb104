"""Serve a script as an OpenAI-compatible endpoint.

    python -m envace.benchmarks.replay bfcl --mode oracle --parts multi_turn_base [--port 0] [--home .bench]
    python -m envace.benchmarks.replay tau2 --mode judge --name gpt-4.1-2025-04-14

oracle plays a task's gold actions, null does nothing; where a harness asks for a user, they play it too. judge finds
everything right in tau2, and in vita what leads to the expected state.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from envace.benchmarks.replay import bfcl, finmcp, tau2, vita
from envace.benchmarks.replay.script import Script, ScriptError, silent
from envace.config import load_config
from envace.console import add_options, command
from envace.serve.__main__ import bound, serve
from envace.serve.app import create_app
from envace.serve.engine import Chunks, Prepared
from envace.serve.errors import bad_request
from envace.serve.replies import Reply, completion
from envace.serve.requests import ChatRequest
from envace.types import Task, UserError

Maker = Callable[[Path, Sequence[str]], Script]
ORACLES: dict[str, Maker] = {"bfcl": bfcl.oracle, "tau2": tau2.oracle, "vita": vita.oracle, "finmcp": finmcp.oracle}
NULLS: dict[str, Script] = {"tau2": tau2.null, "vita": vita.null}  # where being silent is not all
JUDGES: dict[str, Maker] = {"tau2": lambda home, parts: tau2.judge, "vita": vita.judge}
NAME = "replay"
logger = logging.getLogger("envace")


class ReplayEngine:
    def __init__(self, script: Script, name: str = NAME):
        self.script = script
        self.model = name

    async def complete(self, request: ChatRequest, memory: str) -> dict[str, Any]:
        try:
            answer = self.script(request.messages, request.tools)
        except ScriptError as error:
            logger.error("%s", error)
            raise bad_request(str(error), "messages", "no_script") from None
        reason = "tool_calls" if answer.calls else "stop"
        return completion(Reply(answer.content, "", answer.calls, reason, 0, 0), self.model)

    async def stream(self, request: ChatRequest, memory: str) -> Chunks:
        raise bad_request("a script is not streamed", "stream", "unsupported_parameter")

    async def rehearse(self, task: Task) -> Prepared:
        raise NotImplementedError("nothing is rehearsed here")

    async def close(self) -> None:
        pass


def script_of(benchmark: str, mode: str, home: Path, parts: Sequence[str]) -> Script:
    """Raises UserError if there is none."""
    if mode == "oracle":
        return ORACLES[benchmark](home, parts)
    if mode == "null":
        return NULLS.get(benchmark, silent)
    if benchmark not in JUDGES:
        raise UserError(f"{benchmark} has no judge")
    return JUDGES[benchmark](home, parts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envace.benchmarks.replay", description=__doc__.splitlines()[0])
    parser.add_argument("benchmark", choices=ORACLES)
    parser.add_argument("--mode", choices=("oracle", "null", "judge"), required=True)
    parser.add_argument("--parts", default="", metavar="A,B", help="oracle, judge: categories or domains that it knows")
    parser.add_argument("--home", type=Path, default=Path(".bench"), help="where the harnesses are (default .bench)")
    parser.add_argument("--name", default=NAME, help=f"of the model (default {NAME})")
    parser.add_argument("--port", type=int, default=0, help="0 (default) takes a free one and logs it")
    add_options(parser)
    arguments = parser.parse_args()
    with command(arguments, interrupted="interrupted"):
        script = script_of(arguments.benchmark, arguments.mode, arguments.home, arguments.parts.split(","))
        config = load_config(None, ["model.path="])
        app = create_app(ReplayEngine(script, arguments.name), config)
        with bound("127.0.0.1", arguments.port) as listening:
            asyncio.run(serve(app, listening, config.serve.timeout))


if __name__ == "__main__":
    main()
