"""The policy: weights, optimizer, forward pass, sampling, saving. The only file that knows accelerate, DeepSpeed and
ranks.

Every rank unfolds its share of a batch and then knows all of it (`share`, `gather`), so rewards, advantages and the
division into micro-batches are the same everywhere without further talk. The loss given to `backward` is normalised by
one denominator over all ranks and micro-batches: an update does not depend on how the batch was divided.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    gather_object,
    set_seed,
)
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.utils import is_flash_attn_2_available

from envace.attention import SDPA
from envace.batching import Row, divide, num_scored, rows_to_batch, rows_to_packed_batch
from envace.chat import TOOL_TOKENS, TURN_TOKENS, ChatFormat
from envace.checkpoints import PARTIAL, publish
from envace.failures import in_memory, is_out_of_memory
from envace.generation import CachedGenerator
from envace.memory import read_deepspeed
from envace.model_folders import base_of, is_adapter, is_model
from envace.scoring import Scorer, score_inputs
from envace.settings import LoraConfig as LoraSettings
from envace.settings import ModelConfig, PolicyConfig, SamplingConfig
from envace.types import Batch, Role, UserError, first_line

# Ranks meet after a rollout, and one may have much longer to generate than another; the default is ten minutes.
PATIENCE = timedelta(hours=6)
ADAPTER, REFERENCE = "default", "reference"  # names of the adapters: what is trained, what it started from
Item = TypeVar("Item")


class LoadError(UserError):
    """A model or tokenizer cannot be loaded; the message says what, from where, and what to do."""


class SaveError(UserError):
    """The weights could not be written."""


class Diverged(UserError):
    """Too many steps in a row had a gradient that was not finite."""


class Policy:
    """One causal LM in both roles.

    model: what is loaded, a Hugging Face folder or hub name, or the folder of a saved adapter.
    sharding: how it is trained; without `training` every rank holds all weights.
    thinking: see ChatFormat.
    build: makes the model at `model.path` if nothing is there; called on one rank.
    """

    @in_memory("load")
    def __init__(
        self,
        model: ModelConfig,
        sharding: PolicyConfig | None = None,
        *,
        thinking: bool = True,
        seed: int = 0,
        training: bool = False,
        build: Callable[[Path], None] | None = None,
    ):
        self.config = model
        self.sharding = sharding = sharding or PolicyConfig()
        self.seed = seed
        self.accelerator = _accelerator(model, sharding if training else PolicyConfig())
        if not self.is_main:
            logging.getLogger("envace").setLevel(logging.ERROR)  # one rank speaks for all
        if build is not None:
            with self.accelerator.main_process_first():
                if not Path(model.path).exists():
                    build(Path(model.path))
        self.lm, self.tokenizer = self._load()
        if training:
            self.lm = _with_adapter(self.lm, model, sharding.lora)
        _switch_dropout_off(self.lm)
        self.name = model.path
        self.chat = ChatFormat(self.tokenizer, thinking=thinking)
        self.scorer = Scorer(self.lm, self.model, sharding.logprob_chunk).to(self.accelerator.device)
        self.engine: Any = self.scorer
        self.reference: Any = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.skipped_in_a_row = 0
        self.skipped_steps = 0
        self._last_backward = True
        self._accumulated = False

    def _load(self) -> tuple[Any, Any]:
        """The same weights on every rank and at every call, new embeddings included."""
        set_seed(self.seed)
        loaded = _load(self.config)
        set_seed(self.seed, device_specific=True)  # ranks sample different rollouts
        return loaded

    @property
    def model(self) -> Any:
        """The Hugging Face model, adapters inside it."""
        return self.lm.get_base_model() if isinstance(self.lm, PeftModel) else self.lm

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def world_size(self) -> int:
        return self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def is_sharded(self) -> bool:
        """Whether the weights are partitioned over ranks (ZeRO-3)."""
        return self.accelerator.distributed_type is DistributedType.DEEPSPEED

    @property
    def _generates_partitioned(self) -> bool:
        return self.is_sharded and self.sharding.rollout_weights == "partitioned"

    @property
    def num_parameters(self) -> int:
        """Of the whole model, however it is divided."""
        return sum(p.ds_numel if self.is_sharded else p.numel() for p in self.model.parameters())

    def decode(self, ids: list[int]) -> str:
        """Token ids -> text, special tokens kept. For logs only."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @in_memory("load")
    def prepare_training(
        self,
        *,
        lr: float,
        weight_decay: float,
        grad_clip: float,
        max_nonfinite_steps: int,
        with_reference: bool,
        adam_beta2: float = 0.999,
    ) -> None:
        """Create the optimizer, divide the model over the ranks, and keep what it starts from as the reference."""
        self.max_nonfinite_steps = max_nonfinite_steps
        self.grad_clip = grad_clip
        if self.sharding.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        trained = [p for p in self.lm.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=weight_decay, betas=(0.9, adam_beta2))
        if self.is_sharded:
            self.accelerator.state.deepspeed_plugin.deepspeed_config["gradient_clipping"] = grad_clip
        self.engine, self.optimizer = self.accelerator.prepare(self.scorer, optimizer)
        if with_reference:
            self._keep_reference()
        with nullcontext() if self._generates_partitioned else self._whole_weights():
            exact = self.scorer.is_exact()
            packs = not self.sharding.pack_tokens or self.scorer.packs_exactly()
        where = f"model.path {self.config.path!r}: this architecture"
        if not exact:
            raise LoadError(
                f"{where} changes logits behind its output layer, which log-probabilities in chunks leave out; "
                "take another model"
            )
        if not packs:
            raise LoadError(f"{where} lets packed sequences see each other: set policy.pack_tokens=0")

    def _keep_reference(self) -> None:
        """A frozen copy of the weights before training; of adapters alone if only they are trained."""
        if isinstance(self.lm, PeftModel):
            return  # `_with_adapter` kept them
        lm, _ = self._load()
        scorer = Scorer(lm, lm, self.sharding.logprob_chunk).eval().requires_grad_(False)
        if not self.is_sharded:
            self.reference = scorer.to(self.device)
            return
        import deepspeed

        config = dict(self.accelerator.deepspeed_config)
        zero = dict(config["zero_optimization"])
        zero.pop("offload_optimizer", None)
        if self.sharding.offload_reference:
            zero["offload_param"] = {"device": "cpu"}
        self.reference, *_ = deepspeed.initialize(model=scorer, config=config | {"zero_optimization": zero})
        self.reference.eval()

    def randomness(self) -> dict[str, Any]:
        """The states of everything random, for `restore_randomness`."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": cuda,
        }

    def restore_randomness(self, states: dict[str, Any]) -> None:
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        for index, state in enumerate(states["cuda"]):
            torch.cuda.set_rng_state(state, index)

    @contextmanager
    def own_randomness(self) -> Iterator[None]:
        """Random states of its own, from the seed alone: what is sampled inside changes nothing that comes later."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self.seed + self.rank)
            yield

    @contextmanager
    def generating(self, sampling: SamplingConfig) -> Iterator[CachedGenerator]:
        """A `generate` callable for one rollout phase. Caches are gone when the phase ends."""
        partitioned = self._generates_partitioned
        was_training = self.lm.training
        self.lm.eval()
        try:
            with in_memory("rollout"), nullcontext() if partitioned else self._whole_weights():
                generator = CachedGenerator(
                    self.model,
                    self.chat.pad_id,
                    sampling,
                    anyone=self.any_rank if partitioned else None,
                    decode=self.sharding.decode,
                )
                yield generator
                generator.keep_pace()
        finally:
            self.lm.train(was_training)

    @contextmanager
    def _whole_weights(self) -> Iterator[None]:
        """Under ZeRO-3 all weights on every rank, for as long as it lasts, so ranks generate independently.

        The hooks that would gather and release the weights of each module are off meanwhile.
        """
        if not self.is_sharded:
            yield
            return
        import deepspeed

        offload = self.engine.optimizer.parameter_offload
        with deepspeed.zero.GatheredParameters(list(self.scorer.parameters())):
            offload.destroy()
            offload.forward_hooks.clear()
            offload.backward_hooks.clear()
            try:
                yield
            finally:
                offload.setup_zero_stage3_hooks()

    @in_memory("update")
    def logprobs(self, batch: Batch, temperature: float, *, with_entropy: bool = True) -> tuple[Tensor, Tensor | None]:
        """(logprobs, entropy or None), both (B, T), of `batch` (on this device) under the current weights.

        0 where no token is trained. Dropout is off: old and new log-probabilities of the same weights are equal.
        """
        # Hugging Face recomputes activations only in training mode; `_switch_dropout_off` saw to the rest.
        self.engine.train(self.sharding.gradient_checkpointing)
        return self.engine(**self._inputs(batch), temperature=temperature, with_entropy=with_entropy)

    @in_memory("update")
    @torch.no_grad()
    def ref_logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """(B, T) under the frozen reference."""
        with self._reference_adapter() if self.reference is None else nullcontext():
            scorer = self.engine if self.reference is None else self.reference
            return scorer(**self._inputs(batch), temperature=temperature, with_entropy=False)[0]

    @contextmanager
    def _reference_adapter(self) -> Iterator[None]:
        """The adapters that training started from; none if it started from the bare model."""
        if REFERENCE not in self.lm.peft_config:
            with self.lm.disable_adapter():
                yield
            return
        self.lm.set_adapter(REFERENCE, inference_mode=True)
        try:
            yield
        finally:
            self.lm.set_adapter(ADAPTER)

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        # Running the shared start apart is one more forward pass, which sharded ranks would have to agree on, and
        # its cache is what gradient checkpointing does not support.
        share_start = not self.is_sharded and not self.sharding.gradient_checkpointing
        return score_inputs(batch, self.sharding.logprob_chunk, share_start=share_start)

    def micro_batches(self, rows: list[Row], size: int) -> list[Batch]:
        """This rank's part of `rows`, which are the same on all ranks, in batches of at most `size` on this device.

        Every rank has equally many and scores in equally many chunks: with fewer rows it adds some of weight 0.
        """
        parts = divide(rows, self.world_size, size, self.sharding.pack_tokens)
        idle = [Row([self.chat.pad_id] * 2, [int(Role.CONTEXT)] * 2, [0.0] * 2, [0.0] * 2)]
        batches = []
        for number, mine in enumerate(parts[self.rank]):
            rows_to = rows_to_packed_batch if self.sharding.pack_tokens else self._padded
            most = max(num_scored(part[number]) for part in parts)
            batches.append(self._to_device(replace(rows_to(mine or idle), num_scored=most)))
        return batches

    def batch(self, rows: list[Row]) -> Batch:
        """All of `rows` on this device, for what every rank computes alike."""
        return self._to_device(self._padded(rows))

    def _padded(self, rows: list[Row]) -> Batch:
        return rows_to_batch(rows, self.chat.pad_id)

    def _to_device(self, batch: Batch) -> Batch:
        moved: dict[str, Any] = {
            name: value.to(self.device) for name, value in vars(batch).items() if isinstance(value, Tensor)
        }
        return replace(batch, **moved)

    def accumulating(self, batches: list[Batch]) -> Iterator[Batch]:
        """`batches` in turn; gradients are exchanged between ranks in the backward pass of the last one."""
        for number, batch in enumerate(batches, 1):
            self._last_backward = number == len(batches)
            with self._apart() if number < len(batches) else nullcontext():
                yield batch

    def _apart(self) -> AbstractContextManager[None]:
        return self.engine.no_sync() if isinstance(self.engine, DistributedDataParallel) else nullcontext()

    @in_memory("update")
    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of `loss`, which is normalised by the denominator of the whole global batch."""
        self._accumulated = True
        # Ranks average their gradients, while their losses add up.
        loss = loss * self.world_size
        if self.is_sharded:
            self.engine.set_gradient_accumulation_boundary(self._last_backward)
            self.engine.backward(loss, scale_wrt_gas=False)
        else:
            self.accelerator.backward(loss)

    @in_memory("update")
    def step(self, lr: float) -> dict[str, float]:
        """One optimizer step at learning rate `lr`. Returns grad_norm and skipped.

        A gradient that is not finite changes nothing: the step is skipped and counted, on all ranks alike, since they
        know the same norm. Without any backward pass since the last step nothing happens.
        """
        accumulated, self._accumulated = self._accumulated, False
        if self.optimizer is None:
            raise RuntimeError("prepare_training comes before step")
        if self.is_sharded and not accumulated:  # DeepSpeed would look for gradients
            return {"grad_norm": 0.0, "skipped": 0.0}
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.is_sharded:
            self.engine.step()
            # DeepSpeed itself leaves such a step out, and then knows no norm.
            finite = self.engine.was_step_applied()
            grad_norm = float(self.engine.get_global_grad_norm()) if finite else math.nan
        else:
            grad_norm = float(self.accelerator.clip_grad_norm_(self.lm.parameters(), self.grad_clip))
            finite = math.isfinite(grad_norm)
            if finite:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        self.skipped_steps += not finite
        return {"grad_norm": grad_norm, "skipped": float(not finite)}

    def check_progress(self) -> None:
        """Raise Diverged when max_nonfinite_steps updates in a row were skipped. For after the step was logged."""
        if self.skipped_in_a_row >= self.max_nonfinite_steps:
            raise Diverged(
                f"{self.skipped_in_a_row} updates in a row had a gradient that is not finite; "
                "lower the learning rate, and look at loss and grad_norm in metrics.jsonl for the step where it began"
            )

    # Between ranks

    def share(self, items: list[Item]) -> list[Item]:
        """This rank's part of a list that is the same on all ranks; neighbours stay together."""
        start = self.rank * len(items) // self.world_size
        return items[start : start + self.share_of(len(items))]

    def share_of(self, count: int) -> int:
        """How many of `count` items are this rank's."""
        return (self.rank + 1) * count // self.world_size - self.rank * count // self.world_size

    def gather(self, items: list[Item]) -> list[Item]:
        """The parts of all ranks in the order of ranks, on every rank: undoes `share`."""
        return gather_object(items) if self.world_size > 1 else items

    def sum_over_ranks(self, value: float) -> float:
        return float(self.accelerator.reduce(torch.tensor(value, dtype=torch.float64, device=self.device), "sum"))

    def any_rank(self, flag: bool) -> bool:
        return self.sum_over_ranks(float(flag)) > 0

    def wait(self) -> None:
        """Until all ranks are here."""
        self.accelerator.wait_for_everyone()

    # On disk

    def save(self, path: Path) -> None:
        """Write an ordinary Hugging Face folder (with LoRA: of the adapter); complete or absent. All ranks call it."""
        what: dict[str, Any] = {"selected_adapters": [ADAPTER]} if isinstance(self.lm, PeftModel) else {}
        # Ranks work together on the whole weights, which then are in the first one's memory.
        weights = self.accelerator.get_state_dict(self.engine) if self.is_sharded else None
        if self.is_main:
            if weights is not None:
                what["state_dict"] = {name.removeprefix("lm."): tensor for name, tensor in weights.items()}
            _write(self.lm, self.tokenizer, path, **what)
        self.wait()

    def save_state(self, folder: Path) -> None:
        """Weights, optimizer, random states and counters, for `load_state`. All ranks call it.

        Raises OSError when it cannot be written.
        """
        try:
            self.accelerator.save_state(str(folder))
        except (RuntimeError, SafetensorError) as e:  # what torch and safetensors make of a full disk
            raise OSError(f"{first_line(e)}; is the disk full?") from e
        counters = {"skipped_in_a_row": self.skipped_in_a_row, "skipped_steps": self.skipped_steps}
        if self.is_main:
            (folder / "policy.json").write_text(json.dumps(counters), encoding="utf-8")

    def load_state(self, folder: Path) -> None:
        """Undo `save_state`, with as many ranks as wrote it. Raises LoadError."""
        try:
            # accelerate goes on without random states that it cannot read.
            torch.load(folder / f"random_states_{self.rank}.pkl", weights_only=False)
            self.accelerator.load_state(str(folder))
            counters = json.loads((folder / "policy.json").read_text(encoding="utf-8"))
        except (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError, SafetensorError) as e:
            raise LoadError(f"checkpoint {folder} does not fit this model or is damaged ({first_line(e)})") from e
        self.skipped_in_a_row, self.skipped_steps = counters["skipped_in_a_row"], counters["skipped_steps"]


