"""Batching: what each token weighs, what is padding, and that loss and gradient do not depend on how rows are cut."""

import math
import random

import pytest
import torch

from envace.advantages import rolewise_advantages
from envace.batching import (
    Row,
    divide,
    output_table,
    rows_from_trajectories,
    rows_to_batch,
    rows_to_packed_batch,
    sft_rows,
    total_weight,
)
from envace.losses import policy_loss, sft_loss, token_logprobs
from envace.types import Evidence, Role, Segment, Sequence, Task, Trajectory

VOCAB = 11
PAD = 0
EQUAL = {"act": 1.0, "rehearse": 1.0}
ROLES = {"c": Role.CONTEXT, "a": Role.ACT, "r": Role.REHEARSE}


def trajectory(*sequences, group="g", reward=1.0):
    """trajectory("cc aaa c rr"): one sequence for each argument, one segment for each word, one token a letter."""

    def segment(word):
        return Segment(ROLES[word[0]], [1 + i % (VOCAB - 1) for i in range(len(word))], Evidence.GIVEN)

    built = [Sequence([segment(word) for word in words.split()]) for words in sequences]
    return Trajectory(Task("t", "", [], []), group, built, reward=reward)


def rows_of(trajectories, advantages=None, aggregation="token_mean", role_weights=EQUAL, **settings):
    if advantages is None:
        advantages = torch.ones(len(output_table(trajectories)[0]))
    return rows_from_trajectories(
        trajectories, advantages, loss_aggregation=aggregation, role_weights=role_weights, **settings
    )


def random_trajectories(seed, count=7):
    """Ragged: several sequences and outputs, token 0 (also the padding id) included, some rewards unknown."""
    rng = random.Random(seed)
    result = []
    for _ in range(count):
        sequences = []
        for _ in range(rng.randint(1, 2)):
            words = ["c" * rng.randint(1, 3)]
            for _ in range(rng.randint(1, 3)):
                words += [rng.choice("ar") * rng.randint(1, 5), "c" * rng.randint(0, 2) or "c"]
            sequences.append(" ".join(words))
        built = trajectory(*sequences, group=rng.choice("xy"), reward=rng.choice([0.0, 1.0, 0.5, None]))
        for sequence in built.sequences:
            for segment in sequence.segments:
                segment.ids = [rng.randrange(VOCAB) for _ in segment.ids]
        result.append(built)
    return result


# From outputs to tokens


def test_output_table_lists_outputs_in_the_order_of_outputs():
    trajectories = [
        trajectory("c a c r", "c r", group="x"),
        trajectory("c a", group="y", reward=None),
        trajectory("c r a", group="x", reward=0.5),
    ]
    rewards, group_ids, role_ids, trajectory_ids = output_table(trajectories)
    assert rewards.isnan().tolist() == [False] * 3 + [True] + [False] * 2
    assert rewards.nan_to_num(-1).tolist() == [1, 1, 1, -1, 0.5, 0.5]
    assert group_ids.tolist() == [0, 0, 0, 1, 0, 0]
    assert role_ids.tolist() == [1, 2, 2, 1, 2, 1]
    assert trajectory_ids.tolist() == [0, 0, 0, 1, 2, 2]


def test_output_table_of_nothing_is_empty():
    table = output_table([trajectory("cc")])
    assert [column.shape for column in table] == [(0,)] * 4
    assert [column.dtype for column in table] == [torch.float32] + [torch.long] * 3


def test_each_output_carries_its_advantage_and_context_carries_nothing():
    trajectories = [trajectory("cc aaa c rr", "c r"), trajectory("c a")]
    rows = rows_of(trajectories, torch.tensor([0.5, -1.0, 2.0, 3.0]))
    assert [row.advantages for row in rows] == [[0, 0, 0.5, 0.5, 0.5, 0, -1, -1], [0, 2], [0, 3]]
    assert [row.weights for row in rows] == [[0, 0, 1, 1, 1, 0, 1, 1], [0, 1], [0, 1]]
    assert rows[0].role_ids == [0, 0, 1, 1, 1, 0, 2, 2]
    assert rows[0].ids == trajectories[0].sequences[0].ids


def test_unknown_reward_leaves_the_loss_and_does_not_shift_later_advantages():
    trajectories = [trajectory("c a"), trajectory("c a r", reward=None), trajectory("c a r")]
    rows = rows_of(trajectories, torch.tensor([1.0, 9, 9, 2, 3]))
    assert [row.advantages for row in rows] == [[0, 1], [0, 2, 3]]
    assert total_weight(rows) == 3
    assert rows_of(trajectories[1:2]) == []


def test_unknown_reward_from_table_to_loss():
    trajectories = [trajectory("c a", reward=r) for r in (1.0, None, 0.0, 1.0)]
    rewards, group_ids, role_ids, _ = output_table(trajectories)
    rows = rows_of(trajectories, rolewise_advantages(rewards, group_ids, role_ids))
    assert [row.advantages[1] for row in rows] == pytest.approx([0.5774, -1.1547, 0.5774], abs=1e-4)
    assert float(rewards.nanmean()) == pytest.approx(2 / 3)


