"""Agents that stand in for the policy as controls: one that does nothing and one that calls at random."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from envace.chat import ChatFormat
from envace.demo.desk import DAYS, TIERS, TOOLS, TOPICS
from envace.prompts import tool_call_block
from envace.types import Completion, Generate, Request, ToolCall


def do_nothing(chat: ChatFormat) -> Generate:
    """Answers at once and calls nothing."""
    return _scripted(chat, lambda text: "I cannot do that.")


def call_at_random(chat: ChatFormat, seed: int) -> Generate:
    """Calls random tools with ids and numbers from the conversation, and stops with probability 1/3 an output."""
    rng = random.Random(seed)

    def write(text: str) -> str:
        if rng.random() < 1 / 3:
            return f"Order is {rng.choice(['shipped', 'delivered', 'processing', 'cancelled', *TIERS])}."
        function = rng.choice(TOOLS)["function"]
        ids = re.findall(r"[A-Z]\d(?!\d)", text) or ["A1"]
        amounts = [int(n) for n in re.findall(r"(?<![A-Z\d])\d\d", text)] or [10]
        values = {"topic": rng.choice(TOPICS), "amount": rng.choice(amounts), "day": rng.choice(DAYS)}
        arguments = {name: values.get(name, rng.choice(ids)) for name in function["parameters"]["properties"]}
        return tool_call_block(ToolCall(function["name"], arguments))

    return _scripted(chat, write)


def _scripted(chat: ChatFormat, write: Callable[[str], str]) -> Generate:
    def generate(requests: list[Request]) -> list[Completion]:
        completions = []
        for request in requests:
            ids = chat.output(write(chat.tokenizer.decode(request.sequence.ids)))
            completions.append(Completion(ids, [0.0] * len(ids), "stop"))
        return completions

    return generate
