"""BFCL's gold answers as a script: a task is known by its messages and tools."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envace.benchmarks.bfcl import IRRELEVANCE, MULTI_TURN, data_folder, read_lines
from envace.benchmarks.replay.script import Answer, Script, ScriptError, silent
from envace.types import ToolCall

DONE = Answer("Done.")


@dataclass(frozen=True)
class Gold:
    """turns: what is said in each, None where the harness says something of its own. tools: of the task, or None.

    answers: the calls of each turn.
    """

    id: str
    turns: list[list[dict[str, str]] | None]
    tools: frozenset[str] | None
    answers: list[list[Any]]


def oracle(home: Path, parts: Sequence[str]) -> Script:
    """Raises ScriptError at a request that tasks with different answers begin with: base and long_context of the
    multi-turn tasks share most of theirs, so each part wants an endpoint of its own."""
    if set(parts) <= set(IRRELEVANCE):
        return silent
    golds = [gold for part in parts for gold in read_golds(data_folder(home), part)]

    def answer(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Answer:
        last_user = max(i for i, message in enumerate(messages) if message["role"] == "user")
        if last_user < len(messages) - 1:  # the calls of this turn were made
            return DONE
        said = turns_of(messages)
        names = fingerprint([tool["function"] for tool in tools])
        fitting = [gold for gold in golds if fits(gold, said, names)]
        answers = {json.dumps(gold.answers[len(said) - 1]): gold for gold in fitting}
        if len(answers) != 1:
            raise ScriptError(f"{len(answers)} scripts fit: {', '.join(gold.id for gold in fitting)}")
        [gold] = answers.values()
        calls = [read_call(call, tools) for call in gold.answers[len(said) - 1]]
        return Answer(calls=calls) if calls else silent(messages, tools)

    return answer


def turns_of(messages: list[dict[str, Any]]) -> list[list[tuple[str, str]]]:
    """What system and users said, a turn at a time."""
    turns: list[list[tuple[str, str]]] = [[]]
    for before, message in zip([None, *messages], messages, strict=False):
        if message["role"] in ("assistant", "tool"):
            continue
        if before and before["role"] in ("assistant", "tool"):
            turns.append([])
        turns[-1].append((message["role"], message["content"]))
    return turns


def fits(gold: Gold, said: list[list[tuple[str, str]]], names: frozenset[str]) -> bool:
    if len(said) > len(gold.turns) or (gold.tools is not None and gold.tools != names):
        return False
    return all(
        wanted is None or [(m["role"], m["content"]) for m in wanted] == turn
        for wanted, turn in zip(gold.turns, said, strict=False)
    )


def fingerprint(functions: list[dict[str, Any]]) -> frozenset[str]:
    """Names of tools and of their parameters. The harness writes a name's dots as underscores."""
    return frozenset(
        f"{function['name'].replace('.', '_')}({','.join(function['parameters'].get('properties', {}))})"
        for function in functions
    )


def read_golds(data: Path, part: str) -> list[Gold]:
    tasks = read_lines(data / f"BFCL_v4_{part}.json")
    path = data / "possible_answer" / f"BFCL_v4_{part}.json"
    truths: list[Any] = [entry["ground_truth"] for entry in read_lines(path)] if path.exists() else [None] * len(tasks)
    golds = []
    for task, truth in zip(tasks, truths, strict=True):
        if part in MULTI_TURN:
            golds.append(Gold(task["id"], [turn or None for turn in task["question"]], None, truth))
            continue
        if truth is None:  # relevance wants any call, irrelevance none
            first = task["function"][0]["name"] if task["function"] else ""
            truth = [] if part in IRRELEVANCE else [{first: {}}]
        golds.append(Gold(task["id"], task["question"], fingerprint(task["function"]), [truth]))
    return golds


def read_call(gold: Any, tools: list[dict[str, Any]]) -> ToolCall:
    """A gold call as one that a model could make: of a multi-turn task Python, otherwise allowed values by argument."""
    if isinstance(gold, str):
        return read_python_call(gold, tools)
    [(name, arguments)] = gold.items()
    name = name.replace(".", "_")
    schemas = [t["function"]["parameters"] for t in tools if t["function"]["name"] == name]
    return ToolCall(name, first_allowed(arguments, schemas[0].get("required", []) if schemas else []))


def read_python_call(text: str, tools: list[dict[str, Any]]) -> ToolCall:
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ScriptError(f"not a call: {text}")
    name = call.func.id
    arguments = {}
    if call.args:
        [parameters] = [t["function"]["parameters"]["properties"] for t in tools if t["function"]["name"] == name]
        arguments = dict(zip(parameters, map(ast.literal_eval, call.args), strict=False))
    return ToolCall(name, arguments | {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg})


def first_allowed(arguments: dict[str, Any], required: Iterable[str] = ()) -> dict[str, Any]:
    """The first allowed value of each argument; what may be "" is left out, unless its tool's schema requires it."""
    filled = {}
    for name, values in arguments.items():
        if not isinstance(values, list) or not values:  # some gold answers have the value itself here
            filled[name] = values
        elif "" not in values:
            filled[name] = _filled(values[0])
        elif name in required:
            filled[name] = _filled(next((value for value in values if value != ""), ""))
    return filled


def _filled(value: Any) -> Any:
    """Values inside a value are lists of allowed ones too, where they belong to an object."""
    if isinstance(value, dict):
        return first_allowed(value)
    if isinstance(value, list):
        return [_filled(item) for item in value]
    return value
