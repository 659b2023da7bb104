"""How much memory one GPU needs, estimated before anything is loaded. Pure; sizes in bytes.

With P parameters of b bytes (2 in bfloat16, 4 in float32), T of them trained (all of them, or the adapters), and s the
number of ranks that share them (all under DeepSpeed, else 1), each GPU holds

    weights      b P / s
    adapters     b T / s                     LoRA; without DeepSpeed 4 T, as peft then makes them float32
    gradients    4 T / s                     float32; without DeepSpeed twice that on several ranks (DDP's buckets),
                                             and for simplicity in both phases
    optimizer    8 T / s, or 12 T / s        AdamW's two moments in float32, and a float32 master of bfloat16 weights
    reference    b P / s                     RL with a KL term; LoRA takes the base weights for it

and, of what comes and goes, the larger of two phases:

    rollout      rows * (longest stream) * layers * 2 * kv_heads * head_dim * b of KV cache, and the gathered weights
    update       the activations of one micro-batch (see `activation_bytes`), the logits of one chunk, and what ZeRO-3
                 gathers on the way

"Longest" is what the limits of `rollout` allow, so most steps need less. Not counted, and left to the headroom of
whoever compares: the CUDA context, fragmentation, the workspace of kernels, the activations of a prefill, the holes
that streams of different lengths leave in a cache (up to as much again), and the temporaries of the optimizer step
(which comes when the activations are gone).

The formulas are this project's own reasoning about the code of transformers, DeepSpeed and PyTorch; a test holds the
activations of a small model against them. They have not been compared with a GPU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from envace.settings import Config
from envace.types import UserError

Stage = Literal["sft", "rl", "eval"]

GIB = 2**30
FLOAT32 = 4
BYTES = {"float32": 4, "bfloat16": 2}
# Logits of a chunk, counted in float32 copies: those of the head, scaled, their log-softmax, and a gradient or, for the
# entropy, probabilities.
LOGIT_COPIES = 4
# DeepSpeed's defaults, in elements.
REDUCE_BUCKET = 5e8
MAX_LIVE_PARAMETERS = 1e9

RESIDENT = ("weights", "adapters", "gradients", "optimizer", "reference", "reduce_bucket")
PHASES = {
    "rollout": (*RESIDENT, "rollout_weights", "kv_cache"),
    "update": (*RESIDENT, "live_weights", "activations", "logits"),
}


class ShapeError(UserError):
    """The architecture has no sizes that the estimate knows."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder of the Llama and Qwen kind. tied: the head shares the weights of the embedding."""

    parameters: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    intermediate: int
    tied: bool

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_dim


def shape_of(hf_config: Any, *, parameters: int | None = None, trust_remote_code: bool = False) -> ModelShape:
    """The shape of a causal LM from its transformers config.

    parameters: how many it has; None counts them on the meta device, exactly and without data.
    Raises ShapeError if the config does not name a size.
    """
    sizes = hf_config.get_text_config().to_dict()
    required = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "intermediate_size")
    if missing := [name for name in required if name not in sizes]:
        raise ShapeError(f"the config of a {hf_config.model_type} model has no {', '.join(missing)}")
    if parameters is None:
        parameters = _count_parameters(hf_config, trust_remote_code)
    heads = sizes["num_attention_heads"]
    return ModelShape(
        parameters=parameters,
        layers=sizes["num_hidden_layers"],
        hidden=sizes["hidden_size"],
        heads=heads,
        kv_heads=sizes.get("num_key_value_heads") or heads,
        head_dim=sizes.get("head_dim") or sizes["hidden_size"] // heads,
        vocabulary=sizes["vocab_size"],
        intermediate=sizes["intermediate_size"],
        tied=bool(sizes["tie_word_embeddings"]),
    )


def _count_parameters(hf_config: Any, trust_remote_code: bool) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


