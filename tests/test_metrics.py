"""Metrics: golden numbers, what an unknown reward must not do, fidelity against the real desk, the bootstrap."""

import math
import random
from collections import Counter
from statistics import fmean, quantiles

import pytest
import torch

from envace.advantages import group_advantages
from envace.demo.desk import CallCounter, Desk
from envace.metrics import (
    advantage_metrics,
    bootstrap_ci,
    fidelity_shares,
    field_agreement,
    is_error,
    rehearsal_fidelity,
    rollout_metrics,
)
from envace.types import Evidence, Exchange, Role, Segment, Sequence, Status, Task, ToolCall, Trajectory

ROLES = {"c": Role.CONTEXT, "a": Role.ACT, "r": Role.REHEARSE}
WORLD = {
    "customer": "K10",
    "orders": {"A10": {"customer_id": "K10", "status": "processing", "total": 40}},
    "customers": {"K10": {"tier": "gold", "last_order": "A10"}},
}
GET, CANCEL = ToolCall("get_order", {"order_id": "A10"}), ToolCall("cancel_order", {"order_id": "A10"})


def trajectory(*sequences, reward=1.0, group="g", parts=None, exchanges=(), rounds=0, status=Status.FINISHED):
    """One sequence for each argument, one segment for each word, one token a letter: "cc aaa c rr"."""
    built = [
        Sequence([Segment(ROLES[word[0]], [1] * len(word), Evidence.GIVEN) for word in words.split()])
        for words in sequences
    ]
    task = Task("t", "", [], [], world=WORLD)
    built = Trajectory(task, group, built, exchanges=list(exchanges), rounds=rounds, status=status, reward=reward)
    built.reward_parts = parts or {}
    return built


def exchange(call, response, round=0):
    return Exchange(call, response, turn=0, round=round, evidence=Evidence.REHEARSED)


# Rollouts


def test_golden_numbers_of_a_rollout():
    metrics = rollout_metrics(
        [
            trajectory("cc aaa c rr c aa", parts={"reads": 1.0}, exchanges=[exchange(GET, {})], rounds=1),
            trajectory("cc a", reward=0.0, parts={"reads": 0.0}),
            trajectory("c a c rrrr", reward=0.0, group="h", rounds=1, status=Status.PARSE_ERROR),
            trajectory("c aa", "ccc rr", reward=0.0, group="h", rounds=1, status=Status.TRUNCATED),
        ]
    )
    assert metrics == pytest.approx(
        {
            "reward/mean": 0.25,
            "reward/success": 0.25,
            "reward/unknown_share": 0.0,
            "reward/filtered_share": 0.0,
            "reward/zero_variance_share": 0.5,
            "reward_parts/reads": 0.5,
            "status/finished": 0.5,
            "status/parse_error": 0.25,
            "status/truncated": 0.25,
            "status/fault": 0.0,
            "rollout/act_outputs": 5 / 4,
            "rollout/act_tokens": (3 + 2 + 1 + 1 + 2) / 5,
            "rollout/rehearse_outputs": 3 / 4,
            "rollout/rehearse_tokens": (2 + 4 + 2) / 3,
            "rollout/tokens": (7 + 1 + 5 + 4) / 4,
            "rollout/rounds": 0.75,
            "rollout/no_call_share": 0.25,
            "rollout/sequence_length": (11 + 3 + 7 + 3 + 5) / 5,
        }
    )


def test_an_unknown_reward_is_left_out_and_counted():
    fault = trajectory("c a", reward=None, status=Status.FAULT)
    metrics = rollout_metrics([trajectory("c a"), fault, trajectory("c a", reward=0.5)])
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/success"] == 0.5
    assert metrics["reward/unknown_share"] == metrics["status/fault"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("rewards", "share"),
    [
        ([("x", 1.0), ("x", None), ("y", 0.0), ("y", 1.0)], 0.0),  # x has nothing to compare
        ([("x", 1.0), ("x", 1.0), ("x", None), ("y", 0.0), ("y", 1.0)], 0.5),  # None is no third value
        ([("x", 0.0), ("y", 0.0)], math.nan),
    ],
)
def test_zero_variance_compares_known_rewards_within_a_group(rewards, share):
    trajectories = [trajectory("c a", reward=reward, group=group) for group, reward in rewards]
    assert rollout_metrics(trajectories)["reward/zero_variance_share"] == pytest.approx(share, nan_ok=True)


