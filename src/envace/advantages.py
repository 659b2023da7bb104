"""Group-relative advantages, by role. Pure: tensors in, a tensor out.

An output is compared with the outputs of its role in all rollouts of its prompt: `by_prompt_and_role` says which those
are, `group_advantages` what follows.

The mean is over outputs, so a rollout with more outputs of a role counts more in that role's baseline. All outputs of
a rollout share one R: role-wise and shared baselines differ only where output counts per role differ.

Departures. The paper divides by the standard deviation, the released launch scripts do not: hence `normalize_std`.
The released code gives the only output of a group its raw reward; here it is 0, as there is nothing to compare it
with. An unknown reward (NaN) leaves the baseline; the released code scores it as a failure.
"""

from __future__ import annotations

import torch
from torch import Tensor


def by_prompt_and_role(group_ids: Tensor, role_ids: Tensor) -> Tensor:
    """(N,), (N,) -> (N,): the dense index of each output's (prompt, role).

    Role-wise group: G_{x,r} = {outputs of role r in tau_1..tau_K of x}
    """
    return torch.stack([group_ids, role_ids], dim=1).unique(dim=0, return_inverse=True)[1]


def by_prompt(group_ids: Tensor, role_ids: Tensor) -> Tensor:
    """(N,), (N,) -> (N,): the dense index of each output's prompt, both roles pooled.

    Shared group: G_x = {outputs of both roles in tau_1..tau_K of x}
    """
    return group_ids.unique(return_inverse=True)[1]


BASELINES = {"rolewise": by_prompt_and_role, "shared": by_prompt}


def rolewise_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    role_ids: Tensor,
    *,
    normalize_std: bool = True,
    baseline_over: str = "outputs",
    trajectory_ids: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """`group_advantages` over `by_prompt_and_role`, as a step does it by default. All (N,), one entry an output.

    rewards: NaN means unknown: the output leaves the baseline and its advantage is 0. The dtype is kept.
    group_ids, role_ids: any integers; order and gaps do not matter.
    The keyword arguments are those of `group_advantages`.
    """
    _check_shapes(rewards, group_ids=group_ids, role_ids=role_ids)
    return group_advantages(
        rewards,
        BASELINES["rolewise"](group_ids, role_ids),
        normalize_std=normalize_std,
        baseline_over=baseline_over,
        trajectory_ids=trajectory_ids,
        eps=eps,
    )


def group_advantages(
    rewards: Tensor,
    group_index: Tensor,
    *,
    normalize_std: bool = True,
    baseline_over: str = "outputs",
    trajectory_ids: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Advantage of each output against its group. All (N,); `group_index` comes from an entry of BASELINES.

    Role-wise advantage, of output m of trajectory i in its group G (all its tokens get it):

        A_{i,m} = (R_i - mean_G(R)) / (std_G(R) + eps)

    normalize_std: False leaves the unbiased standard deviation out.

    baseline_over: "outputs" takes mean and std over the group's outputs; "trajectories" over one entry for each
        trajectory in the group, and needs `trajectory_ids`.
    A group whose known rewards are all equal, or that has one entry, gets exactly 0.
    """
    _check_shapes(rewards, group_index=group_index)
    if baseline_over not in ("outputs", "trajectories"):
        raise ValueError(f"baseline_over must be 'outputs' or 'trajectories', not {baseline_over!r}")
    if rewards.isinf().any():
        raise ValueError("rewards must be finite, or NaN where unknown")
    if not rewards.is_floating_point():
        rewards = rewards.to(torch.get_default_dtype())

    known = ~rewards.isnan()
    # These tensors are tiny: sums in float64 make the result independent of the order of the outputs.
    values, groups = rewards[known].double(), group_index[known]
    entries, entry_groups = values, groups
    if baseline_over == "trajectories":
        if trajectory_ids is None:
            raise ValueError("baseline_over='trajectories' needs trajectory_ids")
        _check_shapes(rewards, trajectory_ids=trajectory_ids)
        entries, entry_groups = _one_entry_a_trajectory(values, groups, trajectory_ids[known])

    zeros = values.new_zeros(int(group_index.max()) + 1 if len(group_index) else 0)
    size = zeros.index_add(0, entry_groups, torch.ones_like(entries))
    mean = zeros.index_add(0, entry_groups, entries) / size
    variance = zeros.index_add(0, entry_groups, (entries - mean[entry_groups]) ** 2) / (size - 1)
    # Equal rewards have a rounding error for a standard deviation; comparing extremes is exact.
    low = zeros.scatter_reduce(0, entry_groups, entries, "amin", include_self=False)
    high = zeros.scatter_reduce(0, entry_groups, entries, "amax", include_self=False)

    scale = variance.sqrt()[groups] + eps if normalize_std else 1.0
    advantages = torch.where((low < high)[groups], (values - mean[groups]) / scale, 0.0)
    return torch.zeros_like(rewards).masked_scatter(known, advantages.to(rewards.dtype))


def _one_entry_a_trajectory(values: Tensor, groups: Tensor, trajectory_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs -> (reward, group) of each (group, trajectory) pair."""
    pairs, index = torch.stack([groups, trajectory_ids], dim=1).unique(dim=0, return_inverse=True)
    zeros = values.new_zeros(len(pairs))
    low = zeros.scatter_reduce(0, index, values, "amin", include_self=False)
    high = zeros.scatter_reduce(0, index, values, "amax", include_self=False)
    if (low < high).any():
        raise ValueError("baseline_over='trajectories' needs one reward a trajectory, found outputs that differ")
    return low, pairs[:, 0]


def _check_shapes(rewards: Tensor, **others: Tensor) -> None:
    shapes = {"rewards": rewards.shape} | {name: tensor.shape for name, tensor in others.items()}
    if rewards.dim() != 1 or len(set(shapes.values())) > 1:
        raise ValueError("all must be (N,): " + ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items()))
