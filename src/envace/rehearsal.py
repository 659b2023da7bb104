"""Private rehearsal at test time: imagine whole trajectories, judge them, keep a memory, then act once.

    rehearsals   whole trajectories, ACT and REHEARSE in turn as in training; user turns after the first are imagined
    evaluations  of each by the policy itself: what went wrong, how to fix it
    memory       one text of bounded length out of both
    committed    the one execution, which sees the memory; see `envace.committed`

| mode       | rehearsals                                                                                      |
| parallel   | N, independent of each other, generated together                                                |
| sequential | N, one after another; each sees the calls, responses and evaluations of those before it          |
| candidates | no memory: before each action N next ones are imagined to the end of the turn; the best is taken |

Nothing in here takes an executable environment: whoever commits opens one afterwards.

From the paper: one policy in both roles, whole imagined trajectories, parallel and sequential, self-evaluation without
a judge, a condensed memory, one execution. Ours, as nothing is published on it: every prompt, what the memory holds and
where it stands (at the end of the system message, once for the whole dialogue), imagined user turns, verification,
agreement and candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from envace.chat import ChatFormat, parse_action
from envace.environments import Environment, fail_output, write_output
from envace.episodes import add_user_turn, begin, gather, serve, write_action
from envace.filters import FILTERS
from envace.prompts import (
    EVALUATE,
    MEMORY_HEADER,
    USER_DONE,
    broken_off,
    call_text,
    rehearsal_note,
    to_json,
    user_messages,
)
from envace.schemas import call_error
from envace.settings import RehearsalConfig
from envace.types import (
    Evidence,
    Limits,
    Role,
    Segment,
    Sequence,
    ServiceFault,
    Status,
    Steps,
    Task,
    Trajectory,
)

Note = tuple[tuple[str, ...], str, bool | None]  # what happened in rehearsals that went alike, evaluation, verdict
VERDICTS = {"good": True, "bad": False}


@dataclass(frozen=True)
class Rehearsal:
    """An imagined trajectory and what the policy says of it.

    verdict: whether it calls the rehearsal good; None if it says neither good nor bad.
    plan: the calls, equal for equal ones however they are written.
    """

    trajectory: Trajectory
    evaluation: str
    verdict: bool | None

    @property
    def plan(self) -> tuple[str, ...]:
        return tuple(exchange.call.key() for exchange in self.trajectory.exchanges)


@dataclass(frozen=True)
class Memory:
    """text: for `begin`; "" if there is nothing to say. rehearsals: all of them.

    left_out: how many of them are not in the text, by why: "verify", "select" or "budget".
    """

    text: str
    rehearsals: list[Rehearsal]
    left_out: Counter[str]


@dataclass(frozen=True)
class Rehearser:
    """How one model rehearses. imagine: a task -> the environment that its calls get, never an executable one."""

    settings: RehearsalConfig
    chat: ChatFormat
    limits: Limits
    imagine: Callable[[Task], Environment]
    separate: bool = False

    def prepare(self, task: Task) -> Steps[Memory]:
        """Rehearse a task as the settings say and condense that into a memory."""
        rehearsals = yield from MODES[self.settings.mode](self, task)
        return self.condense(rehearsals)

    def rehearse(self, task: Task, earlier: str = "") -> Steps[Rehearsal]:
        """One imagined trajectory and its evaluation. Of the task only the first user turn is read."""
        trajectory = begin(task, self.chat, memory=earlier)
        try:
            yield from self._unfold(trajectory)
            evaluation = yield from self.evaluate(trajectory)
        except ServiceFault as fault:
            trajectory.status, trajectory.reason = Status.FAULT, str(fault)
            evaluation = broken_off(trajectory.reason)
        finally:
            close(trajectory)
        return Rehearsal(trajectory, evaluation, verdict_of(evaluation))

    def _unfold(self, trajectory: Trajectory) -> Steps[None]:
        environment = self.imagine(trajectory.task)
        while True:
            yield from serve(trajectory, environment, self.chat, self.limits)
            turns = len(trajectory.answers)
            if trajectory.status is not Status.FINISHED or turns >= self.settings.user_turns:
                return
            if not (yield from self._imagine_user_turn(trajectory)):
                return

    def _imagine_user_turn(self, trajectory: Trajectory) -> Steps[str]:
        """What the user says next, "" if nothing more. In view shared it is written in the user's own slot.

        Thinking before it stays in the stream and is no part of what is said.
        """
        stream = trajectory.sequences[0]
        if self.separate:
            prompt = self.chat.prompt(user_messages(trajectory.messages))
            sequence = Sequence([Segment(Role.CONTEXT, prompt, Evidence.GIVEN)])
            trajectory.sequences.append(sequence)
        else:
            sequence = stream
            stream.segments.append(Segment(Role.CONTEXT, self.chat.user_open(), Evidence.GIVEN))
        text = yield from write_output(
            trajectory, sequence, Role.REHEARSE, self.chat, self.limits, Evidence.REHEARSED, model="imagined user"
        )
        if self.separate:
            sequence.open = False
        if text is None:
            return ""
        said = parse_action(text)
        ends_as_turn = sequence.segments[-1].ids[-1] in self.chat.act_stops
        if said.calls or said.error or not ends_as_turn:
            reason = said.error or ("a user calls no tool" if ends_as_turn else "the turn does not end as one")
            fail_output(trajectory, sequence, f"user: {reason}")
            return ""
        if said.content in ("", USER_DONE):
            return ""
        if self.separate:
            stream.segments.append(Segment(Role.CONTEXT, self.chat.user_turn(said.content), Evidence.REHEARSED))
        else:
            stream.segments.append(Segment(Role.CONTEXT, self.chat.act_open(), Evidence.GIVEN))
        trajectory.messages.append({"role": "user", "content": said.content})
        return said.content

    def evaluate(self, trajectory: Trajectory) -> Steps[str]:
        """What went wrong and how to fix it, as the policy answers when it is asked behind the rehearsal.

        Self-evaluation: e_n ~ pi(. | x, tau_n, "was it right?")

        "" if it does not come to an end of its answer: that is no verdict on a rehearsal that did.
        """
        if trajectory.status is not Status.FINISHED:
            return broken_off(trajectory.reason)
        add_user_turn(trajectory, EVALUATE, self.chat)
        text = yield from write_output(trajectory, trajectory.sequences[0], Role.ACT, self.chat, self.limits)
        if text is None:
            trajectory.status, trajectory.reason = Status.FINISHED, ""
            return ""
        trajectory.messages.append({"role": "assistant", "content": text})
        return " ".join((parse_action(text).content or text).split())

    def condense(self, rehearsals: list[Rehearsal], *, in_full: bool = False) -> Memory:
        """What is worth remembering, in at most `memory_tokens` tokens; a note is there whole or not at all.

        Rehearsal memory: m_x = condense((tau_1, e_1), ..., (tau_N, e_N)), of at most rehearsal.memory_tokens tokens

        Rehearsals that went alike share a note. Where there is not enough room, notes without a readable verdict leave
        first, and of equally useful ones the oldest. in_full: notes tell the imagined responses too.
        """
        left_out: Counter[str] = Counter()
        fit = [r for r in rehearsals if not VERIFIERS[self.settings.verify](r.trajectory)]
        left_out["verify"] = len(rehearsals) - len(fit)
        chosen = SELECTIONS[self.settings.select](fit)
        left_out["select"] = len(fit) - len(chosen)
        alike: Counter[Note] = Counter((tuple(events(r, in_full=in_full)), r.evaluation, r.verdict) for r in chosen)
        notes = list(alike)
        while notes and len(self.chat.literal(text := self._text(notes, alike))) > self.settings.memory_tokens:
            _, dropped = min((notes[i][2] is not None, i) for i in range(len(notes)))
            left_out["budget"] += alike[notes.pop(dropped)]
        return Memory(text if notes else "", rehearsals, +left_out)

    @staticmethod
    def _text(notes: list[Note], alike: Counter[Note]) -> str:
        lines = [rehearsal_note(alike[note], list(note[0]), note[1]) for note in notes]
        return "\n".join([MEMORY_HEADER, *lines])

    def choose_action(self, trajectory: Trajectory, chat: ChatFormat, limits: Limits) -> Steps[str | None]:
        """ACT's next output, the best of `n` whose outcome was imagined; for `act` of `episode`.

        Best: one whose rehearsal is called good; of those what most of them do; of those the first.
        """
        if not self.settings.n:
            return (yield from write_action(trajectory, chat, limits))
        copies = [fork(trajectory) for _ in range(self.settings.n)]
        begun = len(trajectory.sequences[0].segments)
        evaluations = yield from gather([self._look_ahead(copy) for copy in copies])
        candidates = [
            (copy.sequences[0].segments[begun], verdict_of(evaluation) is True)
            for copy, evaluation in zip(copies, evaluations, strict=True)
            if len(copy.sequences[0].segments) > begun
        ]
        if not candidates:
            trajectory.status, trajectory.reason = copies[0].status, copies[0].reason
            return None
        votes = Counter((good, deed(chat.turn_text(output.ids))) for output, good in candidates)
        output, _ = max(candidates, key=lambda c: (c[1], votes[c[1], deed(chat.turn_text(c[0].ids))]))
        trajectory.sequences[0].segments.append(output)
        if output.finish_reason == "length":
            trajectory.status, trajectory.reason = Status.TRUNCATED, "new_tokens"
            return None
        # A copy in which it could not be read has noted that on the output, which is shared.
        output.finish_reason = "stop"
        return chat.turn_text(output.ids)

    def _look_ahead(self, copy: Trajectory) -> Steps[str]:
        try:
            yield from serve(copy, self.imagine(copy.task), self.chat, self.limits)
            return (yield from self.evaluate(copy))
        except ServiceFault as fault:
            copy.status, copy.reason = Status.FAULT, str(fault)
            return broken_off(copy.reason)
        finally:
            close(copy)


def parallel(rehearser: Rehearser, task: Task) -> Steps[list[Rehearsal]]:
    """Parallel rehearsal: tau_1..tau_N ~ pi(. | x), independent of each other"""
    return gather([rehearser.rehearse(task) for _ in range(rehearser.settings.n)])


def sequential(rehearser: Rehearser, task: Task) -> Steps[list[Rehearsal]]:
    """Sequential rehearsal: tau_n ~ pi(. | x, m(tau_1, e_1, ..., tau_(n-1), e_(n-1)))"""
    rehearsals: list[Rehearsal] = []
    for _ in range(rehearser.settings.n):
        earlier = rehearser.condense(rehearsals, in_full=True).text
        rehearsals.append((yield from rehearser.rehearse(task, earlier)))
    return rehearsals


MODES = {"parallel": parallel, "sequential": sequential}


def events(rehearsal: Rehearsal, *, in_full: bool) -> list[str]:
    """The calls of a rehearsal, in_full: with their responses and the answers."""
    exchanges = rehearsal.trajectory.exchanges
    if not in_full:
        return [call_text(e.call) for e in exchanges]
    calls = [f"{call_text(e.call)} -> {to_json(e.response)}" for e in exchanges]
    return [*calls, *rehearsal.trajectory.answers]


def deed(text: str) -> tuple[str, ...]:
    """What an output of ACT does: its calls, or the answer it gives."""
    action = parse_action(text)
    return tuple(call.key() for call in action.calls) or (action.content,)


def verdict_of(evaluation: str) -> bool | None:
    """What an evaluation begins with: good, bad, or neither."""
    first = evaluation.split(maxsplit=1)[:1]
    return VERDICTS.get(first[0].strip(".,:;!*").lower()) if first else None


def fits_schemas(trajectory: Trajectory) -> str:
    """What is wrong with a call by its tool's schema; "" if nothing is."""
    errors = (call_error(trajectory.task.tools, exchange.call) for exchange in trajectory.exchanges)
    return next((f"{error['error_tool_call']['message']}" for error in errors if error), "")


