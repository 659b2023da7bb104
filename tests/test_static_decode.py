"""policy.decode=static: compiled steps over a cache of fixed length write what plain decoding writes."""

import random
import shutil

import pytest
import torch
from test_generation import CLOSE_ALWAYS, GREEDY, PAD, VOCAB, ask, ragged_episodes, stream
from test_kv_cache import plain_columns, some_columns
from transformers.cache_utils import DynamicLayer

from envace.attention import SDPA
from envace.config import ConfigError, load_config
from envace.generation import CachedGenerator
from envace.kv_cache import ROOM, STEP, FixedLayer
from envace.settings import SamplingConfig

compiles = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler found")


@pytest.mark.parametrize("seed", range(5))
def test_a_fixed_layer_holds_what_the_plain_one_holds(seed):
    torch.manual_seed(seed)
    dice = random.Random(seed)
    ours, plain, rows = FixedLayer(), DynamicLayer(), 3
    lengths = set()
    for _ in range(40):
        what = dice.choice(["token", "token", "block", "crop", "select", "columns"])
        if what in ("token", "block") or plain.get_seq_length() < 3:
            tokens = 1 if what == "token" else dice.randint(2, 200)
            new = torch.randn(rows, 2, tokens, 4), torch.randn(rows, 2, tokens, 4)
            ours.reserve(plain.get_seq_length() + tokens)
            ours.update(*new)
            plain.update(*new)
        elif what == "crop":
            ours.crop(-2)
            plain.crop(-2)
        elif what == "columns":
            columns = some_columns(rows, plain.get_seq_length())
            ours.keep_columns(columns)
            plain.keys, plain.values = plain_columns(plain.keys, columns), plain_columns(plain.values, columns)
        else:
            kept = torch.tensor([dice.randrange(rows) for _ in range(dice.randint(1, 3))])
            rows = len(kept)
            ours.batch_select_indices(kept)
            plain.batch_select_indices(kept)
        held = plain.get_seq_length()
        assert int(ours.get_seq_length()) == held and ours.keys.shape[2] % STEP == 0
        assert torch.equal(ours.keys[:, :, :held], plain.keys) and torch.equal(ours.values[:, :, :held], plain.values)
        lengths.add(ours.keys.shape[2])
    assert len(lengths) > 1


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(("seed", "room"), [(0, ROOM), (1, ROOM), (0, CLOSE_ALWAYS)])
def test_greedy_outputs_are_those_of_clean_decoding(tiny_model, monkeypatch, seed, room):
    monkeypatch.setattr("envace.generation.ROOM", room)
    model = tiny_model(VOCAB, attn_implementation=SDPA)
    pairs = ragged_episodes(model, seed, decode="static")
    assert len(pairs) > 15 and all(sampled == clean for sampled, clean in pairs)
    assert model._compiled_call is not model.__call__


@compiles
@pytest.mark.slow
def test_sampled_outputs_are_those_of_plain_decoding_also_where_the_cache_grows(tiny_model):
    model = tiny_model(VOCAB, attn_implementation=SDPA)

    def outputs(decode):
        torch.manual_seed(0)
        generator = CachedGenerator(model, PAD, SamplingConfig(), decode=decode)
        return ask(generator, stream([1, 2, 3]), stream(range(1, 12)), budget=STEP + 20)

    for static, plain in zip(outputs("static"), outputs("dynamic"), strict=True):
        assert static.ids == plain.ids
        assert torch.tensor(static.logprobs).allclose(torch.tensor(plain.logprobs), atol=1e-4)


@compiles
@pytest.mark.slow
def test_new_weights_are_used_without_compiling_again(tiny_model):
    model = tiny_model(VOCAB, attn_implementation=SDPA)
    before = ask(CachedGenerator(model, PAD, GREEDY, decode="static"), stream([1, 2, 3]))[0].ids
    compiled = model._compiled_call
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(-1.5)
    after = ask(CachedGenerator(model, PAD, GREEDY, decode="static"), stream([1, 2, 3]))[0].ids
    assert after == ask(CachedGenerator(model, PAD, GREEDY), stream([1, 2, 3]))[0].ids != before
    assert model._compiled_call is compiled


@pytest.mark.parametrize(
    ("other", "advice"),
    [
        ("policy.deepspeed=configs/deepspeed/zero3.json", "policy.deepspeed"),
        ("model.attn_implementation=eager", "sdpa"),
    ],
)
def test_where_it_cannot_be_it_is_refused(other, advice):
    with pytest.raises(ConfigError, match=rf"policy.decode.*{advice}"):
        load_config(None, ["model.path=x", "policy.decode=static", other])
