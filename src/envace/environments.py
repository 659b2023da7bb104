"""Who answers a tool call. This is all that differs between training, ablation, rehearsal and evaluation.

| class       | who answers                                | trained | evidence  |
| Rehearsed   | the policy itself, in the role REHEARSE    | yes     | rehearsed |
| Simulated   | a frozen model in its place                | no      | simulated |
| Remote      | a model behind an endpoint                 | no      | simulated |
| Constant    | always the same response (a control)       | no      | simulated |
| Real        | an executable environment                  | no      | observed  |

and two layers around another one:

| Recorded    | the reference dialogue, where it makes the same call           | no | observed |
| SchemaCheck | an error of ours, where the tool's schema forbids the call     | no | given    |

An environment object serves one episode. `respond` is a coroutine: it appends the response to the ACT stream and
returns what it means. In view `shared` REHEARSE writes in the very slot where a real response would stand.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

from envace.chat import ChatFormat, parse_observation
from envace.prompts import rehearse_messages, to_json
from envace.schemas import call_error
from envace.types import (
    Evidence,
    Executable,
    Limits,
    Observation,
    Request,
    Role,
    Segment,
    Sequence,
    ServiceFault,
    Status,
    Steps,
    ToolCall,
    Trajectory,
    UserError,
    Wait,
    content_hash,
)


class Environment(Protocol):
    # Whether a call that cannot be read is answered with an error, or ends the trajectory.
    answers_malformed_calls: bool

    def respond(self, trajectory: Trajectory, call: ToolCall, chat: ChatFormat, limits: Limits) -> Steps[Observation]:
        """Append the response to `call` to the ACT stream; on failure set the trajectory's status and reason."""


class Rehearsed:
    """The policy rehearses its own world.

    separate: REHEARSE gets a chat of its own per call; its response is then fed to the ACT stream as context.
    grounded: that chat shows the recorded calls of earlier user turns.
    model: the name that is logged as the author of each rehearsed segment.
    """

    answers_malformed_calls = False
    role, evidence = Role.REHEARSE, Evidence.REHEARSED

    def __init__(self, *, separate: bool = False, grounded: bool = False, model: str = ""):
        self.separate = separate
        self.grounded = grounded
        self.model = model

    def respond(self, trajectory: Trajectory, call: ToolCall, chat: ChatFormat, limits: Limits) -> Steps[Observation]:
        stream = trajectory.sequences[0]
        if self.separate:
            messages = rehearsing_chat(trajectory, call, grounded=self.grounded)
            sequence = Sequence([Segment(Role.CONTEXT, chat.prompt(messages), Evidence.GIVEN)])
            trajectory.sequences.append(sequence)
        else:
            sequence = stream
        text = yield from write_output(trajectory, sequence, self.role, chat, limits, self.evidence, model=self.model)
        if self.separate:
            sequence.open = False
        if text is None:
            return Observation(text="", evidence=self.evidence)
        observation = parse_observation(text)
        ended_by = sequence.segments[-1].ids[-1]
        error = observation.error
        if not self.separate and ended_by != chat.response_end:
            error = error or "the response does not end with </tool_response>"
        if error:
            fail_output(trajectory, sequence, f"rehearse: {error}")
            return Observation(text=observation.text, error=error, evidence=self.evidence)
        if self.separate:
            written = sequence.segments[-1].provenance
            feed_response(stream, observation.text, self.evidence, chat, provenance=written)
        return replace(observation, evidence=self.evidence)


class Simulated(Rehearsed):
    """A frozen model plays the environment: as Rehearsed, but what it writes is context.

    What it writes wrongly is no fault of the policy: the trajectory's reward is then unknown.
    """

    role, evidence = Role.CONTEXT, Evidence.SIMULATED

    def respond(self, trajectory: Trajectory, call: ToolCall, chat: ChatFormat, limits: Limits) -> Steps[Observation]:
        observation = yield from super().respond(trajectory, call, chat, limits)
        # In view shared the policy's own stream may have reached its cap; any other cap is one of the simulator's.
        is_its_cap = trajectory.status is Status.TRUNCATED and (self.separate or trajectory.reason == "new_tokens")
        if observation.error or is_its_cap:
            raise ServiceFault(f"simulator: {observation.error or trajectory.reason}")
        return observation


class Remote:
    """A model behind an endpoint plays the environment, in a chat of its own per call; what it writes is context.

    ask: a chat -> a Future of the response in it. None, as no readable one came, leaves the reward unknown.
    grounded: the chat shows the recorded calls of earlier user turns.
    """

    answers_malformed_calls = False

    def __init__(
        self, ask: Callable[[list[dict[str, Any]]], Future[str | None]], model: str, *, grounded: bool = False
    ):
        self.ask = ask
        self.model = model
        self.grounded = grounded

    def respond(self, trajectory: Trajectory, call: ToolCall, chat: ChatFormat, limits: Limits) -> Steps[Observation]:
        messages = rehearsing_chat(trajectory, call, grounded=self.grounded)
        pending = self.ask(messages)
        yield Wait(pending, is_last=False)
        try:
            text = pending.result()
        except UserError as error:
            raise ServiceFault(str(error)) from error
        if text is None:
            raise ServiceFault("simulator: no reply held a response")
        provenance = {"model": self.model, "prompt_hash": content_hash(messages)}
        feed_response(trajectory.sequences[0], text, Evidence.SIMULATED, chat, provenance=provenance)
        return Observation(text, parse_observation(text).value, evidence=Evidence.SIMULATED)


