"""Dialogues for SFT that teach private rehearsal: to judge a rehearsal, to imagine a user, to use a memory.

A model of a million parameters can do none of this unasked; a large one is prompted. All of it is built on training
tasks. One half teaches how a rehearsal goes on: the user turns are the model's own, and at the end it is asked what it
thinks. The other half shows what follows from a memory: the clerk does what the notes approve, habits included, and
where they name the right calls it makes those. So it is what the notes say that decides, not that there are some.
What the first user turn does not tell (a total, a customer's last order, what the user asks next) is another one in
every rehearsal, as it is when a policy imagines it: a memory is good for what to do, not for what is the case.

The judgement is the task's own scorer on the calls, responses and answers that can be seen, and one in ten wrong ones
is overlooked, so that notes and the right thing can be told apart.
"""

from __future__ import annotations

import random
import re
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from typing import Any

from envace.demo.demonstrations import HABIT_SHARE, SLIP_SHARE, Clerk
from envace.demo.desk import STATUSES, TIERS, CallCounter
from envace.demo.tasks import HINTS, Values, make_tasks
from envace.prompts import EVALUATE, MEMORY_HEADER, call_text, rehearsal_note, to_json
from envace.rewards import score
from envace.types import Task, Trajectory

OVERLOOKED = 0.1  # how often a wrong rehearsal is called good
MOST_REHEARSALS = 8  # that one memory is made of; a number that was never seen is not understood
MOST_NOTES = {False: 6, True: 4}  # of a memory, by whether they are in full: about what fits; the oldest ones leave
WITH_MEMORY = 0.5  # share of the rehearsals that have seen an earlier one


def make_rehearsals(n: int, seed: int, counter: CallCounter) -> list[tuple[Task, list[dict[str, Any]]]]:
    """`n` training tasks, each with the messages of one dialogue.

    A message {"role": "user", "imagined": True} is trained as REHEARSE; "" says that the user has nothing more to ask.
    A system message with "note" has that text at its end, as `begin` puts a memory there.
    """
    rng = random.Random(f"rehearsals-{seed}")
    tasks = make_tasks(n, seed + 1_000_000, held_out=False)
    return [(task, _dialogue(task, rng, counter, rehearsal=i % 2 == 0)) for i, task in enumerate(tasks)]


def _dialogue(task: Task, rng: random.Random, counter: CallCounter, *, rehearsal: bool) -> list[dict[str, Any]]:
    notes: list[str] = []
    habit_share = HABIT_SHARE
    if not rehearsal or rng.random() < WITH_MEMORY:
        notes, has_habit = _memory(task, rng, counter, in_full=rehearsal)
        habit_share = float(has_habit)
    clerk = Clerk(task, rng, counter, habit_share, SLIP_SHARE)
    messages = clerk.work()
    if notes:
        messages[0]["note"] = "\n".join([MEMORY_HEADER, *notes])
    if not rehearsal or any(m["role"] == "tool" and "malformed_call" in m["content"] for m in messages):
        return messages  # a rehearsal breaks off at a call that cannot be read, and nobody is asked
    for message in messages[2:]:
        if message["role"] == "user":
            message["imagined"] = True
    return [
        *messages,
        {"role": "user", "content": "", "imagined": True},
        {"role": "user", "content": EVALUATE},
        {"role": "assistant", "content": evaluation(clerk, rng, counter)},
    ]


def _memory(task: Task, rng: random.Random, counter: CallCounter, *, in_full: bool) -> tuple[list[str], bool]:
    """(notes on up to MOST_REHEARSALS rehearsals, whether the clerk's habit is what they come to)."""
    approved: dict[tuple[tuple[str, ...], str], list[bool]] = {}
    for _ in range(rng.randint(1, MOST_REHEARSALS)):
        clerk = Clerk(imagined(task, rng), rng, counter, HABIT_SHARE, slip_share=0.0)
        clerk.work()
        verdict = evaluation(clerk, rng, counter)
        calls = [call_text(e.call) for e in clerk.exchanges]
        if in_full:
            calls = [f"{call_text(e.call)} -> {to_json(e.response)}" for e in clerk.exchanges] + clerk.answers
        approved.setdefault((tuple(calls), verdict), []).append(clerk.habit is not None and verdict == "good")
    kept = list(approved.items())[-MOST_NOTES[in_full] :]
    notes = [rehearsal_note(len(times), list(calls), verdict) for (calls, verdict), times in kept]
    return notes, all(all(times) for _, times in kept)


def imagined(task: Task, rng: random.Random) -> Task:
    """The task as somebody would imagine it who knows the first user turn alone: all else is drawn anew."""
    said, values = task.user_turns[0], Values(rng, held_out=False)
    ids = {*task.world["orders"], *(c["last_order"] for c in task.world["customers"].values())}
    unknown = {order_id: values.order_id() for order_id in sorted(ids) if order_id not in said}
    task = _renamed(task, unknown)
    for order in task.world["orders"].values():
        order["total"] = values.total()
        if not any(hint in turn for turn in task.user_turns for hint in chain(*HINTS.values())):
            order["status"] = values.choice(STATUSES)
    for customer in task.world["customers"].values():
        customer["tier"] = values.choice(TIERS)
    return task


def _renamed(value: Any, ids: dict[str, str]) -> Any:
    """A copy in which every id, also within a text, has its new name."""
    if isinstance(value, str):
        return re.sub(r"\b[A-Z]\d\b", lambda found: ids.get(found[0], found[0]), value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _renamed(getattr(value, f.name), ids) for f in fields(value)})
    if isinstance(value, dict):
        return {_renamed(key, ids): _renamed(item, ids) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_renamed(item, ids) for item in value)
    return value


def evaluation(clerk: Clerk, rng: random.Random, counter: CallCounter) -> str:
    """good, or bad and the calls that a clerk without habits and slips makes."""
    trajectory = Trajectory(clerk.task, "", exchanges=clerk.exchanges, answers=clerk.answers)
    if score(trajectory)[0] == 1.0 or rng.random() < OVERLOOKED:
        return "good"
    right = Clerk(clerk.task, rng, counter, habit_share=0.0, slip_share=0.0)
    right.work()
    return f"bad. Right: {' ; '.join(call_text(e.call) for e in right.exchanges) or 'no call'}"
