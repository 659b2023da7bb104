"""Losses: golden numbers, a slow loop as oracle, exact KL gradients by enumeration, and what masks must keep out."""

import math

import pytest
import torch

from envace.losses import KL_ESTIMATORS, entropy, policy_loss, sft_loss, token_logprobs

NAN, INF = math.nan, math.inf


def leaf(values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def const(values):
    return torch.tensor(values, dtype=torch.float64)


def loss_and_grad(logprobs, old, ref, advantages, mask, **settings):
    logprobs = logprobs.detach().clone().requires_grad_()
    loss, metrics = policy_loss(logprobs, old, ref, advantages, mask, **settings)
    loss.backward()
    return loss.detach(), logprobs.grad, metrics


# Token log-probabilities


def test_logprob_and_entropy_use_the_sampling_temperature():
    logits = torch.tensor([[[2.0, 1, 0], [0, 0, 0]]])
    chosen = torch.tensor([[2, 0]])
    cold = token_logprobs(logits, chosen, temperature=0.5)
    assert cold.tolist()[0] == pytest.approx([0.0, -0.1429], abs=1e-4)
    assert entropy(logits[0, 0], temperature=0.5).item() == pytest.approx(0.4411, abs=1e-4)
    assert entropy(logits[0, 0]).item() == pytest.approx(0.8324, abs=1e-4)
    mismatch = (token_logprobs(logits, chosen) - cold).exp()[0, 1]
    assert float(mismatch) == pytest.approx(0.7675, abs=1e-3)


def test_index_t_is_the_logprob_of_token_t_given_earlier_tokens():
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    input_ids = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(1))
    logprobs, entropies = token_logprobs(logits, input_ids), entropy(logits)
    for b in range(2):
        assert logprobs[b, 0] == 0
        for t in range(1, 5):
            before = torch.distributions.Categorical(logits=logits[b, t - 1])
            torch.testing.assert_close(logprobs[b, t], before.log_prob(input_ids[b, t]))
            torch.testing.assert_close(entropies[b, t - 1], before.entropy())


def test_impossible_tokens_leave_the_entropy_finite():
    assert float(entropy(torch.tensor([0.0, 0.0, -INF]))) == pytest.approx(math.log(2))


def test_half_precision_logits_give_float32_logprobs():
    logits = torch.randn(1, 3, 9, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    input_ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(token_logprobs(logits, input_ids), token_logprobs(logits.float(), input_ids))
    assert token_logprobs(logits.double(), input_ids).dtype == torch.float64


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN])
def test_greedy_temperature_is_refused(temperature):
    with pytest.raises(ValueError, match="RL needs temperature > 0"):
        token_logprobs(torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.long), temperature)
    with pytest.raises(ValueError, match="RL needs temperature > 0"):
        entropy(torch.zeros(1, 2, 3), temperature)


# The surrogate and its clipping


def test_on_policy_ratio_is_one_and_carries_the_gradient():
    logprobs, advantages, mask = const([[-1.0, -2, -3]]), const([[2.0, -1, 5]]), const([[1.0, 1, 0]])
    loss, grad, metrics = loss_and_grad(logprobs, None, None, advantages, mask)
    assert float(loss) == pytest.approx(-0.5)
    assert grad.tolist() == [[-1.0, 0.5, 0.0]]
    assert metrics["ratio_mean"] == 1 and metrics["clip_fraction"] == 0
    assert loss_and_grad(logprobs, logprobs, None, advantages, mask)[0] == loss


def test_old_logprobs_that_share_the_graph_do_not_cancel_the_gradient():
    logprobs = leaf([[-1.0, -2]])
    policy_loss(logprobs, logprobs, None, const([[1.0, 1]]), const([[1.0, 1]]))[0].backward()
    assert logprobs.grad.tolist() == [[-0.5, -0.5]]


def test_clipping_removes_the_gradient_only_beyond_the_trusted_side():
    ratio, advantages = const([[1.5, 0.5, 0.5, 1.5]]), const([[1.0, -1, 1, -1]])
    loss, grad, metrics = loss_and_grad(ratio.log(), torch.zeros_like(ratio), None, advantages, torch.ones_like(ratio))
    assert float(loss) == pytest.approx((-1.2 + 0.8 - 0.5 + 1.5) / 4)
    torch.testing.assert_close(grad, const([[0.0, 0, -0.5, 1.5]]) / 4)
    assert float(metrics["clip_fraction"]) == 0.5
    assert float(metrics["ratio_mean"]) == pytest.approx(1.0)


