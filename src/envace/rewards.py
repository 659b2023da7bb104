"""Pure: a trajectory and its goal -> reward. The same scorer judges rehearsed and real trajectories.

A goal never names the state of a world. Where the right action depends on a value, the goal points at the response in
which the agent saw it (`Seen`): rehearsed or real, the agent has to act on what it was told. Rules:

- reads      every required read is called, and before the first write that is made from its turn on;
- writes     in each turn, the distinct calls to anything but a read tool equal the writes of the branch that
             applies. An identical retry counts once; what a response said about a write does not matter, so
             REHEARSE cannot launder one;
- answers    each turn's answer states what the branch demands, as it was seen, and no alternative to it;
- a trajectory that did not finish has reward 0; one with a service fault has reward None (unknown).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from envace.checklist import score_checklist
from envace.types import Exchange, Status, ToolCall, Trajectory, canonical_json


@dataclass(frozen=True)
class Seen:
    """A value known only from a response: `field` in the first response to `call` that has it."""

    call: ToolCall  # its arguments may hold Seen values too
    field: str


@dataclass(frozen=True)
class Says:
    """The answer must contain `value` as a word, and of the words in `among` only those that its branch demands.

    Case counts in what is demanded, and not in what is unwanted: ids and values are copied as they were seen.
    about: an id; then only the sentences that name it count, so facts about two things cannot be swapped.
    """

    value: str | Seen
    among: tuple[str, ...] = ()
    about: str | Seen | None = None


@dataclass(frozen=True)
class Branch:
    """What is right when every condition (seen value, allowed values) holds. No conditions: always."""

    when: tuple[tuple[Seen, tuple[Any, ...]], ...] = ()
    writes: tuple[ToolCall, ...] = ()
    says: tuple[Says, ...] = ()


@dataclass(frozen=True)
class TurnGoal:
    """What is right in one user turn: the first branch that applies. None applies: the turn cannot be solved."""

    branches: tuple[Branch, ...]
    reads: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Goal:
    turns: tuple[TurnGoal, ...]
    read_tools: frozenset[str] = field(default_factory=frozenset)


class Unseen(LookupError):
    """A value that the goal needs was in no response."""


def score(trajectory: Trajectory) -> tuple[float | None, dict[str, float]]:
    """(reward, parts). reward is 1.0 if all parts are 1, else 0.0; None if a service fault left it unknown.

    Task success: R = [finished] * [reads] * [writes] * [answers]
    """
    if trajectory.status is Status.FAULT:
        return None, {}
    parts = {"finished": 0.0, "reads": 0.0, "writes": 0.0, "answers": 0.0}
    goal: Goal = trajectory.task.goal
    if trajectory.status is not Status.FINISHED or len(trajectory.answers) != len(goal.turns):
        return 0.0, parts
    reads = writes = answers = True
    written: set[str] = set()  # what was right to write in earlier turns: writing it again changes nothing
    try:
        for turn, turn_goal in enumerate(goal.turns):
            # A turn is judged by what the agent knew in it: nothing read later makes an earlier guess right.
            # A call that was held back is no deed.
            seen = [e for e in trajectory.executed if e.turn <= turn]
            branch = applicable_branch(turn_goal, seen)
            wanted = {resolve_call(call, seen).key() for call in branch.writes} - written
            made = {e.call.key() for e in seen if e.turn == turn and e.call.name not in goal.read_tools} - written
            writes &= made == wanted
            written |= wanted
            reads &= _reads_done(turn_goal, turn, goal, seen)
            answers &= _is_answered(branch, trajectory.answers[turn], seen)
    except Unseen:
        return 0.0, parts | {"finished": 1.0}
    parts = {
        "finished": 1.0,
        "reads": float(reads),
        "writes": float(writes),
        "answers": float(answers),
    }
    return float(all(parts.values())), parts


def gold_calls(trajectory: Trajectory) -> tuple[float | None, dict[str, float]]:
    """1.0 if the right calls were made, whatever the answers say; otherwise as `score`."""
    return _of_parts(trajectory, "reads", "writes")


def answer_facts(trajectory: Trajectory) -> tuple[float | None, dict[str, float]]:
    """1.0 if the answers state what they have to, whatever was called; otherwise as `score`."""
    return _of_parts(trajectory, "answers")


def _of_parts(trajectory: Trajectory, *names: str) -> tuple[float | None, dict[str, float]]:
    value, parts = score(trajectory)
    return value if value is None else float(parts["finished"] and all(parts[name] for name in names)), parts


# A reward is a function (trajectory) -> (reward or None, parts). What it reads of `task.goal`: a Goal, or a Checklist.
REWARDS = {"goal": score, "gold_calls": gold_calls, "answer_facts": answer_facts, "checklist": score_checklist}


def applicable_branch(turn_goal: TurnGoal, exchanges: list[Exchange]) -> Branch:
    """The first branch whose conditions hold for what was seen. Raises Unseen if none does."""
    for branch in turn_goal.branches:
        try:
            if all(resolve(seen, exchanges) in allowed for seen, allowed in branch.when):
                return branch
        except Unseen:
            continue
    raise Unseen


def _reads_done(turn_goal: TurnGoal, turn: int, goal: Goal, exchanges: list[Exchange]) -> bool:
    writes = [e.round for e in exchanges if e.turn >= turn and e.call.name not in goal.read_tools]
    # A read beside a write in one output came too late: the write was decided without its response.
    before = {e.call.key() for e in exchanges if not writes or e.round < writes[0]}
    return all(resolve_call(read, exchanges).key() in before for read in turn_goal.reads)


def _is_answered(branch: Branch, answer: str, exchanges: list[Exchange]) -> bool:
    try:
        return _says_all(branch, answer, exchanges)
    except Unseen:  # what was never seen cannot be said
        return False


def _says_all(branch: Branch, answer: str, exchanges: list[Exchange]) -> bool:
    by_subject: dict[str | None, list[Says]] = {}
    for says in branch.says:
        subject = None if says.about is None else as_text(resolve(says.about, exchanges))
        by_subject.setdefault(subject, []).append(says)
    return all(_is_said(group, _sentences(answer, subject), exchanges) for subject, group in by_subject.items())


def _is_said(group: list[Says], text: str, exchanges: list[Exchange]) -> bool:
    wanted = set()
    for says in group:
        value = resolve(says.value, exchanges)
        if says.among and value not in says.among:
            raise Unseen(f"{value!r} is none of {', '.join(says.among)}")
        wanted.add(as_text(value))
    unwanted = {word for says in group for word in says.among} - wanted
    return all(contains(text, word) for word in wanted) and not any(
        contains(text.lower(), word.lower()) for word in unwanted
    )


def _sentences(answer: str, subject: str | None) -> str:
    """The sentences of `answer` that name `subject`; without one, the whole answer."""
    if subject is None:
        return answer
    return " ".join(s for s in re.split(r"(?<=[.!?])\s+", answer) if contains(s, subject))


def as_text(value: Any) -> str:
    """How an answer writes a value."""
    return value if isinstance(value, str) else canonical_json(value)


def contains(answer: str, word: str) -> bool:
    """Whether `word` stands in `answer` on its own. A seen value without a word in it, such as "", never does."""
    return bool(re.search(r"\w", word) and re.search(rf"(?<!\w){re.escape(word)}(?!\w)", answer))


def resolve(value: Any, exchanges: list[Exchange]) -> Any:
    """`value`, or if it is a Seen the value it points at. Raises Unseen if no response held it."""
    if not isinstance(value, Seen):
        return value
    wanted = resolve_call(value.call, exchanges).key()
    for exchange in exchanges:
        if exchange.call.key() == wanted and isinstance(exchange.response, dict) and value.field in exchange.response:
            return exchange.response[value.field]
    raise Unseen(value.field)


def resolve_call(call: ToolCall, exchanges: list[Exchange]) -> ToolCall:
    """`call` with every Seen argument resolved."""
    return ToolCall(call.name, {k: resolve(v, exchanges) for k, v in call.arguments.items()})
