"""The environment NAME: its tools work, right work solves its tasks, and doing nothing solves none."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from envace.config import load_config
from envace.custom.dialogue import Dialogue, work_rightly
from envace.custom.source import CustomSource
from envace.gate import status_of
from envace.rewards import score
from envace.types import CallStatus, ToolCall

FOLDER = Path(__file__).parent.parent / "envs" / "NAME"


@pytest.fixture(scope="module")
def source():
    return CustomSource(load_config(str(FOLDER / "config.yaml"), [f"data.path={FOLDER}", "data.demonstrations=64"]))


def worked(source, task, work):
    dialogue = Dialogue(task, source.executable(task, "test"))
    work(dialogue)
    return dialogue.trajectory()


def answer_only(dialogue):
    for _ in dialogue.task.user_turns:
        dialogue.answer("Sorry.")


def test_every_tool_says_what_it_does(source):
    assert all(tool["function"]["description"] for tool in source.environment.tools.schemas)


@pytest.mark.parametrize("tasks", ["train_tasks", "eval_tasks"])
def test_right_work_solves_every_task_and_doing_nothing_solves_none(source, tasks):
    for task in getattr(source, tasks)()[:50]:
        right, idle = worked(source, task, work_rightly), worked(source, task, answer_only)
        assert score(right) == (1.0, {"finished": 1.0, "reads": 1.0, "writes": 1.0, "answers": 1.0}), task
        assert score(idle)[0] == 0.0, task
        assert source.reaches_right_state(right) in (True, None)


def test_right_work_is_never_refused(source):
    for task in source.train_tasks()[:50]:
        writes = [e for e in worked(source, task, work_rightly).exchanges if e.call.name not in task.goal.read_tools]
        assert all(status_of(write.response) is CallStatus.SUCCESS for write in writes), writes


def test_a_book_that_is_lent_is_out_and_cannot_be_lent_again(source):
    """The part that knows the tools: replace it by what yours have to do."""
    [task, *_] = source.train_tasks()
    desk = source.executable(replace(task, world={"books": {"B3": {"shelf": "north", "status": "in"}}}), "test")
    get, lend = (ToolCall(name, {"book_id": "B3"}) for name in ("get_book", "lend_book"))
    assert desk.execute(get) == {"book_id": "B3", "shelf": "north", "status": "in"}
    assert desk.execute(lend) == {"book_id": "B3", "status": "out"}
    assert desk.execute(get) == {"book_id": "B3", "shelf": "north", "status": "out"}
    assert desk.execute(lend) == {"error": "forbidden_state"}


def test_each_episode_has_a_world_of_its_own(source):
    """Also while another one is alive, and after calls that changed that one."""
    task = next(t for t in source.train_tasks() if any(b.writes for goal in t.goal.turns for b in goal.branches))
    first, second = (Dialogue(task, source.executable(task, "test")) for _ in range(2))
    work_rightly(first)
    work_rightly(second)
    assert [e.response for e in first.exchanges] == [e.response for e in second.exchanges]


def test_a_call_that_fits_no_tool_is_answered_with_an_error(source):
    [task, *_] = source.train_tasks()
    assert "error_tool_call" in source.executable(task, "test").execute(ToolCall("no_such_tool", {}))


def test_held_out_tasks_are_not_training_tasks(source):
    asked_in_training = [task.user_turns for task in source.train_tasks()]
    assert not [task.id for task in source.eval_tasks() if task.user_turns in asked_in_training]


def test_the_expert_shows_how_most_tasks_are_solved(source):
    """Some, if RL shall have something to improve; the dialogues are those that SFT imitates."""
    rng = random.Random(0)
    rewards = [score(source.demonstrate(task, rng).trajectory())[0] for task in source.train_tasks()[:64]]
    assert sum(rewards) / len(rewards) > 0.5
