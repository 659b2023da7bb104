"""What users want, and what is right. A goal points at values that the agent sees (`Seen`), never at the world, so
the same scorer judges rehearsed and real episodes; see envace.rewards."""

from __future__ import annotations

import random
from typing import Any

from envace.rewards import Branch, Goal, Says, Seen, TurnGoal
from envace.types import Task, ToolCall

from .tools import TOOLS

SYSTEM = "Look a book up first. Lend it if it is in, reserve it if it is out."
LETTERS = "ABCDEFGHJKLM"
SHELVES = ("north", "south", "east", "west")
DEEDS = ("lent", "reserved")
# The user's words hint at the status, so that a rehearsed response can be plausible.
HINTS = {"in": ("I see it on the shelf.", "It is back."), "out": ("Somebody has it.", "It is gone.")}


def make_tasks(n: int, seed: int, *, held_out: bool) -> list[Task]:
    """`n` tasks. Training and held-out ones have no book in common."""
    split = "held-out" if held_out else "train"
    rng = random.Random(f"{split}-{seed}")
    kinds = [_find, _borrow, _borrow, _find_and_borrow]
    return [_task(rng.choice(kinds), f"{split}-{seed}-{i}", rng, held_out) for i in range(n)]


def _task(kind: Any, task_id: str, rng: random.Random, held_out: bool) -> Task:
    book, status = _book(rng, held_out), rng.choice(list(HINTS))
    turns, goals = kind(book, rng.choice(HINTS[status]))
    return Task(
        id=task_id,
        system=SYSTEM,
        tools=TOOLS.schemas,
        user_turns=turns,
        kind=kind.__name__.removeprefix("_"),
        goal=Goal(tuple(goals), TOOLS.read_only),
        world={"books": {book: {"shelf": rng.choice(SHELVES), "status": status}}},
    )


def _book(rng: random.Random, held_out: bool) -> str:
    """A letter and a digit. One pair in four is held out: every character occurs in training, not every pair."""
    pairs = [(i, digit) for i in range(len(LETTERS)) for digit in range(10)]
    i, digit = rng.choice([(i, digit) for i, digit in pairs if ((i + digit) % 4 == 0) == held_out])
    return f"{LETTERS[i]}{digit}"


def _find(book: str, hint: str) -> tuple[list[str], list[TurnGoal]]:
    return [f"Where is book {book} ?"], [_shelf(book)]


def _borrow(book: str, hint: str) -> tuple[list[str], list[TurnGoal]]:
    return [f"I want book {book} . {hint}"], [_lend_or_reserve(book)]


def _find_and_borrow(book: str, hint: str) -> tuple[list[str], list[TurnGoal]]:
    turns = [f"Where is book {book} ? {hint}", "Then I want it."]
    return turns, [_shelf(book), _lend_or_reserve(book)]


def _shelf(book: str) -> TurnGoal:
    """Look up, then say the shelf that was seen."""
    read = ToolCall("get_book", {"book_id": book})
    return TurnGoal((Branch(says=(Says(Seen(read, "shelf"), SHELVES),)),), (read,))


def _lend_or_reserve(book: str) -> TurnGoal:
    """Look up, then lend what is in and reserve what is out, and say which."""
    read = ToolCall("get_book", {"book_id": book})
    status = Seen(read, "status")
    return TurnGoal(
        (
            Branch(((status, ("in",)),), (ToolCall("lend_book", {"book_id": book}),), (Says("lent", DEEDS),)),
            Branch(((status, ("out",)),), (ToolCall("reserve_book", {"book_id": book}),), (Says("reserved", DEEDS),)),
        ),
        (read,),
    )
