"""Recorded dialogues -> training sequences for SFT."""

from __future__ import annotations

from typing import Any

from envace.chat import ChatFormat, parse_action, parse_observation
from envace.environments import feed_response
from envace.prompts import USER_DONE, execution_result, rehearse_messages, user_messages
from envace.types import Evidence, Role, Segment, Sequence, Task, ToolCall, Trajectory, UserError


class DialogueError(UserError):
    """A recorded dialogue breaks the expected order of messages; the message says where."""


def demonstration(
    task: Task, messages: list[dict[str, Any]], chat: ChatFormat, *, separate: bool = False, grounded: bool = False
) -> Trajectory:
    """A recorded dialogue as a trajectory for SFT, token for token as a rollout would have laid it out.

    messages: system (optional), user, assistant (raw text, calls inline), tool, ...; each assistant message with n
    calls, or with one call that cannot be read, is followed by n (or one) tool messages.
    The recorded responses stand where REHEARSE writes: in the ACT stream, or in chats of their own if `separate`.
    One that is no JSON object or array is context only: SFT teaches nothing that a rollout would refuse.
    grounded: the chats of view `separate` show the recorded calls of earlier user turns (`task.recorded`).
    A system message may have a "note", which stands at its end as `begin` puts a memory there. A user message that is
    "imagined" is one that the policy writes itself, in view `shared` in the user's own slot; an empty one says that the
    user has nothing more to ask.
    """
    trajectory = Trajectory(task, task.id, sequences=[Sequence()])
    stream = trajectory.sequences[0]
    first_user = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if first_user is None:
        raise DialogueError(f"dialogue {task.id}: no user message")
    head, rest = messages[: first_user + 1], messages[first_user + 1 :]
    if note := head[0].get("note"):
        before, inside, behind = chat.prompt_around(note, head, task.tools)
        _give(stream, before)
        stream.segments.append(Segment(Role.CONTEXT, inside, Evidence.REHEARSED))
        _give(stream, behind)
    else:
        _give(stream, chat.prompt(head, task.tools))
    trajectory.messages += head
    answered = False
    while rest:
        message, rest = rest[0], rest[1:]
        trajectory.messages.append(message)
        if message["role"] != ("user" if answered else "assistant"):
            raise DialogueError(f"dialogue {task.id}: unexpected {message['role']} message")
        if answered:
            if message.get("imagined"):
                _imagined_user_turn(trajectory, message["content"], chat, separate)
            else:
                _give(stream, chat.user_turn(message["content"]))
            answered = bool(message.get("imagined")) and not message["content"]
            continue
        stream.segments.append(
            Segment(Role.ACT, chat.output(message["content"]), Evidence.CLAIMED, finish_reason="stop")
        )
        action = parse_action(message["content"])
        expected = max(len(action.calls), 1 if action.error else 0)
        responses, rest = rest[:expected], rest[expected:]
        if [m["role"] for m in responses] != ["tool"] * expected:
            raise DialogueError(f"dialogue {task.id}: a call is not followed by its tool message")
        _responses(trajectory, action.calls, responses, chat, separate, grounded)
        trajectory.messages += responses
        answered = not responses
    stream.open = False
    return trajectory


def _responses(
    trajectory: Trajectory,
    calls: list[ToolCall],
    responses: list[dict[str, Any]],
    chat: ChatFormat,
    separate: bool,
    grounded: bool,
) -> None:
    stream = trajectory.sequences[0]
    for index, response in enumerate(responses):
        text = response["content"]
        _give(stream, chat.response_open(index))
        # A call that cannot be read never reaches REHEARSE, and what is no JSON it could not have written.
        written = execution_result(text) if separate else text
        by_rehearse = bool(calls) and parse_observation(written).error is None
        if by_rehearse and separate:
            trajectory.sequences.append(_rehearse_chat(trajectory, calls[index], text, chat, grounded))
        if by_rehearse and not separate:
            ids = chat.response(text)
            stream.segments.append(Segment(Role.REHEARSE, ids, Evidence.OBSERVED, finish_reason="stop"))
        else:
            feed_response(stream, text, Evidence.OBSERVED, chat)
    if responses:
        _give(stream, chat.response_close())


def _rehearse_chat(trajectory: Trajectory, call: ToolCall, text: str, chat: ChatFormat, grounded: bool) -> Sequence:
    task, current_turn = trajectory.task, sum(m["role"] == "user" for m in trajectory.messages) - 1
    known = [r for turn in task.recorded[:current_turn] for r in turn] if grounded else []
    prompt = chat.prompt(rehearse_messages(task.tools, trajectory.messages, call, known))
    return _asked(prompt, chat.output(execution_result(text)), Evidence.OBSERVED)


def _imagined_user_turn(trajectory: Trajectory, text: str, chat: ChatFormat, separate: bool) -> None:
    stream = trajectory.sequences[0]
    if separate:
        prompt = chat.prompt(user_messages(trajectory.messages[:-1]))
        trajectory.sequences.append(_asked(prompt, chat.output(text or USER_DONE), Evidence.GIVEN))
        if text:
            _give(stream, chat.user_turn(text))
        return
    _give(stream, chat.user_open())
    stream.segments.append(Segment(Role.REHEARSE, chat.output(text), Evidence.GIVEN, finish_reason="stop"))
    if text:
        _give(stream, chat.act_open())


def _asked(prompt: list[int], output: list[int], evidence: Evidence) -> Sequence:
    """What REHEARSE is asked and writes in a chat of its own."""
    written = Segment(Role.REHEARSE, output, evidence, finish_reason="stop")
    return Sequence([Segment(Role.CONTEXT, prompt, Evidence.GIVEN), written], open=False)


def _give(stream: Sequence, ids: list[int]) -> None:
    stream.segments.append(Segment(Role.CONTEXT, ids, Evidence.GIVEN))