def estimate(
    config: Config, shape: ModelShape, ranks: int, stage: Stage, zero: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Bytes on each of `ranks` GPUs: every part by name, the sum of each phase ("rollout", "update"), and the "peak".

    zero: the section zero_optimization of the DeepSpeed JSON, for what it offloads to the CPU and its bucket sizes.
    A phase that the stage does not have is 0.
    """
    parts = dict.fromkeys([part for phase in PHASES.values() for part in phase], 0.0)
    parts |= _model_parts(config, shape, ranks, stage, zero or {})
    if stage != "eval":
        width, rows = update_batch(config, stage)
        parts["activations"] = activation_bytes(config, shape, width, rows)
        parts["logits"] = float(LOGIT_COPIES * FLOAT32 * config.policy.logprob_chunk * shape.vocabulary)
    if stage != "sft":
        tokens = rollout_rows(config, ranks, stage) * longest_stream(config)
        parts["kv_cache"] = float(tokens * kv_bytes_per_token(config, shape))
    happening = {"rollout": stage != "sft", "update": stage != "eval"}
    totals = {name: sum(parts[part] for part in PHASES[name]) if on else 0.0 for name, on in happening.items()}
    return parts | totals | {"peak": max(totals.values())}


def _model_parts(
    config: Config, shape: ModelShape, ranks: int, stage: Stage, zero: Mapping[str, Any]
) -> dict[str, float]:
    """The parts that follow from the number of parameters."""
    policy, size = config.policy, BYTES[config.model.dtype]
    sharded = bool(policy.deepspeed) and stage != "eval"
    shards = ranks if sharded else 1
    adapters = adapter_parameters(config, shape)
    parts = {"weights": 0.0 if sharded and _offloaded(zero, "param") else size * shape.parameters / shards}
    parts["adapters"] = (size if sharded else FLOAT32) * adapters / shards
    if stage == "eval":
        return parts
    trained = adapters or shape.parameters
    if not (sharded and _offloaded(zero, "optimizer")):
        copies = 2 if ranks > 1 and not sharded else 1
        master = FLOAT32 if sharded and size < FLOAT32 else 0
        parts["gradients"] = copies * FLOAT32 * trained / shards
        parts["optimizer"] = (2 * FLOAT32 + master) * trained / shards
    if stage == "rl" and config.rl.kl_coef > 0 and not adapters and not (sharded and policy.offload_reference):
        parts["reference"] = size * shape.parameters / shards
    if sharded:
        parts["reduce_bucket"] = size * _number(zero, "reduce_bucket_size", REDUCE_BUCKET)
        # A single rank owns whole parameters: nothing is gathered.
        live = min(shape.parameters, _number(zero, "stage3_max_live_parameters", MAX_LIVE_PARAMETERS))
        parts["live_weights"] = size * live if ranks > 1 else 0.0
        full = size * shape.parameters if ranks > 1 else 0.0
        parts["rollout_weights"] = full if policy.rollout_weights == "gathered" else parts["live_weights"]
    return parts


def adapter_parameters(config: Config, shape: ModelShape) -> int:
    """LoRA's parameters when every linear layer has an adapter: r (inputs + outputs) each. Other targets have fewer."""
    attention = 2 * (shape.hidden + shape.query_width) + 2 * (shape.hidden + shape.key_width)
    mlp = 3 * (shape.hidden + shape.intermediate)
    return config.policy.lora.r * shape.layers * (attention + mlp)


def longest_stream(config: Config) -> int:
    """Tokens. A prompt below max_context_tokens may still get an output of max_new_tokens."""
    return config.rollout.max_context_tokens + config.rollout.max_new_tokens


def update_batch(config: Config, stage: Stage) -> tuple[int, int]:
    """(tokens in a row, rows) of the largest micro-batch. Demonstrations are taken to keep the limits of rollouts."""
    longest = longest_stream(config)
    if config.policy.pack_tokens:
        return max(longest, config.policy.pack_tokens), 1
    return longest, (config.rl if stage == "rl" else config.sft).micro_batch_size


def rollout_rows(config: Config, ranks: int, stage: Stage) -> int:
    """Streams in the KV cache of one rank. `rl` evaluates too. View `separate` keeps a second stream per episode."""
    episodes = (config.eval.tasks or config.data.eval_tasks) * config.eval.samples
    if stage == "rl":
        episodes = max(episodes, config.rl.prompts_per_step * config.rl.group_size)
    streams = 2 if config.rollout.view == "separate" else 1
    return streams * min(config.rollout.batch_size, math.ceil(episodes / ranks))


def kv_bytes_per_token(config: Config, shape: ModelShape) -> int:
    return shape.layers * 2 * shape.key_width * BYTES[config.model.dtype]


def activation_bytes(config: Config, shape: ModelShape, width: int, rows: int) -> float:
    """What the backward pass of `rows` rows of `width` tokens needs.

    With L the bytes that one layer saves for its backward pass, per token, and once more L for the gradients that pass
    through a layer,

        tokens * (layers + 1) * L                         everything is saved
        tokens * (layers * b * hidden + 2 L)              checkpointing: the input of each layer, and one layer anew

    where, with q = heads * head_dim, k = kv_heads * head_dim and b the bytes of a number,

        norms        2 (4 + b) hidden + (4 + b)(q + k)    the float32 input and the normalised one
        attention    b (hidden + 4 q)                     its input; queries, keys and values repeated, output
        scores       b width, and once width              the mask added to the scores, made from one of booleans
        MLP          b (hidden + 4 intermediate)          its input; gate, SiLU, up, product

    flash_attention_2 needs no mask and repeats no keys; eager attention keeps the scores of all heads.
    """
    size = BYTES[config.model.dtype]
    q, k = shape.query_width, shape.key_width
    norms = (FLOAT32 + size) * (2 * shape.hidden + q + k)
    attention, scores, mask = size * (shape.hidden + 4 * q), size * width, width
    if config.model.attn_implementation == "flash_attention_2":
        attention, scores, mask = size * (shape.hidden + 2 * q + 2 * k), 0, 0
    elif config.model.attn_implementation == "eager":
        scores = shape.heads * width * (FLOAT32 + size)
    mlp = size * (shape.hidden + 4 * shape.intermediate)
    layer = norms + attention + scores + mlp
    if config.policy.gradient_checkpointing:
        return float(width * rows * (shape.layers * size * shape.hidden + 2 * layer + mask))
    return float(width * rows * ((shape.layers + 1) * layer + mask))


def export_bytes(config: Config, shape: ModelShape) -> float:
    """Size on disk of what a stage writes at its end: the model, or with LoRA the adapters."""
    adapters = adapter_parameters(config, shape)
    return float(FLOAT32 * adapters if adapters else BYTES[config.model.dtype] * shape.parameters)


def checkpoint_bytes(config: Config, shape: ModelShape) -> float:
    """Size on disk of one checkpoint, all ranks together: all weights, AdamW's master and moments of the trained.

    An upper bound: some kinds of checkpoint leave out the copy of the weights that the master makes superfluous.
    """
    trained = adapter_parameters(config, shape) or shape.parameters
    return float(BYTES[config.model.dtype] * shape.parameters + 3 * FLOAT32 * trained)


def table(estimate: Mapping[str, float]) -> str:
    """An estimate as text in GiB: a line for each part that is not 0, a column for each phase."""
    phases = [name for name in PHASES if estimate[name]]
    names = dict.fromkeys(part for phase in phases for part in PHASES[phase] if estimate[part])
    lines = ["GiB per GPU".ljust(18) + "".join(phase.rjust(10) for phase in phases)]
    for part in names:
        cells = [f"{estimate[part] / GIB:.2f}" if part in PHASES[phase] else "" for phase in phases]
        lines.append(part.replace("_", " ").ljust(18) + "".join(cell.rjust(10) for cell in cells))
    lines.append("total".ljust(18) + "".join(f"{estimate[phase] / GIB:.2f}".rjust(10) for phase in phases))
    lines.append(f"peak {estimate['peak'] / GIB:.2f} GiB")
    return "\n".join(line.rstrip() for line in lines)


def describe(config: Config, hf_config: Any, parameters: int, ranks: int, stage: Stage) -> str:
    """The estimate of a sharded run as a line for its log."""
    try:
        shape = shape_of(hf_config, parameters=parameters)
    except ShapeError as error:
        return f"memory not estimated: {error}"
    zero = read_deepspeed(config.policy.deepspeed)["zero_optimization"]
    needed = {part: size / GIB for part, size in estimate(config, shape, ranks, stage, zero).items()}
    update = f"update {needed['update']:.1f} GiB"
    if stage == "sft":
        return f"estimated memory per GPU: {update}"
    return (
        f"estimated memory per GPU: {update}, rollout {needed['rollout']:.1f} GiB (weights "
        f"{config.policy.rollout_weights} {needed['rollout_weights']:.1f}, KV cache {needed['kv_cache']:.1f})"
    )


def read_deepspeed(path: str) -> dict[str, Any]:
    """The settings in a DeepSpeed JSON; what is "auto" there is left out, so that DeepSpeed's default holds.

    Raises UserError unless it can be read, is of ZeRO stage 3 and leaves optimizer and schedule to this program.
    """
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"policy.deepspeed={path} cannot be read ({reason}): see configs/deepspeed/") from error
    zero = settings.get("zero_optimization") if isinstance(settings, dict) else None
    if not isinstance(zero, dict) or zero.get("stage") != 3:
        raise UserError(f"policy.deepspeed={path}: set zero_optimization.stage to 3, as in configs/deepspeed/")
    if taken := [name for name in ("optimizer", "scheduler") if name in settings]:
        raise UserError(f"policy.deepspeed={path}: remove {taken[0]!r}, which sft.lr, rl.lr and their like decide")
    return _without_auto(settings)


def _without_auto(settings: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in settings.items() if value != "auto"}
    return {key: _without_auto(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _offloaded(zero: Mapping[str, Any], what: Literal["param", "optimizer"]) -> bool:
    return (zero.get(f"offload_{what}") or {}).get("device", "none") != "none"


def _number(zero: Mapping[str, Any], key: str, default: float) -> float:
    return float(zero.get(key, default))
