"""Answers that state what was only imagined. Pure: a committed trajectory and its rehearsals -> flagged claims.

A memory tells the policy what its rehearsals came to, so a total that REHEARSE invented can end up in a real answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from envace.rewards import as_text, contains
from envace.types import Evidence, Exchange, Trajectory


@dataclass(frozen=True)
class Claim:
    """A fact in the answer of a user turn, and the rehearsed response that it came from: the first one that has it.

    rehearsal: its number, from 0; None if the response stands in the committed trajectory itself.
    sequence, segment: where it stands in the trajectory of that rehearsal. provenance: of that segment.
    """

    fact: str
    turn: int
    rehearsal: int | None
    sequence: int
    segment: int | None
    provenance: dict[str, str]


def unsupported_claims(trajectory: Trajectory, rehearsals: list[Trajectory]) -> list[Claim]:
    """Facts that an answer states and that only rehearsed responses tell, each once in a turn.

    A fact is a value in a rehearsed JSON response, nested or not, as an answer would write it: a string, or a number.
    Keys, true, false, null, strings without a letter or digit, and single letters are none: an answer has those by
    itself. A fact is stated if it stands in the answer on its own, whatever the case; 3, 3.0 and 3.00 are one number,
    and 3 does not stand in 3.5. A string counts as a whole: an answer in other words is not found.

    A fact is supported if it stands in the system prompt (a memory is no part of it), the tools, a user turn up to this
    one, or a response observed up to this turn, which has to be JSON. What ACT wrote and errors of ours support none.
    """
    imagined: dict[str, tuple[Claim, Exchange]] = {}
    for number, source in [*enumerate(rehearsals), (None, trajectory)]:
        for exchange in source.exchanges:
            if exchange.evidence is Evidence.REHEARSED:
                for fact in _facts(exchange.response):
                    imagined.setdefault(_plain(fact), (_claim(fact, number, source, exchange), exchange))
    claims = []
    for turn, answer in enumerate(trajectory.answers):
        said, known = _plain(answer), _plain("\n".join(_known(trajectory, turn)))
        for fact, (claim, exchange) in imagined.items():
            is_future = claim.rehearsal is None and exchange.turn > turn
            if not is_future and _stands_in(said, fact) and not _stands_in(known, fact):
                claims.append(replace(claim, turn=turn))
    return claims


def _claim(fact: str, number: int | None, source: Trajectory, exchange: Exchange) -> Claim:
    place = exchange.segment
    provenance = {} if place is None else source.sequences[0].segments[place].provenance
    return Claim(fact, exchange.turn, number, sequence=0, segment=place, provenance=provenance)


def _facts(response: Any) -> Iterator[str]:
    for leaf in leaves(response):
        if isinstance(leaf, str | int | float) and not isinstance(leaf, bool):
            text = as_text(leaf).strip()
            if len(text) > 1 or text.isdigit():
                yield text


def _known(trajectory: Trajectory, turn: int) -> Iterator[str]:
    """Every text that was given or observed up to a turn."""
    task = trajectory.task
    yield task.system
    yield from task.user_turns[: turn + 1]
    observed = [e.response for e in trajectory.exchanges if e.evidence is Evidence.OBSERVED and e.turn <= turn]
    yield from (as_text(leaf) for leaf in leaves([task.tools, observed], with_keys=True))


def leaves(value: Any, *, with_keys: bool = False) -> Iterator[Any]:
    """What stands in JSON, in its order; found without recursion, for the value may come from a model."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack += [*reversed(item.values()), *(item if with_keys else ())]
        elif isinstance(item, list):
            stack += reversed(item)
        else:
            yield item


def _stands_in(text: str, fact: str) -> bool:
    # The plain search first: of many facts few are anywhere in a text, and `contains` compiles an expression for each.
    return fact in text and contains(text, fact)


def _plain(text: str) -> str:
    """Lower case, and 1,200.50 becomes 1200_5: numbers are equal however they are written, and each is one word."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.casefold())
    text = re.sub(r"(?<![\d.])\d+\.\d+(?!\.?\d)", lambda found: found[0].rstrip("0").rstrip("."), text)
    return re.sub(r"(?<=\d)\.(?=\d)", "_", text)