# What a token weighs


@pytest.mark.parametrize(
    ("aggregation", "act", "short_rehearse", "long_rehearse"),
    [("token_mean", 2.0, 0.5, 0.5), ("output_mean", 2 / 3, 0.5 / 1, 0.5 / 4), ("role_mean", 2 / 3, 0.5 / 5, 0.5 / 5)],
)
def test_weight_of_a_token(aggregation, act, short_rehearse, long_rehearse):
    rows = rows_of(
        [trajectory("c aaa r"), trajectory("c rrrr"), trajectory("c aaaa rrrr", reward=None)],
        aggregation=aggregation,
        role_weights={"act": 2.0, "rehearse": 0.5},
    )
    weights = [w for row in rows for w in row.weights]
    assert weights == pytest.approx([0, act, act, act, short_rehearse, 0] + [long_rehearse] * 4)


def test_aggregations_give_the_means_they_are_named_after():
    # Token losses: ACT outputs [1, 1, 1] and [5], REHEARSE output [7, 7].
    trajectories = [trajectory("c aaa"), trajectory("c a"), trajectory("c rr")]
    expected = {
        "token_mean": (3 * 1 + 5 + 2 * 7) / 6,
        "output_mean": (1 + 5 + 7) / 3,
        "role_mean": ((3 * 1 + 5) / 4 + 7) / 2,
    }
    for aggregation, value in expected.items():
        rows = rows_of(trajectories, torch.tensor([1.0, 5, 7]), aggregation)
        batch = rows_to_batch(rows, PAD)
        loss = sft_loss(-batch.advantages, batch.weights, denominator=total_weight(rows))
        assert float(loss) == pytest.approx(value)


def test_a_role_of_weight_zero_carries_no_loss_and_costs_no_forward_pass():
    rows = rows_of([trajectory("c a r", "c r")], role_weights={"act": 1.0, "rehearse": 0.0})
    assert [row.weights for row in rows] == [[0, 1, 0]]


def test_empty_output_has_an_advantage_but_no_token():
    built = trajectory("c a r")
    built.sequences[0].segments[1].ids = []
    for aggregation in ("token_mean", "output_mean", "role_mean"):
        (row,) = rows_of([built], torch.tensor([4.0, 5.0]), aggregation)
        assert row.advantages == [0, 5] and row.weights == [0, 1]


def test_supervised_rows_train_the_named_roles():
    trajectories = [trajectory("cc aa c rr", reward=None), trajectory("c r")]
    assert [row.weights for row in sft_rows(trajectories, ["act", "rehearse"])] == [[0, 0, 1, 1, 0, 1, 1], [0, 1]]
    assert [row.weights for row in sft_rows(trajectories, ["act"])] == [[0, 0, 1, 1, 0, 0, 0]]
    assert total_weight(sft_rows(trajectories, ["rehearse"])) == 3


# Padding


def test_padding_follows_from_length_not_from_token_id():
    pad_id = 1  # the first token of every segment
    batch = rows_to_batch(rows_of([trajectory("c aa"), trajectory("cc aaa")]), pad_id)
    assert batch.input_ids.tolist() == [[1, 1, 2, 1, 1], [1, 2, 1, 2, 3]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert batch.role_ids.tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 1]]
    assert batch.weights.tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 1]]
    assert batch.advantages.tolist() == batch.weights.tolist()
    assert batch.input_ids.dtype == torch.long and batch.weights.dtype == torch.float32


def test_micro_batches_hold_every_row_once_sorted_by_length():
    rows = rows_of(random_trajectories(0))
    batches = batches_of(rows, 3)
    lengths = [n for batch in batches for n in batch.attention_mask.sum(1).tolist()]
    assert lengths == sorted((len(row) for row in rows), reverse=True)
    assert all(len(batch.input_ids) <= 3 for batch in batches)
    assert sum(float(batch.weights.sum()) for batch in batches) == total_weight(rows)
    assert divide([], 2, 3) == [[], []]


def test_every_rank_gets_equally_many_micro_batches():
    rows = rows_of(random_trajectories(0, count=7))
    for ranks, size, pack_tokens in [(1, 2, 0), (2, 2, 0), (3, 2, 0), (16, 4, 0), (2, 1, 30), (3, 1, 10_000)]:
        parts = divide(rows, ranks, size, pack_tokens)
        assert len(parts) == ranks and len({len(part) for part in parts}) == 1
        dealt = [row for part in parts for micro_batch in part for row in micro_batch]
        assert sorted(map(id, dealt)) == sorted(map(id, rows)), "each row once"
        assert not any(all(not part[i] for part in parts) for i in range(len(parts[0]))), "no round without a row"