def test_the_two_clip_bounds_are_independent():
    ratio, advantages = const([[1.5, 0.5]]), const([[1.0, -1]])
    old, ones, settings = torch.zeros(1, 2), torch.ones(1, 2), {"clip_eps_low": 0.1, "clip_eps_high": 0.3}
    loss, grad, _ = loss_and_grad(ratio.log(), old, None, advantages, ones, **settings)
    assert float(loss) == pytest.approx((-1.3 + 0.9) / 2)
    assert grad.tolist() == [[0.0, 0.0]]


def test_clip_fraction_and_means_follow_the_weights():
    ratio = const([[1.5, 1.0]])
    weights = const([[3.0, 1.0]])
    metrics = loss_and_grad(ratio.log(), torch.zeros_like(ratio), None, const([[1.0, 1]]), weights)[2]
    assert float(metrics["clip_fraction"]) == 0.75
    assert float(metrics["ratio_mean"]) == pytest.approx(1.375)


# KL estimators

P, Q = const([0.5, 0.3, 0.2]), const([0.2, 0.3, 0.5])
REVERSE_KL_GRADIENT = [0.3207, -0.0825, -0.2382]


def expected_value_and_gradient(estimator, old=P):
    """Expectation over tokens drawn from `old` and its gradient with respect to the logits of P, by enumeration."""
    logits = P.log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    value = (old * KL_ESTIMATORS[estimator](logprobs, Q.log(), (logprobs - old.log()).exp())).sum()
    return float(value.detach()), torch.autograd.grad(value, logits)[0].tolist()


def test_reverse_kl_gradient_is_what_the_estimators_are_compared_with():
    logits = P.log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    kl = (logprobs.exp() * (logprobs - Q.log())).sum()
    assert float(kl.detach()) == pytest.approx(0.2749, abs=1e-4)
    assert torch.autograd.grad(kl, logits)[0].tolist() == pytest.approx(REVERSE_KL_GRADIENT, abs=1e-4)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", 0.2749, [0.0, 0.0, 0.0]),
        ("k2", 0.2939, REVERSE_KL_GRADIENT),
        ("k3", 0.2749, [0.3, 0.0, -0.3]),
        ("k3_ratio", 0.2749, REVERSE_KL_GRADIENT),
    ],
)
def test_expected_value_and_gradient_on_policy(estimator, value, gradient):
    actual_value, actual_gradient = expected_value_and_gradient(estimator)
    assert actual_value == pytest.approx(value, abs=1e-4)
    assert actual_gradient == pytest.approx(gradient, abs=1e-4)


def test_only_the_ratio_weighted_estimator_stays_exact_off_policy():
    old = const([0.2, 0.2, 0.6])
    value, gradient = expected_value_and_gradient("k3_ratio", old)
    assert value == pytest.approx(0.2749, abs=1e-4)
    assert gradient == pytest.approx(REVERSE_KL_GRADIENT, abs=1e-4)
    for biased in ("k2", "k3"):
        assert expected_value_and_gradient(biased, old)[1] != pytest.approx(REVERSE_KL_GRADIENT, abs=0.05)


@pytest.mark.parametrize(
    ("estimator", "gradient"), [("k2", REVERSE_KL_GRADIENT), ("k3", [0.3, 0, -0.3]), ("k3_ratio", REVERSE_KL_GRADIENT)]
)
def test_policy_loss_adds_the_kl_term_with_its_coefficient(estimator, gradient):
    logits = P.log()[None].requires_grad_()
    settings = {"kl_coef": 0.1, "kl_estimator": estimator}
    loss, metrics = policy_loss(logits.log_softmax(-1), None, Q.log()[None], torch.zeros(1, 3), P[None], **settings)
    loss.backward()
    assert logits.grad[0].tolist() == pytest.approx([0.1 * g for g in gradient], abs=1e-5)
    assert float(metrics["kl"]) == pytest.approx(0.2749, abs=1e-4)


