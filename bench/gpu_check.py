"""What only a GPU can show: the demo's first losses on CUDA, and speed and memory at the shape of Qwen3-8B.

    python bench/gpu_check.py --out runs/gpu_check [--shape tiny]

The 8B-shaped model has random weights, LoRA on every linear layer, bfloat16 and gradient checkpointing; it trains
through `Scorer` and generates through `CachedGenerator`, as the policy does. `--shape tiny` tries the script on a CPU.

Model FLOPs of training, for MFU: frozen weights cost 2 a parameter and token in the forward pass and 2 in the backward
pass (activations only), without the embedding, which is looked up, and with half of the head, as half of the tokens are
scored. Attention costs 4 * layers * heads * head_dim * context / 2 a token forward and twice that backward. What is
recomputed is not counted. Limit of generation: every step reads all weights but the embedding, and the KV cache, once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, CompileConfig, Qwen3Config

from envace.attention import SDPA
from envace.batching import Row, rows_to_batch
from envace.generation import CachedGenerator
from envace.scoring import Scorer, score_inputs
from envace.settings import SamplingConfig
from envace.tracking import without_nan
from envace.types import Evidence, Request, Role, Segment, Sequence

CHUNK = 1024
NEW_TOKENS = 128
SHAPES = {
    "8b": Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=False,
    ),
    "tiny": Qwen3Config(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=40_960,
        tie_word_embeddings=False,
    ),
}
TRAINED = {"8b": [4096, 12_288], "tiny": [128, 256]}  # context of the sequence that is trained on
# (context, rows generated together)
GENERATED = {"8b": [(4096, 16), (4096, 32), (4096, 64), (4096, 128), (12_288, 16)], "tiny": [(128, 4), (256, 2)]}


@dataclass
class Peak:
    """Dense bfloat16 FLOP/s and bytes/s of a device, from its data sheet."""

    flops: float
    bandwidth: float


PEAKS = {"H200": Peak(989e12, 4.8e12), "H100": Peak(989e12, 3.35e12), "A100": Peak(312e12, 2.0e12)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"))
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    arguments = parser.parse_args()
    if arguments.shape == "8b" and not torch.cuda.is_available():
        sys.exit("error: no NVIDIA GPU found; --shape tiny tries this script on a CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    arguments.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"device": name, "torch": torch.__version__, "shape": arguments.shape}
    report["first_losses"] = first_losses(arguments.out)
    peak = next((peak for key, peak in PEAKS.items() if key in name), None)
    report["training"], report["generating"] = speed(arguments.shape, device, peak)
    (arguments.out / "gpu_check.json").write_text(json.dumps(without_nan(report), indent=2) + "\n")
    text = table(report)
    (arguments.out / "gpu_check.md").write_text(text)
    print(text)


def first_losses(out: Path) -> dict[str, Any]:
    """The first three SFT losses of the demo on the CPU and on the device, from the same weights and dialogues."""
    losses = {}
    for place, hidden in (("cpu", {"CUDA_VISIBLE_DEVICES": ""}), ("device", {})):
        run = out / f"demo-{place}"
        settings = [f"run_dir={run}", f"model.path={out / 'base'}", "sft.steps=3", "data.demonstrations=256"]
        command = [sys.executable, "train_sft.py", "--config", "configs/demo.yaml", *settings]
        subprocess.run(command, check=True, env=os.environ | hidden, stdout=subprocess.DEVNULL)
        lines = (run / "metrics.jsonl").read_text().splitlines()
        losses[place] = [json.loads(line)["loss/sft"] for line in lines]
    pairs = zip(losses["cpu"], losses["device"], strict=True)
    return losses | {"largest_relative_difference": max(abs(a - b) / abs(a) for a, b in pairs)}


def speed(name: str, device: torch.device, peak: Peak | None) -> tuple[list[dict], list[dict]]:
    """A record for each length that is trained on, and for each way to decode at each size."""
    shape = SHAPES[name]
    with device:
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16, attn_implementation=SDPA)
    parameters = sum(p.numel() for p in model.parameters())
    generated = [
        {"context": context, "rows": rows, "decode": way, **decoding(model, context, rows, parameters, device, peak)}
        for context, rows in GENERATED[name]
        for way, decoding in DECODING.items()
    ]
    adapters = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapters = adapters.to(device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    scorer = Scorer(adapters, model, CHUNK)
    trained = [
        {"context": context, **training_speed(scorer, context, shape, parameters, device, peak)}
        for context in TRAINED[name]
    ]
    return trained, generated


def training_speed(
    scorer: Scorer, context: int, shape: Qwen3Config, parameters: int, device: torch.device, peak: Peak | None
) -> dict[str, float]:
    """Forward and backward passes on one sequence, half of it outputs."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(10, shape.vocab_size, (context,), generator=draw).tolist()
    half = context // 2
    roles = [int(Role.CONTEXT)] * half + [int(Role.ACT)] * (context - half)
    row = Row(ids, roles, [float(role > 0) for role in roles], [0.0] * context)
    inputs = score_inputs(rows_to_batch([row], 0), CHUNK, share_start=False)
    inputs = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    scorer.train()

    def step() -> None:
        logprobs, _ = scorer(**inputs, temperature=1.0, with_entropy=False)
        logprobs.sum().backward()
        scorer.zero_grad()

    seconds, memory = timed(step, 3, device)
    rate = context / seconds
    attention = 4 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * context / 2
    flops = 4 * (parameters - 1.5 * shape.vocab_size * shape.hidden_size) + 3 * attention
    return {
        "train_tokens_per_s": rate,
        "train_mfu": rate * flops / peak.flops if peak else float("nan"),
        "train_peak_gib": memory,
    }


