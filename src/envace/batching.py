"""Trajectories -> rows -> batches, padded or packed. Pure.

A row is one sequence with a loss weight and an advantage for each token. The loss is sum(weights * per_token) over
`total_weight` of all rows, on every rank; `loss_aggregation` only decides the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from envace.types import Batch, Role, Segment, Trajectory


@dataclass
class Row:
    """One sequence to train on. All lists have an entry for each token; see `envace.types.Batch`."""

    ids: list[int]
    role_ids: list[int]
    weights: list[float]
    advantages: list[float]

    def __len__(self) -> int:
        return len(self.ids)


def token_mean(output: Segment, role_tokens: dict[Role, int]) -> float:
    """Every token counts the same, so long outputs weigh more.

    Token mean: aggregation_weight = 1
    """
    return 1.0


def output_mean(output: Segment, role_tokens: dict[Role, int]) -> float:
    """Every output counts the same, whatever its length: what the released code does in effect.

    Output mean: aggregation_weight = 1 / tokens of the output
    """
    return 1.0 / len(output.ids)


def role_mean(output: Segment, role_tokens: dict[Role, int]) -> float:
    """Each role counts the same, whatever its share of the tokens.

    Role mean: aggregation_weight = 1 / tokens of the role in the batch
    """
    return 1.0 / role_tokens[output.role]


LOSS_AGGREGATIONS = {"token_mean": token_mean, "output_mean": output_mean, "role_mean": role_mean}


def output_table(trajectories: list[Trajectory]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rewards, group_ids, role_ids, trajectory_ids), each (N,): one entry for each output, in the order of
    `for t in trajectories for output in t.outputs()`.

    rewards: float32, NaN where unknown. group_ids: dense, by first appearance of a trajectory's group_id.
    trajectory_ids: the position in `trajectories`.
    """
    dense: dict[str, int] = {}
    table = []
    for number, trajectory in enumerate(trajectories):
        reward = float("nan") if trajectory.reward is None else trajectory.reward
        group = dense.setdefault(trajectory.group_id, len(dense))
        table += [(reward, group, int(output.role), number) for output in trajectory.outputs()]
    rewards, *ids = zip(*table, strict=True) if table else [()] * 4
    group_ids, role_ids, trajectory_ids = (torch.tensor(column, dtype=torch.long) for column in ids)
    return torch.tensor(rewards, dtype=torch.float32), group_ids, role_ids, trajectory_ids


def count_role_tokens(trajectories: list[Trajectory]) -> dict[Role, int]:
    """Tokens written in each role by the trajectories that are trained on, those whose reward is known."""
    counts = {Role.ACT: 0, Role.REHEARSE: 0}
    for trajectory in trajectories:
        if trajectory.reward is not None:
            for output in trajectory.outputs():
                counts[output.role] += len(output.ids)
    return counts


def rows_from_trajectories(
    trajectories: list[Trajectory],
    advantages: Tensor,
    *,
    loss_aggregation: str,
    role_weights: dict[str, float],
) -> list[Row]:
    """The rows of policy-gradient training: one for each sequence that carries loss.

    Role mask, and the weight of a token in the loss:

        w_t = m_t * role_weight_r * aggregation_weight, m_t = [token t was written by ACT or REHEARSE, and R is known]

    trajectories: those of the whole batch, of all ranks.
    advantages: (N,), one entry for each output in the order of `output_table`.
    loss_aggregation: a key of LOSS_AGGREGATIONS. role_weights: by lower-case role name.
    A trajectory with an unknown reward is left out.
    """
    if loss_aggregation not in LOSS_AGGREGATIONS:
        raise ValueError(f"loss_aggregation must be one of {', '.join(LOSS_AGGREGATIONS)}, not {loss_aggregation!r}")
    num_outputs = sum(len(trajectory.outputs()) for trajectory in trajectories)
    if advantages.shape != (num_outputs,):
        raise ValueError(f"advantages must be ({num_outputs},), one an output, not {tuple(advantages.shape)}")

    role_tokens = count_role_tokens(trajectories)
    token_weight = LOSS_AGGREGATIONS[loss_aggregation]
    remaining = iter(advantages.tolist())
    rows = []
    for trajectory in trajectories:
        for sequence in trajectory.sequences:
            row = Row(sequence.ids, sequence.role_ids, [], [])
            for segment in sequence.segments:
                weight = advantage = 0.0
                if segment.role is not Role.CONTEXT:
                    advantage = next(remaining)
                    if segment.ids and trajectory.reward is not None:
                        weight = role_weights[segment.role.name.lower()] * token_weight(segment, role_tokens)
                row.weights += [weight] * len(segment.ids)
                row.advantages += [advantage] * len(segment.ids)
            rows.append(row)
    return [row for row in rows if any(row.weights)]