class Constant:
    """Always the same response: the control that shows whether a world needs rehearsal."""

    answers_malformed_calls = False

    def __init__(self, response: Any):
        self.response = response

    def respond(self, trajectory: Trajectory, call: ToolCall, chat: ChatFormat, limits: Limits) -> Steps[Observation]:
        return feed_value(trajectory.sequences[0], self.response, Evidence.SIMULATED, chat)
        yield  # makes this a coroutine like the others; it never asks for tokens


class Real:
    """An executable environment. Its responses are context: they carry no loss."""

    answers_malformed_calls = True

    def __init__(self, executable: Executable):
        self.executable = executable

    def respond(self, trajectory: Trajectory, call: ToolCall, chat: ChatFormat, limits: Limits) -> Steps[Observation]:
        return feed_value(trajectory.sequences[0], self.executable.execute(call), Evidence.OBSERVED, chat)
        yield  # makes this a coroutine like the others; it never asks for tokens


class Recorded:
    """The recorded response where the reference dialogue has the same call, by name and arguments; `inner` otherwise.

    Only of this user turn and earlier ones, as later ones are not known yet. A call that is made again gets the next
    recorded response to it, and the last one when there is no further.
    """

    def __init__(self, inner: Environment):
        self.inner = inner
        self.answers_malformed_calls = inner.answers_malformed_calls

    def respond(self, trajectory: Trajectory, call: ToolCall, chat: ChatFormat, limits: Limits) -> Steps[Observation]:
        known = chain(*trajectory.task.recorded[: len(trajectory.answers) + 1])
        responses = [recorded.response for recorded in known if recorded.call.key() == call.key()]
        if not responses:
            return (yield from self.inner.respond(trajectory, call, chat, limits))
        reused = [e.call.key() for e in trajectory.exchanges if e.evidence is Evidence.OBSERVED]
        made = reused.count(call.key())
        text = responses[min(made, len(responses) - 1)]
        provenance = {"payload_hash": content_hash(text), "source": "recorded dialogue"}
        feed_response(trajectory.sequences[0], text, Evidence.OBSERVED, chat, provenance=provenance)
        return Observation(text, parse_observation(text).value, evidence=Evidence.OBSERVED)


class SchemaCheck:
    """An error where the call names no tool, or its arguments do not fit the tool's JSON schema; `inner` otherwise.

    The error is fed as context and the episode goes on, as it would with a real environment that checks its calls.
    """

    def __init__(self, inner: Environment):
        self.inner = inner
        self.answers_malformed_calls = inner.answers_malformed_calls

    def respond(self, trajectory: Trajectory, call: ToolCall, chat: ChatFormat, limits: Limits) -> Steps[Observation]:
        error = call_error(trajectory.task.tools, call)
        if error is None:
            return (yield from self.inner.respond(trajectory, call, chat, limits))
        return feed_value(trajectory.sequences[0], error, Evidence.GIVEN, chat)


def rehearsing_chat(trajectory: Trajectory, call: ToolCall, *, grounded: bool) -> list[dict[str, Any]]:
    """grounded: it shows the recorded calls of earlier user turns."""
    known = chain(*trajectory.task.recorded[: len(trajectory.answers)]) if grounded else ()
    return rehearse_messages(trajectory.task.tools, trajectory.messages, call, known)


def write_output(
    trajectory: Trajectory,
    sequence: Sequence,
    role: Role,
    chat: ChatFormat,
    limits: Limits,
    evidence: Evidence = Evidence.CLAIMED,
    *,
    model: str = "",
) -> Steps[str | None]:
    """One output of a model, appended to `sequence`. Returns its text, or None if a cap ended the trajectory.

    role: who writes it; CONTEXT is one who is not trained. model: its name, for the log, unless it is ACT.
    A prompt is never shortened: one that is too long ends the trajectory.
    """
    if len(sequence) >= limits.max_context_tokens:
        trajectory.status, trajectory.reason = Status.TRUNCATED, "context_tokens"
        return None
    in_slot = role is not Role.ACT and sequence is trajectory.sequences[0]
    stops = chat.rehearse_stops if in_slot else chat.act_stops
    provenance = {} if role is Role.ACT else {"model": model, "prompt_hash": content_hash(sequence.ids)}
    [completion] = yield [Request(sequence, role, stops, limits.max_new_tokens)]
    sequence.segments.append(
        Segment(
            role,
            completion.ids,
            evidence,
            logprobs=None if role is Role.CONTEXT else completion.logprobs,
            finish_reason=completion.finish_reason,
            provenance=provenance,
        )
    )
    if completion.finish_reason == "length":
        trajectory.status, trajectory.reason = Status.TRUNCATED, "new_tokens"
        return None
    return chat.text(completion.ids) if in_slot else chat.turn_text(completion.ids)


def fail_output(trajectory: Trajectory, sequence: Sequence, reason: str) -> None:
    """The last output of `sequence` cannot be read: the trajectory ends with a known low value."""
    sequence.segments[-1].finish_reason = "parse_error"
    trajectory.status, trajectory.reason = Status.PARSE_ERROR, reason


def feed_value(stream: Sequence, value: Any, evidence: Evidence, chat: ChatFormat) -> Observation:
    """Append JSON as a response."""
    text = to_json(value)
    feed_response(stream, text, evidence, chat)
    return Observation(text, value, evidence=evidence)


def feed_response(
    stream: Sequence, text: str, evidence: Evidence, chat: ChatFormat, *, provenance: dict[str, str] | None = None
) -> None:
    """Append a response as context. What a real environment returned is logged with the hash of its payload."""
    if provenance is None:
        provenance = {"payload_hash": content_hash(text)} if evidence is Evidence.OBSERVED else {}
    stream.segments.append(Segment(Role.CONTEXT, chat.response(text), evidence, provenance=provenance))
