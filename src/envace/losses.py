"""Token log-probabilities, the clipped policy loss with its KL penalty, and the supervised loss. Pure.

All token tensors are (B, T) and index t means token t of the sequence. A loss is one weighted sum over one denominator

    loss = sum(mask * per_token) / denominator

so with the denominator of the whole batch the losses of its micro-batches (and ranks) add up to the loss of the batch.
The released code averages the means of micro-batches of one output each instead; the aggregation `output_mean` of
`envace.batching` gives the same objective by weights.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def token_logprobs(logits: Tensor, input_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """(B, T, V), (B, T) -> (B, T): log pi(token t | tokens before t) at the sampling temperature.

    Position 0 is 0: nothing predicts it. At least float32, whatever the dtype of the logits.
    """
    return pad(chosen_logprobs(logits[:, :-1], input_ids[:, 1:], temperature), (1, 0))


def chosen_logprobs(logits: Tensor, chosen: Tensor, temperature: float = 1.0) -> Tensor:
    """(..., V), (...) -> (...): the log-probability of `chosen` where `logits` predict it; nothing is shifted."""
    return log_distribution(logits, temperature).gather(-1, chosen[..., None]).squeeze(-1)


@torch.no_grad()
def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """(..., V) -> (...): entropy in nats of the predicted distributions. A metric, without gradient.

    Entropy: H_t = -sum_v p_v log p_v
    """
    return torch.special.entr(log_distribution(logits, temperature).exp()).sum(-1)


def log_distribution(logits: Tensor, temperature: float) -> Tensor:
    """(..., V) -> (..., V), in at least float32.

    Token log-probability: log pi(y_t | y_<t) = log_softmax(z_t / temperature)[y_t]
    """
    if not temperature > 0:
        raise ValueError(f"RL needs temperature > 0, not {temperature}: greedy decoding has no log-probabilities")
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return (logits.to(dtype) / temperature).log_softmax(-1)


# Estimators of the reverse KL(pi || ref) from one sampled token: (logprobs, ref_logprobs, ratio) -> KL, all (B, T).
# With d = ref_logprobs - logprobs, at pi = [.5, .3, .2] and ref = [.2, .3, .5] the exact KL is .2749 and its gradient
# with respect to the logits is [.3207, -.0825, -.2382]. "Gradient" is the expected gradient under pi.


def k1(logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor) -> Tensor:
    """KL estimator k1: KL_t = -d

    Value unbiased; the gradient is zero in expectation, so it is a metric and not a loss.
    """
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor) -> Tensor:
    """KL estimator k2: KL_t = d^2 / 2

    Value biased (.2939 in the example); gradient that of the reverse KL while on-policy.
    """
    return (ref_logprobs - logprobs) ** 2 / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor) -> Tensor:
    """KL estimator k3: KL_t = exp(d) - d - 1

    Never negative; the usual GRPO term. Value unbiased; gradient that of KL(ref || pi): [.3, 0, -.3].
    """
    log_ratio = ref_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


def k3_ratio(logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor) -> Tensor:
    """KL estimator k3_ratio: KL_t = ratio_t * (exp(d) - d - 1)

    Value and gradient unbiased, also when the tokens were sampled from the old policy.
    """
    return ratio * k3(logprobs, ref_logprobs, ratio)


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "k3_ratio": k3_ratio}


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    denominator: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate with a KL penalty. All tensors (B, T); gradient reaches `logprobs` only.

    Clipped loss, with w_t of `mask`, W of `denominator` and the l_t of one token:

        ratio_t = exp(log pi(y_t) - log pi_old(y_t))
        l_t = -min(ratio_t * A, clip(ratio_t, 1 - eps_low, 1 + eps_high) * A) + kl_coef * KL_t
        loss = sum_t w_t * l_t / W

    old_logprobs: None means on-policy: ratio is 1 and still carries the gradient.
    ref_logprobs: may be None when kl_coef is 0.
    mask: 0, or the weight of the token. Where it is 0 no input is read: even NaN changes neither value nor gradient.
    kl_estimator: "k2", "k3" or "k3_ratio"; see KL_ESTIMATORS.
    denominator: the weight of the whole batch, over micro-batches and ranks; None takes mask.sum().
    Returns the loss and detached metrics, means over tokens weighted by `mask` (0 if all is masked): clip_fraction
    (where clipping removed the gradient), ratio_mean and, with ref_logprobs, kl (the k3 value).

    Departure: the released code also bounds the loss of a negative advantage (dual clip at 3) and leaves the KL off.
    """
    if kl_estimator == "k1":
        raise ValueError("kl_estimator 'k1' has zero expected gradient: use k2, k3 or k3_ratio")
    if kl_estimator not in KL_ESTIMATORS:
        raise ValueError(f"kl_estimator must be k2, k3 or k3_ratio, not {kl_estimator!r}")
    if kl_coef != 0 and ref_logprobs is None:
        raise ValueError(f"kl_coef {kl_coef} needs ref_logprobs")
    _check_shapes(
        logprobs=logprobs, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, advantages=advantages, mask=mask
    )

    # Select before any arithmetic: 0 * NaN is NaN, and so is the gradient of exp(NaN) behind a later selection.
    masked = ~(mask > 0)
    weights = mask.to(logprobs.dtype).masked_fill(masked, 0)
    logprobs = logprobs.masked_fill(masked, 0)
    advantages = advantages.detach().masked_fill(masked, 0)
    old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs.detach().masked_fill(masked, 0)

    ratio = (logprobs - old_logprobs).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high) * advantages
    per_token = -torch.minimum(unclipped, clipped)
    metrics = {
        "clip_fraction": _weighted_mean(clipped < unclipped, weights),
        "ratio_mean": _weighted_mean(ratio, weights),
    }
    if ref_logprobs is not None:
        ref_logprobs = ref_logprobs.detach().masked_fill(masked, 0)
        metrics["kl"] = _weighted_mean(k3(logprobs, ref_logprobs, ratio), weights)
        if kl_coef != 0:
            per_token = per_token + kl_coef * KL_ESTIMATORS[kl_estimator](logprobs, ref_logprobs, ratio)
    return _weighted_sum(per_token, weights, denominator), metrics


def sft_loss(logprobs: Tensor, mask: Tensor, *, denominator: Tensor | float | None = None) -> Tensor:
    """(B, T), (B, T) -> scalar; mask and denominator as in `policy_loss`.

    SFT loss: loss = -sum_t m_t * log pi(y_t | y_<t) / sum_t m_t
    """
    _check_shapes(logprobs=logprobs, mask=mask)
    masked = ~(mask > 0)
    weights = mask.to(logprobs.dtype).masked_fill(masked, 0)
    return _weighted_sum(-logprobs.masked_fill(masked, 0), weights, denominator)


def _weighted_sum(per_token: Tensor, weights: Tensor, denominator: Tensor | float | None) -> Tensor:
    denominator = weights.sum() if denominator is None else denominator
    total = torch.as_tensor(denominator, dtype=weights.dtype, device=weights.device)
    # A denominator of 0 means that nothing is trained: 0 with a graph rather than 0 / 0.
    return (weights * per_token).sum() / torch.where(total == 0, 1.0, total)


def _weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    return _weighted_sum(values.detach(), weights, None)


def _check_shapes(**tensors: Tensor | None) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        raise ValueError("all must be (B, T): " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))
