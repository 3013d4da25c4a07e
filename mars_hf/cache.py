"""The KV cache of MARS decoding: one pre-allocated buffer in which every row has its own cursor.

Shapes: R rows of the batch, N of them still decoding, H key-value heads, W tokens of a forward, S slots of the buffer,
D head size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

# The buffer grows by this many slots, or by an eighth of itself where that is more: a reply of unknown length pays for
# few copies, and for little memory that it does not need.
GROWTH = 16
NOWHERE = torch.empty(0, 0, dtype=torch.long, device="cpu")


class WritePlan:
    """Where the next forward writes, shared by all layers of a cache.

    Attributes:
        slots: (N, W) slot of every token of the forward.
        first: the first slot, where every row writes to the same W consecutive slots; else None.
        visible: number of slots that the forward reads.
        rows: N, the rows that the forward is for: the first N of the buffer.
    """

    def __init__(self) -> None:
        self.slots = NOWHERE
        self.first: int | None = None
        self.visible = 0
        self.rows = 0


class MarsCacheLayer(CacheLayerMixin):
    """Keys and values of one layer, buffers of (R, H, S, D) that `update` writes in place as the plan says."""

    is_sliding = False

    def __init__(self, plan: WritePlan) -> None:
        super().__init__()
        self.plan = plan

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self.keys, self.values = (
            # Zeros, not garbage: a slot that is never written is masked, but 0 x NaN would still be NaN.
            states.new_zeros((*states.shape[:2], self.plan.visible + 1, states.shape[3]))
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write (N, H, W, D) keys and values at the planned slots; return views of all slots that are visible."""
        if (key_states.shape[0], key_states.shape[2]) != (self.plan.rows, self.plan.slots.shape[1]):
            raise ValueError(
                "A `MarsCache` is written by MARS decoding only, which says where each row's tokens go. Pass it to "
                "`generate` with `mars_threshold` or `mars_lossless`, or give the model another cache."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        # One slot more than the forward reads takes what nobody may read.
        missing = self.plan.visible + 1 - self.keys.shape[2]
        if missing > 0:
            extra = max(missing, GROWTH, self.keys.shape[2] // 8)
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, extra))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, extra))
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        active = buffer if self.plan.rows == len(buffer) else buffer[: self.plan.rows]
        if self.plan.first is not None:
            active[:, :, self.plan.first : self.plan.first + states.shape[2]] = states
        else:
            slots = self.plan.slots.to(buffer.device)
            active.scatter_(2, slots[:, None, :, None].expand_as(states), states)
        return active[:, :, : self.plan.visible]

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy the slots `source` to the slots `target`, both (N, K), of the rows that the plan is for."""
        if self.is_initialized:
            for buffer in (self.keys, self.values):
                active = buffer[: self.plan.rows]
                shape = (-1, active.shape[1], -1, active.shape[3])
                states = active.gather(2, source.to(buffer.device)[:, None, :, None].expand(shape))
                active.scatter_(2, target.to(buffer.device)[:, None, :, None].expand(shape), states)

    def exchange_rows(self, left: Tensor, right: Tensor) -> None:
        """Exchange rows pairwise."""
        if self.is_initialized:
            for buffer in (self.keys, self.values):
                a, b = left.to(buffer.device), right.to(buffer.device)
                buffer[a], buffer[b] = buffer[b], buffer[a]

    def take_rows(self, rows: Tensor) -> None:
        """Have copies of these rows instead, in this order."""
        if self.is_initialized:
            self.keys, self.values = (
                buffer.index_select(0, rows.to(buffer.device)) for buffer in (self.keys, self.values)
            )

    def become_writable(self) -> None:
        """Make buffers of a closed `torch.inference_mode` ones that can be written."""
        if self.is_initialized:
            self.keys, self.values = writable(self.keys), writable(self.values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.plan.visible, 0

    def get_seq_length(self) -> int:
        return self.plan.visible if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1


def writable(tensor: Tensor) -> Tensor:
    """The tensor, or its copy if it was made under a `torch.inference_mode` that has ended: those are read-only."""
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


class MarsCache(Cache):
    """A cache whose rows advance independently.

    A forward writes its tokens at the slots of `plan_write`. What is not committed stays in the buffer until it is
    overwritten: rolling back is doing nothing. No row waits for another, and the cache is copied only where it grows.

    Rows that end go to the back of the buffer, behind the rows that are still decoding.

    Attributes:
        order: which row of the batch stands where in the buffer.
        cursor: (R,) int64, how many slots of each buffer row hold committed tokens.
        host_cursor: the same on the host.
        hidden: leading slots whose tokens were given as embeddings only.
        longest: most slots that the text of a row has held since the cache was last empty, cropped since or not.
    """

    def __init__(self) -> None:
        self.plan = WritePlan()
        self.order: list[int] = []
        self.host_cursor: list[int] = []
        self.cursor = torch.empty(0, dtype=torch.long, device="cpu")
        self.hidden = self.longest = 0
        super().__init__(layer_class_to_replicate=partial(MarsCacheLayer, self.plan))

    def start(self, batch: int, device: torch.device) -> None:
        """Begin, or go on, with all `batch` rows in their order."""
        if not self.order:
            self.order, self.host_cursor = list(range(batch)), [0] * batch
            self.cursor = torch.zeros(batch, dtype=torch.long, device=device)
        self._restore_order()
        if not any(self.host_cursor):
            # What a step left behind that was never committed is no text that a prompt could follow.
            self.layers.clear()
            self.plan.visible = self.longest = 0
        self.plan.rows = batch

    def plan_write(self, slots: Tensor, visible: int, first: int | None = None) -> None:
        """Tell the layers where the next forward writes.

        Args:
            slots: (N, W) int64; slot `visible` itself takes what nobody may read.
            visible: how many slots the forward reads.
            first: the first slot, when all rows write to the same consecutive ones.
        """
        self.plan.slots, self.plan.first, self.plan.visible = slots, first, visible

    def commit(self, cursor: Tensor, host_cursor: list[int]) -> None:
        """Set the cursors of the N rows: what stands before them stays, what stands behind is overwritten."""
        count = self.plan.rows
        self.cursor[:count] = cursor
        self.host_cursor[:count] = host_cursor
        # The plan is for one forward: whatever else writes from now on is not MARS decoding.
        self.plan.slots, self.plan.visible = NOWHERE, max(self.host_cursor)
        self.longest = max(self.longest, self.plan.visible)

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy what stands in the slots `source` to the slots `target`, both (N, K) int64, in every layer."""
        for layer in self.layers:
            layer.copy_slots(source, target)

    def keep_rows(self, rows: list[int]) -> list[int]:
        """Let all rows but these of the first N stand back, in place.

        Returns:
            The kept rows in their new order.
        """
        count = len(rows)
        free = sorted(set(range(count)) - set(rows))
        late = [row for row in rows if row >= count]
        order = list(range(count))
        for place, row in zip(free, late, strict=True):
            order[place] = row
        self._exchange(list(zip(free, late, strict=True)))
        self.plan.rows = count
        return order

    def reset(self) -> None:
        """Forget everything."""
        self.layers.clear()
        self.plan.slots, self.plan.visible, self.plan.rows = NOWHERE, 0, 0
        self.order, self.host_cursor, self.cursor, self.hidden, self.longest = [], [], self.cursor[:0], 0, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns.

        Args:
            tokens_to_remove: how many, as a negative number, counted from where the longest row ends.

        Raises:
            ValueError: for a positive number.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"`crop` takes the number of tokens to remove as a negative number, got {tokens_to_remove}."
            )
        end = max(self.host_cursor, default=0) + tokens_to_remove
        if end <= 0:
            self.reset()
            return
        self.host_cursor = [min(cursor, end) for cursor in self.host_cursor]
        self.cursor = self.cursor.clamp(max=end)
        self.plan.visible = end

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch, in this order; one may come several times. Or a mask, bool (R,)."""
        self._restore_order()
        if indices.dtype is torch.bool:
            indices = indices.nonzero()[:, 0]
        self.host_cursor = [self.host_cursor[row] for row in indices.tolist()]
        self.cursor = self.cursor[indices.to(self.cursor.device)]
        self.order = list(range(len(self.host_cursor)))
        for layer in self.layers:
            layer.take_rows(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The same as `batch_select_indices`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have every row so many times, one after the other."""
        self.batch_select_indices(torch.arange(len(self.order), device="cpu").repeat_interleave(repeats))

    def _restore_order(self) -> None:
        """Put the rows where they stand in the batch, in buffers that can be written."""
        self.cursor = writable(self.cursor)
        for layer in self.layers:
            layer.become_writable()
        while (places := [place for place, row in enumerate(self.order) if place != row]) != []:
            self._exchange([(places[0], self.order[places[0]])])

    def _exchange(self, pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        left, right = torch.tensor(pairs, device=self.cursor.device).unbind(-1)
        for layer in self.layers:
            layer.exchange_rows(left, right)
        self.cursor[left], self.cursor[right] = self.cursor[right], self.cursor[left]
        for a, b in pairs:
            self.order[a], self.order[b] = self.order[b], self.order[a]
            self.host_cursor[a], self.host_cursor[b] = self.host_cursor[b], self.host_cursor[a]