def sft_rows(trajectories: list[Trajectory], roles: list[str]) -> list[Row]:
    """The rows of supervised training: weight 1 on the tokens of the named roles ("act", "rehearse")."""
    names = {role.name.lower(): int(role) for role in (Role.ACT, Role.REHEARSE)}
    for name in roles:
        if name not in names:
            raise ValueError(f"roles must be among {', '.join(names)}, not {name!r}")
    trained = {names[name] for name in roles}
    rows = []
    for trajectory in trajectories:
        for sequence in trajectory.sequences:
            weights = [float(role in trained) for role in sequence.role_ids]
            rows.append(Row(sequence.ids, sequence.role_ids, weights, [0.0] * len(sequence)))
    return [row for row in rows if any(row.weights)]


def total_weight(rows: list[Row]) -> float:
    """Loss denominator: W = sum_t w_t over all rows, micro-batches and ranks"""
    return sum(sum(row.weights) for row in rows)


def rows_to_batch(rows: list[Row], pad_id: int) -> Batch:
    """Right-padded to the longest row. What is padding follows from lengths: `pad_id` may be a token that occurs."""
    width = max(len(row) for row in rows)

    def padded(columns: list[list[Any]], value: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([column + [value] * (width - len(column)) for column in columns], dtype=dtype)

    attention_mask = padded([[1] * len(row) for row in rows], 0, torch.long)
    return Batch(
        input_ids=padded([row.ids for row in rows], pad_id, torch.long),
        attention_mask=attention_mask,
        # They count on through the padding: where they start anew a model sees another sequence.
        position_ids=torch.arange(width).repeat(len(rows), 1),
        role_ids=padded([row.role_ids for row in rows], int(Role.CONTEXT), torch.long),
        weights=padded([row.weights for row in rows], 0.0, torch.float32),
        advantages=padded([row.advantages for row in rows], 0.0, torch.float32),
        num_scored=num_scored(rows),
    )


def rows_to_packed_batch(rows: list[Row]) -> Batch:
    """One row (1, T) without padding: the sequences one behind the other, told apart by positions that start anew."""

    if any(row.weights[0] for row in rows):
        raise ValueError("the first token of a sequence has nothing that predicts it: it cannot carry weight")

    def joined(columns: list[list[Any]], dtype: torch.dtype) -> Tensor:
        return torch.tensor([[value for column in columns for value in column]], dtype=dtype)

    return Batch(
        input_ids=joined([row.ids for row in rows], torch.long),
        attention_mask=None,
        position_ids=joined([list(range(len(row))) for row in rows], torch.long),
        role_ids=joined([row.role_ids for row in rows], torch.long),
        weights=joined([row.weights for row in rows], torch.float32),
        advantages=joined([row.advantages for row in rows], torch.float32),
        num_scored=num_scored(rows),
    )


def num_scored(rows: list[Row]) -> int:
    """Tokens whose log-probability the loss reads."""
    return sum(weight > 0 for row in rows for weight in row.weights)


def divide(rows: list[Row], ranks: int, size: int, pack_tokens: int = 0) -> list[list[list[Row]]]:
    """The micro-batches of every rank: [rank][micro-batch][row].

    At most `size` rows in one, or with pack_tokens > 0 at most so many tokens (a longer row has one for itself).
    Similar lengths stand together, for little padding, and the longest come first, so memory peaks at once.
    Every rank has equally many, the last ones perhaps empty: a forward or backward pass is a collective.
    """
    if size < 1:
        raise ValueError(f"a micro-batch needs at least 1 row, not {size}")
    by_length = sorted(rows, key=len, reverse=True)
    if pack_tokens:
        packs = _packs(by_length, pack_tokens)
        parts = [packs[rank::ranks] for rank in range(ranks)]
    else:
        dealt = [by_length[rank::ranks] for rank in range(ranks)]
        parts = [[part[i : i + size] for i in range(0, len(part), size)] for part in dealt]
    most = max(map(len, parts))
    return [part + [[]] * (most - len(part)) for part in parts]


def _packs(by_length: list[Row], pack_tokens: int) -> list[list[Row]]:
    """First fit, longest first; the fullest pack first."""
    packs: list[list[Row]] = []
    free: list[int] = []
    for row in by_length:
        fitting = next((i for i, room in enumerate(free) if len(row) <= room), None)
        if fitting is None:
            packs.append([row])
            free.append(pack_tokens - len(row))
        else:
            packs[fitting].append(row)
            free[fitting] -= len(row)
    order = sorted(range(len(packs)), key=lambda i: free[i])
    return [packs[i] for i in order]
