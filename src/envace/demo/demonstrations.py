"""Recorded dialogues for SFT: a scripted clerk works on the real desk, and not well.

The clerk slips at random, and it has habits: in the kinds of HABITS it usually does the wrong thing. A policy that
imitates it is wrong there too, even greedily, so reinforcement learning has to change behaviour and not merely sharpen
it.
"""

from __future__ import annotations

import random
from typing import Any

from envace.chat import parse_action
from envace.demo.desk import CallCounter, Desk
from envace.demo.tasks import make_tasks
from envace.prompts import malformed_call_error, to_json, tool_call_block
from envace.rewards import Branch, Says, Seen, Unseen, applicable_branch, resolve, resolve_call
from envace.types import Evidence, Exchange, Task, ToolCall

# kind -> what the clerk usually does there.
HABITS = {
    "cancel": "writes without looking the order up",
    "refund": "opens a ticket where a refund is due",
    "move": "refuses where it could move the order",
    "broken": "files the ticket under the wrong topic",
}
HABIT_SHARE = 0.7  # how often a habit shows
SLIP_SHARE = 0.02  # how often an output with calls is spoiled, in any kind


def make_demonstrations(n: int, seed: int, counter: CallCounter) -> list[tuple[Task, list[dict[str, Any]]]]:
    """`n` training tasks, each with the messages of one recorded dialogue."""
    rng = random.Random(f"clerk-{seed}")
    tasks = make_tasks(n, seed, held_out=False)
    return [(task, Clerk(task, rng, counter, HABIT_SHARE, SLIP_SHARE).work()) for task in tasks]


def right_final_state(task: Task, counter: CallCounter) -> dict[str, Any]:
    """The state in which a clerk without habits or slips leaves the desk."""
    clerk = Clerk(task, random.Random(0), counter, habit_share=0.0, slip_share=0.0)
    clerk.work()
    return clerk.desk.state


class Clerk:
    def __init__(self, task: Task, rng: random.Random, counter: CallCounter, habit_share: float, slip_share: float):
        self.task = task
        self.rng = rng
        self.desk = Desk(task.world, counter, "demonstrations")
        self.habit = task.kind if task.kind in HABITS and rng.random() < habit_share else None
        self.slip_share = slip_share
        self.exchanges: list[Exchange] = []
        self.answers: list[str] = []
        self.rounds = 0
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": task.system}]

    def work(self) -> list[dict[str, Any]]:
        for turn, text in enumerate(self.task.user_turns):
            self.messages.append({"role": "user", "content": text})
            try:
                answer = self._serve(turn)
            except Unseen:
                answer = "I cannot find that."
            self.answers.append(answer)
            self.messages.append({"role": "assistant", "content": answer})
        return self.messages

    def _serve(self, turn: int) -> str:
        goal = self.task.goal.turns[turn]
        if self.habit == "cancel":
            [response] = self._call([goal.branches[0].writes[0]], turn)
            return _answer(goal.branches[1 if "error" in response else 0], self.exchanges)
        self._read(list(goal.reads), turn)
        branch = applicable_branch(goal, self.exchanges)
        writes = [resolve_call(write, self.exchanges) for write in branch.writes]
        if self.habit == "refund" and writes:
            writes = [ToolCall("open_ticket", {"order_id": writes[0].arguments["order_id"], "topic": "other"})]
            self._call(writes, turn)
            return _ticket_answer(writes[0])
        if self.habit == "move" and writes:
            return _answer(goal.branches[1], self.exchanges)
        if self.habit == "broken":
            writes = [ToolCall(writes[0].name, {**writes[0].arguments, "topic": "other"})]
        if writes:
            self._call(writes, turn)
        return _answer(branch, self.exchanges)

    def _read(self, reads: list[ToolCall], turn: int) -> None:
        """Make the reads that are missing, those that another one depends on first, independent ones together."""
        for read in reads:
            self._read([v.call for v in read.arguments.values() if isinstance(v, Seen)], turn)
        done = {e.call.key() for e in self.exchanges}
        missing = [call for call in (resolve_call(r, self.exchanges) for r in reads) if call.key() not in done]
        if missing:
            self._call(missing, turn)

    def _call(self, calls: list[ToolCall], turn: int) -> list[Any]:
        text = "\n".join(tool_call_block(call) for call in calls)
        spoiled = _spoil(text, self.rng) if self.rng.random() < self.slip_share else text
        self.messages.append({"role": "assistant", "content": spoiled})
        action = parse_action(spoiled)
        if action.error:
            self.messages.append({"role": "tool", "content": to_json(malformed_call_error(action.error))})
            return self._call(calls, turn)
        self.rounds += 1
        responses = [self.desk.execute(call) for call in action.calls]
        self.messages += [{"role": "tool", "content": to_json(response)} for response in responses]
        self.exchanges += [
            Exchange(call, response, turn, self.rounds, Evidence.OBSERVED)
            for call, response in zip(action.calls, responses, strict=True)
        ]
        return responses


def _spoil(text: str, rng: random.Random) -> str:
    """A random digit in the place of another, or a brace too few."""
    digits = [i for i, c in enumerate(text) if c.isdigit()]
    if digits and rng.random() < 0.5:
        i = rng.choice(digits)
        return f"{text[:i]}{rng.choice('123456789')}{text[i + 1 :]}"
    return text.replace("}}\n", "}\n", 1)


def _answer(branch: Branch, exchanges: list[Exchange]) -> str:
    if branch.writes:
        return _write_answer(resolve_call(branch.writes[0], exchanges))
    return " ".join(_sentence(says, exchanges) for says in branch.says)


def _write_answer(call: ToolCall) -> str:
    order = call.arguments["order_id"]
    if call.name == "open_ticket":
        return _ticket_answer(call)
    return {
        "cancel_order": f"Order {order} is cancelled.",
        "refund_order": f"I refunded {call.arguments.get('amount')} for order {order} .",
        "move_order": f"Order {order} is moved to {call.arguments.get('day')} .",
    }[call.name]


def _ticket_answer(call: ToolCall) -> str:
    return f"I opened a ticket for order {call.arguments['order_id']} ."


def _sentence(says: Says, exchanges: list[Exchange]) -> str:
    value = resolve(says.value, exchanges)
    if isinstance(says.value, Seen) and says.value.field == "status":
        return f"Order {resolve(says.value.call.arguments['order_id'], exchanges)} is {value}."
    return {"cannot": "I cannot do that.", "unknown": "This order is unknown."}.get(value, f"Your tier is {value}.")
