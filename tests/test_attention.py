"""Attention without a mask for queries behind a cache: that of a mask, in value and gradient."""

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from envace.attention import SDPA, attend, mask
from envace.policy import Policy
from envace.settings import ModelConfig

LAYER = SimpleNamespace(num_key_value_groups=2, is_causal=True)


def tensors(queries, keys):
    torch.manual_seed(0)
    shapes = [(3, 4, queries, 8), (3, 2, keys, 8), (3, 2, keys, 8)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def output_and_gradients(attention, inputs, attention_mask):
    output, _ = attention(LAYER, *inputs, attention_mask, scaling=0.3)
    return output, *torch.autograd.grad((output * torch.arange(8)).sum(), inputs)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (5, 5), (5, 6), (4, 90)])
def test_no_mask_means_the_last_of_the_keys(queries, keys):
    inputs = tensors(queries, keys)
    causal = sdpa_mask(1, queries, keys, q_offset=keys - queries, allow_is_causal_skip=False)
    found = output_and_gradients(attend, inputs, None)
    for a, b in zip(found, output_and_gradients(sdpa_attention_forward, inputs, causal), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_without_it_the_queries_would_be_the_first():
    inputs = tensors(5, 9)
    assert (attend(LAYER, *inputs, None)[0] - sdpa_attention_forward(LAYER, *inputs, None)[0]).abs().max() > 0.1


def test_a_mask_is_obeyed():
    inputs = tensors(5, 9)
    holes = torch.rand(3, 1, 5, 9) < 0.7
    holes[..., 0] = True
    assert torch.equal(attend(LAYER, *inputs, holes)[0], sdpa_attention_forward(LAYER, *inputs, holes)[0])


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((5, 9, 4), {"attention_mask": torch.tensor([[False] + [True] * 8])}),  # a hole
        ((5, 9, 4), {"local_size": 3}),  # a sliding window
        ((5, 9, 4), {"allow_is_causal_skip": False}),  # packed sequences, for example
        ((5, 12, torch.tensor(4)), {}),  # a cache of fixed length, which tells its position on the device
        ((5, 12, 0), {}),  # one with room behind the queries
    ],
)
def test_a_mask_is_made_where_one_is_needed(sizes, options):
    queries, keys, offset = sizes
    made = mask(batch_size=1, q_length=queries, kv_length=keys, q_offset=offset, **options)
    expected = sdpa_mask(1, queries, keys, q_offset=offset, **(options | {"allow_is_causal_skip": False}))
    assert torch.equal(made, expected)


def test_none_is_made_where_none_is_needed():
    assert mask(batch_size=1, q_length=5, kv_length=9, q_offset=4) is None


@pytest.mark.parametrize(("asked", "got"), [("sdpa", SDPA), ("eager", "eager")])
def test_a_policy_attends_so(tmp_path, tiny_model, demo_tokenizer, asked, got):
    tiny_model(len(demo_tokenizer)).save_pretrained(tmp_path)
    demo_tokenizer.save_pretrained(tmp_path)
    policy = Policy(ModelConfig(path=str(tmp_path), attn_implementation=asked))
    assert policy.model.config._attn_implementation == got
