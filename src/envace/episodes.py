"""An episode is a coroutine that asks for outputs; one driver batches all live episodes.

The episode knows a `generate` callable and an environment, not an engine. Training and evaluation unfold through the
same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from contextlib import closing
from itertools import chain, islice
from typing import Any, TypeVar

from envace.chat import ChatFormat, parse_action
from envace.environments import Environment, fail_output, feed_response, write_output
from envace.prompts import malformed_call_error, to_json
from envace.types import (
    Action,
    Completion,
    Evidence,
    Exchange,
    Generate,
    Limits,
    Request,
    Result,
    Role,
    Segment,
    Sequence,
    ServiceFault,
    Status,
    Steps,
    Task,
    Trajectory,
    Wait,
)

Item = TypeVar("Item", bound=tuple[Any, ...])
EndTurn = Callable[[Trajectory], Steps[bool]]
WriteAction = Callable[[Trajectory, ChatFormat, Limits], Steps[str | None]]


def go_on(trajectory: Trajectory) -> Steps[bool]:
    """Every user turn is followed by the next one."""
    return True
    yield  # makes this a coroutine


def opening(task: Task) -> list[dict[str, str]]:
    """The messages that an episode begins with. An empty system message is none."""
    system = [{"role": "system", "content": task.system}] if task.system else []
    return [*system, {"role": "user", "content": task.user_turns[0]}]


def begin(task: Task, chat: ChatFormat, group_id: str = "", *, memory: str = "") -> Trajectory:
    """A trajectory with its prompt and nothing else.

    memory: what was rehearsed beforehand; it stands at the end of the system message, as a segment of its own.
    """
    trajectory = Trajectory(task, group_id or task.id, sequences=[Sequence()])
    trajectory.messages += opening(task)
    parts = [(chat.prompt(trajectory.messages, task.tools), Evidence.GIVEN)]
    if memory:
        before, inside, behind = chat.prompt_around(memory, trajectory.messages, task.tools)
        parts = [(before, Evidence.GIVEN), (inside, Evidence.REHEARSED), (behind, Evidence.GIVEN)]
    trajectory.sequences[0].segments += [Segment(Role.CONTEXT, ids, evidence) for ids, evidence in parts]
    return trajectory


def write_action(trajectory: Trajectory, chat: ChatFormat, limits: Limits) -> Steps[str | None]:
    """ACT's next output, as it comes."""
    return write_output(trajectory, trajectory.sequences[0], Role.ACT, chat, limits)


def episode(
    task: Task,
    environment: Environment,
    chat: ChatFormat,
    limits: Limits,
    *,
    group_id: str = "",
    end_turn: EndTurn = go_on,
    memory: str = "",
    act: WriteAction = write_action,
) -> Steps[Trajectory]:
    """Unfold one trajectory: for each scripted user turn, ACT and the environment alternate until ACT answers.

    Rollout factorisation, where the environment is the policy in the role REHEARSE:

        pi(tau | x) = prod_k pi(a_k | x, h_k) * prod_j pi(o_kj | x, h_k, a_k, o_k1..o_k(j-1))

    end_turn: called after each answer; tells whether the next user turn comes.
    memory: see `begin`. act: how each of ACT's outputs comes about.
    """
    trajectory = begin(task, chat, group_id, memory=memory)
    stream = trajectory.sequences[0]
    try:
        for turn, text in enumerate(task.user_turns):
            if turn:
                add_user_turn(trajectory, text, chat)
            yield from serve(trajectory, environment, chat, limits, act)
            if trajectory.status is not Status.FINISHED:
                break
            stream.open = turn + 1 < len(task.user_turns)
            if not (yield from end_turn(trajectory)):
                trajectory.reason = "gate" if turn + 1 < len(task.user_turns) else ""
                break
    except ServiceFault as fault:
        trajectory.status, trajectory.reason = Status.FAULT, str(fault)
    finally:
        stream.open = False
    return trajectory


def add_user_turn(trajectory: Trajectory, text: str, chat: ChatFormat) -> None:
    trajectory.messages.append({"role": "user", "content": text})
    trajectory.sequences[0].segments.append(Segment(Role.CONTEXT, chat.user_turn(text), Evidence.GIVEN))


def serve(
    trajectory: Trajectory,
    environment: Environment,
    chat: ChatFormat,
    limits: Limits,
    act: WriteAction = write_action,
) -> Steps[None]:
    """One user turn: ACT, responses, ACT, ... until ACT answers without a call or something ends the trajectory."""
    stream = trajectory.sequences[0]
    while True:
        text = yield from act(trajectory, chat, limits)
        if text is None:
            return
        action = parse_action(text)
        trajectory.messages.append({"role": "assistant", "content": text})
        if action.error and not environment.answers_malformed_calls:
            fail_output(trajectory, stream, f"act: {action.error}")
            return
        if not action.calls and not action.error:
            trajectory.answers.append(action.content)
            return
        if exceeded := _cap_reached(trajectory, action, limits):
            trajectory.status, trajectory.reason = Status.TRUNCATED, exceeded
            return
        trajectory.rounds += 1
        yield from _respond(trajectory, environment, action, chat, limits)
        if trajectory.status is not Status.FINISHED:
            return


