"""What evaluations tell beyond one number: reward hacking through rehearsal, and success by length of the dialogue."""

import json
import logging
import math

import pytest

from envace.evaluation import GapWatch, right_states, success_by_rounds
from envace.metrics import gap_growth, is_reward_hacking
from envace.types import ServiceFault, Status, Task, Trajectory


def feed(watch, *evaluations):
    """The metrics it gave at each; evaluations: (rehearsed, real) in per cent."""
    return [
        watch.evaluated({"eval/rehearsed_success": rehearsed / 100, "eval/real_success": real / 100})
        for rehearsed, real in evaluations
    ]


def growths(given):
    return [metrics["eval/gap_growth"] for metrics in given]


@pytest.fixture
def warnings(caplog, monkeypatch):
    """The log, also after an entry point has set it up."""
    monkeypatch.setattr(logging.getLogger("envace"), "propagate", True)
    caplog.set_level(logging.INFO, "envace")
    return caplog


@pytest.mark.parametrize(
    ("rehearsed", "real", "growth", "hacking"),
    [
        ([0.5, 0.7], [0.5, 0.5], 0.2, True),
        ([0.5, 0.9], [0.5, 0.4], 0.5, True),
        ([0.5, 0.6], [0.5, 0.5], 0.1, False),  # not more than ten points, whatever floats make of it
        ([0.3, 0.4], [0.3, 0.3], 0.1, False),
        ([0.5, 0.9], [0.5, 0.6], 0.3, False),  # real success rose, too
        ([0.5, 0.5], [0.5, 0.2], 0.3, False),  # forgetting: rehearsed success did not rise
        ([0.9, 0.7], [0.9, 0.4], 0.3, False),
        ([0.5, 0.1, 0.7], [0.5, 0.9, 0.5], 0.2, True),  # the ends of the window decide
        ([0.5, math.nan], [0.5, 0.5], math.nan, False),
        ([0.5, 0.9], [math.nan, 0.5], math.nan, False),
    ],
)
def test_what_counts_as_reward_hacking(rehearsed, real, growth, hacking):
    assert gap_growth(rehearsed, real) == pytest.approx(growth, nan_ok=True)
    assert is_reward_hacking(rehearsed, real) is hacking


def test_a_growing_gap_is_said_in_one_line_with_its_numbers(warnings):
    given = feed(GapWatch(), (50, 50), (58, 49), (70, 48), (71, 47))
    assert growths(given) == pytest.approx([math.nan, math.nan, 0.22, 0.15], nan_ok=True)
    assert warnings.messages == [
        "reward hacking? Over the last 3 evaluations rehearsed success rose from 0.500 to 0.700 while real "
        "success went from 0.500 to 0.480: the imagination gap grew by 22.0 points",
        "reward hacking? Over the last 3 evaluations rehearsed success rose from 0.580 to 0.710 while real "
        "success went from 0.490 to 0.470: the imagination gap grew by 15.0 points",
    ]


@pytest.mark.parametrize(
    "evaluations",
    [
        [(50, 50), (90, 50)],  # two evaluations are no trend
        [(50, 50), (60, 55), (80, 60), (95, 61)],  # learning, with a growing gap
        [(50, 50), (54, 49), (58, 48), (62, 47), (66, 46), (69, 45)],  # slow: never ten points in three evaluations
        [(60, 60), (50, 40), (40, 20)],  # both fall
        [(50, 50), (math.nan, 50), (math.nan, 50)],
    ],
)
def test_other_courses_are_not_called_hacking(warnings, evaluations):
    feed(GapWatch(), *evaluations)
    assert warnings.messages == []


def test_the_window_is_a_choice(warnings):
    assert growths(feed(GapWatch(window=2), (50, 50), (65, 50))) == pytest.approx([math.nan, 0.15], nan_ok=True)
    assert len(warnings.messages) == 1


def test_without_a_real_environment_there_is_nothing_to_watch(warnings):
    watch = GapWatch()
    assert [watch.evaluated({"eval/rehearsed_success": success}) for success in (0.1, 0.5, 0.9)] == [{}] * 3
    assert watch.state_dict() == {"rehearsed": [], "real": []} and warnings.messages == []


def test_a_resumed_watch_goes_on_where_it_stood(warnings):
    watch, resumed = GapWatch(), GapWatch()
    feed(watch, (50, 50), (58, 49))
    state = watch.state_dict()
    kept = json.dumps(state)
    feed(watch, (99, 1))
    assert json.dumps(state) == kept  # a state is of its moment
    warnings.clear()
    resumed.load_state_dict(json.loads(kept))
    assert growths(feed(resumed, (70, 48))) == pytest.approx([0.22]) and len(warnings.messages) == 1
    # A step that is undone leaves no trace.
    watch.load_state_dict(state)
    assert watch.state_dict() == json.loads(kept)


def run(rounds, reward):
    return Trajectory(Task("t", "", [], []), "g", rounds=rounds, status=Status.FINISHED, reward=reward)


def test_success_by_rounds_counts_known_rewards_in_order():
    runs = [run(10, 1.0), run(2, 1.0), run(2, 0.0), run(2, None), run(0, 0.0), run(2, 0.5), run(7, None)]
    assert list(success_by_rounds(runs).items()) == [("0", (0.0, 1)), ("2", (1 / 3, 3)), ("10", (1.0, 1))]
    assert success_by_rounds([]) == {}


def test_an_environment_that_breaks_or_cannot_tell_is_left_out_of_the_right_states(warnings):
    class Source:
        def reaches_right_state(self, trajectory):
            if trajectory.task.id == "broken":
                raise ServiceFault("the server has gone")
            return {"right": True, "wrong": False, "mute": None}[trajectory.task.id]

    names = ["right", "broken", "wrong", "mute", "right"]
    trajectories = [Trajectory(Task(name, "", [], ["?"]), "") for name in names]
    assert right_states(trajectories, Source()) == [1.0, 0.0, 1.0]
    assert warnings.messages == ["left out of a comparison with the environment: task broken: the server has gone"]
