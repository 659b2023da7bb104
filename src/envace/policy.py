"""The policy: weights, optimizer, forward pass, sampling, saving. The only file that knows accelerate and ranks.

The loss given to `backward` is normalised by one denominator over all ranks and micro-batches, so an update does not
depend on how the batch was split.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from envace.batching import Row, micro_batches, rows_to_batch
from envace.chat import TOOL_TOKENS, TURN_TOKENS, ChatFormat
from envace.config import ModelConfig, SamplingConfig
from envace.generation import CACHE, CachedGenerator
from envace.losses import token_entropy, token_logprobs
from envace.types import Batch, Role, UserError


class LoadError(UserError):
    """A model or tokenizer cannot be loaded; the message says what, from where, and what to do."""


class SaveError(UserError):
    """The weights could not be written."""


class Diverged(UserError):
    """Too many steps in a row had a gradient that was not finite."""


class Policy:
    """One causal LM in both roles.

    path: Hugging Face folder or hub name. thinking: see ChatFormat.
    """

    def __init__(self, config: ModelConfig, *, thinking: bool = True, seed: int = 0):
        # Without `cpu`, accelerate takes every CPU process for the only one.
        self.accelerator = Accelerator(
            cpu=not torch.cuda.is_available(),
            mixed_precision="no",  # not from the environment
            # Buffers are constants here. To send them would be a collective in each forward pass, and `_forward` makes
            # one or two, as the rows of a rank need it.
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
        )
        # All ranks start from the same weights, new embeddings included, and then sample different rollouts.
        set_seed(seed)
        model, tokenizer = _load(config)
        set_seed(seed, device_specific=True)
        self.name = config.path
        self.chat = ChatFormat(tokenizer, thinking=thinking)
        self.tokenizer = tokenizer
        self._model_config = model.config
        self.model = model.to(self.accelerator.device)
        self.reference: Any = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.skipped_in_a_row = 0
        self.skipped_steps = 0

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

    def decode(self, ids: list[int]) -> str:
        """Token ids -> text, special tokens kept. For logs only."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

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
        """Create the optimizer, wrap the model for all ranks, and freeze a copy of it as the reference."""
        if with_reference:
            self.reference = copy.deepcopy(self.model).eval().requires_grad_(False)
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=lr, weight_decay=weight_decay, betas=(0.9, adam_beta2)
        )
        self.grad_clip = grad_clip
        self.max_nonfinite_steps = max_nonfinite_steps
        self.model, self.optimizer = self.accelerator.prepare(self.model, optimizer)

    @contextmanager
    def generating(self, sampling: SamplingConfig) -> Iterator[CachedGenerator]:
        """A `generate` callable for one rollout phase. Caches are gone when the phase ends."""
        model = self.accelerator.unwrap_model(self.model)
        was_training = model.training
        model.eval()
        try:
            yield CachedGenerator(model, self.chat.pad_id, sampling)
        finally:
            model.train(was_training)

    def logprobs(self, batch: Batch, temperature: float, *, with_entropy: bool = True) -> tuple[Tensor, Tensor | None]:
        """(logprobs, entropy or None), both (B, T), of `batch` (on this device) under the current weights.

        Dropout is off, so that old and new log-probabilities of the same weights are equal.
        """
        self.model.eval()
        logits = _forward(self.model, self._model_config, batch)
        entropy = token_entropy(logits.detach(), temperature) if with_entropy else None
        return token_logprobs(logits, batch.input_ids, temperature), entropy

    @torch.no_grad()
    def ref_logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """(B, T) under the frozen reference."""
        return token_logprobs(_forward(self.reference, self._model_config, batch), batch.input_ids, temperature)

    def micro_batches(self, rows: list[Row], size: int) -> list[Batch]:
        """`rows` in batches of at most `size` on this device, equally many on every rank.

        A backward pass is a collective: ranks with fewer batches, or none at all, add some with weight 0.
        """
        batches = list(micro_batches(rows, size, self.chat.pad_id))
        counts = self.accelerator.gather(torch.tensor([len(batches)], device=self.device))
        idle = rows_to_batch([Row([self.chat.pad_id] * 2, [int(Role.CONTEXT)] * 2, [0.0] * 2, [0.0] * 2)], 0)
        batches += [idle] * (int(counts.max()) - len(batches))
        return [self._to_device(batch) for batch in batches]

    def _to_device(self, batch: Batch) -> Batch:
        return replace(batch, **{k: v.to(self.device) for k, v in vars(batch).items() if v is not None})

    def sum_over_ranks(self, value: float) -> float:
        return float(self.accelerator.reduce(torch.tensor(value, dtype=torch.float64, device=self.device), "sum"))

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of `loss`, which is normalised by the denominator of the whole global batch."""
        # Ranks average their gradients, while their losses add up.
        self.accelerator.backward(loss * self.world_size)

    def step(self, lr: float) -> dict[str, float]:
        """One optimizer step at learning rate `lr`. Returns grad_norm and skipped.

        A gradient that is not finite changes nothing: the step is skipped and counted, on all ranks alike, since they
        hold the same gradient. Raises Diverged when that happened max_nonfinite_steps times in a row.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        grad_norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.grad_clip))
        finite = math.isfinite(grad_norm)
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        self.skipped_steps += not finite
        if self.skipped_in_a_row >= self.max_nonfinite_steps:
            raise Diverged(
                f"{self.skipped_in_a_row} updates in a row had a gradient that is not finite; "
                "lower the learning rate or look at the losses in metrics.jsonl"
            )
        return {"grad_norm": grad_norm, "skipped": float(not finite)}

    def save(self, path: Path) -> None:
        """Write an ordinary Hugging Face folder; a folder of that name is complete or absent."""
        if not self.is_main:
            return
        partial = path.with_name(path.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        model = self.accelerator.unwrap_model(self.model)
        try:
            model.save_pretrained(partial)
            self.tokenizer.save_pretrained(partial)
            shutil.rmtree(path, ignore_errors=True)
            partial.rename(path)
        except OSError as e:
            raise SaveError(
                f"the model cannot be saved to {path} ({e.strerror or e}); what was written is {partial}"
            ) from e


def learning_rate(step: int, *, steps: int, peak: float, warmup: float, schedule: str) -> float:
    """The rate of optimizer step `step` (from 0): linear to `peak` over warmup * steps, then cosine to 0 or constant.

    The k-th of w warm-up steps runs at peak * k / w, so no step runs at 0.
    """
    warmup_steps = round(warmup * steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def _forward(model: Any, config: Any, batch: Batch) -> Tensor:
    """(B, T, V) logits. What all rows start with (system prompt, tools, task) runs once, not B times.

    The logits inside that shared start are not computed and left 0: no role spoke there, so nothing reads them.
    """
    shared = _shared_prefix(batch)
    inputs = {"input_ids": batch.input_ids[:, shared:], "position_ids": batch.position_ids[:, shared:]}
    if shared == 0:
        return model(**inputs, attention_mask=batch.attention_mask, use_cache=False).logits
    rows, width = batch.input_ids.shape
    prefix = batch.input_ids[:1, :shared]
    cache = DynamicCache(config=config)
    positions = batch.position_ids[:1, :shared]
    model(input_ids=prefix, position_ids=positions, use_cache=True, logits_to_keep=1, **{CACHE: cache})
    # Copies, but keeps the graph: gradients of all rows add up in the one prefix.
    cache.batch_repeat_interleave(rows)
    logits = model(**inputs, attention_mask=batch.attention_mask, use_cache=True, **{CACHE: cache}).logits
    return torch.nn.functional.pad(logits, (0, 0, shared, 0))


def _shared_prefix(batch: Batch) -> int:
    """How many leading tokens all rows share, short of the last token before anyone's first output."""
    if batch.input_ids.shape[0] == 1:
        return 0
    same = (batch.input_ids == batch.input_ids[:1]).all(0) & (batch.attention_mask == 1).all(0)
    context = (batch.role_ids == int(Role.CONTEXT)).all(0)
    alike = int((same & context).long().cumprod(0).sum())
    return max(0, alike - 1)


def _load(config: ModelConfig) -> tuple[Any, Any]:
    where = f"model.path {config.path!r}"
    # A hub name has at most one slash; without this check a missing folder is reported as a malformed name.
    if not Path(config.path).exists() and (config.path.count("/") > 1 or config.path.startswith(("/", ".", "~"))):
        raise LoadError(f"{where} is no folder; give an existing one, such as that of an earlier stage, or a hub name")
    options = {"trust_remote_code": config.trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, **options)
        model = AutoModelForCausalLM.from_pretrained(
            config.path,
            dtype=getattr(torch, config.dtype),
            attn_implementation=config.attn_implementation,
            **options,
        )
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError, SafetensorError) as e:
        reason = str(e).strip().splitlines()[0]
        raise LoadError(f"{where} cannot be loaded ({reason}); give a folder or hub name of a causal LM") from e
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
