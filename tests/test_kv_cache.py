"""A cache with room holds what transformers' own cache holds, through all that is done to it, and copies less."""

import random

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from envace import generation
from envace.generation import CachedGenerator
from envace.kv_cache import ROOM, RoomyCache, RoomyLayer
from envace.settings import SamplingConfig
from envace.types import Evidence, Request, Role, Segment, Sequence


def states(rows, tokens):
    return torch.randn(rows, 2, tokens, 4), torch.randn(rows, 2, tokens, 4)


def some_columns(rows, held):
    """(rows, W): other ones in each row."""
    width = max(3, held - 3)
    return torch.stack([torch.randperm(held)[:width].sort().values for _ in range(rows)])


def plain_columns(values, columns):
    return torch.stack([row[:, kept] for row, kept in zip(values, columns, strict=True)])


@pytest.mark.parametrize("seed", range(5))
def test_it_holds_what_the_plain_layer_holds(seed):
    torch.manual_seed(seed)
    dice = random.Random(seed)
    ours, plain, rows = RoomyLayer(), DynamicLayer(), 3
    for _ in range(60):
        what = dice.choice(["token", "token", "token", "block", "crop", "select", "repeat", "columns"])
        if what in ("token", "block") or ours.get_seq_length() < 3:
            new = states(rows, 1 if what == "token" else dice.randint(2, ROOM + 10))
            for a, b in zip(ours.update(*new), plain.update(*new), strict=True):
                assert torch.equal(a, b)
        elif what == "crop":
            for layer in (ours, plain):
                layer.crop(-2)
        elif what == "select":
            kept = [dice.randrange(rows) for _ in range(dice.randint(1, 3))]
            rows = len(kept)
            for layer in (ours, plain):
                layer.batch_select_indices(torch.tensor(kept))
        elif what == "columns":
            columns = some_columns(rows, plain.get_seq_length())
            ours.keep_columns(columns)
            plain.keys, plain.values = plain_columns(plain.keys, columns), plain_columns(plain.values, columns)
        elif rows < 4:
            rows *= 2
            for layer in (ours, plain):
                layer.batch_repeat_interleave(2)
        assert ours.get_seq_length() == plain.get_seq_length()
        assert torch.equal(ours.keys, plain.keys) and torch.equal(ours.values, plain.values)


def test_what_was_cropped_is_written_over_and_not_kept():
    layer = RoomyLayer()
    layer.update(*states(1, 5))
    layer.crop(-2)
    new = states(1, 2)
    keys, _ = layer.update(*new)
    assert keys.shape[2] == 5 and torch.equal(keys[:, :, 3:], new[0])


@pytest.mark.parametrize(("kind", "copies"), [(RoomyLayer, 1), (DynamicLayer, ROOM - 1)])
def test_a_token_is_written_in_place(kind, copies):
    layer, places = kind(), set()
    kept = [layer.update(*states(1, 10))]
    for _ in range(ROOM - 1):
        kept.append(layer.update(*states(1, 1)))  # alive, so that no address is used twice
        places.add(kept[-1][0].data_ptr())
    assert len(places) == copies


def test_rollouts_are_the_same_bit_for_bit(tiny_model, monkeypatch):
    model = tiny_model()

    def roll_out():
        torch.manual_seed(0)
        rows = [Sequence([Segment(Role.CONTEXT, list(range(5, 25 + n)), Evidence.GIVEN)]) for n in range(3)]
        generate = CachedGenerator(model, 0, SamplingConfig())
        written = []
        for turn in range(4):
            if turn == 2:
                rows.pop(0).open = False
            completions = generate([Request(row, Role.ACT, frozenset({7}), 90) for row in rows])
            for row, completion in zip(rows, completions, strict=True):
                written.append((completion.ids, completion.logprobs))
                row.segments.append(Segment(Role.ACT, completion.ids, Evidence.CLAIMED))
                row.segments.append(Segment(Role.CONTEXT, [9, 8, 7 + turn], Evidence.GIVEN))
        return written

    ours = roll_out()
    monkeypatch.setattr(generation, "RoomyCache", lambda config: DynamicCache(config=config))
    assert ours == roll_out()
    assert len(RoomyCache(model.config).layers) == model.config.num_hidden_layers