def learning_rate(step: int, *, steps: int, peak: float, warmup: float, schedule: str) -> float:
    """The rate of optimizer step `step` (from 0): linear to `peak` over warmup * steps, then cosine to 0 or constant.

    Learning rate: lr_s = peak * (s + 1) / S_w for s < S_w, then peak, or from there half a cosine from peak to 0

    So no step of the warm-up runs at 0.
    """
    warmup_steps = round(warmup * steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def merge_adapter(adapter: Path, output: Path, config: ModelConfig) -> None:
    """Write the model that `adapter` makes of its base as an ordinary Hugging Face folder.

    Raises LoadError or SaveError; what the merge is made of is never overwritten.
    """
    output = output.resolve()
    check_output(output, str(adapter))
    lm, tokenizer = _load(replace(config, path=str(adapter)))
    if not isinstance(lm, PeftModel):
        raise LoadError(f"{adapter} is no adapter: it has no adapter_config.json")
    _write(lm.merge_and_unload(), tokenizer, output)


def check_output(output: Path, model_path: str) -> None:
    """Raise SaveError if a model written to `output` would replace what it starts from, an adapter's base included."""
    for source in (Path(model_path), Path(base_of(model_path))):
        if source.exists() and output.resolve() in [source.resolve(), *source.resolve().parents]:
            raise SaveError(f"the result would replace {source}, which it starts from: choose another folder")


def _write(lm: Any, tokenizer: Any, path: Path, **what: Any) -> None:
    """A Hugging Face folder, complete or absent. Raises SaveError."""
    if path.exists() and not is_model(path):
        raise SaveError(f"{path} is there already and is no model: name another folder, or remove it")
    partial = path.with_name(path.name + PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        lm.save_pretrained(partial, **what)
        tokenizer.save_pretrained(partial)
        publish(partial, path)
    except Exception as e:  # of a full disk the tokenizers library makes no other kind
        raise SaveError(f"the model cannot be saved to {path} ({first_line(e)}); what was written is {partial}") from e


def _accelerator(model: ModelConfig, sharding: PolicyConfig) -> Accelerator:
    if not sharding.deepspeed:
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # the config decides
        return Accelerator(
            # Without `cpu`, accelerate takes every CPU process for the only one.
            cpu=not torch.cuda.is_available(),
            mixed_precision="no",  # not from the environment
            kwargs_handlers=[
                DistributedDataParallelKwargs(broadcast_buffers=False),  # they are constants
                InitProcessGroupKwargs(backend=None, timeout=PATIENCE),
            ],
        )
    if not torch.cuda.is_available() and not sharding.cpu:
        raise UserError(
            f"policy.deepspeed={sharding.deepspeed} shards over NVIDIA GPUs and none was found; "
            "`make demo` runs on a CPU (policy.cpu=true allows CPU processes, for tests)"
        )
    half = model.dtype == "bfloat16"
    plugin_config = _deepspeed_config(sharding.deepspeed, half)
    if "RANK" not in os.environ:
        raise UserError(
            f"policy.deepspeed={sharding.deepspeed} wants a process for each GPU: start with `make sft` or `make rl`, "
            "or `python -m envace.launch train_rl.py ...`"
        )
    # accelerate reads this switch when its state is created, which on a CPU has to be before the Accelerator: it would
    # take every process for the first one.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(timeout=PATIENCE, **({} if torch.cuda.is_available() else {"backend": "gloo"}))
    plugin = DeepSpeedPlugin(hf_ds_config=plugin_config)
    return Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16" if half else "no")


def _deepspeed_config(path: str, half: bool) -> dict[str, Any]:
    """The file, and what this program decides. Batch sizes are placeholders: micro-batches are formed here."""
    config = read_deepspeed(path)
    # Without it there would be nothing to export in the end.
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return config | {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": half},
        "zero_allow_untested_optimizer": True,
    }


def _load(config: ModelConfig) -> tuple[Any, Any]:
    where = f"model.path {config.path!r}"
    # A hub name has at most one slash; without this check a missing folder is reported as a malformed name.
    if not Path(config.path).exists() and (config.path.count("/") > 1 or config.path.startswith(("/", ".", "~"))):
        raise LoadError(f"{where} is no folder; give an existing one, such as that of an earlier stage, or a hub name")
    options = {"trust_remote_code": config.trust_remote_code}
    has_adapter = is_adapter(Path(config.path))
    if config.attn_implementation == "flash_attention_2" and not _has_flash_attention():
        raise LoadError(
            "model.attn_implementation=flash_attention_2 needs an NVIDIA GPU and the package flash-attn: "
            "install it, or set model.attn_implementation=sdpa"
        )
    if config.dtype == "bfloat16" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported(False):
        raise LoadError("this GPU does not compute in bfloat16: set model.dtype=float32, or use a newer one")
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, **options)
        model: Any = AutoModelForCausalLM.from_pretrained(
            PeftConfig.from_pretrained(config.path).base_model_name_or_path if has_adapter else config.path,
            dtype=getattr(torch, config.dtype),
            attn_implementation=SDPA if config.attn_implementation == "sdpa" else config.attn_implementation,
            **options,
        )
        if has_adapter:
            model = PeftModel.from_pretrained(model, config.path, adapter_name=ADAPTER, is_trainable=True)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError, SafetensorError) as e:
        if is_out_of_memory(e):
            raise
        advice = "give a folder or hub name of a causal LM"
        if not Path(config.path).exists():
            advice = "no such folder is here, so the Hugging Face hub was asked: check the name and the network"
        raise LoadError(f"{where} cannot be loaded ({first_line(e)}); {advice}") from e
    # Exactly this kind: a sliding window would count the holes that a kept cache has.
    if not all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers):
        raise LoadError(
            f"{where} has sliding windows or keeps more than keys and values between tokens, so rollouts cannot go on "
            "from its cache; take a model of full attention"
        )
    vocabulary = set(tokenizer.get_vocab())
    if not vocabulary - set(tokenizer.all_special_tokens):
        # transformers makes an empty tokenizer where the files of one are missing.
        raise LoadError(f"{where} has no tokenizer; save the model's own one there")
    if config.add_missing_tokens:
        tokenizer.add_tokens([t for t in TURN_TOKENS + TOOL_TOKENS if t not in vocabulary])
        # Some checkpoints have more embeddings than tokens; those stay.
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer


