"""Advantages: golden numbers, a slow loop as oracle, and what they must not depend on."""

import math
import random
import statistics

import pytest
import torch

from envace.advantages import BASELINES, group_advantages, rolewise_advantages
from envace.types import Role

ACT, REHEARSE = int(Role.ACT), int(Role.REHEARSE)
UNKNOWN = math.nan


def advantages_of_one_group(rewards, **settings):
    rewards = torch.as_tensor(rewards)
    one_group = torch.zeros(len(rewards), dtype=torch.long)
    return rolewise_advantages(rewards, one_group, one_group + ACT, **settings)


def assert_advantages(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), atol=1e-4, rtol=0)


def slow_advantages(rewards, keys, trajectories, normalize_std, baseline_over, eps=1e-6):
    """The definition, one output at a time."""
    advantages = []
    for reward, key in zip(rewards, keys, strict=True):
        rows = zip(trajectories, rewards, keys, strict=True)
        members = [(t, r) for t, r, k in rows if k == key and not math.isnan(r)]
        group = [r for _, r in members] if baseline_over == "outputs" else list(dict(members).values())
        if math.isnan(reward) or len(set(group)) < 2:
            advantages.append(0.0)
        else:
            scale = statistics.stdev(group) + eps if normalize_std else 1.0
            advantages.append((reward - statistics.fmean(group)) / scale)
    return advantages


def ragged_rollouts(seed):
    """Rollouts of a few prompts, each with its own number of outputs a role; some rewards unknown; ids with gaps."""
    rng = random.Random(seed)
    rewards, groups, roles, trajectories = [], [], [], []
    for trajectory in range(rng.randint(1, 12)):
        group = rng.choice([-7, 3, 1000])
        reward = rng.choice([0.0, 0.0, 1.0, 0.7, rng.random(), UNKNOWN])
        for role, count in ((ACT, rng.randint(1, 4)), (REHEARSE, rng.randint(0, 4))):
            rewards += [reward] * count
            groups += [group] * count
            roles += [role] * count
            trajectories += [trajectory * 5 + 2] * count
    return rewards, groups, roles, trajectories


# Golden numbers


def test_advantage_is_reward_standardised_within_the_group():
    advantages = advantages_of_one_group([1.0, 0, 1, 0])
    assert_advantages(advantages, [0.8660, -0.8660, 0.8660, -0.8660])
    assert abs(advantages.sum()) < 1e-6


def test_outputs_of_different_prompts_are_not_compared():
    each_its_own_group = torch.arange(4)
    advantages = rolewise_advantages(torch.tensor([1.0, 0, 1, 0]), each_its_own_group, torch.full((4,), ACT))
    assert torch.equal(advantages, torch.zeros(4))


def test_std_is_unbiased_and_optional():
    assert_advantages(advantages_of_one_group([1.0, 0, 1, 0], normalize_std=False), [0.5, -0.5, 0.5, -0.5])
    population = (torch.tensor([1.0, 0, 1, 0]) - 0.5) / 0.5
    assert not torch.allclose(advantages_of_one_group([1.0, 0, 1, 0]), population, atol=0.1)


def test_each_role_has_its_own_baseline():
    rewards = torch.tensor([1.0, 0, 1, 0, 0.2, 0.8, 0.5, 0.5])
    groups, roles = torch.zeros(8, dtype=torch.long), torch.tensor([ACT] * 4 + [REHEARSE] * 4)
    assert_advantages(
        rolewise_advantages(rewards, groups, roles), [0.8660, -0.8660, 0.8660, -0.8660, -1.2247, 1.2247, 0.0, 0.0]
    )
    pooled = group_advantages(rewards, BASELINES["shared"](groups, roles))
    assert_advantages(pooled, [1.2178, -1.2178, 1.2178, -1.2178, -0.7307, 0.7307, 0.0, 0.0])


def test_single_output_has_nothing_to_be_compared_with():
    assert advantages_of_one_group([0.7]).tolist() == [0.0]
    assert advantages_of_one_group([UNKNOWN] * 3 + [0.7] + [UNKNOWN] * 4).tolist() == [0.0] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_give_exactly_zero(dtype, normalize_std):
    rewards = torch.full((8,), 0.7, dtype=dtype)
    assert advantages_of_one_group(rewards, normalize_std=normalize_std).tolist() == [0.0] * 8


def test_the_plain_formula_would_turn_rounding_into_a_signal():
    rewards = torch.full((8,), 0.7)
    plain = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    assert plain.abs().max() > 0.01


def test_one_failure_among_equal_successes():
    advantages = advantages_of_one_group([0.0] + [0.95] * 7)
    assert_advantages(advantages, [-2.4749] + [0.3536] * 7)


def test_unknown_reward_leaves_the_baseline():
    advantages = advantages_of_one_group([1.0, UNKNOWN, 0, 1])
    assert_advantages(advantages, [0.5774, 0.0, -1.1547, 0.5774])
    scored_as_failure = advantages_of_one_group([1.0, 0, 0, 1])
    assert_advantages(scored_as_failure, [0.8660, -0.8660, -0.8660, 0.8660])


# Against the definition


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("baseline_over", ["outputs", "trajectories"])
def test_matches_a_slow_loop(normalize_std, baseline_over):
    settings = {"normalize_std": normalize_std, "baseline_over": baseline_over}
    for seed in range(40):
        rewards, groups, roles, trajectories = ragged_rollouts(seed)
        keys = {"rolewise": list(zip(groups, roles, strict=True)), "shared": groups}
        for name, key in keys.items():  # those defined here: one that somebody adds has a definition of its own
            actual = group_advantages(
                torch.tensor(rewards, dtype=torch.float64),
                BASELINES[name](torch.tensor(groups), torch.tensor(roles)),
                trajectory_ids=torch.tensor(trajectories),
                **settings,
            )
            expected = slow_advantages(rewards, key, trajectories, **settings)
            torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


