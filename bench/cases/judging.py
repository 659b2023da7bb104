"""Judging while others generate: how much of a judge's time a rollout does not wait for.

    python -m bench.cases.judging none|judged

16 dialogues of three user turns, up to three calls a turn, outputs of 120 tokens, on the untrained embedded model: its
samples are paid for and then replaced by a script. The judge, behind HTTP, takes 500 ms a question. Measured is what
the rollout waits for it, and the whole: a dialogue that is judged sits out a round, so there are more rounds too.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from openai_server import Logged, OpenAIServer, Reply, verdict

from bench.measure import peak_mib, seconds, tell
from envace import episodes
from envace.chat import ChatFormat
from envace.checklist import REPLY, Checklist, Item
from envace.config import load_config
from envace.data import open_source
from envace.environments import Constant
from envace.episodes import go_on, rollout
from envace.evaluation import limits_of
from envace.services import Services
from envace.team import Writers, evaluation_team
from envace.types import Completion, Request, Sequence, Task

DIALOGUES, TURNS, MOST_CALLS, LATENCY = 16, 3, 3, 0.5
NEW_TOKENS = 120
FILLER = "Look at it now. " * NEW_TOKENS
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def time_waits() -> list[float]:
    """Gets the seconds of every wait of a rollout for a service."""
    plain, waited = episodes.wait, []

    def wait(futures: Any) -> Any:
        started = time.perf_counter()
        try:
            return plain(futures)
        finally:
            waited.append(time.perf_counter() - started)

    vars(episodes)["wait"] = wait
    return waited


def dialogues() -> list[Task]:
    item = Item("polite", "Is it polite?", REPLY, "yes", (), (), False, (), 1.0)
    checklist = Checklist((((item,),) * TURNS,), False)
    # Each asks for something else, as a judge is not asked the same question twice.
    return [Task(str(n), "", [LOOK], [f"Look at {n}!"] * TURNS, goal=checklist) for n in range(DIALOGUES)]


class Scripted:
    """Samples NEW_TOKENS; then a call stands in their place, or an answer.

    Each dialogue has a script of its own, so that the work does not depend on the order in which requests come.
    """

    def __init__(self, writers: Writers, chat: ChatFormat):
        self.writers = writers
        dice = random.Random(0)
        call, answer = (self.padded(chat, text) for text in (CALL, "All is well."))
        self.scripts = iter(
            [output for _ in range(TURNS) for output in [*[call] * dice.randint(0, MOST_CALLS), answer]]
            for _ in range(DIALOGUES)
        )
        self.of: dict[Sequence, Iterator[list[int]]] = {}
        self.outputs = 0

    @staticmethod
    def padded(chat: ChatFormat, text: str) -> list[int]:
        end = chat.output(text)
        return chat.tokenizer(FILLER, add_special_tokens=False).input_ids[: NEW_TOKENS - len(end)] + end

    def __call__(self, requests: list[Request]) -> list[Completion]:
        sampled = self.writers([replace(request, stop_ids=frozenset()) for request in requests])
        for request in requests:
            if request.sequence not in self.of:
                self.of[request.sequence] = iter(next(self.scripts))
        self.outputs += len(requests)
        return [
            replace(completion, ids=list(next(self.of[request.sequence])), finish_reason="stop")
            for request, completion in zip(requests, sampled, strict=True)
        ]


@contextmanager
def judge() -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """(its URL, what it has done so far), in a process of its own, as its CPU time is not the rollout's."""
    spawning = get_context("spawn")
    here, there = spawning.Pipe()
    process = spawning.Process(target=be_judge, args=(there,), daemon=True)
    process.start()

    def ask_what_it_did() -> dict[str, float]:
        here.send("done?")
        return here.recv()

    yield here.recv(), ask_what_it_did
    process.terminate()
    process.join()


def be_judge(connection: Connection) -> None:
    with OpenAIServer(lambda n, body: Reply(verdict(True), delay=LATENCY)) as server:
        connection.send(server.url)
        while connection.recv():
            connection.send({"judging_s": judging_seconds(server.log), "asked": len(server.log)})


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
    with TemporaryDirectory() as folder, judge() as (url, done):
        settings = [f"model.path={folder}/base", f"rollout.max_new_tokens={NEW_TOKENS}", "rollout.max_rounds=30"]
        judged = ["data.source=cm2", "data.path=d", "reward.name=checklist", "judge.model=judge"]
        open_source(load_config("configs/demo.yaml", settings)).build_embedded_model(Path(folder) / "base", 0)
        config = load_config("configs/demo.yaml", [*settings, *judged, f"judge.endpoints=[{url}]"])
        config.rollout.max_context_tokens = 4000
        team = evaluation_team(config)
        with Services(config) as services, team.generating(config.sampling) as writers:
            scripted = Scripted(writers, team.lead.chat)
            waited = time_waits()
            with seconds() as found:
                trajectories = rollout(
                    dialogues(),
                    scripted,
                    lambda task: Constant({"ok": True}),
                    team.lead.chat,
                    limits_of(config),
                    end_turn=services.end_turn if is_judged else go_on,
                )
        if any(len(trajectory.answers) != TURNS for trajectory in trajectories):
            raise RuntimeError(f"a dialogue ended early: {[t.reason for t in trajectories if t.reason]}")
        tell({**found, **done(), "waited_s": sum(waited), "peak_mib": peak_mib(), "outputs": scripted.outputs})


if __name__ == "__main__":
    main()
