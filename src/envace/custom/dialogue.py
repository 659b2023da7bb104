"""An expert at work in a real environment, recorded message by message for SFT."""

from __future__ import annotations

from typing import Any

from envace.prompts import to_json, tool_call_block
from envace.rewards import Branch, Says, Seen, TurnGoal, Unseen, applicable_branch, as_text, resolve, resolve_call
from envace.types import Evidence, Exchange, Executable, Task, ToolCall, Trajectory, UserError


class Dialogue:
    """One dialogue in the making: `call`, `read` and `write` execute, `answer` ends a user turn and begins the next.

    messages: what was said so far. exchanges: calls and their responses. answers: of the turns that are done.
    """

    def __init__(self, task: Task, executable: Executable):
        self.task = task
        self.executable = executable
        self.exchanges: list[Exchange] = []
        self.answers: list[str] = []
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": task.system}] if task.system else []
        self.messages.append({"role": "user", "content": task.user_turns[0]})
        self._rounds = 0

    @property
    def goal(self) -> TurnGoal:
        """Of the current user turn."""
        return self.task.goal.turns[len(self.answers)]

    def call(self, *calls: ToolCall) -> list[Any]:
        """The responses to calls that stand in one output."""
        if not calls:
            return []
        if len(self.answers) == len(self.task.user_turns):
            raise UserError(f"task {self.task.id}: the expert calls a tool after its last answer")
        responses = [self.executable.execute(call) for call in calls]
        self.messages.append({"role": "assistant", "content": "\n".join(map(tool_call_block, calls))})
        self.messages += [{"role": "tool", "content": to_json(response)} for response in responses]
        self.exchanges += [
            Exchange(call, response, len(self.answers), self._rounds, Evidence.OBSERVED)
            for call, response in zip(calls, responses, strict=True)
        ]
        self._rounds += 1
        return responses

    def read(self) -> Branch:
        """Make the reads that the current goal requires, and return the branch of it that applies then.

        A read that needs another one's response comes after it. Raises Unseen if none applies.
        """
        self._make(list(self.goal.reads))
        return applicable_branch(self.goal, self.exchanges)

    def _make(self, reads: list[ToolCall]) -> None:
        for read in reads:
            self._make([value.call for value in read.arguments.values() if isinstance(value, Seen)])
        calls = {call.key(): call for call in (resolve_call(read, self.exchanges) for read in reads)}
        done = {exchange.call.key() for exchange in self.exchanges}
        self.call(*(call for key, call in calls.items() if key not in done))

    def write(self, branch: Branch) -> list[Any]:
        """Make the writes of a branch."""
        return self.call(*(resolve_call(write, self.exchanges) for write in branch.writes))

    def seen(self, value: Any) -> str:
        """The text of a value, looked up if it is Seen."""
        return as_text(resolve(value, self.exchanges))

    def answer(self, text: str) -> None:
        if len(self.answers) == len(self.task.user_turns):
            raise UserError(f"task {self.task.id}: the expert answers more often than the user asks")
        self.messages.append({"role": "assistant", "content": text})
        self.answers.append(text)
        if len(self.answers) < len(self.task.user_turns):
            self.messages.append({"role": "user", "content": self.task.user_turns[len(self.answers)]})

    def trajectory(self) -> Trajectory:
        """What rewards look at: the calls, their responses and the answers."""
        return Trajectory(self.task, self.task.id, exchanges=self.exchanges, answers=self.answers)


def work_rightly(dialogue: Dialogue) -> None:
    """Do what the goal says and nothing else; the answers state the bare facts. A goal that nothing meets ends it."""
    for _ in dialogue.task.user_turns:
        try:
            branch = dialogue.read()
            dialogue.write(branch)
            dialogue.answer(" ".join(_sentence(says, dialogue) for says in branch.says) or "Done.")
        except Unseen:
            dialogue.answer("")


def _sentence(says: Says, dialogue: Dialogue) -> str:
    subject = "" if says.about is None else f"{dialogue.seen(says.about)} : "
    return f"{subject}{dialogue.seen(says.value)} ."
