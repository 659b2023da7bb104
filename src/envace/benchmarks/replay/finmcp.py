"""The recorded dialogues of FinMCP-Bench as a script: after a recorded history it says and calls what follows there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from envace.benchmarks.finmcp import arguments_of, read_samples
from envace.benchmarks.replay.script import Answer, Script, ScriptError
from envace.types import ToolCall

DEMO = Path("finmcp") / "DianJin-TIR" / "infer" / "demo_infer.json"  # six records that the repository shows
DONE = Answer("完成。")


def oracle(home: Path, parts: Iterable[str]) -> Script:
    """parts: of any part it knows all. The records are those of the repository; `of_samples` takes others."""
    return of_samples(read_samples(str(home / DEMO)))


def of_samples(samples: list[dict[str, Any]]) -> Script:
    def answer(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Answer:
        asked = said_by_users(messages)
        fitting = [sample for sample in samples if said_by_users(sample["messages"])[: len(asked)] == asked]
        if not fitting:
            raise ScriptError("no record begins with what was asked")
        # Records that begin alike go on alike as far as can be known; their answers to this turn may differ.
        turn = turns(fitting[0]["messages"])[len(asked) - 1]
        made = sum(message["role"] == "assistant" for message in turns(messages)[-1])
        recorded = [message for message in turn if message["role"] == "assistant"]
        if made >= len(recorded):
            return DONE
        calls = [ToolCall(c["function"]["name"], arguments_of(c)) for c in recorded[made].get("tool_calls") or []]
        return Answer(recorded[made].get("content") or ("" if calls else DONE.content), calls)

    return answer


def said_by_users(messages: list[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "user"]


def turns(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What follows each message of a user, up to the next one."""
    found: list[list[dict[str, Any]]] = []
    for message in messages:
        if message["role"] == "user":
            found.append([])
        elif found:
            found[-1].append(message)
    return found
