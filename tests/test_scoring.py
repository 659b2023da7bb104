"""Log-probabilities of the scored tokens alone, in chunks, padded or packed: those of the plain model, for less memory.

The oracle runs one row after the other through the Hugging Face model, unpadded and without a cache, and reads whole
logits. Everything is float32 on a CPU.
"""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from envace import scoring
from envace.batching import Row, divide, num_scored, rows_to_batch, rows_to_packed_batch, total_weight
from envace.losses import entropy, sft_loss, token_logprobs
from envace.policy import LoadError, Policy
from envace.scoring import Scorer, score_inputs
from envace.settings import ModelConfig, PolicyConfig

VOCAB, PAD, TEMPERATURE = 400, 0, 0.7
SETTINGS = {"lr": 1e-3, "weight_decay": 0.0, "grad_clip": 1.0, "max_nonfinite_steps": 5}


def make_rows(*, number=8, shared=0, seed=0):
    """Rows of different lengths with the same `shared` tokens in front, some without outputs. No two weights agree."""
    rng = Random(seed)
    start, rows = [rng.randrange(1, VOCAB) for _ in range(shared)], []
    for turns in range(number):
        roles = [0] * max(shared, 1)
        for _ in range(turns % 4):
            roles += [0] * rng.randint(0, 4) + [rng.choice([1, 2])] * rng.randint(1, 6)
        roles += [0] * rng.randint(0, 3)
        ids = start + [rng.randrange(1, VOCAB) for _ in roles[shared:]]
        weights = [rng.uniform(0.5, 1.5) * (role > 0) for role in roles]
        rows.append(Row(ids, roles, weights, [0.0] * len(roles)))
    return rows


def padded(rows):
    return rows_to_batch(rows, PAD)


LAYOUTS = [padded, rows_to_packed_batch]


def without_loss(rows):
    return [Row(row.ids, [0] * len(row), [0.0] * len(row), [0.0] * len(row)) for row in rows]


def row_by_row(values, rows):
    """(B, T) of a padded batch, or (1, T) of a packed one, -> the tokens of each row."""
    if len(values) == 1:
        return list(values[0].split([len(row) for row in rows]))
    return [line[: len(row)] for line, row in zip(values, rows, strict=True)]


