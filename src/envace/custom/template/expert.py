"""Who shows how it is done, by working in the real environment. It is not always right: RL has to improve on it."""

from __future__ import annotations

import random

from envace.custom.dialogue import Dialogue
from envace.rewards import Branch

HABIT_SHARE = 0.6  # how often the expert sends a reader away where it could reserve the book


def expert(dialogue: Dialogue, rng: random.Random) -> None:
    for _ in dialogue.task.user_turns:
        branch = dialogue.read()
        is_reserving = any(call.name == "reserve_book" for call in branch.writes)
        if is_reserving and rng.random() < HABIT_SHARE:
            dialogue.answer("It is out. Come again later.")
        else:
            dialogue.write(branch)
            dialogue.answer(_sentence(dialogue, branch))


def _sentence(dialogue: Dialogue, branch: Branch) -> str:
    [says] = branch.says
    value = dialogue.seen(says.value)
    return f"The book is {value} for you." if branch.writes else f"It is on the shelf {value} ."
