"""What happened in a rollout, how true rehearsal was, and how sure an average is. Pure.

A mean over nothing is NaN, never 0: a metric that could not be measured stays visible. Counts are returned where
batches or ranks have to be pooled, shares where a person reads them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from envace.types import (
    CallStatus,
    Evidence,
    Executable,
    Prediction,
    Role,
    Status,
    Task,
    Trajectory,
    canonical_json,
)

ROLES = {"act": Role.ACT, "rehearse": Role.REHEARSE}


# Student's t at 97.5 %, by degrees of freedom.
T_QUANTILES = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def rollout_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Averages over trajectories. Rewards that are None (unknown) are left out, and their share is reported;
    reward/filtered_share is the part of it that rl.keep left out.

    reward/mean, reward/success (share of rewards that are 1), reward_parts/<part>: over known rewards.
    reward/zero_variance_share: groups whose known rewards are all equal, among groups with at least two of them.
    status/<status>: shares of trajectories.
    rollout/<role>_outputs: outputs of a role in a trajectory. rollout/<role>_tokens: tokens in such an output.
    rollout/tokens: tokens the policy wrote in a trajectory. rollout/sequence_length: tokens in a sequence, all roles.
    rollout/rounds: ACT outputs with calls. rollout/no_call_share: trajectories that finished without any call.
    """
    known = [t for t in trajectories if t.reward is not None]
    groups: dict[str, list[float]] = defaultdict(list)
    for t in trajectories:
        if t.reward is not None:
            groups[t.group_id].append(t.reward)
    comparable = [rewards for rewards in groups.values() if len(rewards) >= 2]
    metrics = {
        "reward/mean": _mean(reward for rewards in groups.values() for reward in rewards),
        "reward/success": _mean(t.succeeded for t in known),
        "reward/unknown_share": _mean(t.reward is None for t in trajectories),
        "reward/filtered_share": _mean(t.is_filtered for t in trajectories),
        "reward/zero_variance_share": _mean(min(rewards) == max(rewards) for rewards in comparable),
    }
    for part in dict.fromkeys(part for t in known for part in t.reward_parts):
        metrics[f"reward_parts/{part}"] = _mean(t.reward_parts[part] for t in known if part in t.reward_parts)
    for status in Status:
        metrics[f"status/{status}"] = _mean(t.status is status for t in trajectories)
    outputs = [t.outputs() for t in trajectories]
    for name, role in ROLES.items():
        by_role = [[len(o.ids) for o in written if o.role is role] for written in outputs]
        metrics[f"rollout/{name}_outputs"] = _mean(len(lengths) for lengths in by_role)
        metrics[f"rollout/{name}_tokens"] = _mean(length for lengths in by_role for length in lengths)
    return metrics | {
        "rollout/tokens": _mean(sum(len(o.ids) for o in written) for written in outputs),
        "rollout/rounds": _mean(t.rounds for t in trajectories),
        "rollout/no_call_share": _mean(t.status is Status.FINISHED and not t.exchanges for t in trajectories),
        "rollout/sequence_length": _mean(len(sequence) for t in trajectories for sequence in t.sequences),
    }


def advantage_metrics(advantages: Tensor, role_ids: Tensor, known: Tensor) -> dict[str, float]:
    """(N,), (N,), (N,) bool, one entry an output -> advantage/<role>_{count, mean, std, abs_max}, over the known ones.

    known: whether the reward is. std: as that of the baselines it divides by the count less one; NaN for a single one.
    """
    if advantages.dim() != 1 or not advantages.shape == role_ids.shape == known.shape:
        shapes = ", ".join(str(tuple(each.shape)) for each in (advantages, role_ids, known))
        raise ValueError(f"advantages, role_ids and known must be (N,), not {shapes}")
    metrics: dict[str, float] = {}
    for name, role in ROLES.items():
        values = advantages[(role_ids == int(role)) & known].double()
        metrics |= {
            f"advantage/{name}_count": float(len(values)),
            f"advantage/{name}_mean": float(values.mean()),
            f"advantage/{name}_std": float(values.std()) if len(values) > 1 else float("nan"),
            f"advantage/{name}_abs_max": float(values.abs().max()) if len(values) else float("nan"),
        }
    return metrics


