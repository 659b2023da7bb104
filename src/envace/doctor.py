"""Check that this machine, this config and this model go together, before a long run finds out.

    python -m envace.doctor --config configs/qwen3_8b.yaml [key=value ...]

Prints one line per check (ok, or FAIL and what to change) and the estimated memory of each stage. Exit code 1 if
anything fails. Nothing is trained; of the model only config and tokenizer are read, of a judge what models it lists.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from envace.chat import TOOL_TOKENS, TURN_TOKENS, ChatFormat, TokenizerError
from envace.console import run
from envace.data import open_source
from envace.endpoints import probe
from envace.memory import (
    GIB,
    RESIDENT,
    ModelShape,
    Stage,
    checkpoint_bytes,
    estimate,
    export_bytes,
    longest_stream,
    read_deepspeed,
    shape_of,
    table,
)
from envace.model_folders import base_of, is_adapter
from envace.outage import EndpointError
from envace.settings import Config, EndpointConfig, ModelConfig
from envace.types import UserError, first_line

STAGES: tuple[Stage, ...] = ("sft", "rl", "eval")
# Of the GPU's memory; the rest is for the CUDA context, fragmentation and what the estimate leaves out.
USABLE = 0.9
# What a sharded config is estimated for where there is no GPU.
ASSUMED_GPUS = 8
SHOWN_MODELS = 5  # of those that an endpoint lists
# What transformers raises for a file that is missing, unreadable or of another kind, and for a hub out of reach.
LOAD_ERRORS = (OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError)


@dataclass(frozen=True)
class Check:
    """detail: what was found; if not ok, what to change too."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Machine:
    """gpu_memory: bytes of the smallest GPU. bfloat16: all GPUs compute in it. free_disk: bytes at run_dir."""

    gpus: int
    gpu_memory: int
    bfloat16: bool
    free_disk: int


@dataclass(frozen=True)
class Model:
    """What could be read at model.path. If shape is None without a problem, the embedded model is not built yet."""

    shape: ModelShape | None = None
    eos_ids: list[int] = field(default_factory=list)
    problem: str = ""
    tokenizer: Any = None
    tokenizer_problem: str = ""


def main(config: Config) -> None:
    machine, model = inspect_machine(config), inspect_model(config.model)
    failed = 0
    for check in checks(config, machine, model):
        failed += not check.ok
        print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.detail}")
    if model.shape is not None:
        ranks = machine.gpus or (ASSUMED_GPUS if config.policy.deepspeed else 1)
        for stage in STAGES:
            print(f"\n{stage} on {ranks} GPU{'s' * (ranks > 1)}{'' if machine.gpus else ' (assumed, none found)'}")
            print(table(estimate(config, model.shape, ranks, stage, _zero(config))))
    if failed:
        sys.exit(1)


def checks(config: Config, machine: Machine, model: Model) -> Iterator[Check]:
    yield check_gpus(config, machine)
    yield check_bfloat16(config, machine)
    yield check_deepspeed(config)
    yield check_model(config.model, model)
    if model.tokenizer is not None:
        yield check_padding(model.tokenizer)
        yield check_chat(config, model.tokenizer)
        yield check_end_of_turn(model.tokenizer, model.eos_ids)
    elif model.tokenizer_problem:
        yield Check("tokenizer", False, model.tokenizer_problem)
    if model.shape is not None:
        yield check_disk(config, machine, model.shape)
        for stage in STAGES:
            yield check_memory(config, machine, model.shape, stage)
    yield check_data(config)
    if config.reward.name == "checklist":
        yield check_endpoints("judge", config.judge)
    if config.simulator_endpoint.endpoints:
        yield check_endpoints("simulator_endpoint", config.simulator_endpoint)


def check_gpus(config: Config, machine: Machine) -> Check:
    if machine.gpus:
        return Check("GPUs", True, f"{machine.gpus} with {machine.gpu_memory / GIB:.0f} GiB or more each")
    if config.policy.deepspeed and not config.policy.cpu:
        return Check("GPUs", False, "no NVIDIA GPU found, and policy.deepspeed needs one: run it where there is one")
    return Check("GPUs", True, "none found; this config also runs on a CPU")


def check_bfloat16(config: Config, machine: Machine) -> Check:
    if config.model.dtype == "bfloat16" and machine.gpus and not machine.bfloat16:
        advice = "set model.dtype=float32 or use GPUs of compute capability 8.0 or newer"
        return Check("bfloat16", False, f"a GPU does not compute in bfloat16: {advice}")
    return Check("bfloat16", True, f"model.dtype={config.model.dtype}")