def take_gradients(model):
    """By name; the model has none afterwards."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def from_whole_logits(model, rows):
    """The oracle: logprobs and entropies of each row, 0 where nothing is trained, and the gradient of the mean loss."""
    logprobs, entropies = [], []
    for row in rows:
        ids, weights = torch.tensor([row.ids]), torch.tensor(row.weights)
        logits = model(input_ids=ids, use_cache=False).logits
        values = token_logprobs(logits, ids, TEMPERATURE)[0]
        if any(row.weights):
            (-(values * weights).sum() / total_weight(rows)).backward()
        logprobs.append(values.detach().where(weights > 0, 0))
        entropies.append(torch.cat([torch.zeros(1), entropy(logits[0, :-1], TEMPERATURE)]).where(weights > 0, 0))
    return logprobs, entropies, take_gradients(model)


def score(model, batch, chunk):
    return Scorer(model, model, chunk)(
        **score_inputs(batch, chunk, share_start=True), temperature=TEMPERATURE, with_entropy=True
    )


def from_chunks(model, rows, layout, chunk, *, others=0):
    """The same three from a Scorer, where another rank has `others` more tokens to score."""
    batch = layout(rows)
    logprobs, entropies = score(model, replace(batch, num_scored=batch.num_scored + others), chunk)
    sft_loss(logprobs, batch.weights).backward()
    assert not logprobs[batch.weights == 0].any() and not entropies[batch.weights == 0].any()
    return row_by_row(logprobs.detach(), rows), row_by_row(entropies, rows), take_gradients(model)


def distance(found, expected):
    """The largest difference between tensors in two lists or dictionaries, or in tuples of those."""
    if isinstance(expected, torch.Tensor):
        return float((found - expected).detach().abs().max())
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = found.values(), expected.values()
    distances = [distance(a, b) for a, b in zip(found, expected, strict=True)]
    return float(torch.tensor(distances).max())  # unlike `max` of Python never silent about NaN


def largest(gradient):
    return max(float(tensor.abs().max()) for tensor in gradient.values())


def count_calls(module):
    """A list that gets the number of tokens of each call, before it runs: recomputation may break it off."""
    calls = []
    module.register_forward_pre_hook(lambda module, inputs: calls.append(math.prod(inputs[0].shape[:-1])))
    return calls


# The values of the plain model


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("shared", [0, 9])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_are_those_of_whole_logits(tiny_model, layout, shared, chunk):
    model, rows = tiny_model(VOCAB), make_rows(shared=shared)
    assert num_scored(rows) > 20 and num_scored(rows) % 7 != 0
    assert scoring.shared_start(padded(rows)) == max(0, shared - 1)
    expected = from_whole_logits(model, rows)
    assert distance(from_chunks(model, rows, layout, chunk), expected) < 1e-5
    assert all(gradient.abs().max() > 1e-3 for gradient in expected[2].values())


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_that_stay_empty_change_nothing(tiny_model, layout, chunk):
    model, rows = tiny_model(VOCAB), make_rows(shared=9)
    calls = count_calls(model.lm_head)
    found = from_chunks(model, rows, layout, chunk, others=8 * num_scored(rows))
    assert 0 in calls
    assert distance(found, from_whole_logits(model, rows)) < 1e-5


@pytest.mark.parametrize("others", [0, 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_nothing_to_score_all_values_are_zero_and_so_is_every_gradient(tiny_model, layout, others):
    model, rows = tiny_model(VOCAB), without_loss(make_rows(shared=9))
    logprobs, entropies, gradients = from_chunks(model, rows, layout, 7, others=others)
    assert not any(values.any() for values in logprobs + entropies)
    # Zeros, not None: ranks that have nothing to score take part in the exchange.
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values())


def test_the_first_token_of_a_row_has_no_value_even_if_it_carries_weight(tiny_model):
    model, rows = tiny_model(VOCAB), make_rows()
    for row in rows[::2]:
        row.weights[0], row.role_ids[0] = 1.0, 1
    logprobs, entropies, gradients = from_chunks(model, rows, padded, 7)
    assert not any(values[0] for values in logprobs + entropies)
    expected = from_whole_logits(model, rows)
    assert distance((logprobs, gradients), (expected[0], expected[2])) < 1e-5


def half_the_gradient(self, states, *arguments):
    return SCORE(self, (states + states.detach()) / 2, *arguments)


SCORE, HIDDEN, SCATTER = Scorer._score, Scorer._hidden, scoring._scatter
BREAKAGES = {
    "states of the token itself": (Scorer, "_hidden", lambda *inputs: HIDDEN(*inputs).roll(-1, 1)),
    "another temperature": (Scorer, "_score", lambda *inputs: SCORE(*inputs[:3], 1.0, inputs[4])),
    "half the gradient": (Scorer, "_score", half_the_gradient),
    "values at other tokens": (scoring, "_scatter", lambda values, where: SCATTER(values.flip(0), where)),
}


@pytest.mark.parametrize("broken", BREAKAGES)
def test_the_comparison_with_whole_logits_notices(tiny_model, monkeypatch, broken):
    model, rows = tiny_model(VOCAB), make_rows(shared=9)
    monkeypatch.setattr(*BREAKAGES[broken])
    for layout in LAYOUTS:
        assert distance(from_chunks(model, rows, layout, 7), from_whole_logits(model, rows)) > 0.01


# What reaches the head


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_head_sees_the_states_before_scored_tokens_and_no_others(tiny_model, layout, chunk):
    model, rows = tiny_model(VOCAB), make_rows(shared=9)
    seen = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        score(model, layout(rows), chunk)
        hook.remove()
        expected = []
        for row in rows:
            states = model.model(input_ids=torch.tensor([row.ids])).last_hidden_state[0]
            expected += [states[i - 1] for i, weight in enumerate(row.weights) if weight > 0]
    assert max(map(len, seen)) <= chunk
    assert len(seen) == math.ceil(num_scored(rows) / chunk)
    torch.testing.assert_close(torch.cat(seen), torch.stack(expected), atol=1e-5, rtol=0)


def test_in_the_backward_pass_too_a_call_of_the_head_has_at_most_a_chunk(tiny_model, monkeypatch):
    model, rows = tiny_model(VOCAB), make_rows()
    calls = count_calls(model.lm_head)
    from_chunks(model, rows, padded, 7)
    assert len(calls) == 2 * math.ceil(num_scored(rows) / 7) and max(calls) <= 7
    assert sum(calls) == 2 * num_scored(rows)
    calls.clear()
    monkeypatch.setattr(scoring, "checkpoint", lambda function, *inputs, use_reentrant: function(*inputs))
    from_chunks(model, rows, padded, 7)
    assert sum(calls) == num_scored(rows), "the count tells recomputed logits from kept ones"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_call_the_head_equally_often_however_many_tokens_they_score(tiny_model, layout):
    model = tiny_model(VOCAB)
    shares = [make_rows(seed=1), make_rows(seed=1)[:3], make_rows(number=2), without_loss(make_rows(seed=1))]
    most = max(map(num_scored, shares))
    assert len({num_scored(rows) for rows in shares}) == 4 and min(map(num_scored, shares)) == 0
    calls, counts, own_counts = count_calls(model.lm_head), [], []
    for rows in shares:
        for others, result in ((most - num_scored(rows), counts), (0, own_counts)):
            calls.clear()
            from_chunks(model, rows, layout, 7, others=others)
            result.append(len(calls))
    assert counts == [2 * math.ceil(most / 7)] * 4
    assert len(set(own_counts)) > 1, "what they score themselves would tell them otherwise"


# Packing


def accumulated(model, parts, layout):
    """Logprobs of each row, in the order of `parts`, and the gradient of all rows over one denominator."""
    logprobs, denominator = [], sum(map(total_weight, parts))
    for rows in parts:
        batch = layout(rows)
        values, _ = score(model, batch, 7)
        sft_loss(values, batch.weights, denominator=denominator).backward()
        logprobs += row_by_row(values.detach(), rows)
    return logprobs, take_gradients(model)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("tokens", [20, 40, 10_000])
def test_packed_sequences_do_not_see_each_other(tiny_model, attention, tokens):
    model, rows = tiny_model(VOCAB, attn_implementation=attention), make_rows()
    rows += [Row([5], [0], [0.0], [0.0])] * 2
    [packs] = divide(rows, 1, 1, tokens)
    ordered = [row for pack in packs for row in pack]
    assert len(ordered) == 10 and max(map(len, packs)) > 1
    packed = accumulated(model, packs, rows_to_packed_batch)
    expected = from_whole_logits(model, ordered)
    assert distance(packed, (expected[0], expected[2])) < 1e-5
    assert distance(packed, accumulated(model, [ordered[:4], ordered[4:]], padded)) < 1e-5


def positions_that_go_on(rows):
    batch = rows_to_packed_batch(rows)
    return replace(batch, position_ids=torch.arange(batch.input_ids.shape[1])[None])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sequences_that_are_not_told_apart_have_other_values(tiny_model, attention):
    model, rows = tiny_model(VOCAB, attn_implementation=attention), make_rows()[1:4]
    (first, *later), gradient = accumulated(model, [rows], positions_that_go_on)
    (expected_first, *expected_later), expected_gradient = accumulated(model, [rows], rows_to_packed_batch)
    assert distance(first, expected_first) < 1e-5, "nothing stands before it"
    assert all(distance(a, b) > 0.1 for a, b in zip(later, expected_later, strict=True))
    assert distance(gradient, expected_gradient) > 0.01


# Through the policy


@pytest.fixture(scope="module")
def saved(tmp_path_factory, demo_tokenizer):
    """saved(model): an ordinary folder of it, with the demo's tokenizer."""
    assert len(demo_tokenizer) >= VOCAB

    def save(model):
        path = tmp_path_factory.mktemp("model")
        model.save_pretrained(path)
        demo_tokenizer.save_pretrained(path)
        return path

    return save