def kept_cache(
    model: Any,
    context: int,
    rows: int,
    parameters: int,
    device: torch.device,
    peak: Peak | None,
    decode: str = "dynamic",
) -> dict[str, float]:
    """NEW_TOKENS for `rows` streams whose caches hold `context` tokens and more, as rollouts do, without the prompt.

    decode: as policy.decode.
    """
    model.eval()
    streams = [Sequence([Segment(Role.CONTEXT, prompt(model, context), Evidence.GIVEN)]) for _ in range(rows)]
    generator = CachedGenerator(model, 0, SamplingConfig(), decode=decode)

    def output(tokens: int) -> None:
        completions = generator([Request(s, Role.ACT, frozenset(), tokens) for s in streams])
        for stream, completion in zip(streams, completions, strict=True):
            stream.segments.append(Segment(Role.ACT, completion.ids, Evidence.CLAIMED))
            stream.segments.append(Segment(Role.CONTEXT, [5], Evidence.GIVEN))

    output(2)
    seconds, memory = timed(lambda: output(NEW_TOKENS), 1, device)
    before = len(streams[0]) - NEW_TOKENS - 1  # what the timed output began with
    return decoding_record(model.config, before, rows, seconds, memory, parameters, peak)


def static_compiled(
    model: Any, context: int, rows: int, parameters: int, device: torch.device, peak: Peak | None
) -> dict[str, float]:
    """The same with a cache of fixed length and compiled code (CUDA graphs): what a decoder without Python could reach.

    One output behind one prompt, with transformers alone; the prompt's seconds are taken off.
    """
    model.eval()
    ids = torch.tensor([prompt(model, context)] * rows, device=device)
    compiling = CompileConfig(fullgraph=False)
    compiling._compile_all_devices = True

    def output(tokens: int) -> None:
        settings = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": True, "top_k": 0}
        with torch.no_grad():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), pad_token_id=0, cache_implementation="static", **settings,
                compile_config=compiling,
            )  # fmt: skip

    beginning, _ = timed(lambda: output(2), 1, device)
    seconds, memory = timed(lambda: output(NEW_TOKENS + 2), 1, device)
    return decoding_record(model.config, context, rows, seconds - beginning, memory, parameters, peak)


DECODING = {
    "policy.decode=dynamic": kept_cache,
    "policy.decode=static": partial(kept_cache, decode="static"),
    "transformers alone, static, compiled": static_compiled,
}


def prompt(model: Any, context: int) -> list[int]:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(10, model.config.vocab_size, (context,), generator=draw).tolist()


def decoding_record(
    shape: Any, context: int, rows: int, seconds: float, memory: float, parameters: int, peak: Peak | None
) -> dict[str, float]:
    token = 2 * 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim  # bytes of keys and values
    cache = token * (context + NEW_TOKENS / 2) * rows
    weights = 2 * (parameters - shape.vocab_size * shape.hidden_size)
    return {
        "tokens_per_s": rows * NEW_TOKENS / seconds,
        "limit_tokens_per_s": rows * peak.bandwidth / (weights + cache) if peak else float("nan"),
        "peak_gib": memory,
    }


def timed(work, repeats: int, device: torch.device) -> tuple[float, float]:
    """(seconds a repeat after one to warm up, peak GiB on the device; NaN on a CPU)"""
    on_gpu = device.type == "cuda"
    work()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / repeats
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan")


def table(report: dict[str, Any]) -> str:
    losses = report["first_losses"]
    lines = [
        f"# {report['device']}, torch {report['torch']}, shape {report['shape']}",
        "",
        f"First SFT losses of the demo: CPU {losses['cpu']}, device {losses['device']}; "
        f"largest relative difference {losses['largest_relative_difference']:.1e}",
        "",
        "| context | train tokens/s | MFU | peak GiB |",
        "|---|---|---|---|",
    ]
    for s in report["training"]:
        speed = f"{s['train_tokens_per_s']:.0f} | {s['train_mfu']:.1%} | {s['train_peak_gib']:.1f}"
        lines.append(f"| {s['context']} | {speed} |")
    lines += [
        "",
        "| context | rows | decode | tokens/s | of the bandwidth limit | peak GiB |",
        "|---|---|---|---|---|---|",
    ]
    for s in report["generating"]:
        share = s["tokens_per_s"] / s["limit_tokens_per_s"]
        speed = f"{s['tokens_per_s']:.0f} | {share:.1%} | {s['peak_gib']:.1f}"
        lines.append(f"| {s['context']} | {s['rows']} | {s['decode']} | {speed} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
