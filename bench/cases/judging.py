"""Judging while others generate: how much of a judge's time a rollout does not wait for.

    python -m bench.cases.judging none|judged

32 dialogues of three user turns, up to three calls a turn, on the untrained embedded model, whose samples are paid for
and then replaced by a script. The judge, behind HTTP, takes 200 ms a question.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from openai_server import Logged, OpenAIServer, Reply, verdict

from bench.measure import peak_mib, seconds, tell
from envace.chat import ChatFormat
from envace.checklist import REPLY, Checklist, Item
from envace.config import load_config
from envace.data import open_source
from envace.environments import Constant
from envace.episodes import go_on, rollout
from envace.evaluation import limits_of
from envace.services import Services
from envace.team import Writers, evaluation_team
from envace.types import Completion, Request, Task

DIALOGUES, TURNS, MOST_CALLS, LATENCY = 32, 3, 3, 0.2
NEW_TOKENS = 40
FILLER = "Look at it now. " * NEW_TOKENS
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def dialogues() -> list[Task]:
    item = Item("polite", "Is it polite?", REPLY, "yes", (), (), False, (), 1.0)
    checklist = Checklist((((item,),) * TURNS,), False)
    return [Task(str(n), "", [LOOK], ["Look around!"] * TURNS, goal=checklist) for n in range(DIALOGUES)]


class Scripted:
    """Samples NEW_TOKENS; then a call stands in their place, or an answer, as dice say."""

    def __init__(self, writers: Writers, chat: ChatFormat):
        self.writers = writers
        self.call, self.answer = (self.padded(chat, text) for text in (CALL, "All is well."))
        self.dice = random.Random(0)

    @staticmethod
    def padded(chat: ChatFormat, text: str) -> list[int]:
        end = chat.output(text)
        return chat.tokenizer(FILLER, add_special_tokens=False).input_ids[: NEW_TOKENS - len(end)] + end

    def __call__(self, requests: list[Request]) -> list[Completion]:
        sampled = self.writers([replace(request, stop_ids=frozenset()) for request in requests])
        outputs = [self.call if self.dice.random() < MOST_CALLS / (MOST_CALLS + 2) else self.answer for _ in requests]
        return [
            replace(completion, ids=list(ids), finish_reason="stop")
            for completion, ids in zip(sampled, outputs, strict=True)
        ]


def judging_seconds(log: list[Logged]) -> float:
    """How long at least one question was unanswered."""
    total = end = 0.0
    for request in sorted(log, key=lambda r: r.arrived):
        total += max(0.0, request.finished - max(end, request.arrived))
        end = max(end, request.finished)
    return total


def main() -> None:
    is_judged = sys.argv[1] == "judged"
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder, OpenAIServer(lambda n, body: Reply(verdict(True), delay=LATENCY)) as server:
        settings = [f"model.path={folder}/base", f"rollout.max_new_tokens={NEW_TOKENS}", "rollout.max_rounds=30"]
        judge = ["data.source=cm2", "data.path=d", "reward.name=checklist", "judge.model=judge"]
        open_source(load_config("configs/demo.yaml", settings)).build_embedded_model(Path(folder) / "base", 0)
        config = load_config("configs/demo.yaml", [*settings, *judge, f"judge.endpoints=[{server.url}]"])
        config.rollout.max_context_tokens = 4000
        team = evaluation_team(config)
        with Services(config) as services, team.generating(config.sampling) as writers:
            with seconds() as found:
                trajectories = rollout(
                    dialogues(),
                    Scripted(writers, team.lead.chat),
                    lambda task: Constant({"ok": True}),
                    team.lead.chat,
                    limits_of(config),
                    end_turn=services.end_turn if is_judged else go_on,
                )
        if any(len(trajectory.answers) != TURNS for trajectory in trajectories):
            raise RuntimeError(f"a dialogue ended early: {[t.reason for t in trajectories if t.reason]}")
        tell({**found, "peak_mib": peak_mib(), "judging_s": judging_seconds(server.log), "asked": len(server.log)})


if __name__ == "__main__":
    main()