def test_kl_to_itself_is_zero_and_a_zero_coefficient_only_measures():
    logprobs, zeros, ones = const([[-1.0, -2]]), torch.zeros(1, 2), torch.ones(1, 2)
    assert loss_and_grad(logprobs, None, logprobs, zeros, ones, kl_coef=1.0)[2]["kl"] == 0
    loss, grad, metrics = loss_and_grad(logprobs, None, logprobs + 1, zeros, ones)
    assert loss == 0 and not grad.any()
    assert float(metrics["kl"]) == pytest.approx(math.e - 2)
    assert "kl" not in loss_and_grad(logprobs, None, None, zeros, ones)[2]


# Masks and denominators


def test_nan_behind_the_mask_touches_neither_value_nor_gradient():
    loss, grad, _ = loss_and_grad(const([[0.0, 0]]), const([[0.0, NAN]]), None, const([[1.0, 1]]), const([[1.0, 0]]))
    assert float(loss) == -1.0
    assert grad.tolist() == [[-1.0, 0.0]]


def test_selecting_after_the_exponential_would_poison_the_gradient():
    logprobs = leaf([0.0, 0.0])
    late = torch.where(torch.tensor([True, False]), (logprobs - const([0.0, NAN])).exp(), 0.0).sum()
    late.backward()
    assert float(late.detach()) == 1.0 and logprobs.grad.isnan()[1]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["logprobs", "old", "ref", "advantages"])
@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_ratio"])
def test_garbage_in_any_masked_input_changes_nothing(bad, where, estimator):
    inputs = {
        "logprobs": const([[-1.0, -2, -1]]),
        "old": const([[-1.1, -1.9, -1]]),
        "ref": const([[-0.9, -2.5, -1]]),
        "advantages": const([[1.0, -1, 1]]),
        "mask": const([[1.0, 0.5, 0]]),
    }
    settings = {"kl_coef": 0.3, "kl_estimator": estimator}
    clean_loss, clean_grad, clean_metrics = loss_and_grad(*inputs.values(), **settings)
    inputs[where][0, 2] = bad
    loss, grad, metrics = loss_and_grad(*inputs.values(), **settings)
    assert torch.equal(loss, clean_loss) and torch.equal(grad, clean_grad) and metrics == clean_metrics
    assert grad[0, 2] == 0 and grad[0, :2].all()


def test_masked_garbage_does_not_reach_the_supervised_loss():
    logprobs = leaf([[-1.0, NAN, -3]])
    loss = sft_loss(logprobs, const([[1.0, 0, 1]]))
    loss.backward()
    assert float(loss.detach()) == 2.0
    assert logprobs.grad.tolist() == [[-0.5, 0.0, -0.5]]


def test_masked_rows_leave_the_denominator():
    zeros, unit_loss = torch.zeros(2, 4), torch.full((2, 4), -1.0)
    mask = torch.tensor([[1.0] * 4, [0.0] * 4])
    loss, grad, _ = loss_and_grad(zeros, None, None, unit_loss, mask)
    assert float(loss) == 1.0
    assert grad.tolist() == [[0.25] * 4, [0.0] * 4]


@pytest.mark.parametrize("denominator", [None, 0.0, 7.0])
def test_all_masked_is_a_zero_loss_with_a_zero_gradient(denominator):
    nothing = torch.zeros(2, 4)
    loss, grad, metrics = loss_and_grad(
        nothing, nothing, nothing, torch.ones(2, 4), nothing, kl_coef=1.0, denominator=denominator
    )
    assert loss == 0 and torch.equal(grad, nothing)
    assert all(math.isfinite(value) and not value.requires_grad for value in metrics.values())
    logprobs = torch.zeros(2, 4, requires_grad=True)
    sft_loss(logprobs, nothing, denominator=denominator).backward()
    assert torch.equal(logprobs.grad, nothing)


def losses_of_both_kinds(logprobs, mask, denominator=None):
    """Two losses whose value at a token is -logprobs: supervised, and on-policy with advantage logprobs."""
    yield sft_loss(logprobs, mask, denominator=denominator)
    yield policy_loss(logprobs, None, None, logprobs.detach(), mask, denominator=denominator)[0]