@pytest.fixture(scope="module")
def folder(saved, tiny_model, demo_tokenizer):
    """Attention dropout in the checkpoint would show wherever it is left on."""
    return saved(tiny_model(len(demo_tokenizer), attention_dropout=0.2))


def trainable(path, *, attention="sdpa", **settings):
    model = ModelConfig(path=str(path), attn_implementation=attention)
    policy = Policy(model, PolicyConfig(logprob_chunk=7, **settings))
    policy.prepare_training(**SETTINGS, with_reference=False)
    return policy


def policy_gradient(policy, rows, size, *, denominator=None):
    """Of all `rows`, in micro-batches of at most `size`."""
    denominator = denominator or policy.sum_over_ranks(total_weight(rows))
    for batch in policy.accumulating(policy.micro_batches(rows, size)):
        logprobs, _ = policy.logprobs(batch, TEMPERATURE)
        policy.backward(sft_loss(logprobs, batch.weights, denominator=denominator))
    return take_gradients(policy.model)


def test_micro_batches_packs_and_a_shared_start_give_one_gradient(folder):
    policy, rows = trainable(folder), [row for row in make_rows(number=12, shared=9, seed=3) if any(row.weights)]
    found = {}
    for size in (1, 3, len(rows)):
        batches = policy.micro_batches(rows, size)
        assert len(batches) == math.ceil(len(rows) / size)
        assert all((scoring.shared_start(batch) == 8) == (len(batch.input_ids) > 1) for batch in batches)
        found[f"size {size}"] = policy_gradient(policy, rows, size)
    for tokens in (20, 50, 10_000):
        policy.sharding.pack_tokens = tokens
        batches = policy.micro_batches(rows, 1)
        assert all(batch.attention_mask is None for batch in batches)
        assert (len(batches) == 1) == (tokens > sum(map(len, rows)))
        found[f"pack {tokens}"] = policy_gradient(policy, rows, 1)
    expected = from_whole_logits(policy.model, rows)[2]
    for name, gradient in found.items():
        assert distance(gradient, expected) < 1e-6 * largest(expected), name


