"""The estimate of memory: numbers worked out by hand, and activations against what PyTorch really saves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from envace.config import load_config
from envace.memory import (
    GIB,
    PHASES,
    ModelShape,
    ShapeError,
    activation_bytes,
    adapter_parameters,
    checkpoint_bytes,
    estimate,
    export_bytes,
    rollout_rows,
    shape_of,
    table,
    update_batch,
)

ROOT = Path(__file__).parent.parent
SMALL = ModelShape(
    parameters=1000,
    layers=2,
    hidden=8,
    heads=2,
    kv_heads=1,
    head_dim=4,
    vocabulary=10,
    intermediate=16,
    tied=False,
)
QWEN3_8B = ModelShape(
    parameters=8_190_000_000,
    layers=36,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=151936,
    intermediate=12288,
    tied=False,
)
ZERO3 = "policy.deepspeed=configs/deepspeed/zero3.json"


def settings(*overrides):
    short = ["rollout.max_context_tokens=60", "rollout.max_new_tokens=40", "rollout.batch_size=5"]
    return load_config(
        None, ["model.path=m", *short, "rl.micro_batch_size=2", "policy.logprob_chunk=7", *map(str, overrides)]
    )


def qwen3_8b(*overrides):
    return load_config(str(ROOT / "configs" / "qwen3_8b.yaml"), list(overrides))


def parts(estimated, *names):
    return {name: estimated[name] for name in names}


class TestOneGPUWithoutDeepSpeed:
    def test_every_part_by_hand(self):
        assert estimate(settings(), SMALL, 1, "rl") == {
            "weights": 4000,
            "adapters": 0,
            "gradients": 4000,
            "optimizer": 8000,
            "reference": 4000,
            "reduce_bucket": 0,
            "live_weights": 0,
            "rollout_weights": 0,
            # 5 streams of 100 tokens; 2 layers, keys and values, 4 numbers of 4 bytes
            "kv_cache": 5 * 100 * 2 * 2 * 4 * 4,
            # 2 rows of 100 tokens; the arithmetic of a layer is in `activation_bytes`
            "activations": 200 * (3 * (8 * 28 + 4 * 40 + 4 * 100 + 4 * 72) + 100),
            "logits": 4 * 4 * 7 * 10,
            "rollout": 20000 + 32000,
            "update": 20000 + 663200 + 1120,
            "peak": 684320,
        }

    def test_sft_has_no_reference_and_no_rollout(self):
        estimated = estimate(settings(), SMALL, 1, "sft")
        assert parts(estimated, "reference", "kv_cache", "rollout") == {"reference": 0, "kv_cache": 0, "rollout": 0}
        assert estimated["peak"] == estimated["update"]

    def test_evaluation_needs_weights_and_cache_alone(self):
        estimated = estimate(settings(), SMALL, 1, "eval")
        assert parts(estimated, "rollout", "update", "peak") == {"rollout": 36000, "update": 0, "peak": 36000}

    def test_no_kl_term_no_reference(self):
        assert estimate(settings("rl.kl_coef=0"), SMALL, 1, "rl")["reference"] == 0

    def test_several_ranks_hold_everything_and_the_gradients_twice(self):
        estimated = estimate(settings(), SMALL, 4, "rl")
        held = {"weights": 4000, "gradients": 8000, "optimizer": 8000}
        assert parts(estimated, *held) == held


class TestZeRO3:
    def test_qwen3_8b_on_eight_gpus_by_hand(self):
        estimated = estimate(qwen3_8b(), QWEN3_8B, 8, "rl")
        resident = {
            "weights": 2 * 8.19e9 / 8,
            "gradients": 4 * 8.19e9 / 8,
            "optimizer": 12 * 8.19e9 / 8,
            "reference": 2 * 8.19e9 / 8,
            "reduce_bucket": 2 * 5e8,
        }
        layer = 6 * (8192 + 4096 + 1024) + 2 * (5 * 4096) + 2 * 20000 + 2 * (4096 + 4 * 12288)
        rollout = {"rollout_weights": 2 * 8.19e9, "kv_cache": 147_456 * 20000 * 8}
        update = {
            "live_weights": 2 * 1e9,
            "activations": 20000 * (36 * 2 * 4096 + 2 * layer + 20000),
            "logits": 4 * 4 * 1024 * 151936,
        }
        assert parts(estimated, *resident, *rollout, *update) == pytest.approx(resident | rollout | update)
        assert estimated["rollout"] == pytest.approx(sum(resident.values()) + sum(rollout.values()))
        assert estimated["update"] == pytest.approx(sum(resident.values()) + sum(update.values()))
        assert estimated["peak"] == estimated["rollout"] == pytest.approx(61.45e9, rel=1e-3)

    def test_float32_has_no_second_master(self):
        assert estimate(settings(ZERO3), SMALL, 4, "rl")["optimizer"] == 8 * 1000 / 4

    def test_optimizer_offload_takes_gradients_along(self):
        zero = json.loads((ROOT / "configs/deepspeed/zero3_offload.json").read_text())["zero_optimization"]
        estimated = estimate(qwen3_8b(), QWEN3_8B, 8, "rl", zero)
        assert parts(estimated, "gradients", "optimizer") == {"gradients": 0, "optimizer": 0}
        assert estimated["weights"] > 0

    def test_offload_to_none_is_no_offload(self):
        zero = {"offload_optimizer": {"device": "none"}}
        assert estimate(qwen3_8b(), QWEN3_8B, 8, "rl", zero) == estimate(qwen3_8b(), QWEN3_8B, 8, "rl")

    def test_parameter_and_reference_offload(self):
        config = qwen3_8b("policy.offload_reference=true")
        estimated = estimate(config, QWEN3_8B, 8, "rl", {"offload_param": {"device": "cpu"}})
        assert parts(estimated, "weights", "reference") == {"weights": 0, "reference": 0}

    def test_bucket_sizes_of_the_json_count(self):
        estimated = estimate(
            qwen3_8b(), QWEN3_8B, 8, "rl", {"reduce_bucket_size": 1e6, "stage3_max_live_parameters": 2e6}
        )
        assert parts(estimated, "reduce_bucket", "live_weights") == {"reduce_bucket": 2e6, "live_weights": 4e6}

    def test_partitioned_rollouts_gather_only_what_is_live(self):
        estimated = estimate(qwen3_8b("policy.rollout_weights=partitioned"), QWEN3_8B, 8, "rl")
        assert estimated["rollout_weights"] == estimated["live_weights"] == 2e9

    def test_one_rank_gathers_nothing(self):
        estimated = estimate(qwen3_8b(), QWEN3_8B, 1, "rl")
        assert parts(estimated, "live_weights", "rollout_weights") == {"live_weights": 0, "rollout_weights": 0}

    def test_evaluation_is_not_sharded(self):
        assert estimate(qwen3_8b(), QWEN3_8B, 8, "eval")["weights"] == 2 * 8.19e9


class TestLoRA:
    def test_adapters_of_all_linear_layers(self):
        # Rank 16 on q, k, v, o, gate, up and down of Qwen3-8B; peft counts as many.
        assert adapter_parameters(qwen3_8b("policy.lora.r=16"), QWEN3_8B) == 43_646_976

    def test_only_adapters_have_gradients_and_moments_and_there_is_no_reference(self):
        adapters = 3 * 2 * (2 * (8 + 8) + 2 * (8 + 4) + 3 * (8 + 16))
        estimated = estimate(settings("policy.lora.r=3"), SMALL, 1, "rl")
        expected = {"weights": 4000, "adapters": 4 * adapters, "gradients": 4 * adapters, "optimizer": 8 * adapters}
        assert parts(estimated, *expected, "reference") == expected | {"reference": 0}

    def test_under_zero3_adapters_have_the_dtype_of_the_model_and_a_master(self):
        adapters = 43_646_976
        estimated = estimate(qwen3_8b("policy.lora.r=16"), QWEN3_8B, 8, "rl")
        expected = {"weights": 2 * 8.19e9 / 8, "adapters": 2 * adapters / 8, "optimizer": 12 * adapters / 8}
        assert parts(estimated, *expected) == expected


class TestBatches:
    @pytest.mark.parametrize(
        "overrides, expected",
        [
            ([], (100, 2)),
            (["policy.pack_tokens=50"], (100, 1)),  # a sequence that is longer than a pack has one for itself
            (["policy.pack_tokens=300"], (300, 1)),
        ],
    )
    def test_the_largest_micro_batch(self, overrides, expected):
        assert update_batch(settings(*overrides), "rl") == expected

    def test_sft_has_a_micro_batch_size_of_its_own(self):
        assert update_batch(settings("sft.micro_batch_size=9"), "sft") == (100, 9)

    @pytest.mark.parametrize(
        "overrides, ranks, stage, rows",
        [
            ([], 1, "rl", 5),  # rollout.batch_size
            (["rollout.batch_size=99", "eval.tasks=8"], 4, "rl", 16),  # 16 prompts x 4 over 4 ranks
            (["rollout.batch_size=99", "eval.tasks=8"], 3, "rl", 22),
            (["rollout.batch_size=99", "eval.tasks=8", "eval.samples=5"], 4, "eval", 10),
            (["rollout.batch_size=999"], 4, "rl", 80),  # 320 held-out tasks
            (["rollout.view=separate"], 1, "rl", 10),
        ],
    )
    def test_streams_in_the_cache_of_a_rank(self, overrides, ranks, stage, rows):
        assert rollout_rows(settings(*overrides), ranks, stage) == rows


class TestActivations:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_formula_against_what_a_small_model_saves(self, tiny_model, dtype, attention):
        model = tiny_model(64, attn_implementation=attention).to(getattr(torch, dtype)).train()
        config = settings("policy.lora.r=1", f"model.dtype={dtype}", f"model.attn_implementation={attention}")
        shape, rows, width = shape_of(model.config), 2, 96
        ids = torch.arange(rows * width).reshape(rows, width) % 64
        mask = torch.ones_like(ids)
        mask[0, :5] = 0  # padding, so that attention gets a mask
        saved = saved_bytes(model, lambda: model.model(input_ids=ids, attention_mask=mask, use_cache=False))
        layer = (activation_bytes(config, shape, width, rows) - rows * width * width) / (shape.layers + 1)
        assert saved == pytest.approx(layer * shape.layers + rows * width * width, rel=0.15)

    def test_checkpointing_keeps_the_inputs_and_one_layer(self):
        layer = 8 * 28 + 4 * 40 + 4 * 100 + 4 * 72
        config = settings("policy.gradient_checkpointing=true")
        assert activation_bytes(config, SMALL, 100, 2) == 200 * (2 * 4 * 8 + 2 * layer + 100)

    def test_flash_attention_grows_linearly(self):
        config = settings("model.attn_implementation=flash_attention_2")
        assert activation_bytes(config, SMALL, 200, 1) == 2 * activation_bytes(config, SMALL, 100, 1)


def saved_bytes(model, forward):
    """Bytes of the distinct storages that autograd keeps for the backward pass, without the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept, sizes = [], {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # or its memory would be given away, and counted twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(sizes.values())


class TestShape:
    def test_a_real_model_is_counted_exactly(self, tiny_model):
        model = tiny_model(400)
        expected = sum(parameter.numel() for parameter in model.parameters())
        assert shape_of(model.config) == ModelShape(expected, 2, 64, 4, 2, 16, 400, 128, tied=False)

    def test_qwen3_8b(self):
        from transformers import Qwen3Config

        config = Qwen3Config(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=False,
        )
        assert shape_of(config) == replace(QWEN3_8B, parameters=8_190_735_360)

    def test_tied_weights_count_once(self, tiny_model):
        config = tiny_model(400).config
        untied = shape_of(config)
        config.tie_word_embeddings = True
        assert shape_of(config) == replace(untied, tied=True, parameters=untied.parameters - 400 * 64)

    def test_an_unknown_architecture_names_what_is_missing(self):
        from transformers import GPT2Config

        with pytest.raises(ShapeError, match="gpt2 model has no .*intermediate_size"):
            shape_of(GPT2Config())


def test_sizes_on_disk():
    config = qwen3_8b()
    assert export_bytes(config, QWEN3_8B) == 2 * 8.19e9
    assert checkpoint_bytes(config, QWEN3_8B) == 14 * 8.19e9
    adapters = qwen3_8b("policy.lora.r=16")
    assert export_bytes(adapters, QWEN3_8B) == 4 * 43_646_976
    assert checkpoint_bytes(adapters, QWEN3_8B) == 2 * 8.19e9 + 12 * 43_646_976


class TestTable:
    def test_a_column_per_phase_and_no_empty_rows(self):
        estimated = dict.fromkeys([part for phase in PHASES.values() for part in phase], 0.0)
        estimated |= {"weights": 2.0 * GIB, "kv_cache": 1.5 * GIB, "activations": 0.25 * GIB}
        text = table(estimated | {"rollout": 3.5 * GIB, "update": 2.25 * GIB, "peak": 3.5 * GIB})
        assert [line.split() for line in text.splitlines()] == [
            ["GiB", "per", "GPU", "rollout", "update"],
            ["weights", "2.00", "2.00"],
            ["kv", "cache", "1.50"],
            ["activations", "0.25"],
            ["total", "3.50", "2.25"],
            ["peak", "3.50", "GiB"],
        ]

    def test_a_stage_without_rollouts_has_one_column(self):
        text = table(estimate(settings(), SMALL, 1, "sft"))
        assert "rollout" not in text and "kv cache" not in text