# As in `envace.filters`: a trajectory -> what is wrong with it, "" if nothing.
VERIFIERS = {"none": FILTERS["all"], "schema": fits_schemas, "consistency": FILTERS["consistent"]}


def all_of_them(rehearsals: list[Rehearsal]) -> list[Rehearsal]:
    return rehearsals


def agreement(rehearsals: list[Rehearsal]) -> list[Rehearsal]:
    """Those with the calls that most of them make; of equally many the ones that came first."""
    votes = Counter(rehearsal.plan for rehearsal in rehearsals)
    return [r for r in rehearsals if r.plan == votes.most_common(1)[0][0]]


SELECTIONS = {"all": all_of_them, "agreement": agreement}


def close(trajectory: Trajectory) -> None:
    """Nothing more will be appended to any of its streams, so a KV cache may drop their rows."""
    for sequence in trajectory.sequences:
        sequence.open = False


def fork(trajectory: Trajectory) -> Trajectory:
    """A copy that goes its own way from here; what was said so far is shared, as nothing changes it."""
    return replace(
        trajectory,
        sequences=[Sequence(list(trajectory.sequences[0].segments))],
        messages=list(trajectory.messages),
        exchanges=list(trajectory.exchanges),
        answers=list(trajectory.answers),
        predictions=list(trajectory.predictions),
    )
