"""What an episode asks others for: a judge at the end of a user turn, a simulator for the response to a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from envace.chat import THINK_CLOSE, THINK_OPEN, parse_action
from envace.checklist import Message, asked, filled, goes_on, turn_questions
from envace.judge import Judge
from envace.settings import Config
from envace.simulator import Simulator
from envace.types import ServiceFault, Steps, Trajectory, UserError, Wait

CHECKLIST = "checklist"  # the reward that needs a judge


class Services:
    """The services that the settings name, none by default. A context manager: leaving it ends them.

    simulate: a chat -> a Future of the response in it, None if none could be read; without such a service None.
    Raises EndpointError for settings that cannot work.
    """

    def __init__(self, config: Config):
        self._judge = Judge(config.judge) if config.reward.name == CHECKLIST else None
        self._simulator = Simulator(config.simulator_endpoint) if config.simulator_endpoint.endpoints else None
        self.simulate = None if self._simulator is None else self._simulator.submit

    def end_turn(self, trajectory: Trajectory) -> Steps[bool]:
        """Whether the next user turn comes; the verdicts are added to the trajectory.

        Without a judge it does. If the gate hangs on an unknown verdict it does not, and the reward will be unknown.
        Raises ServiceFault if the judge is gone; `end_step` then stops the run.
        """
        if self._judge is None:
            return True
        checklist = trajectory.task.goal
        variants = checklist.turn(len(trajectory.verdicts))
        messages = seen_messages(trajectory.messages)
        tables = [turn_questions(items, messages) for items in variants]
        pending = self._judge.submit([question for table in tables for question in asked(table)])
        is_last = len(trajectory.verdicts) + 1 == checklist.num_turns
        yield Wait(pending, is_last)
        try:
            verdicts = iter(pending.result())
        except UserError as error:
            raise ServiceFault(str(error)) from error
        turn = [filled(table, [next(verdicts) for _ in asked(table)]) for table in tables]
        trajectory.verdicts.append(turn)
        return not is_last and goes_on(variants, turn, dependence=checklist.dependence) is True

    def end_step(self, total: Callable[[float], float] = float) -> dict[str, float]:
        """Metrics of all services since the last call; see `ChatClient.end_step`. Raises EndpointOutage."""
        metrics: dict[str, float] = {}
        for service in self._open():
            metrics |= service.end_step(total)
        return metrics

    def _open(self) -> list[Judge | Simulator]:
        return [service for service in (self._judge, self._simulator) if service is not None]

    def __enter__(self) -> Services:
        return self

    def __exit__(self, *_: object) -> None:
        for service in self._open():
            service.close()


def seen_messages(messages: Sequence[dict[str, Any]]) -> list[Message]:
    """The messages of a trajectory ({"role", "content"}) for a judge: an output is split in thinking, reply and calls.

    An output with a call that cannot be read shows as a reply, as it was written.
    """
    seen = []
    for message in messages:
        role, text = message["role"], message["content"]
        if role != "assistant":
            seen.append(Message(role, text))
            continue
        action = parse_action(text)
        thinking, reply = action.thinking, action.content
        if action.error:
            thinking, reply = "", text
            if text.lstrip().startswith(THINK_OPEN):
                thinking, _, reply = text.lstrip().removeprefix(THINK_OPEN).partition(THINK_CLOSE)
        seen.append(Message(role, reply.strip(), thinking.strip(), tuple(action.calls)))
    return seen