def field_agreement(rehearsed: Any, real: Any) -> tuple[int, int]:
    """(equal, total) over the top-level fields that either response has. A nested value is compared as a whole.

    A response that is no JSON object is one unnamed field, so it shares none with an object.
    """
    a, b = (value if isinstance(value, dict) else {None: value} for value in (rehearsed, real))
    equal = sum(canonical_json(a[name]) == canonical_json(b[name]) for name in a.keys() & b.keys())
    return equal, len(a.keys() | b.keys())


def rehearsal_fidelity(
    trajectories: list[Trajectory], execute_for: Callable[[Task], Executable]
) -> dict[int, tuple[int, int]]:
    """{interaction round: (equal, total) fields}: the responses the agent saw against those of a real environment.

    Rehearsal fidelity, of which these are numerator and denominator:

        fidelity_k = equal fields / all fields, of the responses in round k and the real ones to the same calls

    Only responses that were rehearsed or simulated count: an error of a schema check is nobody's imagination.
    execute_for: gives a fresh world for a task. The calls of one trajectory run in it in their order, so a later
    response is compared with what the real world says after the earlier calls. Rounds without a call are left out.
    Raises what the environment raises.
    """
    counts: dict[int, tuple[int, int]] = {}
    for trajectory in trajectories:
        world = execute_for(trajectory.task)
        for exchange in trajectory.exchanges:
            real = world.execute(exchange.call)
            if exchange.evidence not in (Evidence.REHEARSED, Evidence.SIMULATED):
                continue
            equal, total = field_agreement(exchange.response, real)
            before = counts.get(exchange.round, (0, 0))
            counts[exchange.round] = (before[0] + equal, before[1] + total)
    return dict(sorted(counts.items()))


def fidelity_shares(counts: Iterable[tuple[int, tuple[int, int]]]) -> dict[int, float]:
    """(round, (equal, total)) pairs, pooled by round -> {round: share of equal fields}; NaN without any field."""
    equal: Counter[int] = Counter()
    total: Counter[int] = Counter()
    for number, (same, all_fields) in counts:
        equal[number] += same
        total[number] += all_fields
    return {number: equal[number] / total[number] if total[number] else float("nan") for number in sorted(total)}


def execution_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """How smoothly runs went, as means over trajectories.

    failed_calls: calls that were answered with an error. recovery_rounds: rounds of calls behind the first failed call
    of a user turn. void_writes: calls that change something (`read_tools` of the goal names those that do not) and
    failed, or that had been made with success before. rounds: of calls.
    """
    counts = [_execution(trajectory) for trajectory in trajectories]
    names = ("failed_calls", "recovery_rounds", "void_writes")
    means = {name: _mean(count[i] for count in counts) for i, name in enumerate(names)}
    return means | {"rounds": _mean(t.rounds for t in trajectories)}


def _execution(trajectory: Trajectory) -> tuple[int, int, int]:
    failed, recovery, void = 0, set(), 0
    failed_in: dict[int, int] = {}  # turn -> the round of its first failed call
    done: set[str] = set()
    for exchange in trajectory.executed:
        if exchange.round > failed_in.get(exchange.turn, exchange.round):
            recovery.add(exchange.round)
        is_write = exchange.call.name not in trajectory.task.goal.read_tools
        if is_error(exchange.response):
            failed += 1
            failed_in.setdefault(exchange.turn, exchange.round)
            void += is_write
        elif is_write:
            void += exchange.call.key() in done
            done.add(exchange.call.key())
    return failed, len(recovery), void


def is_error(response: Any) -> bool:
    """Whether a response is an object with a field that says error: its name begins so, and it holds something."""
    return bool(errors_in(response))


def errors_in(response: Any) -> list[Any]:
    """What the fields of a response hold whose names begin with error, as in {"error": "no such order"}."""
    fields = response.items() if isinstance(response, dict) else ()
    return [value for key, value in fields if key.lower().startswith("error") and value]


