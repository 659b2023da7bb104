"""Token log-probabilities under a causal LM, computed only where a role spoke and a chunk of tokens at a time.

Logits of a whole batch are the largest tensor of training: (tokens, vocabulary) in float32, with gradient. Here the
hidden states of the scored tokens are selected first, and their logits exist for one chunk at a time, in the backward
pass too (activation checkpointing). The head is called as a module, so that sharding can gather its weight.
"""

from __future__ import annotations

import math
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.generation import GenerationMixin

from envace.losses import chosen_logprobs, entropy
from envace.types import Batch, Role

# transformers 5.2x renamed this argument of `forward` and `generate`; both names are accepted.
CACHE = "cache" if "cache" in signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"


class Scorer(nn.Module):
    """The module that is trained: one forward pass from a batch to the log-probabilities of its scored tokens.

    lm: what is saved; `causal_lm` is the Hugging Face model inside it (itself, or what adapters are wrapped around).
    chunk: scored tokens whose logits exist at once.
    """

    def __init__(self, lm: nn.Module, causal_lm: Any, chunk: int):
        super().__init__()
        self.lm = lm
        self.chunk = chunk
        # In a tuple, or they would be registered, and saved, a second time.
        self._parts = (causal_lm.get_decoder(), causal_lm.get_output_embeddings(), causal_lm.config)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        scored: Tensor,
        *,
        temperature: float,
        num_chunks: int,
        shared: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """(logprobs, entropy or None), both (B, T) and 0 where not `scored`.

        shared: how many leading tokens all rows have in common; they run through the model once.
        num_chunks: the same on all ranks, for each chunk gathers the head's weight.
        """
        hidden = self._hidden(input_ids, position_ids, shared)
        predicted = scored[:, 1 + shared :]
        states, chosen = hidden[:, :-1][predicted], input_ids[:, 1 + shared :][predicted]
        pieces = [
            checkpoint(self._score, *piece, temperature, with_entropy, use_reentrant=False)
            for piece in zip(states.tensor_split(num_chunks), chosen.tensor_split(num_chunks), strict=True)
        ]
        logprobs, entropies = (torch.cat(column) for column in zip(*pieces, strict=True))
        return _scatter(logprobs, scored), _scatter(entropies, scored) if with_entropy else None

    def _score(self, states: Tensor, chosen: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
        """(n, H), (n,) -> (n,), (n,)"""
        _, head, _ = self._parts
        logits = head(states)
        logprobs = chosen_logprobs(logits, chosen, temperature)
        return logprobs, entropy(logits, temperature) if with_entropy else logprobs.detach()

    def _hidden(self, input_ids: Tensor, position_ids: Tensor, shared: int) -> Tensor:
        """(B, T - shared, H): the last hidden states.

        No mask is needed: padding is on the right, where no token sees it.
        """
        decoder, _, config = self._parts
        inputs = {"input_ids": input_ids[:, shared:], "position_ids": position_ids[:, shared:]}
        if shared == 0:
            return decoder(**inputs, use_cache=False).last_hidden_state
        cache = DynamicCache(config=config)
        start = {"input_ids": input_ids[:1, :shared], "position_ids": position_ids[:1, :shared]}
        decoder(**start, use_cache=True, **{CACHE: cache})
        # Copies, but keeps the graph: gradients of all rows add up in the one start.
        cache.batch_repeat_interleave(len(input_ids))
        return decoder(**inputs, use_cache=True, **{CACHE: cache}).last_hidden_state

    @torch.no_grad()
    def is_exact(self) -> bool:
        """Whether the model's own logits are those of its head, with nothing scaled or capped behind it."""
        decoder, head, _ = self._parts
        ids = torch.arange(4, device=head.weight.device)[None]
        inputs = {"input_ids": ids, "position_ids": ids, "use_cache": False}
        logits = self.lm(**inputs).logits
        # In proportion to the largest: a cap hardly shows while logits are small.
        return _close(head(decoder(**inputs).last_hidden_state), logits, 1e-5)

    @torch.no_grad()
    def packs_exactly(self) -> bool:
        """Whether the model tells packed sequences apart by positions that start anew."""
        decoder, head, _ = self._parts
        positions = torch.arange(4, device=head.weight.device)[None]
        both = {"input_ids": torch.cat([positions, positions + 4], 1), "position_ids": positions.repeat(1, 2)}
        together = decoder(**both, attention_mask=None, use_cache=False).last_hidden_state
        alone = decoder(input_ids=positions + 4, position_ids=positions, use_cache=False).last_hidden_state
        return _close(together[:, 4:], alone, 1e-2 if alone.dtype == torch.bfloat16 else 1e-4)


def score_inputs(batch: Batch, chunk: int, *, share_start: bool) -> dict[str, Any]:
    """What Scorer.forward wants to know about a batch."""
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "scored": batch.weights > 0,
        "num_chunks": max(1, math.ceil(batch.num_scored / chunk)),
        "shared": shared_start(batch) if share_start else 0,
    }


def shared_start(batch: Batch) -> int:
    """How many leading tokens all rows share, short of the last token before anyone's first output."""
    if len(batch.input_ids) == 1 or batch.attention_mask is None:
        return 0
    same = (batch.input_ids == batch.input_ids[:1]).all(0) & (batch.attention_mask == 1).all(0)
    context = (batch.role_ids == int(Role.CONTEXT)).all(0)
    alike = int((same & context).long().cumprod(0).sum())
    return max(0, alike - 1)


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def _scatter(values: Tensor, scored: Tensor) -> Tensor:
    """(n,) -> (B, T)"""
    # Nothing predicts the first token of a row.
    where = scored & (torch.arange(scored.shape[1], device=scored.device) > 0)
    return torch.zeros(scored.shape, dtype=values.dtype, device=values.device).masked_scatter(where, values)