def test_what_could_not_be_measured_is_nan():
    unknown = rollout_metrics([trajectory("c a", reward=None, status=Status.FAULT)])
    assert math.isnan(unknown["reward/mean"]) and math.isnan(unknown["reward/success"])
    assert math.isnan(unknown["rollout/rehearse_tokens"]) and unknown["rollout/rehearse_outputs"] == 0
    assert all(math.isnan(value) for value in rollout_metrics([]).values())


def test_only_a_finished_trajectory_did_nothing():
    cut = trajectory("c a", status=Status.TRUNCATED)
    worked = trajectory("c a", exchanges=[exchange(GET, {})], rounds=1)
    assert rollout_metrics([trajectory("c a"), cut, worked, worked])["rollout/no_call_share"] == 0.25


# Advantages


def test_golden_numbers_of_advantages():
    advantages, role_ids = torch.tensor([1.0, -3.0, 0.5, 0.0, 2.0]), torch.tensor([1, 1, 2, 1, 1])
    metrics = advantage_metrics(advantages, role_ids, torch.tensor([True, True, True, False, True]))
    assert metrics == pytest.approx(
        {
            "advantage/act_count": 3,
            "advantage/act_mean": 0.0,
            "advantage/act_std": 7**0.5,
            "advantage/act_abs_max": 3.0,
            "advantage/rehearse_count": 1,
            "advantage/rehearse_mean": 0.5,
            "advantage/rehearse_std": math.nan,
            "advantage/rehearse_abs_max": 0.5,
        },
        nan_ok=True,
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_normalised_advantages_of_a_group_have_standard_deviation_one(seed):
    rewards = torch.rand(6, generator=torch.Generator().manual_seed(seed))
    rewards[seed] = math.nan
    group = torch.zeros(6, dtype=torch.long)
    advantages = group_advantages(rewards, group)
    metrics = advantage_metrics(advantages, torch.ones(6, dtype=torch.long), ~rewards.isnan())
    assert metrics["advantage/act_count"] == 5
    assert metrics["advantage/act_mean"] == pytest.approx(0, abs=1e-6)
    assert metrics["advantage/act_std"] == pytest.approx(1, abs=1e-4)


def test_a_role_without_outputs_counts_zero_and_the_rest_is_nan():
    metrics = advantage_metrics(torch.tensor([1.0, 2.0]), torch.tensor([1, 1]), torch.tensor([True, True]))
    assert metrics.pop("advantage/rehearse_count") == 0
    assert {name for name, value in metrics.items() if math.isnan(value)} == {
        "advantage/rehearse_mean",
        "advantage/rehearse_std",
        "advantage/rehearse_abs_max",
    }
    with pytest.raises(ValueError, match=r"must be \(N,\), not \(2,\), \(1,\), \(2,\)"):
        advantage_metrics(torch.zeros(2), torch.zeros(1), torch.ones(2, dtype=torch.bool))


# Errors


@pytest.mark.parametrize(
    ("response", "is_one"),
    [
        ({"error": "no such order"}, True),
        ({"Error_code": 404, "id": "A1"}, True),
        ({"errors": ["late"]}, True),
        ({"error": None, "id": "A1"}, False),
        ({"error": "", "errors": []}, False),
        ({"terror": "x"}, False),
        ({}, False),
        ("error", False),
        (["error"], False),
        (None, False),
    ],
)
def test_an_error_is_a_field_that_says_so_and_holds_something(response, is_one):
    assert is_error(response) is is_one


# Fidelity


@pytest.mark.parametrize(
    ("rehearsed", "real", "counts"),
    [
        ({"id": "A10", "status": "shipped"}, {"status": "delivered", "id": "A10"}, (1, 2)),
        ({"id": "A10"}, {"id": "A10", "total": 4}, (1, 2)),
        ({"id": "A10", "made_up": 1}, {"id": "A10"}, (1, 2)),
        ({"day": None}, {}, (0, 1)),
        ({"total": 40.0}, {"total": 40}, (1, 1)),
        ({"opened": 1}, {"opened": True}, (0, 1)),
        ({"items": [1, {"a": 1, "b": 2}]}, {"items": [1, {"b": 2, "a": 1}]}, (1, 1)),
        ({"items": [1, 2]}, {"items": [2, 1]}, (0, 1)),
        ([1, 2], [1, 2], (1, 1)),
        ([], {"id": "A10", "total": 4}, (0, 3)),
        ({}, {}, (0, 0)),
    ],
)
def test_field_agreement(rehearsed, real, counts):
    assert field_agreement(rehearsed, real) == field_agreement(real, rehearsed) == counts


def fidelity(*trajectories):
    counter = CallCounter()
    counts = rehearsal_fidelity(list(trajectories), lambda task: Desk(task.world, counter, "fidelity"))
    assert counter.calls == Counter(fidelity=sum(len(t.exchanges) for t in trajectories))
    return counts


def test_fidelity_replays_the_calls_in_order():
    order = {"order_id": "A10", "status": "processing", "total": 40}
    cancelled = {"order_id": "A10", "status": "cancelled"}
    right = [exchange(GET, order), exchange(CANCEL, cancelled, 1), exchange(GET, order | {"status": "cancelled"}, 2)]
    assert fidelity(trajectory(exchanges=right)) == {0: (3, 3), 1: (2, 2), 2: (3, 3)}
    # Forgetting its own write, the rehearsal is wrong about one field; with the write last it is right.
    forgot = [exchange(CANCEL, cancelled), exchange(GET, order, 1)]
    assert fidelity(trajectory(exchanges=forgot)) == {0: (2, 2), 1: (2, 3)}
    assert fidelity(trajectory(exchanges=forgot[::-1])) == {0: (2, 2), 1: (3, 3)}


def test_each_trajectory_gets_a_fresh_world_and_rounds_are_pooled():
    twice = [
        exchange(CANCEL, {"order_id": "A10", "status": "cancelled"}),
        exchange(CANCEL, {"error": "forbidden_state"}),
    ]
    later = [exchange(ToolCall("get_order", {"order_id": "B10"}), {"order_id": "B10"}, 1)]
    counts = fidelity(trajectory(exchanges=later), trajectory(exchanges=twice), trajectory(exchanges=twice))
    assert list(counts.items()) == [(0, (6, 6)), (1, (0, 2))]
    assert fidelity_shares([*counts.items(), (2, (0, 0))]) == pytest.approx({0: 1.0, 1: 0.0, 2: math.nan}, nan_ok=True)
    assert fidelity() == fidelity(trajectory()) == {}


# Bootstrap


def test_two_tasks_have_a_known_distribution():
    # The mean of a resample is 0, 1/2 or 1 with probability 1/4, 1/2, 1/4.
    assert bootstrap_ci([0.0, 1.0]) == (0.0, 1.0)
    assert bootstrap_ci([0.0, 1.0], level=0.4) == (0.5, 0.5)


def test_interval_matches_a_slow_loop():
    rng = random.Random(1)
    values = [rng.random() for _ in range(40)]
    means = [fmean(rng.choices(values, k=40)) for _ in range(4000)]
    cuts = quantiles(means, n=40)
    assert bootstrap_ci(values, samples=4000) == pytest.approx((cuts[0], cuts[-1]), abs=0.01)


def test_pairing_removes_the_spread_between_tasks():
    before = [float(i % 2) for i in range(50)]
    after = [value + 0.25 for value in before]
    assert bootstrap_ci(after, before) == (0.25, 0.25)
    low, high = bootstrap_ci(after)
    assert high - low > 0.2
    assert bootstrap_ci(before, after) == (-0.25, -0.25)


def test_the_seed_decides_and_the_global_generator_is_left_alone():
    values = [float(i) for i in range(20)]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert bootstrap_ci(values) == bootstrap_ci(values) != bootstrap_ci(values, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_bootstrap_refuses_what_it_cannot_resample_and_keeps_nan_visible():
    with pytest.raises(ValueError, match="same tasks: 2 and 1"):
        bootstrap_ci([1.0, 0.0], [1.0])
    with pytest.raises(ValueError, match="no tasks"):
        bootstrap_ci([])
    assert all(math.isnan(bound) for bound in bootstrap_ci([0.0, math.nan]))
