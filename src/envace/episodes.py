"""An episode is a coroutine that asks for outputs; one driver batches all live episodes.

The episode knows a `generate` callable and an environment, not an engine. Training and evaluation unfold through the
same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import wait
from itertools import chain

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

EndTurn = Callable[[Trajectory], Steps[bool]]


def go_on(trajectory: Trajectory) -> Steps[bool]:
    """Every user turn is followed by the next one."""
    return True
    yield  # makes this a coroutine


def opening(task: Task) -> list[dict[str, str]]:
    """The messages that an episode begins with. An empty system message is none."""
    system = [{"role": "system", "content": task.system}] if task.system else []
    return [*system, {"role": "user", "content": task.user_turns[0]}]


def episode(
    task: Task,
    environment: Environment,
    chat: ChatFormat,
    limits: Limits,
    *,
    group_id: str = "",
    end_turn: EndTurn = go_on,
) -> Steps[Trajectory]:
    """Unfold one trajectory: for each scripted user turn, ACT and the environment alternate until ACT answers.

    end_turn: called after each answer; tells whether the next user turn comes.
    """
    trajectory = Trajectory(task, group_id or task.id, sequences=[Sequence()])
    stream = trajectory.sequences[0]
    try:
        for turn, text in enumerate(task.user_turns):
            trajectory.messages += [{"role": "user", "content": text}] if turn else opening(task)
            ids = chat.user_turn(text) if turn else chat.prompt(trajectory.messages, task.tools)
            stream.segments.append(Segment(Role.CONTEXT, ids, Evidence.GIVEN))
            yield from _user_turn(trajectory, environment, chat, limits, turn)
            if trajectory.status is not Status.FINISHED:
                break
            stream.open = turn + 1 < len(task.user_turns)
            if not (yield from end_turn(trajectory)):
                trajectory.reason = "gate" if turn + 1 < len(task.user_turns) else ""
                break
    except ServiceFault as fault:
        trajectory.status, trajectory.reason = Status.FAULT, str(fault)
    stream.open = False
    return trajectory


def _user_turn(
    trajectory: Trajectory, environment: Environment, chat: ChatFormat, limits: Limits, turn: int
) -> Steps[None]:
    """ACT, responses, ACT, ... until ACT answers without a call or something ends the trajectory."""
    stream = trajectory.sequences[0]
    while True:
        text = yield from write_output(trajectory, stream, Role.ACT, chat, limits)
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
        yield from _respond(trajectory, environment, action, chat, limits, turn)
        if trajectory.status is not Status.FINISHED:
            return


def _respond(
    trajectory: Trajectory, environment: Environment, action: Action, chat: ChatFormat, limits: Limits, turn: int
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
            Exchange(call, observation.value, turn, trajectory.rounds - 1, observation.evidence)
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


def gather(episodes: Iterable[Steps[Trajectory]]) -> Steps[list[Trajectory]]:
    """Advance several episodes together: one flat list of requests per round, results in the order given.

    An episode that waits for a service sits out one round of the others, which goes on meanwhile; after that all wait
    for it, unless it has nothing more to generate. So what is generated together, and with it what is sampled, does not
    depend on how quick a service is.
    """
    live = list(episodes)
    results: list[Trajectory | None] = [None] * len(live)
    pending: dict[int, list[Request]] = {}
    waiting: dict[int, Wait] = {}

    def advance(i: int, completions: list[Completion] | None) -> None:
        try:
            asked = live[i].send(completions)
        except StopIteration as stop:
            results[i] = stop.value
        else:
            (waiting if isinstance(asked, Wait) else pending)[i] = asked

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
    return results


def drive(steps: Steps[Result], generate: Generate) -> Result:
    """Run a coroutine to its end with `generate` answering its requests."""
    completions = None
    while True:
        try:
            requests = steps.send(completions)
        except StopIteration as stop:
            return stop.value
        completions = generate(requests)


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
    on_done: Callable[[int], None] = lambda n: None,
) -> list[Trajectory]:
    """`samples` trajectories of each task, those of one task adjacent and in one group.

    share: picks those that this process unfolds, as (group_id, task); a group may be divided.
    At most `batch_size` episodes live together; the next ones start when all of those have ended, because a row that
    left a KV cache cannot be refilled. `on_done(n)` is called after each batch of n.
    """
    # The position makes a group of its own of a task that was drawn twice.
    repeated = [(f"{i}:{task.id}", task) for i, task in enumerate(tasks) for _ in range(samples)]
    mine = share(repeated)
    trajectories: list[Trajectory] = []
    for start in range(0, len(mine), batch_size):
        chunk = mine[start : start + batch_size]
        live = [
            episode(task, environment_for(task), chat, limits, group_id=group, end_turn=end_turn)
            for group, task in chunk
        ]
        trajectories += drive(gather(live), generate)
        on_done(len(chunk))
    return trajectories