def test_order_of_the_outputs_does_not_matter():
    for seed in range(10):
        columns = [torch.tensor(column) for column in ragged_rollouts(seed)[:3]]
        order = torch.randperm(len(columns[0]), generator=torch.Generator().manual_seed(seed))
        permuted = rolewise_advantages(*(column[order] for column in columns))
        assert torch.equal(permuted, rolewise_advantages(*columns)[order])


def test_group_ids_are_names_not_positions():
    rewards, roles = torch.tensor([1.0, 0, 0, 1, 1, 0]), torch.full((6,), ACT)
    dense = rolewise_advantages(rewards, torch.tensor([0, 1, 0, 1, 0, 1]), roles)
    sparse = rolewise_advantages(rewards, torch.tensor([99, -4, 99, -4, 99, -4]), roles)
    assert torch.equal(dense, sparse)
    assert not torch.equal(dense, rolewise_advantages(rewards, torch.tensor([0, 0, 0, 1, 1, 1]), roles))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept_and_inputs_are_not_changed(dtype):
    rewards = torch.tensor([1.0, UNKNOWN, 0.3], dtype=dtype)
    before = rewards.clone()
    assert advantages_of_one_group(rewards).dtype == dtype
    assert torch.equal(rewards.nan_to_num(-1), before.nan_to_num(-1))


def test_integer_rewards_do_not_truncate_advantages():
    assert_advantages(advantages_of_one_group([1, 0, 1, 0]), [0.8660, -0.8660, 0.8660, -0.8660])


def test_no_outputs_give_no_advantages():
    nothing = torch.zeros(0, dtype=torch.long)
    for baseline_over in ("outputs", "trajectories"):
        settings = {"baseline_over": baseline_over, "trajectory_ids": nothing}
        assert rolewise_advantages(torch.zeros(0), nothing, nothing, **settings).shape == (0,)


# What the baseline is taken over

# Two rollouts of one prompt: rewards 1 and 0, with 3 + 2 and 1 + 2 outputs (ACT + REHEARSE).
RAGGED = {
    "rewards": torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0]),
    "group_ids": torch.zeros(8, dtype=torch.long),
    "role_ids": torch.tensor([ACT] * 3 + [REHEARSE] * 2 + [ACT] + [REHEARSE] * 2),
}
RAGGED_TRAJECTORIES = torch.tensor([0] * 5 + [1] * 3)


def shared_advantages(rewards, group_ids, role_ids, **settings):
    return group_advantages(rewards, BASELINES["shared"](group_ids, role_ids), **settings)


def test_rolewise_and_shared_baselines_differ_through_output_counts():
    rolewise = rolewise_advantages(**RAGGED, normalize_std=False)
    assert_advantages(rolewise, [0.25] * 3 + [0.5] * 2 + [-0.75] + [-0.5] * 2)
    assert_advantages(shared_advantages(**RAGGED, normalize_std=False), [0.375] * 5 + [-0.625] * 3)


def test_rolewise_and_shared_baselines_agree_on_equal_output_counts():
    even = {name: column[[0, 3, 5, 6]] for name, column in RAGGED.items()}
    assert_advantages(rolewise_advantages(**even, normalize_std=False), [0.5, 0.5, -0.5, -0.5])
    assert_advantages(shared_advantages(**even, normalize_std=False), [0.5, 0.5, -0.5, -0.5])


def test_trajectory_baseline_counts_each_rollout_once():
    advantages = rolewise_advantages(
        **RAGGED, normalize_std=False, baseline_over="trajectories", trajectory_ids=RAGGED_TRAJECTORIES
    )
    assert_advantages(advantages, [0.5] * 5 + [-0.5] * 3)
    standardised = rolewise_advantages(**RAGGED, baseline_over="trajectories", trajectory_ids=RAGGED_TRAJECTORIES)
    assert_advantages(standardised, [0.7071] * 5 + [-0.7071] * 3)


def test_only_rollout_of_a_role_has_no_advantage_however_many_outputs():
    rewards, roles = torch.tensor([1.0, 1, 1, 0]), torch.tensor([ACT, REHEARSE, REHEARSE, ACT])
    advantages = rolewise_advantages(rewards, torch.zeros(4, dtype=torch.long), roles)
    assert advantages[1:3].tolist() == [0.0, 0.0]


# Refusals


def test_wrong_shapes_are_named():
    ids = torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"group_ids \(2,\)"):
        rolewise_advantages(torch.zeros(3), ids[:2], ids)
    with pytest.raises(ValueError, match=r"rewards \(1, 3\)"):
        rolewise_advantages(torch.zeros(1, 3), ids[None], ids[None])
    with pytest.raises(ValueError, match=r"trajectory_ids \(2,\)"):
        rolewise_advantages(torch.zeros(3), ids, ids, baseline_over="trajectories", trajectory_ids=ids[:2])


def test_trajectory_baseline_needs_trajectories_with_one_reward():
    with pytest.raises(ValueError, match="needs trajectory_ids"):
        advantages_of_one_group([1.0, 0.0], baseline_over="trajectories")
    with pytest.raises(ValueError, match="one reward a trajectory"):
        advantages_of_one_group([1.0, 0.0], baseline_over="trajectories", trajectory_ids=torch.tensor([4, 4]))


def test_unknown_baseline_and_infinite_reward_are_refused():
    with pytest.raises(ValueError, match="'outputs' or 'trajectories'"):
        advantages_of_one_group([1.0, 0.0], baseline_over="tokens")
    with pytest.raises(ValueError, match="finite"):
        advantages_of_one_group([1.0, math.inf])
