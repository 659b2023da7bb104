"""Keys and values with room behind them: a token is written in place.

transformers' DynamicCache copies everything it holds at every token, which at long contexts is most of what a token
costs. Here it is copied once in `ROOM` tokens. The numbers are the same, bit for bit.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

ROOM = 256  # tokens


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


def roomy_cache(config: Any) -> DynamicCache:
    """For models of full attention in every layer, without gradients."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() for _ in cache.layers]
    return cache


def _is_start_of(view: Tensor, buffer: Tensor) -> bool:
    return view.data_ptr() == buffer.data_ptr() and len(view) == len(buffer)


def _with_room(states: Tensor, total: int) -> Tensor:
    batch, heads, held, dim = states.shape
    buffer = states.new_empty(batch, heads, total + ROOM, dim)
    buffer[:, :, :held] = states
    return buffer
