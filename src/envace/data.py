"""Where tasks come from, recorded dialogues -> training sequences, and the order in which items are drawn."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

from envace.chat import ChatFormat, parse_action
from envace.config import DataConfig
from envace.demo.source import DemoSource
from envace.environments import feed_response
from envace.prompts import execution_result, rehearse_messages
from envace.types import Evidence, Executable, Role, Segment, Sequence, Task, ToolCall, Trajectory, UserError


class CountsCalls(Protocol):
    calls: Counter[str]

    def state_dict(self) -> dict[str, int]: ...

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Source(Protocol):
    """What training and evaluation need to know about a set of tasks."""

    counter: CountsCalls

    def build_embedded_model(self, path: Path, seed: int) -> None: ...

    def demonstrations(self) -> list[tuple[Task, list[dict[str, Any]]]]: ...

    def train_tasks(self) -> list[Task]: ...

    def eval_tasks(self) -> list[Task]: ...

    def executable(self, task: Task, purpose: str) -> Executable: ...

    def reaches_right_state(self, trajectory: Trajectory) -> bool: ...

    def score(self, trajectory: Trajectory) -> tuple[float | None, dict[str, float]]: ...


SOURCES = {"demo": DemoSource}


def open_source(config: DataConfig) -> Source:
    return SOURCES[config.source](config)


class DialogueError(UserError):
    """A recorded dialogue breaks the expected order of messages; the message says where."""


def demonstration(
    task: Task, messages: list[dict[str, Any]], chat: ChatFormat, *, separate: bool = False
) -> Trajectory:
    """A recorded dialogue as a trajectory for SFT, token for token as a rollout would have laid it out.

    messages: system (optional), user, assistant (raw text, calls inline), tool, ...; each assistant message with n
    calls, or with one call that cannot be read, is followed by n (or one) tool messages.
    The recorded responses stand where REHEARSE writes: in the ACT stream, or in chats of their own if `separate`.
    """
    trajectory = Trajectory(task, task.id, sequences=[Sequence()])
    stream = trajectory.sequences[0]
    first_user = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if first_user is None:
        raise DialogueError(f"dialogue {task.id}: no user message")
    head, rest = messages[: first_user + 1], messages[first_user + 1 :]
    _give(stream, chat.prompt(head, task.tools))
    trajectory.messages += head
    answered = False
    while rest:
        message, rest = rest[0], rest[1:]
        trajectory.messages.append(message)
        if message["role"] != ("user" if answered else "assistant"):
            raise DialogueError(f"dialogue {task.id}: unexpected {message['role']} message")
        if answered:
            _give(stream, chat.user_turn(message["content"]))
            answered = False
            continue
        stream.segments.append(
            Segment(Role.ACT, chat.output(message["content"]), Evidence.CLAIMED, finish_reason="stop")
        )
        action = parse_action(message["content"])
        expected = max(len(action.calls), 1 if action.error else 0)
        responses, rest = rest[:expected], rest[expected:]
        if [m["role"] for m in responses] != ["tool"] * expected:
            raise DialogueError(f"dialogue {task.id}: a call is not followed by its tool message")
        _responses(trajectory, action.calls, responses, chat, separate)
        trajectory.messages += responses
        answered = not responses
    stream.open = False
    return trajectory


def _responses(
    trajectory: Trajectory, calls: list[ToolCall], responses: list[dict[str, Any]], chat: ChatFormat, separate: bool
) -> None:
    stream = trajectory.sequences[0]
    for index, response in enumerate(responses):
        _give(stream, chat.response_open(index))
        if not calls:
            # A call that cannot be read never reaches REHEARSE.
            feed_response(stream, response["content"], Evidence.OBSERVED, chat)
        elif separate:
            trajectory.sequences.append(_rehearse_chat(trajectory, calls[index], response["content"], chat))
            feed_response(stream, response["content"], Evidence.OBSERVED, chat)
        else:
            ids = chat.response(response["content"])
            stream.segments.append(Segment(Role.REHEARSE, ids, Evidence.OBSERVED, finish_reason="stop"))
    if responses:
        _give(stream, chat.response_close())


def _rehearse_chat(trajectory: Trajectory, call: ToolCall, text: str, chat: ChatFormat) -> Sequence:
    prompt = chat.prompt(rehearse_messages(trajectory.task.tools, trajectory.messages, call))
    output = chat.output(execution_result(text))
    return Sequence(
        [
            Segment(Role.CONTEXT, prompt, Evidence.GIVEN),
            Segment(Role.REHEARSE, output, Evidence.OBSERVED, finish_reason="stop"),
        ],
        open=False,
    )


def _give(stream: Sequence, ids: list[int]) -> None:
    stream.segments.append(Segment(Role.CONTEXT, ids, Evidence.GIVEN))


class Sampler:
    """Draws items without replacement, epoch after epoch, each epoch in its own seeded order."""

    def __init__(self, items: list[Any], seed: int):
        self.items = items
        self.seed = seed
        self.drawn = 0
        self._epoch, self._order = -1, []

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]

    def next(self, n: int) -> list[Any]:
        return [self._draw() for _ in range(n)]

    def _draw(self) -> Any:
        epoch, index = divmod(self.drawn, len(self.items))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self.items)))
            random.Random(f"{self.seed}-{epoch}").shuffle(self._order)
        self.drawn += 1
        return self.items[self._order[index]]