def test_a_denominator_for_each_micro_batch_would_be_another_gradient(folder):
    policy, rows = trainable(folder), [row for row in make_rows(number=12, shared=9, seed=3) if any(row.weights)]
    whole = policy_gradient(policy, rows, len(rows))
    batches = policy.micro_batches(rows, 3)
    for batch in policy.accumulating(batches):
        logprobs, _ = policy.logprobs(batch, TEMPERATURE)
        policy.backward(sft_loss(logprobs, batch.weights) / len(batches))
    assert distance(take_gradients(policy.model), whole) > 0.01 * largest(whole)


# Recomputed activations


@pytest.mark.parametrize("pack_tokens", [0, 50])
def test_recomputed_activations_give_the_same_gradient_without_dropout(folder, pack_tokens):
    rows = make_rows()
    kept, recomputed = (trainable(folder, gradient_checkpointing=on, pack_tokens=pack_tokens) for on in (False, True))
    assert kept.model.config.attention_dropout == 0.2
    expected = policy_gradient(kept, rows, 3)
    assert distance(policy_gradient(recomputed, rows, 3), expected) < 1e-6
    [batch, *_] = recomputed.micro_batches(rows, 3)
    one, two = (recomputed.logprobs(batch, TEMPERATURE)[0] for _ in range(2))
    assert torch.equal(one, two)
    for module in recomputed.model.modules():
        if "attention_dropout" in vars(module):
            module.attention_dropout = 0.2
    assert distance(policy_gradient(recomputed, rows, 3), expected) > 0.01, "dropout would show"


