"""Keys and values with room behind them: a token is written in place.

transformers' DynamicCache copies everything it holds at every token, which at long contexts is most of what a token
costs. Here it is copied once in `ROOM` tokens. The numbers are the same, bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, StaticLayer

ROOM = 256  # tokens
STEP = 64  # tokens; attention of compiled code runs over what is reserved, and each length is a shape of its own


class RoomyLayer(DynamicLayer):
    """keys, values: (B, heads, T, head_dim), views of the beginning of buffers that are longer."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.get_seq_length() == 0:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
            self._buffers: tuple[Tensor, Tensor] | None = None
        assert self.keys is not None and self.values is not None  # as lazy_initialization left them
        held = self.keys.shape[2]
        total = held + key_states.shape[2]
        # `crop` leaves views of the buffers behind; what selects rows makes tensors of its own.
        if self._buffers is None or not _is_start_of(self.keys, self._buffers[0]) or total > self._buffers[0].shape[2]:
            self._buffers = _with_room(self.keys, total), _with_room(self.values, total)
        keys, values = self._buffers
        keys[:, :, held:total], values[:, :, held:total] = key_states, value_states
        self.keys, self.values = keys[:, :, :total], values[:, :, :total]
        return self.keys, self.values

    def keep_columns(self, columns: Tensor) -> None:
        """columns: (B, W), of each row the W tokens that stay, in their order."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = _columns(self.keys, columns), _columns(self.values, columns)


class RoomyCache(DynamicCache):
    """For models of full attention in every layer, without gradients."""

    def __init__(self, config: Any):
        super().__init__(config=config)
        self.roomy = [RoomyLayer() for _ in self.layers]
        self.layers = [*self.roomy]

    def keep_columns(self, columns: Tensor) -> None:
        for layer in self.roomy:
            layer.keep_columns(columns)


class FixedLayer(StaticLayer):
    """keys, values: (B, heads, L, head_dim) with L a multiple of STEP, of which the first `get_seq_length()` are held.

    Attention runs over all of it, and a mask hides the room: shapes and addresses stay as they are from token to token,
    so that compiled code, and a CUDA graph of it, can be used again.
    """

    def __init__(self) -> None:
        super().__init__(max_cache_len=0)

    def reserve(self, total: int) -> None:
        """See to it that there is room for `total` tokens."""
        if total <= self.max_cache_len:
            return
        more = math.ceil(total / STEP) * STEP - self.max_cache_len
        self.max_cache_len += more
        if self.keys is not None and self.values is not None:
            self._replace(F.pad(self.keys, (0, 0, 0, more)), F.pad(self.values, (0, 0, 0, more)))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self._replace(self.keys[indices], self.values[indices])

    def keep_columns(self, columns: Tensor) -> None:
        """columns: (B, W), of each row the W tokens that stay, in their order. What is reserved becomes fitting."""
        if self.keys is not None and self.values is not None:
            kept = columns.shape[1]
            self.max_cache_len = math.ceil(kept / STEP) * STEP
            room = (0, 0, 0, self.max_cache_len - kept)
            self._replace(F.pad(_columns(self.keys, columns), room), F.pad(_columns(self.values, columns), room))
            self.cumulative_length.fill_(kept)

    def _replace(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.batch_size = len(keys)
        torch._dynamo.mark_static_address(keys)
        torch._dynamo.mark_static_address(values)


class FixedCache(Cache):
    """For models of full attention in every layer, without gradients."""

    def __init__(self, config: Any):
        self.fixed = [FixedLayer() for _ in DynamicCache(config=config).layers]
        super().__init__(layers=[*self.fixed])

    def reserve(self, total: int) -> None:
        for layer in self.fixed:
            layer.reserve(total)

    def batch_select_indices(self, indices: Tensor) -> None:
        for layer in self.fixed:
            layer.batch_select_indices(indices)

    def keep_columns(self, columns: Tensor) -> None:
        for layer in self.fixed:
            layer.keep_columns(columns)


def _columns(states: Tensor, columns: Tensor) -> Tensor:
    _, heads, _, dim = states.shape
    return states.gather(2, columns[:, None, :, None].expand(-1, heads, -1, dim))


def _is_start_of(view: Tensor, buffer: Tensor) -> bool:
    return view.data_ptr() == buffer.data_ptr() and len(view) == len(buffer)


def _with_room(states: Tensor, total: int) -> Tensor:
    batch, heads, held, dim = states.shape
    buffer = states.new_empty(batch, heads, total + ROOM, dim)
    buffer[:, :, :held] = states
    return buffer
