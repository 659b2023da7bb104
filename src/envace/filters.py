"""Which trajectories are trained on. Pure: a trajectory -> what is wrong with it, "" if nothing.

What a filter does not keep has an unknown reward: it leaves the loss and the baseline.
"""

from __future__ import annotations

from typing import Any

from envace.metrics import is_error
from envace.schemas import call_error
from envace.types import Evidence, Exchange, Trajectory, canonical_json


def keep_all(trajectory: Trajectory) -> str:
    return ""


def consistent(trajectory: Trajectory) -> str:
    """Whether what REHEARSE answered can be told to be wrong without knowing the world.

    - a call that its tool's schema forbids, or to no tool, is answered with an error;
    - a field of the response that has the name of an argument has its value, unless the response is an error;
    - the same call again, with no other call between the two, gets the same response.
    """
    before: Exchange | None = None
    for exchange in trajectory.exchanges:
        if exchange.evidence is Evidence.REHEARSED:
            if problem := _problem(trajectory.task.tools, exchange, before):
                return f"{exchange.call.name}: {problem}"
        before = exchange
    return ""


def _problem(tools: list[dict[str, Any]], exchange: Exchange, before: Exchange | None) -> str:
    call, response = exchange.call, exchange.response
    if before is not None and before.call.key() == call.key():
        if not _equal(before.response, response):
            return "the same call has two responses"
    if is_error(response):
        return ""
    if call_error(tools, call) is not None:
        return "a call that the schema forbids was answered"
    shared = call.arguments.keys() & response.keys() if isinstance(response, dict) else ()
    differing = [name for name in sorted(shared) if not _equal(call.arguments[name], response[name])]
    return f"{differing[0]} differs from the argument" if differing else ""


def _equal(a: Any, b: Any) -> bool:
    return canonical_json(a) == canonical_json(b)


FILTERS = {"all": keep_all, "consistent": consistent}
