"""The KV cache of MARS decoding: one pre-allocated buffer in which every row has its own cursor.

Shapes: N rows, H key-value heads, W tokens of a forward, S slots of the buffer, D head size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

# The buffer grows by this many slots, or by an eighth of itself where that is more: a reply of unknown length pays for
# few copies, and never for twice its memory.
GROWTH = 64


class WritePlan:
    """Where the next forward writes, shared by all layers of a cache.

    Attributes:
        slots: (N, W) slot of every token of the forward.
        first: the first slot, where every row writes to the same W consecutive slots; else None.
        visible: number of slots that the forward reads.
        needed: number of slots that the buffer must have.
    """

    def __init__(self) -> None:
        self.slots = torch.empty(0, 0, dtype=torch.long)
        self.first: int | None = None
        self.visible = 0
        self.needed = 0


class MarsCacheLayer(CacheLayerMixin):
    """Keys and values of one layer, buffers of (N, H, S, D) that `update` writes in place as the plan says."""

    is_sliding = False

    def __init__(self, plan: WritePlan) -> None:
        super().__init__()
        self.plan = plan

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._empty_like(key_states)
        self.values = self._empty_like(value_states)
        self.device = key_states.device
        self.is_initialized = True

    def _empty_like(self, states: Tensor) -> Tensor:
        batch, heads, _, head_dim = states.shape
        # Zeros, not garbage: a slot that is never written is masked, but 0 x NaN would still be NaN.
        return states.new_zeros((batch, heads, self.plan.needed, head_dim))

    def _grow(self) -> None:
        held = self.keys.shape[2]
        extra = max(self.plan.needed - held, GROWTH, held // 8)
        self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, extra))
        self.values = torch.nn.functional.pad(self.values, (0, 0, 0, extra))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write (N, H, W, D) keys and values at the planned slots; return views of all slots that are visible."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.shape[2] < self.plan.needed:
            self._grow()
        self._write(self.keys, key_states)
        self._write(self.values, value_states)
        return self.keys[:, :, : self.plan.visible], self.values[:, :, : self.plan.visible]

    def _write(self, buffer: Tensor, states: Tensor) -> None:
        if self.plan.first is not None:
            buffer[:, :, self.plan.first : self.plan.first + states.shape[2]] = states
        else:
            buffer.scatter_(2, self.plan.slots[:, None, :, None].expand_as(states), states)

    def keep_rows(self, moves: list[tuple[int, int]], rows: int) -> None:
        if not self.is_initialized:
            return
        for buffer in (self.keys, self.values):
            for source, target in moves:
                buffer[target] = buffer[source]
        self.keys, self.values = self.keys[:rows], self.values[:rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.plan.visible, 0

    def get_seq_length(self) -> int:
        return self.plan.visible if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1


class MarsCache(Cache):
    """A cache whose rows advance independently ("cursor" cache).

    A forward writes its tokens at the slots of `plan_write`. What is not committed stays in the buffer until it is
    overwritten: rolling back is doing nothing. No row waits for another and no copy of the cache is taken.

    Attributes:
        cursor: (N,) int64, the number of slots of each row that hold committed tokens; set by the first write.
    """

    def __init__(self) -> None:
        self.plan = WritePlan()
        self.cursor = torch.empty(0, dtype=torch.long)
        super().__init__(layer_class_to_replicate=partial(MarsCacheLayer, self.plan))

    def plan_write(self, slots: Tensor, visible: int, first: int | None = None) -> None:
        """Tell the layers where the next forward writes.

        Args:
            slots: (N, W) int64; slot `visible` itself takes what nobody must read.
            visible: how many slots the forward reads.
            first: the first slot, when all rows write to the same consecutive ones.
        """
        self.plan.slots, self.plan.first, self.plan.visible = slots, first, visible
        self.plan.needed = visible + 1
        if not self.cursor.numel():
            self.cursor = torch.zeros(slots.shape[0], dtype=torch.long, device=slots.device)

    def commit(self, count: Tensor) -> None:
        """Keep the first `count` (N,) tokens of each row's last write; the next one overwrites the rest."""
        self.cursor = self.cursor + count

    def keep_rows(self, rows: list[int]) -> list[int]:
        """Drop all rows but these, in place: kept rows move into the places of dropped ones.

        Returns:
            The kept rows in their new order.
        """
        count = len(rows)
        free = sorted(set(range(count)) - set(rows))
        late = [row for row in rows if row >= count]
        moves = list(zip(late, free, strict=True))
        for layer in self.layers:
            layer.keep_rows(moves, count)
        order = list(range(count))
        for source, target in moves:
            order[target] = source
        self.cursor = self.cursor[torch.tensor(order, dtype=torch.long, device=self.cursor.device)]
        return order