def _has_flash_attention() -> bool:
    return torch.cuda.is_available() and is_flash_attn_2_available()


def _switch_dropout_off(model: nn.Module) -> None:
    """In training mode too, which recomputing activations needs."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        rates = [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
        for name in rates:
            setattr(module, name, 0.0)


def _with_adapter(lm: Any, model: ModelConfig, lora: LoraSettings) -> Any:
    """What is trained: the model itself, new adapters around it, or those of an earlier stage, also the reference."""
    if not isinstance(lm, PeftModel):
        if not lora.r:
            return lm
        targets = "all-linear" if list(lora.targets) == ["all-linear"] else list(lora.targets)
        config = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")
        try:
            return get_peft_model(lm, config, adapter_name=ADAPTER)
        except ValueError as e:
            known = ", ".join(sorted({n.rpartition(".")[2] for n, m in lm.named_modules() if isinstance(m, nn.Linear)}))
            raise LoadError(f"policy.lora.targets={targets}: {first_line(e)} This model has {known}") from e
    saved: Any = lm.peft_config[ADAPTER]
    if (saved.r, saved.lora_alpha) != (lora.r, lora.alpha):
        raise LoadError(
            f"model.path {model.path!r} is an adapter with r={saved.r}, alpha={saved.lora_alpha}, and policy.lora has "
            f"r={lora.r}, alpha={lora.alpha}: use the same, or merge the adapter into its base first"
        )
    lm.load_adapter(model.path, adapter_name=REFERENCE, is_trainable=False)
    lm.set_adapter(ADAPTER)
    return lm
