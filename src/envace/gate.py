"""A dry run before a risky call: the policy predicts what would happen, and the settings decide what becomes of it.

    risk         of a tool: gate.risk, else its MCP annotations, else medium; predicted from gate.at on
    imagined     o_1..n ~ pi(. | tau, call): REHEARSE answers the call n times, each on a fork of the trajectory
    prediction   the most frequent status of o_1..n; its share is the confidence
    decision     log: execute | block: execute if success is predicted | ask: somebody decides

The executable environment sees nothing of a prediction, and neither does the stream that goes on: only forks grow, and
they are closed. Predictions do draw from the random state, so sampled outputs behind a gate are others than without it.

Ours, as nothing is published on it: all of this.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from envace.chat import ChatFormat
from envace.claims import leaves
from envace.environments import Environment, feed_value
from envace.episodes import gather
from envace.metrics import errors_in, field_agreement
from envace.prompts import not_executed_error
from envace.rehearsal import fork
from envace.rules import RISKS
from envace.settings import GateConfig
from envace.types import (
    CallStatus,
    Decision,
    Evidence,
    Exchange,
    Limits,
    Observation,
    Prediction,
    Steps,
    Task,
    ToolCall,
    Trajectory,
    UserError,
    canonical_json,
)

Ask = Callable[[ToolCall, Prediction], bool]

# How the words of an error begin, or its code. The first row that fits decides; UNKNOWN stands first, as an unknown
# error is no unknown id.
ERRORS: dict[CallStatus, tuple[str | int, ...]] = {
    CallStatus.UNKNOWN: (
        *(500, 502, 503, 504, "unknown error", "unknown reason", "internal", "timeout", "timed out", "unavailable"),
        *("not recorded",),
    ),
    CallStatus.PERMISSION_ERROR: (
        *(401, 403, "permi", "not permi", "forbid", "denied", "unauth", "not auth", "not allow", "disallow"),
        *("privilege", "not executed"),
    ),
    CallStatus.VALIDATION_ERROR: (
        *(400, 404, 409, 410, 422, "invalid", "unknown", "not found", "no such", "not exist", "missing", "required"),
        *("malformed", "unsupported", "bad request", "must be", "tool not available"),
    ),
}
# What says that a response is an error, beside a field whose name begins so.
FLAGS = {"isError": True, "success": False, "ok": False, "status": "error"}


class Gate:
    """`inner`, with a prediction before each call to a risky tool.

    A call that is held back is answered with an error of ours, as context, and the episode goes on.
    settings: of any mode but none. inner: may be anything; it is asked for the calls that are executed.
    predictor: who imagines the response; never an executable environment.
    ask: for mode ask; called with the call and its prediction, and only True executes. All episodes wait for it.
    """

    def __init__(self, inner: Environment, predictor: Environment, settings: GateConfig, ask: Ask | None = None):
        if settings.mode == "ask" and ask is None:
            raise UserError("gate.mode=ask: there is nobody to ask here, so set gate.mode=block or gate.mode=log")
        self.inner = inner
        self.predictor = predictor
        self.settings = settings
        self.ask = ask
        self.answers_malformed_calls = inner.answers_malformed_calls

    def respond(self, trajectory: Trajectory, call: ToolCall, chat: ChatFormat, limits: Limits) -> Steps[Observation]:
        risk = risk_of(call.name, trajectory.task.tools, self.settings.risk)
        if RISKS.index(risk) < RISKS.index(self.settings.at):
            return (yield from self.inner.respond(trajectory, call, chat, limits))
        prediction = yield from self.predict(trajectory, call, risk, chat, limits)
        prediction.decision = self._decide(call, prediction)
        trajectory.predictions.append(prediction)
        if prediction.is_held_back:
            error = not_executed_error(prediction.decision, prediction.status)
            return feed_value(trajectory.sequences[0], error, Evidence.GIVEN, chat)
        observation = yield from self.inner.respond(trajectory, call, chat, limits)
        prediction.happened = status_of(observation.value)
        if prediction.response is not None:
            prediction.agreement = field_agreement(prediction.response, observation.value)
        return observation

    def predict(
        self, trajectory: Trajectory, call: ToolCall, risk: str, chat: ChatFormat, limits: Limits
    ) -> Steps[Prediction]:
        copies = [fork(trajectory) for _ in range(self.settings.samples)]
        try:
            imagined = yield from gather([self.predictor.respond(copy, call, chat, limits) for copy in copies])
        finally:
            for sequence in [sequence for copy in copies for sequence in copy.sequences]:
                sequence.open = False
        # One that was cut or is no JSON has ended its fork, and nothing else; its value is None.
        responses = [observation.value for observation in imagined]
        statuses = [status_of(response) for response in responses]
        # Of equally frequent ones the bad news: an error is the cheaper mistake.
        status = max(statuses, key=lambda s: (statuses.count(s), s is not CallStatus.SUCCESS))
        alike = [r for r, s in zip(responses, statuses, strict=True) if s is status and r is not None]
        texts = [canonical_json(response) for response in alike]
        response = max(alike, key=lambda r: texts.count(canonical_json(r)), default=None)
        return Prediction(
            call,
            exchange=len(trajectory.exchanges),
            turn=len(trajectory.answers),
            round=trajectory.rounds - 1,
            risk=risk,
            status=status,
            confidence=statuses.count(status) / len(statuses),
            response=response,
            change=state_change(call, response, trajectory.exchanges) if status is CallStatus.SUCCESS else {},
        )

    def _decide(self, call: ToolCall, prediction: Prediction) -> Decision:
        if self.settings.mode == "ask":
            # Not anything that is true: a coroutine, say, has not answered.
            is_approved = self.ask is not None and self.ask(call, prediction) is True
            return Decision.APPROVED if is_approved else Decision.DECLINED
        blocks = self.settings.mode == "block" and prediction.status is not CallStatus.SUCCESS
        return Decision.BLOCKED if blocks else Decision.EXECUTED


def risk_of(name: str, tools: list[dict[str, Any]], configured: dict[str, str]) -> str:
    """low, medium or high: what is configured, else what the tool's MCP annotations say, else medium.

    They stand on the tool or on its function. destructiveHint wins over readOnlyHint: who says both is not trusted.
    """
    if name in configured:
        return configured[name]
    places = [place for tool in tools if tool["function"]["name"] == name for place in (tool, tool["function"])]
    hints = [place["annotations"] for place in places if isinstance(place.get("annotations"), dict)]
    if any(hint.get("destructiveHint") is True for hint in hints):
        return "high"
    return "low" if any(hint.get("readOnlyHint") is True for hint in hints) else "medium"


def check_risks(settings: GateConfig, tasks: list[Task]) -> None:
    """Raises UserError if a risk is that of a tool which no task has: a misspelt one would guard nothing."""
    names = {tool["function"]["name"] for task in tasks for tool in task.tools}
    if unknown := sorted(settings.risk.keys() - names):
        raise UserError(f"gate.risk: no task has a tool {unknown[0]!r}; there are {', '.join(sorted(names))}")


def status_of(response: Any) -> CallStatus:
    """How a call went, by its response. An error whose words are not in ERRORS is unknown, as is what is no JSON
    object or array."""
    if not isinstance(response, dict):
        return CallStatus.SUCCESS if isinstance(response, list) else CallStatus.UNKNOWN
    errors = errors_in(response)
    if not errors and not any(flag in response and response[flag] == value for flag, value in FLAGS.items()):
        return CallStatus.SUCCESS
    for part in (errors, response):
        # Codes before sentences, which may quote anything.
        for text in sorted(map(str, leaves(part)), key=lambda text: " " in text):
            words = f" {re.sub(r'(?<=[a-z])(?=[A-Z])|[^a-zA-Z0-9]+', ' ', text).lower()} "
            for status, marks in ERRORS.items():
                # A number counts as a whole, a word also with another ending.
                if any((f" {mark} " if isinstance(mark, int) else f" {mark}") in words for mark in marks):
                    return status
    return CallStatus.UNKNOWN


def state_change(call: ToolCall, response: Any, exchanges: list[Exchange]) -> dict[str, Any]:
    """The fields of an imagined response that are new, or differ from what was last observed about the same thing.

    Observed about it: the response to a call whose arguments are the same as far as both calls have them.
    """
    seen: dict[str, Any] = {}
    for exchange in exchanges:
        shared = exchange.call.arguments.keys() & call.arguments.keys()
        is_about_it = shared and all(exchange.call.arguments[name] == call.arguments[name] for name in shared)
        if is_about_it and exchange.evidence is Evidence.OBSERVED and isinstance(exchange.response, dict):
            seen |= exchange.response
    fields = response.items() if isinstance(response, dict) else ()
    return {name: value for name, value in fields if canonical_json(value) != canonical_json(seen.get(name))}