def test_micro_batches_add_up_to_the_batch():
    # Token losses [2, 2, 2, 2] and [8].
    logprobs = torch.tensor([[-2.0, -2, -2, -2], [-8, 0, 0, 0]])
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0]])
    for kind in range(2):
        together = logprobs.clone().requires_grad_()
        loss = list(losses_of_both_kinds(together, mask))[kind]
        loss.backward()
        assert float(loss.detach()) == pytest.approx(3.2)

        split = logprobs.clone().requires_grad_()
        parts = [list(losses_of_both_kinds(split[i : i + 1], mask[i : i + 1], mask.sum()))[kind] for i in range(2)]
        sum(parts).backward()
        assert float(sum(parts).detach()) == pytest.approx(3.2)
        torch.testing.assert_close(split.grad, together.grad, atol=1e-6, rtol=0)

        own = [list(losses_of_both_kinds(logprobs[i : i + 1], mask[i : i + 1]))[kind] for i in range(2)]
        assert float(sum(own)) / 2 == pytest.approx(5.0)  # averaging the means of micro-batches is another loss


def test_boolean_mask_and_integer_denominator_are_understood():
    logprobs, mask = torch.tensor([[-2.0, -4, -8]]), torch.tensor([[True, True, False]])
    assert sft_loss(logprobs, mask) == sft_loss(logprobs, mask, denominator=2) == 3.0


def slow_policy_loss(logprobs, old, ref, advantages, mask, low, high, kl_coef, estimator, denominator):
    total = 0.0
    for b in range(len(mask)):
        for t in range(len(mask[b])):
            if mask[b][t] > 0:
                ratio = math.exp(logprobs[b][t] - old[b][t])
                x = ref[b][t] - logprobs[b][t]
                k3 = math.exp(x) - x - 1
                kl = {"k2": x * x / 2, "k3": k3, "k3_ratio": ratio * k3}[estimator]
                bounded = min(max(ratio, 1 - low), 1 + high)
                gain = min(ratio * advantages[b][t], bounded * advantages[b][t])
                total += mask[b][t] * (kl_coef * kl - gain)
    return total / denominator


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_ratio"])
def test_matches_a_slow_loop(estimator):
    for seed in range(8):
        draw = torch.Generator().manual_seed(seed)
        logprobs, old, ref = (-torch.rand(3, 6, generator=draw, dtype=torch.float64) for _ in range(3))
        advantages = torch.randn(3, 6, generator=draw, dtype=torch.float64)
        lengths = torch.randint(1, 7, (3, 1), generator=draw)
        mask = torch.rand(3, 6, generator=draw, dtype=torch.float64) * (torch.arange(6) < lengths)
        ref[mask == 0] = NAN
        settings = {"clip_eps_low": 0.1, "clip_eps_high": 0.3, "kl_coef": 0.7, "kl_estimator": estimator}
        loss, grad, _ = loss_and_grad(logprobs, old, ref, advantages, mask, denominator=5.0, **settings)

        def slow(at, fixed=(old, ref, advantages, mask)):
            return slow_policy_loss(at.tolist(), *(x.tolist() for x in fixed), 0.1, 0.3, 0.7, estimator, 5.0)

        assert float(loss) == pytest.approx(slow(logprobs))
        for index in range(logprobs.numel()):
            step = torch.zeros(18, dtype=torch.float64).index_fill(0, torch.tensor(index), 1e-6).view(3, 6)
            slope = (slow(logprobs + step) - slow(logprobs - step)) / 2e-6
            assert float(grad.flatten()[index]) == pytest.approx(slope, abs=1e-6)


# Refusals


def test_settings_that_cannot_work_are_refused():
    tensors = [torch.zeros(1, 2)] * 5
    with pytest.raises(ValueError, match="zero expected gradient"):
        policy_loss(*tensors, kl_coef=0.1, kl_estimator="k1")
    with pytest.raises(ValueError, match="k2, k3 or k3_ratio, not 'abs'"):
        policy_loss(*tensors, kl_estimator="abs")
    with pytest.raises(ValueError, match="needs ref_logprobs"):
        policy_loss(tensors[0], None, None, *tensors[3:], kl_coef=0.1)


def test_shapes_that_would_broadcast_are_refused():
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"advantages \(2, 1\)"):
        policy_loss(ones, None, None, ones[:, :1], ones)
    with pytest.raises(ValueError, match=r"mask \(3,\)"):
        sft_loss(ones, ones[0])
