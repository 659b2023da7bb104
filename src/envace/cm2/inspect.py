"""Count, measure and check the rows of a CM2 data set.

    python -m envace.data inspect PATH [--schema rl|sft] [--tokenizer FOLDER]

PATH is a .json (a list of rows), .jsonl or .parquet file, a folder of them, or a data set on the Hugging Face hub:
OWNER/NAME, or OWNER/NAME:PATTERN for some of its files. A bad row is a Problem: file, row (from 1), field and reason.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from envace.chat import ChatFormat, parse_observation
from envace.checklist import FOCUS_ON, Item
from envace.cm2.files import FileError, read_rows
from envace.cm2.records import Problem, Record, SFTRow, load_rl, load_sft
from envace.cm2.rows import Messages, Tools, prompt_of
from envace.console import add_options, command
from envace.demonstrations import demonstration
from envace.prompts import to_json
from envace.types import first_line


@dataclass(frozen=True)
class TokenCounter:
    """Token counts in one chat format."""

    chat: ChatFormat

    def prompt(self, messages: Messages, tools: Tools) -> int:
        """Up to where the assistant writes, as the tokenizer's own template renders it."""
        return len(self.chat.prompt(messages, tools))

    def dialogue(self, record: Record | SFTRow) -> int:
        """The whole training sequence of view `shared`, with all thinking."""
        return len(demonstration(record.task(), record.messages(), self.chat).sequences[0])


def describe(records: list[Any], problems: list[Problem], counter: TokenCounter | None = None) -> str:
    """Counts, lengths and the first problem of each kind, in lines of at most 100 columns."""
    lines = [("rows", f"{len(records)} ok, {len(problems)} bad")]
    lines += [*_dialogue_lines(records), *_length_lines(records, counter)]
    turns = [turn for r in records if isinstance(r, Record) for variant in r.checklist().variants for turn in variant]
    if turns:
        lines += [("checklist variants", _spread([len(r.checklist().variants) for r in records]))]
        lines += _checklist_lines(turns)
    text = "\n".join(fill(f"{name:<30}{value}", 100, subsequent_indent=" " * 30) for name, value in lines)
    kinds: dict[str, list[Problem]] = {}
    for problem in problems:
        kinds.setdefault(problem.kind, []).append(problem)
    first = [fill(f"{len(same)} like {same[0]}", 100, subsequent_indent="    ") for same in kinds.values()]
    return "\n".join([text, *(["", "problems, the first of each kind:", *first] if first else [])])


def _dialogue_lines(records: list[Any]) -> Iterator[tuple[str, str]]:
    dialogues = [record.dialogue() for record in records]
    offered = [[tool["function"]["name"] for tool in record.tools()] for record in records]
    calls = [[call.name for m in dialogue for call in m.calls] for dialogue in dialogues]
    parallel = [len(m.calls) for dialogue in dialogues for m in dialogue if len(m.calls) > 1]
    responses = [m.text for dialogue in dialogues for m in dialogue if m.role == "tool"]
    unknown = sum(name not in names for made, names in zip(calls, offered, strict=True) for name in made)
    free = sum(parse_observation(text).error is not None for text in responses)
    turns = Counter(sum(m.role == "user" for m in dialogue) for dialogue in dialogues)
    yield "user turns", ", ".join(f"{n}: {count}" for n, count in sorted(turns.items())) + "  (turns: rows)"
    yield "with a system message", _share(sum(d[0].role == "system" for d in dialogues), len(dialogues))
    yield "assistant messages", _spread([sum(m.role == "assistant" for m in d) for d in dialogues])
    yield "calls", f"{_spread([len(made) for made in calls])}; {sum(map(len, calls))} in all"
    yield "parallel calls", f"{len(parallel)} messages with more than one call, at most {max(parallel, default=1)}"
    yield "tools offered", f"{_spread(list(map(len, offered)))}; {len({n for names in offered for n in names})} names"
    yield "calls of tools not offered", _share(unknown, sum(map(len, calls)))
    yield "responses not JSON {} or []", _share(free, len(responses)) + ", which REHEARSE could not write"


def _length_lines(records: list[Any], counter: TokenCounter | None) -> Iterator[tuple[str, str]]:
    def characters(messages: Messages, tools: Tools) -> int:
        return sum(len(m["content"]) for m in messages) + len(to_json(tools))

    dialogues = [(record.messages(), record.tools()) for record in records]
    prompts = [(prompt_of(messages), tools) for messages, tools in dialogues]
    yield "prompt, characters", _spread([characters(*prompt) for prompt in prompts])
    yield "dialogue, characters", _spread([characters(*dialogue) for dialogue in dialogues])
    if counter is not None:
        yield "prompt, tokens", _spread([counter.prompt(*prompt) for prompt in prompts])
        yield "dialogue, tokens", _spread([counter.dialogue(r) for r in records])


def _checklist_lines(turns: list[tuple[Item, ...]]) -> Iterator[tuple[str, str]]:
    items = [item for turn in turns for item in turn]
    yield "items per turn", f"{_spread(list(map(len, turns)))}; {len(items)} in all"
    for focus in FOCUS_ON:
        yield f"on {focus.removeprefix('assistant.')}", _share(sum(i.focus_on == focus for i in items), len(items))
    yield "required for next turn", _share(sum(i.required_for_next_turn for i in items), len(items))
    yield "with dependence", _share(sum(bool(i.dependence) for i in items), len(items))


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / max(whole, 1):.0f}%)"


def _spread(values: list[int]) -> str:
    """Percentiles by nearest rank: each is a value that occurs."""
    ranked = sorted(values)
    at = {f"p{p}": ranked[max(0, math.ceil(p / 100 * len(ranked)) - 1)] for p in (10, 50, 90, 99)}
    return f"min {ranked[0]}  " + "  ".join(f"{k} {v}" for k, v in at.items()) + f"  max {ranked[-1]}"


def report(path: str, schema: str | None = None, tokenizer: str | None = None) -> str:
    """The text of `inspect`. schema: "rl", "sft", or None for what the first row looks like. Raises UserError."""
    if schema is None:
        first = next((row for _, _, row in read_rows(path)), None)
        schema = "rl" if isinstance(first, dict) and "extra_info" in first else "sft"
    loaders: dict[str, Callable[[str], tuple[list[Any], list[Problem]]]] = {"rl": load_rl, "sft": load_sft}
    records, problems = loaders[schema](path)
    counter = None
    if tokenizer is not None:
        from transformers import AutoTokenizer  # slow to import, and only token counts need it

        try:
            counter = TokenCounter(ChatFormat(AutoTokenizer.from_pretrained(tokenizer)))
        except (OSError, ValueError) as error:
            raise FileError(f"no tokenizer at {tokenizer}: {first_line(error)}") from None
    return f"{path}: CM2 {schema.upper()} rows\n" + describe(records, problems, counter)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envace.data", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    inspect = commands.add_parser("inspect", help="count, measure and check the rows of a data set")
    inspect.add_argument("path", help="file, folder, or OWNER/NAME[:PATTERN] on the Hugging Face hub")
    inspect.add_argument("--schema", choices=("rl", "sft"), help="of the rows; by default as the first row looks")
    inspect.add_argument("--tokenizer", help="folder of a tokenizer: lengths in tokens too")
    add_options(inspect)
    arguments = parser.parse_args()
    with command(arguments, interrupted="interrupted"):
        print(report(arguments.path, arguments.schema, arguments.tokenizer))
