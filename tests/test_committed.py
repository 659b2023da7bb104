"""Evaluation with private rehearsal: what happens before the real environment is opened, and what is reported of it."""

import json
import math
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import evaluate
from envace.committed import Runs, judged, of_other_tasks, rehearse_and_execute, results_of
from envace.config import load_config
from envace.data import open_source
from envace.demo.desk import READ_TOOLS
from envace.demo.source import DemoSource
from envace.demo.tasks import make_tasks
from envace.metrics import execution_metrics
from envace.rehearsal import Memory, Rehearsal, Rehearser
from envace.rewards import Goal
from envace.services import Services
from envace.team import Team, evaluation_team, rehearsing_team
from envace.types import Evidence, Exchange, Status, Task, ToolCall, Trajectory, UserError

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An untrained embedded model: what it writes is nonsense, and it always writes the same."""
    path = tmp_path_factory.mktemp("model") / "base"
    DemoSource(config_for(path)).build_embedded_model(path, 0)
    return path


def config_for(path, *overrides):
    small = ["data.demonstrations=64", "data.eval_tasks=6", "eval.tasks=6", "rollout.max_new_tokens=12"]
    return load_config(str(ROOT / "configs/demo.yaml"), [f"model.path={path}", *small, *overrides])


def run(config, source=None, rehearsing=None):
    torch.manual_seed(0)
    team = evaluation_team(config)
    source = source or open_source(config)
    with Services(config) as services:
        return rehearse_and_execute(team, rehearsing or team, source.eval_tasks(), config, source, services)


@pytest.fixture
def happened(monkeypatch):
    """What happened in which order: generating begins and ends, a real environment is opened or called."""
    events = []
    generating, executable = Team.generating, DemoSource.executable

    @contextmanager
    def watched(team, sampling):
        events.append("generating")
        try:
            with generating(team, sampling) as generate:
                yield generate
        finally:
            events.append("done")

    def opened(source, task, purpose):
        events.append(f"opened for {purpose}")
        return executable(source, task, purpose)

    monkeypatch.setattr(Team, "generating", watched)
    monkeypatch.setattr(DemoSource, "executable", opened)
    return events


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_the_real_environment_is_opened_when_all_rehearsals_are_over(model, happened, mode):
    config = config_for(model, f"rehearsal.mode={mode}", "rehearsal.n=2", "rollout.batch_size=4")
    source = open_source(config)
    runs = run(config, source)
    assert happened == ["generating", "done", "generating", *["opened for evaluation"] * 6, "done"]
    assert [len(memory.rehearsals) for memory in runs.memories] == [2] * 6
    assert set(source.counter.calls) <= {"evaluation"}


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_interrupted_rehearsals_leave_the_real_environment_untouched(model, happened, monkeypatch, mode):
    asked = Rehearser.evaluate

    def interrupted(self, trajectory):
        interrupted.calls += 1
        if interrupted.calls == 3:
            raise KeyboardInterrupt
        return asked(self, trajectory)

    interrupted.calls = 0
    monkeypatch.setattr(Rehearser, "evaluate", interrupted)
    config = config_for(model, f"rehearsal.mode={mode}", "rehearsal.n=2")
    source = open_source(config)
    with pytest.raises(KeyboardInterrupt):
        run(config, source)
    assert happened == ["generating", "done"] and not source.counter.calls


@pytest.mark.parametrize("mode", ["parallel", "sequential", "candidates"])
def test_no_rehearsal_is_the_ordinary_evaluation(model, mode):
    plain = run(config_for(model, "rehearsal.mode=parallel", "rehearsal.n=0", "eval.samples=2"))
    none = run(config_for(model, f"rehearsal.mode={mode}", "rehearsal.n=0", "eval.samples=2"))
    assert [t.sequences[0].ids for t in none.trajectories] == [t.sequences[0].ids for t in plain.trajectories]
    assert none.tokens["rehearsal"] == 0 and none.rehearsals == [] and {m.text for m in none.memories} == {""}
    # And that is what evaluation without any of it unfolds.
    config = config_for(model, "eval.samples=2")
    torch.manual_seed(0)
    team, source = evaluation_team(config), open_source(config)
    with Services(config) as services:
        _, unfolded = evaluate.evaluate_team(team, source.eval_tasks(), config, source, services)
    assert [t.sequences[0].ids for t in unfolded["real"]] == [t.sequences[0].ids for t in plain.trajectories]


def test_the_memory_stands_in_the_committed_prompt_and_is_marked(model):
    runs = run(config_for(model, "rehearsal.mode=parallel", "rehearsal.n=2"))
    for trajectory, memory in zip(runs.trajectories, runs.memories, strict=True):
        marked = [s for s in trajectory.sequences[0].segments if s.evidence is Evidence.REHEARSED]
        assert memory.text and len(marked) == 1


def test_the_control_gives_each_run_the_memory_of_another_task(model, monkeypatch):
    def prepare(self, task):
        return Memory(f"\nabout {task.id}", [], Counter())
        yield

    monkeypatch.setattr(Rehearser, "prepare", prepare)
    config = config_for(model, "rehearsal.mode=parallel", "rehearsal.n=1", "rehearsal.shuffle=true", "eval.samples=2")
    runs = run(config)
    tasks = [t.task.id for t in runs.trajectories]
    told = [memory.text.removeprefix("\nabout ") for memory in runs.memories]
    assert all(mine != other for mine, other in zip(tasks, told, strict=True)) and Counter(tasks) == Counter(told)


class Rank:
    """One of several, between which `parts` lie."""

    def __init__(self, rank, parts):
        self.rank, self.parts = rank, parts

    def gather(self, mine):
        assert mine == self.parts[self.rank]
        return [item for part in self.parts for item in part]

    def share(self, items):
        before = sum(map(len, self.parts[: self.rank]))
        return items[before : before + len(self.parts[self.rank])]


@pytest.mark.parametrize("cuts", [[], [2], [3], [1, 5], [0, 6]])
def test_the_control_is_the_same_on_any_number_of_ranks(cuts):
    memories = [f"{task}{run}" for task in "abc" for run in range(2)]
    parts = [memories[start:end] for start, end in zip([0, *cuts], [*cuts, 6], strict=True)]
    told = [memory for rank, part in enumerate(parts) for memory in of_other_tasks(part, 2, Rank(rank, parts))]
    assert told == ["b0", "b1", "c0", "c1", "a0", "a1"]


def test_with_one_task_there_is_no_other():
    with pytest.raises(UserError, match=r"eval\.tasks"):
        of_other_tasks(["a0", "a1"], 2, Rank(0, [["a0", "a1"]]))


def test_who_rehearses(model, tmp_path):
    config = config_for(model)
    team = evaluation_team(config)
    assert rehearsing_team(team, config) is team
    other = tmp_path / "other"
    DemoSource(config).build_embedded_model(other, 1)
    config = replace(config, rehearsal=replace(config.rehearsal, path=str(other)))
    rehearsing = rehearsing_team(team, config)
    assert {policy.name for policy in rehearsing.writers.values()} == {str(other)} and len(rehearsing.writers) == 2


def test_data_without_a_real_environment_is_refused(model):
    config = config_for(model, "rehearsal.mode=parallel")
    with pytest.raises(UserError, match="no executable environment"), Services(config) as services:
        evaluate.evaluate_with_rehearsal(evaluation_team(config), config, object(), services, None)


def test_evaluation_writes_what_the_rehearsals_were_worth_and_cost(model, tmp_path):
    config = config_for(model, "rehearsal.mode=sequential", "rehearsal.n=2", f"run_dir={tmp_path}", "eval.tasks=3")
    results = evaluate.main(config)
    assert results["tasks"] == 3 and len(results["success_by_task"]) == 3
    assert results["rehearsal"] | {"mode": "sequential", "n": 2, "rehearser": str(model)} == results["rehearsal"]
    assert (
        set(results["cost"]["tokens_per_run"]) == set(results["cost"]["seconds_per_run"]) == {"rehearsal", "execution"}
    )
    records = [json.loads(line) for line in (tmp_path / "trajectories.jsonl").read_text().splitlines()]
    pairs = {split: [r["execution"] for r in records if r["split"] == split] for split in ("rehearsal", "committed")}
    assert pairs == {"rehearsal": [0, 0, 1, 1, 2, 2], "committed": [0, 1, 2]} and len(records) == 9


# Metrics


def trajectory(*exchanges, rounds=0):
    task = Task("t", "", [], ["?"], goal=Goal((), READ_TOOLS))
    return Trajectory(task, "t", exchanges=list(exchanges), rounds=rounds)


def exchange(name, response, turn=0, number=0, **arguments):
    return Exchange(ToolCall(name, arguments), response, turn, number, Evidence.OBSERVED)


ERROR = {"error": "unknown_id"}


@pytest.mark.parametrize(
    ("exchanges", "expected"),
    [
        ([], (0, 0, 0)),
        ([exchange("get_order", {"order_id": "A1"}), exchange("cancel_order", {}, number=1)], (0, 0, 0)),
        ([exchange("get_order", ERROR)], (1, 0, 0)),  # a read is no write
        ([exchange("cancel_order", ERROR)], (1, 0, 1)),
        # Two further rounds in the turn of the error; its own round and the next turn are none.
        (
            [
                exchange("get_order", ERROR),
                exchange("get_order", {}, number=0),
                exchange("get_order", {}, number=1),
                exchange("get_order", ERROR, number=2),
                exchange("get_order", {}, turn=1, number=3),
            ],
            (2, 2, 0),
        ),
        # The same write again changes nothing, unless it had failed before.
        (
            [exchange("cancel_order", {}, order_id="A1"), exchange("cancel_order", {}, number=1, order_id="A1")],
            (0, 0, 1),
        ),
        (
            [exchange("cancel_order", {}, order_id="A1"), exchange("cancel_order", {}, number=1, order_id="B1")],
            (0, 0, 0),
        ),
        ([exchange("cancel_order", ERROR), exchange("cancel_order", {}, number=1)], (1, 1, 1)),
        ([exchange("no_such_tool", {"error_tool_call": {"code": 404}})], (1, 0, 1)),
        ([exchange("get_order", None), exchange("get_order", ["error"])], (0, 0, 0)),
    ],
)
def test_what_failed_on_the_way(exchanges, expected):
    found = execution_metrics([trajectory(*exchanges, rounds=3)])
    assert (found["failed_calls"], found["recovery_rounds"], found["void_writes"]) == expected
    assert found["rounds"] == 3
    halved = execution_metrics([trajectory(*exchanges), trajectory()])
    assert halved["failed_calls"] == expected[0] / 2


def test_nothing_executed_is_unknown():
    assert all(math.isnan(value) for value in execution_metrics([]).values())


def rehearsed(verdict, answers, status=Status.FINISHED):
    [task] = make_tasks(1, 0, held_out=False)
    goal = Goal(())  # any finished trajectory without answers is right, any with one is wrong
    return Rehearsal(Trajectory(replace(task, goal=goal), "t", answers=answers, status=status), "", verdict)


def test_how_well_rehearsals_are_judged():
    right, wrong = [], ["an answer too many"]
    rehearsals = [
        *(rehearsed(True, right), rehearsed(True, wrong), rehearsed(False, wrong), rehearsed(False, wrong)),
        *(rehearsed(None, right), rehearsed(False, right, Status.TRUNCATED)),
    ]
    assert judged(rehearsals, "goal") == pytest.approx(
        {
            "rehearsed_success": 2 / 6,
            "called_good": 2 / 4,
            "verdict_accuracy": 3 / 4,
            "broken_off": 1 / 6,
            "no_verdict": 1 / 6,
        }
    )
    assert all(math.isnan(value) for value in judged([], "goal").values())


def test_costs_are_means_over_runs_of_both_phases(model):
    config = config_for(model, "eval.samples=2")
    made = [trajectory() for _ in range(4)]
    for number, each in enumerate(made):
        each.reward = float(number % 2)
    runs = Runs(
        made,
        [Memory("abc", [], Counter({"budget": 1})), *[Memory("", [], Counter())] * 3],
        {"rehearsal": 80, "execution": 20},
        {"rehearsal": 2.0, "execution": 1.0},
    )

    class Nothing:
        def reaches_right_state(self, trajectory):
            return True

    results = results_of(runs, config, Nothing(), list)
    assert results["cost"] == {
        "tokens_per_run": {"rehearsal": 20, "execution": 5},
        "seconds_per_run": {"rehearsal": 0.5, "execution": 0.25},
    }
    assert results["real_success"] == 0.5 and results["success_by_task"] == [0.5, 0.5]
    assert results["rehearsal"]["memory_tokens"] == 3 / 4 and results["rehearsal"]["left_out"] == {"budget": 1}