def _respond(
    trajectory: Trajectory, environment: Environment, action: Action, chat: ChatFormat, limits: Limits
) -> Steps[None]:
    """One response per call, in order, inside one user block.

    In view `shared` call 2 sees result 1, for both stand in one stream. `messages` grow only behind the last response,
    so in view `separate` it does not.
    """
    stream = trajectory.sequences[0]
    results = []
    if action.error:
        stream.segments.append(Segment(Role.CONTEXT, chat.response_open(0), Evidence.GIVEN))
        text = to_json(malformed_call_error(action.error))
        feed_response(stream, text, Evidence.GIVEN, chat)  # our words, not those of the environment
        results.append({"role": "tool", "content": text})
    for index, call in enumerate(action.calls):
        stream.segments.append(Segment(Role.CONTEXT, chat.response_open(index), Evidence.GIVEN))
        observation = yield from environment.respond(trajectory, call, chat, limits)
        if trajectory.status is Status.TRUNCATED:
            return
        # A response that cannot be read is an exchange too, with value None.
        trajectory.exchanges.append(
            Exchange(
                call,
                observation.value,
                turn=len(trajectory.answers),
                round=trajectory.rounds - 1,
                evidence=observation.evidence,
                segment=len(stream.segments) - 1,
            )
        )
        if trajectory.status is not Status.FINISHED:
            return
        results.append({"role": "tool", "content": observation.text})
    trajectory.messages += results
    stream.segments.append(Segment(Role.CONTEXT, chat.response_close(), Evidence.GIVEN))


def _cap_reached(trajectory: Trajectory, action: Action, limits: Limits) -> str:
    if trajectory.rounds >= limits.max_rounds:
        return "rounds"
    return "parallel_calls" if len(action.calls) > limits.max_parallel_calls else ""


def gather(episodes: Iterable[Steps[Result]]) -> Steps[list[Result]]:
    """Advance several episodes together: one flat list of requests per round, results in the order given.

    An episode that waits for a service sits out one round of the others, which goes on meanwhile; after that all wait
    for it, unless it has nothing more to generate. So what is generated together, and with it what is sampled, does not
    depend on how quick a service is.
    """
    live = list(episodes)
    results: dict[int, Result] = {}
    pending: dict[int, list[Request]] = {}
    waiting: dict[int, Wait] = {}

    def advance(i: int, completions: list[Completion] | None) -> None:
        try:
            asked = live[i].send(completions)
        except StopIteration as stop:
            results[i] = stop.value
        else:
            if isinstance(asked, Wait):
                waiting[i] = asked
            else:
                pending[i] = asked

    try:
        for i in range(len(live)):
            advance(i, None)
        while pending or waiting:
            order = sorted(pending)
            awaited = [i for i in waiting if not waiting[i].is_last] or ([] if order else list(waiting))
            requests, futures = [pending.pop(i) for i in order], [waiting.pop(i).future for i in awaited]
            completions = iter((yield [*chain(*requests)]) if order else ())
            for i, asked in zip(order, requests, strict=True):
                advance(i, [next(completions) for _ in asked])
            wait(futures)
            for i in awaited:
                advance(i, None)
    finally:  # an error in one ends the others too, and each closes its streams
        for one in live:
            one.close()
    return [results[i] for i in range(len(live))]


def drive(steps: Steps[Result], generate: Generate) -> Result:
    """Run a coroutine to its end with `generate` answering its requests. An error of `generate` closes it.

    One that waits for a service has to be inside `gather`.
    """
    completions = None
    with closing(steps):
        while True:
            try:
                asked = steps.send(completions)
            except StopIteration as stop:
                return stop.value
            if isinstance(asked, Wait):
                raise TypeError("only `gather` waits for services")
            completions = generate(asked)


def rollout(
    tasks: list[Task],
    generate: Generate,
    environment_for: Callable[[Task], Environment],
    chat: ChatFormat,
    limits: Limits,
    *,
    end_turn: EndTurn = go_on,
    samples: int = 1,
    share: Callable[[list[tuple[str, Task]]], list[tuple[str, Task]]] = list,
    batch_size: int = 128,
    on_done: Callable[[int], object] = lambda n: None,
) -> list[Trajectory]:
    """`samples` trajectories of each task, those of one task adjacent and in one group.

    Group of rollouts: tau_1..tau_K ~ pi(. | x), for each x of the batch

    share: picks those that this process unfolds, as (group_id, task); a group may be divided.
    batch_size, on_done: as in `in_batches`.
    """
    mine = share(repeated(tasks, samples))
    return in_batches(
        mine,
        lambda group, task: episode(task, environment_for(task), chat, limits, group_id=group, end_turn=end_turn),
        generate,
        batch_size=batch_size,
        on_done=on_done,
    )


def repeated(tasks: list[Task], samples: int) -> list[tuple[str, Task]]:
    """(group_id, task) of each episode. The position makes a group of its own of a task that was drawn twice."""
    return [(f"{i}:{task.id}", task) for i, task in enumerate(tasks) for _ in range(samples)]


def in_batches(
    items: Iterable[Item],
    unfold: Callable[..., Steps[Result]],
    generate: Generate,
    *,
    batch_size: int,
    on_done: Callable[[int], object] = lambda n: None,
) -> list[Result]:
    """What `unfold(*item)` comes to for each item, at most `batch_size` of them alive together.

    The next ones start when all of those have ended, because a row that left a KV cache cannot be refilled.
    `on_done(n)` is called after each batch of n.
    """
    results: list[Result] = []
    for batch in batched(items, batch_size):
        results += drive(gather([unfold(*item) for item in batch]), generate)
        on_done(len(batch))
    return results


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    left = iter(items)
    while batch := list(islice(left, size)):
        yield batch