def test_packs_hold_at_most_so_many_tokens_and_a_longer_row_alone():
    rows = rows_of(random_trajectories(0, count=12))
    limit = max(map(len, rows)) - 1
    packs = divide(rows, 1, 1, limit)[0]
    assert len(packs) < len(rows)
    assert {len(pack) for pack in packs if sum(map(len, pack)) > limit} == {1}


def test_a_packed_batch_is_the_rows_in_a_row_with_positions_of_their_own():
    rows = rows_of([trajectory("c aa"), trajectory("cc aaa")])
    batch = rows_to_packed_batch(rows)
    assert batch.input_ids.tolist() == [rows[0].ids + rows[1].ids]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert batch.weights.tolist() == [[0, 1, 1, 0, 0, 1, 1, 1]]
    assert batch.attention_mask is None and batch.num_scored == 5
    with pytest.raises(ValueError, match="first token"):
        rows_to_packed_batch([Row([1, 2], [1, 1], [1.0, 1.0], [0.0, 0.0])])


# Invariance of the loss


def batches_of(rows, size, ranks=1, rank=0):
    return [rows_to_batch(part, PAD) for part in divide(rows, ranks, size)[rank] if part]


def bigram_loss_and_grad(batches, denominator, loss_kind):
    """Loss and gradient of a bigram model; its logits at padded positions are NaN, as garbage there is allowed."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    reference = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    total = 0.0
    for batch in batches:
        logprobs = token_logprobs(table[batch.input_ids], batch.input_ids)
        logprobs = logprobs.masked_fill(batch.attention_mask == 0, math.nan)
        if loss_kind == "sft":
            loss = sft_loss(logprobs, batch.weights, denominator=denominator)
        else:
            ref_logprobs = token_logprobs(reference[batch.input_ids], batch.input_ids)
            old_logprobs = logprobs.detach() + 0.3 * torch.sin(batch.input_ids.double())
            settings = {"kl_coef": 0.1, "kl_estimator": "k3_ratio", "denominator": denominator}
            loss, _ = policy_loss(logprobs, old_logprobs, ref_logprobs, batch.advantages, batch.weights, **settings)
        loss.backward()
        total += float(loss.detach())
    return total, table.grad


@pytest.mark.parametrize("loss_kind", ["sft", "policy"])
@pytest.mark.parametrize("aggregation", ["token_mean", "output_mean", "role_mean"])
def test_loss_does_not_depend_on_split_order_or_padding(loss_kind, aggregation):
    trajectories = random_trajectories(1, count=9)
    rewards, group_ids, role_ids, _ = output_table(trajectories)
    rows = rows_of(trajectories, rolewise_advantages(rewards, group_ids, role_ids), aggregation)
    denominator = total_weight(rows)
    loss, grad = bigram_loss_and_grad([rows_to_batch(rows, PAD)], denominator, loss_kind)
    assert loss != 0 and grad.abs().max() > 1e-3

    shuffled = random.Random(0).sample(rows, len(rows))
    others = {
        "one row at a time": batches_of(rows, 1),
        "micro-batches of 3": batches_of(rows, 3),
        "shuffled, other padding id": [rows_to_batch(shuffled, PAD + 3)],
        "two ranks": [b for rank in range(2) for b in batches_of(rows, 2, ranks=2, rank=rank)],
    }
    for name, batches in others.items():
        other_loss, other_grad = bigram_loss_and_grad(batches, denominator, loss_kind)
        assert other_loss == pytest.approx(loss, abs=1e-9), name
        torch.testing.assert_close(other_grad, grad, atol=1e-9, rtol=0, msg=name)

    per_micro_batch, _ = bigram_loss_and_grad(batches_of(rows, 3), None, loss_kind)
    assert per_micro_batch / math.ceil(len(rows) / 3) != pytest.approx(loss, abs=1e-4)


def test_policy_gradient_does_not_depend_on_the_order_of_trajectories():
    trajectories = random_trajectories(2, count=9)

    def loss_and_grad(ordered):
        rewards, group_ids, role_ids, _ = output_table(ordered)
        rows = rows_of(ordered, rolewise_advantages(rewards, group_ids, role_ids))
        return bigram_loss_and_grad(batches_of(rows, 2), total_weight(rows), "policy")

    loss, grad = loss_and_grad(trajectories)
    other_loss, other_grad = loss_and_grad(trajectories[::-1])
    assert other_loss == pytest.approx(loss, abs=1e-9)
    torch.testing.assert_close(other_grad, grad, atol=1e-9, rtol=0)


# Refusals


def test_settings_that_cannot_work_are_refused():
    trajectories = [trajectory("c a r")]
    with pytest.raises(ValueError, match=r"advantages must be \(2,\)"):
        rows_of(trajectories, torch.ones(3))
    with pytest.raises(ValueError, match="token_mean, output_mean, role_mean, not 'sum'"):
        rows_of(trajectories, aggregation="sum")
    with pytest.raises(ValueError, match="act, rehearse, not 'user'"):
        sft_rows(trajectories, ["user"])
    with pytest.raises(ValueError, match="at least 1 row, not 0"):
        divide(rows_of(trajectories), 1, 0)
