"""The data that travels through one training step: Task -> Trajectory -> Batch.

A trajectory is token-exact: the ids that were sampled are the ids that are trained; nothing is decoded and
re-encoded. History is append-only. Index t of every (B, T) tensor means token t of the sequence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Protocol, TypeVar

from torch import Tensor


class Role(IntEnum):
    """Who wrote a token. CONTEXT is everyone who is not trained; its tokens carry no loss and no advantage."""

    CONTEXT = 0
    ACT = 1
    REHEARSE = 2


class Evidence(StrEnum):
    """How far a segment can be trusted as a statement about the world."""

    GIVEN = "given"  # prompts, user turns and the framing between outputs
    CLAIMED = "claimed"  # written by ACT
    REHEARSED = "rehearsed"  # written by the policy in the role REHEARSE
    SIMULATED = "simulated"  # written by something that stands in for the environment
    OBSERVED = "observed"  # returned by a real environment (or recorded from one)


class Status(StrEnum):
    """How a trajectory ended. Only FINISHED has an answer; FAULT has an unknown reward."""

    FINISHED = "finished"
    PARSE_ERROR = "parse_error"
    TRUNCATED = "truncated"
    FAULT = "fault"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]

    def key(self) -> str:
        """Canonical text: equal calls have equal keys whatever the order of their arguments."""
        return f"{self.name} {canonical_json(self.arguments)}"


@dataclass(frozen=True)
class Action:
    """What ACT's text means: `calls` to run, or with no calls a final answer in `content`.

    error: set when the text asks for a call that cannot be read; `calls` is then empty.
    thinking: what the think blocks hold, in order.
    """

    content: str
    calls: list[ToolCall]
    error: str | None = None
    thinking: str = ""


@dataclass(frozen=True)
class Observation:
    """What a response's text means: `value` is the JSON object or array, or None with an `error`.

    evidence: how far it can be trusted; unless said otherwise REHEARSE wrote it.
    """

    text: str
    value: Any = None
    error: str | None = None
    evidence: Evidence = Evidence.REHEARSED


@dataclass(frozen=True)
class RecordedCall:
    """A call of a recorded dialogue and the text of its response."""

    call: ToolCall
    response: str


@dataclass(frozen=True)
class Task:
    """One problem: what the agent is told (`system`, `tools`, `user_turns`) and how it is judged (`goal`).

    world: the state behind a real environment. Only that environment reads it: prompts and rewards never do.
    recorded: [turn][call] of a reference dialogue, to be shown to REHEARSE or reused where the settings say so.
    """

    id: str
    system: str
    tools: list[dict[str, Any]]
    user_turns: list[str]
    kind: str = ""
    goal: Any = None
    world: Any = None
    recorded: tuple[tuple[RecordedCall, ...], ...] = ()


@dataclass
class Segment:
    """A run of tokens by one author.

    ids: (n,) token ids exactly as sampled or as fed.
    logprobs: (n,) sampling-time log-probabilities, None for CONTEXT and for forced text.
    finish_reason: "stop", "length" or "parse_error" for an output, None for CONTEXT.
    provenance: payload hash of an observed segment; model name and prompt hash of a rehearsed one.
    """

    role: Role
    ids: list[int]
    evidence: Evidence
    logprobs: list[float] | None = None
    finish_reason: str | None = None
    provenance: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Sequence:
    """One token stream: what a single forward pass sees. `open` until nothing more will be appended.

    Compared by identity: a KV cache row belongs to this very stream.
    """

    segments: list[Segment] = field(default_factory=list)
    open: bool = True

    @property
    def ids(self) -> list[int]:
        return [i for segment in self.segments for i in segment.ids]

    @property
    def role_ids(self) -> list[int]:
        return [int(segment.role) for segment in self.segments for _ in segment.ids]

    def __len__(self) -> int:
        return sum(len(segment.ids) for segment in self.segments)


@dataclass(frozen=True)
class Exchange:
    """One call and the response the agent saw for it; None if that could not be read.

    turn: of the user. round: ACT outputs that asked for calls. Both count from 0.
    segment: where the response stands in the ACT stream; None if the exchange was not part of an episode.
    """

    call: ToolCall
    response: Any
    turn: int
    round: int
    evidence: Evidence
    segment: int | None = field(default=None, compare=False)


class CallStatus(StrEnum):
    """How a call went, or would go.

    A validation error says that the call itself is wrong (its tool, its arguments, an id); a permission error that it
    is understood and not allowed, to this caller or in this state. UNKNOWN: the response tells neither.
    """

    SUCCESS = "success"
    PERMISSION_ERROR = "permission_error"
    VALIDATION_ERROR = "validation_error"
    UNKNOWN = "unknown"


class Decision(StrEnum):
    """What became of a call that was predicted: by the settings (executed, blocked), or by whoever was asked."""

    EXECUTED = "executed"
    BLOCKED = "blocked"
    APPROVED = "approved"
    DECLINED = "declined"


@dataclass
class Prediction:
    """What the policy says would happen if a call was executed, and what became of it; see `envace.gate`.

    exchange: index of the call in `Trajectory.exchanges`. risk: of its tool. turn, round: as in Exchange.
    status, confidence: the most frequent status of the imagined responses, and its share of them.
    response: the imagined response that stands for them, None if none could be read. change: what it would change.
    happened: status of the real response. agreement: (equal, total) fields of the imagined and the real response.
        Both are None if there was no execution, or if it broke; agreement also without an imagined response.
    """

    call: ToolCall
    exchange: int
    turn: int
    round: int
    risk: str
    status: CallStatus
    confidence: float
    response: Any
    change: dict[str, Any]
    decision: Decision | None = None
    happened: CallStatus | None = None
    agreement: tuple[int, int] | None = None

    @property
    def is_held_back(self) -> bool:
        return self.decision in (Decision.BLOCKED, Decision.DECLINED)


FILTERED = "filtered: "  # how the reason of a trajectory begins that a filter left out


@dataclass
class Trajectory:
    """One episode. In view `shared` it has one sequence; in view `separate` the ACT sequence comes first.

    reward: None means unknown (a service fault); it then leaves the loss and the baseline.
    reason: which cap or which parse error ended it; "gate" if user turns were left out for an item not met; else "".
    answers: the final answer of each completed user turn. rounds: ACT outputs that asked for calls.
    verdicts: of a judge on each completed user turn, [turn][variant][step][item]; see `envace.checklist`.
    predictions: of calls to risky tools, before they were executed or held back.
    """

    task: Task
    group_id: str
    sequences: list[Sequence] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    verdicts: list[Any] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    rounds: int = 0
    status: Status = Status.FINISHED
    reason: str = ""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)

    @property
    def executed(self) -> list[Exchange]:
        """The exchanges whose call reached the environment: all but those that a gate held back."""
        held_back = {p.exchange for p in self.predictions if p.is_held_back}
        return [exchange for i, exchange in enumerate(self.exchanges) if i not in held_back]

    @property
    def succeeded(self) -> bool:
        """Whether the reward is 1, up to the rounding of the weights that it is summed from."""
        return self.reward is not None and self.reward > 1 - 1e-5

    @property
    def is_filtered(self) -> bool:
        """Whether the reward is unknown because a filter left the trajectory out."""
        return self.reason.startswith(FILTERED)

    def outputs(self) -> list[Segment]:
        """The segments the policy wrote, in order of generation within each sequence."""
        return [s for sequence in self.sequences for s in sequence.segments if s.role is not Role.CONTEXT]


@dataclass(frozen=True)
class Limits:
    """Caps on an episode. Reaching one ends it with status TRUNCATED; it is never taken for an answer."""

    max_rounds: int
    max_parallel_calls: int
    max_context_tokens: int
    max_new_tokens: int


@dataclass(frozen=True)
class Request:
    """Please continue `sequence` (its ids are the prompt) until one of `stop_ids` or `max_new_tokens`.

    role: who is asked; CONTEXT is a simulator that is not trained.
    """

    sequence: Sequence
    role: Role
    stop_ids: frozenset[int]
    max_new_tokens: int


@dataclass(frozen=True)
class Completion:
    """ids: what was sampled, with the stop token. logprobs: same length. finish_reason: "stop" or "length"."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str