def check_deepspeed(config: Config) -> Check:
    path = config.policy.deepspeed
    if not path:
        return Check("DeepSpeed", True, "not asked for: each GPU holds all weights")
    try:
        read_deepspeed(path)
    except UserError as error:
        return Check("DeepSpeed", False, str(error))
    # In a process of its own: at import it looks for compilers and GPUs, and may fail in any way.
    tried = subprocess.run([sys.executable, "-c", "import deepspeed"], capture_output=True, text=True)
    if tried.returncode:
        reason = (tried.stderr.strip().splitlines() or ["no message"])[-1]
        return Check(
            "DeepSpeed", False, f"`import deepspeed` fails ({reason}): install it, or leave policy.deepspeed empty"
        )
    return Check("DeepSpeed", True, f"{path}, ZeRO stage 3")


def check_model(config: ModelConfig, model: Model) -> Check:
    if model.problem:
        return Check("model", False, model.problem)
    if model.shape is None:
        return Check("model", True, f"{config.path} is not there yet; `make sft` builds the embedded model")
    return Check("model", True, f"{config.path}, {model.shape.parameters:,} parameters")


def check_padding(tokenizer: Any) -> Check:
    if tokenizer.pad_token is not None:
        return Check("padding", True, f"pad token {tokenizer.pad_token}")
    # As ChatFormat has it; what is padding follows from lengths, so any token will do.
    stand_in = tokenizer.eos_token or "<|im_end|>"
    return Check("padding", True, f"no pad token; {stand_in} stands in for it, which does no harm here")


def check_chat(config: Config, tokenizer: Any) -> Check:
    """The chat template and the tokens that frame turns, calls and responses."""
    vocabulary = tokenizer.get_vocab()
    added = [t for t in TURN_TOKENS + TOOL_TOKENS if t not in vocabulary] if config.model.add_missing_tokens else []
    tokenizer.add_tokens(added)
    try:
        ChatFormat(tokenizer, thinking=config.rollout.thinking)
    except TokenizerError as error:
        return Check("chat format", False, str(error))
    taught = f"; {', '.join(added)} will be added, which SFT has to teach" if added else ""
    return Check("chat format", True, f"template and special tokens are there{taught}")


def check_end_of_turn(tokenizer: Any, eos_ids: list[int]) -> Check:
    """Sampling here has its own stops; programs that go by generation_config.json shall stop at the same token."""
    if tokenizer.eos_token_id is None:
        return Check("end of turn", False, "the tokenizer has no eos token: set eos_token in tokenizer_config.json")
    named = f"{tokenizer.eos_token} ({tokenizer.eos_token_id})"
    if tokenizer.eos_token_id not in eos_ids:
        found = f"the tokenizer's is {named}, the model's {eos_ids or 'unknown'}"
        advice = f"add {tokenizer.eos_token_id} to eos_token_id in generation_config.json"
        return Check("end of turn", False, f"{found}: {advice}, or other programs will not stop there")
    return Check("end of turn", True, f"{named}, in the tokenizer and the model's generation config")


def check_disk(config: Config, machine: Machine, shape: ModelShape) -> Check:
    """Room for the checkpoints of a stage, one more while it is written, and the exported models of SFT and RL."""
    # Without `every` a checkpoint is written only when the run is asked to stop.
    kept = config.checkpoint.keep + 1 if config.checkpoint.every else 1
    one, exported = checkpoint_bytes(config, shape), export_bytes(config, shape)
    models = 2 + (config.rl.steps // config.checkpoint.export_every if config.checkpoint.export_every else 0)
    needed = kept * one + models * exported
    detail = (
        f"{machine.free_disk / GIB:.0f} GiB free at {config.run_dir}, {needed / GIB:.0f} GiB needed "
        f"(checkpoints {kept} x {one / GIB:.1f}, models {models} x {exported / GIB:.1f})"
    )
    if needed > machine.free_disk:
        return Check("disk", False, f"{detail}: set run_dir to a larger disk, or lower checkpoint.keep")
    return Check("disk", True, detail)


def check_memory(config: Config, machine: Machine, shape: ModelShape, stage: Stage) -> Check:
    name = f"memory for {stage}"
    if not machine.gpus:
        return Check(name, True, "not compared, there is no GPU")
    needed = estimate(config, shape, machine.gpus, stage, _zero(config))
    detail = f"up to {needed['peak'] / GIB:.1f} of {machine.gpu_memory / GIB:.1f} GiB per GPU"
    if needed["peak"] <= USABLE * machine.gpu_memory:
        return Check(name, True, detail)
    phase = "rollout" if needed["rollout"] > needed["update"] else "update"
    model_is_large = sum(needed[part] for part in RESIDENT) > machine.gpu_memory / 2
    advice = "; ".join(_remedies(config, phase, model_is_large))
    return Check(name, False, f"{detail} in the {phase} phase, of which {USABLE:.0%} is usable: {advice}")


def _remedies(config: Config, phase: str, model_is_large: bool) -> Iterator[str]:
    policy = config.policy
    if model_is_large and not policy.deepspeed:
        yield "set policy.deepspeed=configs/deepspeed/zero3.json to divide the model over the GPUs"
    if model_is_large and policy.deepspeed:
        yield "use more GPUs, configs/deepspeed/zero3_offload.json or policy.offload_reference=true"
    if phase == "update" and not policy.gradient_checkpointing:
        yield "set policy.gradient_checkpointing=true"
    if phase == "update" and not policy.pack_tokens:
        yield f"lower micro_batch_size, or set policy.pack_tokens={longest_stream(config)}"
    if phase == "rollout" and policy.deepspeed and policy.rollout_weights == "gathered":
        yield "set policy.rollout_weights=partitioned, which is slower"
    if phase == "rollout":
        yield "lower rollout.batch_size"
    yield "lower rollout.max_context_tokens or rollout.max_new_tokens"


def check_data(config: Config) -> Check:
    name = f"data.source={config.data.source}"
    try:
        source = open_source(config)
        counts = len(source.demonstrations()), len(source.train_tasks()), len(source.eval_tasks())
    except UserError as error:
        return Check("data", False, f"{name}: {error}")
    return Check("data", True, f"{name}: {counts[0]} demonstrations, {counts[1]} tasks, {counts[2]} held-out tasks")


def check_endpoints(section: str, config: EndpointConfig) -> Check:
    """Every endpoint can be reached, takes the key and lists the model. No question is asked."""
    model = config.model
    try:
        found = probe(config, section)
    except EndpointError as error:
        return Check(section, False, str(error))
    problems, useful = [], []
    for url, models in found.items():
        if isinstance(models, EndpointError):
            problems.append(str(models).removeprefix(f"{section}: "))
        elif model not in models:
            problems.append(f"{url} lists {_some(models)}, not {section}.model={model}: correct it, or serve it there")
        else:
            useful.append(url)
    summary = [f"{model} is listed at {', '.join(useful)}"] if useful else []
    return Check(section, not problems, "; ".join(problems + summary))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_MODELS} more" if len(names) > SHOWN_MODELS else ""
    return ", ".join(names[:SHOWN_MODELS]) + more if names else "no model"


