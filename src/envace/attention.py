"""PyTorch's scaled dot product attention where "causal, without a mask" also holds for queries behind a cache.

transformers makes a mask whenever there are more keys than queries, and a mask keeps the kernels from leaving out what
lies in the future. Here such queries are moved to the end of as many as there are keys: the added ones cost less than
what the causal kernel leaves out, and their outputs are dropped. Everything else is transformers' own.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SDPA = "sdpa_at_end"


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """(B, heads, Q, D), (B, kv_heads, K, D) -> (B, Q, heads, D). No mask: query i sees the keys up to K - Q + i."""
    if query.shape[2] == 1 and attention_mask is not None and is_compiling():
        return _one_query(query, key, value, attention_mask, options["scaling"]), None
    behind = key.shape[2] - query.shape[2]
    if attention_mask is not None or query.shape[2] == 1 or behind == 0:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    output, _ = sdpa_attention_forward(module, F.pad(query, (0, 0, behind, 0)), key, value, None, **options)
    return output[:, behind:], None


def _one_query(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float) -> Tensor:
    """The heads that share keys and values as queries of one head. Compiled, transformers would copy both for each."""
    rows, heads, _, dim = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], dim)
    output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(rows, 1, heads, dim)


def mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,  # a tensor if the cache is of fixed length
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Tensor | None:
    """None where no token is masked and the queries are the last of the keys; else that of transformers."""
    at_end = isinstance(q_offset, int) and q_offset + q_length == kv_length
    if allow_is_causal_skip and at_end and attention_mask is None and local_size is None:
        return None
    return sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        # Otherwise None would mean that the queries are the first of the keys.
        allow_is_causal_skip=allow_is_causal_skip and at_end and q_length in (1, kv_length),
        **options,
    )


AttentionInterface.register(SDPA, attend)
AttentionMaskInterface.register(SDPA, mask)