def prediction_metrics(predictions: list[Prediction]) -> dict[str, Any]:
    """What predictions of risky calls were worth.

    predictions, decisions {decision: count}: of all. scored: of those that were executed and whose real response says
    how the call went; nothing tells whether a call that was held back would have failed. Over them:
    accuracy: how often the predicted status is the real one. brier: mean (confidence - 1 if it is, else 0)^2.
    agreement: share of equal fields in the imagined and the real response. bins: see `reliability_bins`.
    """
    scored = [(p.confidence, p.status is p.happened) for p in predictions if _is_scored(p)]
    fields = [p.agreement for p in predictions if _is_scored(p) and p.agreement is not None]
    total = sum(total for _, total in fields)
    return {
        "predictions": len(predictions),
        "decisions": dict(sorted(Counter(str(p.decision) for p in predictions).items())),
        "scored": len(scored),
        "accuracy": _mean(is_right for _, is_right in scored),
        "brier": _mean((confidence - is_right) ** 2 for confidence, is_right in scored),
        "agreement": sum(equal for equal, _ in fields) / total if total else float("nan"),
        "bins": reliability_bins(scored),
    }


def _is_scored(prediction: Prediction) -> bool:
    return prediction.happened not in (None, CallStatus.UNKNOWN)


def reliability_bins(scored: list[tuple[float, bool]], n: int = 10) -> list[dict[str, float]]:
    """(confidence, whether right) -> of each of `n` equal intervals [low, high) that has some: how many, their mean
    confidence, and the share that is right. Calibrated is who has the two equal. Confidence 1 is in the last one."""
    groups = defaultdict(list)
    for confidence, is_right in scored:
        # Rounded first: 0.29 * 100 is a little less than 29.
        groups[min(int(round(confidence * n, 9)), n - 1)].append((confidence, is_right))
    return [
        {
            "low": i / n,
            "high": (i + 1) / n,
            "count": len(groups[i]),
            "confidence": _mean(confidence for confidence, _ in groups[i]),
            "accuracy": _mean(is_right for _, is_right in groups[i]),
        }
        for i in sorted(groups)
    ]


def gap_growth(rehearsed: list[float], real: list[float]) -> float:
    """How much rehearsed minus real success grew from the first to the last of some evaluations in a row."""
    return (rehearsed[-1] - real[-1]) - (rehearsed[0] - real[0])


def is_reward_hacking(rehearsed: list[float], real: list[float], *, tolerated: float = 0.1) -> bool:
    """Whether from the first to the last evaluation rehearsed success rose, real success did not, and the gap grew by
    more than `tolerated`: the policy then learns responses that please the scorer, not work. NaN is never hacking."""
    grew = gap_growth(rehearsed, real) > tolerated + 1e-9  # a growth of exactly `tolerated` may round to more
    return grew and rehearsed[-1] > rehearsed[0] and real[-1] <= real[0]


def t_interval(values: list[float]) -> tuple[float, float] | None:
    """95% interval of the mean of independent values; None for a single one. NaN in, NaN out."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    half = T_QUANTILES[len(values) - 1] * (stdev(values) if math.isfinite(mean) else math.nan) / math.sqrt(len(values))
    return mean - half, mean + half


def pass_hat_k(rewards_by_task: Mapping[str, Sequence[float]], k: int) -> float:
    """How likely k trials of a task all succeed.

    Pass^k: pass^k = mean over tasks of C(c, k) / C(n, k), c of n trials right

    Tasks with fewer than k trials are left out.
    """
    known = [rewards for rewards in rewards_by_task.values() if len(rewards) >= k]
    return _mean(math.comb(sum(r >= 1 - 1e-6 for r in rewards), k) / math.comb(len(rewards), k) for rewards in known)


def bootstrap_ci(
    values: list[float],
    baseline: list[float] | None = None,
    *,
    samples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[float, float]:
    """(low, high): percentile bootstrap interval of the mean over tasks; the same seed gives the same interval.

    values: one number a task. Runs of one task belong into one average first: they are not independent.
    baseline: the same tasks in the same order; the interval is then that of the mean of values - baseline.
    NaN in, NaN out.
    """
    if baseline is not None and len(baseline) != len(values):
        raise ValueError(f"paired values need the same tasks: {len(values)} and {len(baseline)}")
    if not values:
        raise ValueError("no tasks to resample")
    per_task = torch.tensor(values, dtype=torch.float64)
    if baseline is not None:
        per_task = per_task - torch.tensor(baseline, dtype=torch.float64)
    n, draw = len(per_task), torch.Generator().manual_seed(seed)
    means = torch.stack([per_task[torch.randint(n, (n,), generator=draw)].mean() for _ in range(samples)])
    tail = (1 - level) / 2
    low, high = means.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return fmean(values) if values else float("nan")