def inspect_machine(config: Config) -> Machine:
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    folder = Path(config.run_dir).resolve()
    existing = next(path for path in [folder, *folder.parents] if path.exists())
    return Machine(
        gpus=len(gpus),
        gpu_memory=min((gpu.total_memory for gpu in gpus), default=0),
        bfloat16=all(gpu.major >= 8 for gpu in gpus),
        free_disk=shutil.disk_usage(existing).free,
    )


def inspect_model(config: ModelConfig) -> Model:
    """Config and tokenizer from a folder or from the hub, no weights."""
    folder = Path(config.path)
    if config.embedded and not folder.exists():
        return Model()
    if problem := folder_problem(config.path):
        return Model(problem=problem)
    options = {"trust_remote_code": config.trust_remote_code}
    try:
        base = base_of(config.path)
        hf_config = AutoConfig.from_pretrained(base, **options)
        shape, eos_ids = shape_of(hf_config, **options), _eos_ids(base, hf_config)
    except (UserError, *LOAD_ERRORS) as error:
        problem = f"model.path={config.path} cannot be read ({first_line(error)})"
        if not folder.exists():
            problem += ": no such folder here, so the Hugging Face hub was asked; check the name and the network"
        return Model(problem=problem)
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, **options)
    except LOAD_ERRORS as error:
        problem = f"that of model.path={config.path} cannot be loaded ({first_line(error)})"
        return Model(shape, eos_ids, tokenizer_problem=problem)
    # transformers makes an empty tokenizer where the files of one are missing.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        problem = f"model.path={config.path} has none: save the model's own one there"
        return Model(shape, eos_ids, tokenizer_problem=problem)
    return Model(shape, eos_ids, tokenizer=tokenizer)


def folder_problem(path: str) -> str:
    """What is wrong with a local folder, "" if nothing is or if `path` is a hub name."""
    folder = Path(path)
    if not folder.exists():
        # A hub name has at most one slash.
        is_hub_name = path.count("/") <= 1 and not path.startswith(("/", ".", "~"))
        return "" if is_hub_name else f"model.path={path} is missing: give an existing folder or a hub name"
    if is_adapter(folder):
        return ""
    if not (folder / "config.json").exists():
        return f"model.path={path} has no config.json: give the folder of a Hugging Face model"
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        return f"model.path={path} has no weights (*.safetensors): copy or download them there"
    return ""


def _eos_ids(path: str, hf_config: Any) -> list[int]:
    """eos_token_id of generation_config.json; without that file transformers takes the model's config."""
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:
        generation = GenerationConfig.from_model_config(hf_config)
    ids = generation.eos_token_id
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _zero(config: Config) -> dict[str, Any]:
    """What the estimate takes from the DeepSpeed JSON; one that cannot be read has failed its own check."""
    try:
        return read_deepspeed(config.policy.deepspeed)["zero_optimization"] if config.policy.deepspeed else {}
    except UserError:
        return {}


if __name__ == "__main__":
    run(main, __doc__)