Result = TypeVar("Result")
# A coroutine that asks for completions; whoever drives it decides how they are batched. In an episode that `gather`
# drives it may also wait for a service. It is sent the list[Completion]; None to begin it, and behind a Wait.
Steps = Generator["list[Request] | Wait", Any, Result]
Generate = Callable[[list[Request]], list[Completion]]


@dataclass(frozen=True)
class Wait:
    """Go on when `future` is done. is_last: nothing will be generated after that."""

    future: Future[Any]
    is_last: bool


class UserError(RuntimeError):
    """Something the user can put right. The message is one line: what, where, what to do."""


class Interruption(UserError):
    """A service has failed for too long. All ranks raise it alike and between two updates, so a checkpoint is saved."""


class Executable(Protocol):
    """A stateful world that runs calls. Raises ServiceFault when it is broken, never for a bad call."""

    def execute(self, call: ToolCall) -> Any: ...


class ServiceFault(RuntimeError):
    """An environment, simulator or judge broke. The trajectory's reward is unknown, not 0."""


@dataclass
class Batch:
    """Sequences for one forward pass. All tensors (B, T); index t is token t.

    attention_mask: None if the sequences are packed, one behind the other in one row: position_ids start anew there.
    weights: the loss weight of a token; 0 on context and padding.
    advantages: the advantage of the output a token belongs to; 0 on context and padding.
    old_logprobs, ref_logprobs: filled before the update, None while not needed.
    num_scored: how many tokens carry weight, the most of any rank, as ranks compute them in equally many chunks.
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor
    role_ids: Tensor
    weights: Tensor
    advantages: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    num_scored: int = 0


def first_line(error: BaseException) -> str:
    """What an error says, for a message of one line; its kind if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def canonical_json(value: Any) -> str:
    """Keys sorted, no spaces, 3.0 written as 3: equal values have equal text."""

    def normal(v: Any) -> Any:
        if isinstance(v, float) and v.is_integer():
            return int(v)
        if isinstance(v, dict):
            return {k: normal(x) for k, x in v.items()}
        return [normal(x) for x in v] if isinstance(v, list) else v

    return json.dumps(normal(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def content_hash(value: Any) -> str:
    """First 16 hex digits of SHA-256 over a string, or over the canonical JSON of anything else."""
    text = value if isinstance(value, str) else canonical_json(value)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