@pytest.mark.parametrize(("on", "calls_of_a_layer"), [(False, 1), (True, 2)])
def test_the_layers_run_a_second_time_only_if_activations_are_recomputed(folder, on, calls_of_a_layer):
    policy, rows = trainable(folder, gradient_checkpointing=on), make_rows()
    # Hooks of the layer itself do not see that it is recomputed.
    layers = [count_calls(layer.mlp) for layer in policy.model.model.layers]
    batches = policy.micro_batches(rows, 3)
    assert len(batches) == 3
    policy_gradient(policy, rows, 3)
    assert [len(calls) for calls in layers] == [calls_of_a_layer * len(batches)] * 2


def test_a_shared_start_and_recomputed_activations_go_together(folder):
    policy, rows = trainable(folder, gradient_checkpointing=True), make_rows(shared=9)
    expected = from_whole_logits(policy.model.eval(), rows)[2]
    assert distance(policy_gradient(policy, rows, 8), expected) < 1e-5
    [batch] = policy.micro_batches(rows, 8)
    logprobs, _ = policy.logprobs(batch, TEMPERATURE)
    assert policy.model.training
    dropped, _ = score(policy.model, batch, 7)
    assert distance(dropped, logprobs) > 0.1, "a start that runs apart would be dropped with its cache"


# Other architectures


def enlarge(model):
    """Weights so large that logits differ from each other, as those of a trained model do."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    return model.eval()


def build(kind, config, vocabulary, **settings):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    return enlarge(kind(config(vocab_size=vocabulary, **sizes, **heads, **special, **settings)))


FULL_ATTENTION = {"layer_types": ["full_attention"] * 2}
CHANGED_LOGITS = {
    "capped": (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 5.0, **FULL_ATTENTION}),
    "capped as published": (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 30.0, **FULL_ATTENTION}),
    "divided": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 8.0}),
    "multiplied": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.0625}),
}
UNCHANGED_LOGITS = {
    "no cap": (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": None, **FULL_ATTENTION}),
    "divided by 1": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 1.0}),
}


@pytest.mark.parametrize("change", CHANGED_LOGITS)
def test_a_model_that_changes_logits_behind_its_head_is_refused(saved, demo_tokenizer, change):
    kind, config, settings = CHANGED_LOGITS[change]
    model, rows = build(kind, config, len(demo_tokenizer), **settings), make_rows()
    path = saved(model)
    with pytest.raises(LoadError, match="changes logits") as caught:
        trainable(path, attention="eager")
    assert f"model.path {str(path)!r}" in str(caught.value) and "\n" not in str(caught.value)
    assert distance(from_chunks(model, rows, padded, 7), from_whole_logits(model, rows)) > 1e-3, "and for a reason"


@pytest.mark.parametrize("change", UNCHANGED_LOGITS)
def test_the_same_architecture_is_accepted_where_it_leaves_logits_alone(saved, demo_tokenizer, change):
    kind, config, settings = UNCHANGED_LOGITS[change]
    path, rows = saved(build(kind, config, len(demo_tokenizer), **settings)), make_rows(shared=9)
    policy = trainable(path, attention="eager")
    for layout in LAYOUTS:
        assert distance(from_chunks(policy.model, rows, layout, 7), from_whole_logits(policy.model, rows)) < 1e-5


def test_a_model_with_sliding_windows_is_refused_as_its_kept_cache_would_count_the_holes(saved, demo_tokenizer):
    settings = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    path = saved(build(Qwen2ForCausalLM, Qwen2Config, len(demo_tokenizer), **settings))
    with pytest.raises(LoadError, match="model.path .* sliding windows"):
        Policy(ModelConfig(path=str(path)))


def test_a_forward_pass_that_scales_logits_by_one_percent_is_refused(folder, monkeypatch):
    policy = Policy(ModelConfig(path=str(folder)))
    forward = policy.lm.forward

    def scaled(*arguments, **inputs):
        output = forward(*arguments, **inputs)
        output.logits = 1.01 * output.logits
        return output

    policy.prepare_training(**SETTINGS, with_reference=False)
    monkeypatch.setattr(policy.lm, "forward", scaled)
    with pytest.raises(LoadError, match="model.path .* changes logits"):
        policy.prepare_training(**SETTINGS, with_reference=False)


@pytest.fixture(scope="module")
def gpt2(demo_tokenizer):
    """Learned positions, other names, tied embeddings, and dropout in three places."""
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "bos_token_id": 1, "eos_token_id": 1}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(demo_tokenizer), initializer_range=0.1, **sizes)).eval()
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.1}
    return model


@pytest.mark.parametrize("shared", [0, 9])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_architecture_has_the_values_of_its_plain_model(gpt2, layout, shared):
    rows = make_rows(shared=shared)
    expected = from_whole_logits(gpt2, rows)
    assert distance(from_chunks(gpt2, rows, layout, 7), expected) < 1e-5
    if layout is rows_to_packed_batch:
        assert distance(from_chunks(gpt2, rows, positions_that_go_on, 7), expected) > 0.1


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("pack_tokens", [0, 50])
def test_another_architecture_trains_through_the_policy(gpt2, saved, gradient_checkpointing, pack_tokens):
    rows = make_rows(shared=9)
    policy = trainable(saved(gpt2), gradient_checkpointing=gradient_checkpointing, pack_tokens=pack_tokens)
    assert distance(policy_gradient(policy, rows, 3), from_whole_logits(gpt2, rows)[2]) < 1e-5


# Memory

MEASURE = """
import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from envace.batching import Row, rows_to_batch
from envace.losses import sft_loss, token_logprobs
from envace.scoring import Scorer, score_inputs

chunk, output = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=151_936, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
)
model = Qwen3ForCausalLM(config).eval()


def mebibytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1024


def update(tokens):
    ids = torch.randint(config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    batch = rows_to_batch([Row(ids, [0] + [1] * (tokens - 1), [0.0] + [1.0] * (tokens - 1), [0.0] * tokens)], 0)
    if chunk:
        inputs = score_inputs(batch, chunk, share_start=True)
        logprobs, _ = Scorer(model, model, chunk)(**inputs, temperature=0.7, with_entropy=False)
    else:
        logits = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        logprobs = token_logprobs(logits, batch.input_ids, 0.7)
        del logits
    sft_loss(logprobs, batch.weights).backward()
    return logprobs.detach()


for _ in range(2):
    update(4)
    model.zero_grad(set_to_none=False)
before = mebibytes("VmRSS")
logprobs = update(2048)
print(mebibytes("VmHWM") - before)
torch.save((logprobs, model.model.embed_tokens.weight.grad[:100], model.lm_head.weight.grad[:100]), output)
"""


def start_measuring(chunk, path):
    """One update in a process of its own, which prints its peak in MiB; chunk 0: whole logits.

    The baseline is what is resident after two updates on four tokens: libraries, weights, and gradient buffers, which
    are zeroed and kept. So neither way of computing pays for them; what is left are activations, logits, and the
    gradients on their way into those buffers. VmHWM is the peak that getrusage calls ru_maxrss, but ru_maxrss starts
    at the peak of the process that forked this one, here pytest.
    """
    environment = os.environ | {
        "PYTHONPATH": str(Path(scoring.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-c", MEASURE, str(chunk), str(path)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish_measuring(process):
    with process:
        output, errors = process.communicate()
    assert process.returncode == 0, errors
    return float(output.split()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_the_logits_of_a_chunk_are_all_that_memory_holds_at_once(tmp_path):
    paths = {0: tmp_path / "whole.pt", 256: tmp_path / "chunks.pt"}
    processes = [start_measuring(chunk, path) for chunk, path in paths.items()]
    whole, chunks = map(finish_measuring, processes)
    print(f"\npeak above the model: whole logits {whole:.0f} MiB, chunks of 256 {chunks:.0f} MiB")
    logits = 151_936 * 4 / 2**20
    assert whole > 2 * 2048 * logits, "logits and their gradient: it is they that are measured"
    assert chunks < whole / 4
    assert distance(torch.load(paths[256]), torch.load(paths[0])) < 1e-5
