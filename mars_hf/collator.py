"""From tokenized examples to a batch of two-stream sequences.

Shapes: N rows of a batch, L tokens of an example, T tokens of a two-stream sequence (clean and masked), B the MARS
block size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import pad

from .masks import CLEAN, MASKED, PADDING, Layout, dense_mask

BLOCK_OFFSETS = ("fixed", "random")


@dataclass
class DataCollatorForMars(DataCollatorForLanguageModeling):
    """Collator for MARS training: each row is an example's clean stream with its masked stream right behind it.

    The masked stream holds only what the loss needs: of each block that scores a target, the tokens up to the last
    position that does. Its supervised targets are replaced by the mask token. Rows are padded on the right, to the
    longest.

    An example needs `input_ids`, and may have `labels`, -100 where a token is no target; without them every token is
    one. Keys of the batch:
    - `input_ids` (N, T), `position_ids` (N, T): clean stream, then masked stream, with the same positions.
    - `target_ids` (N, T): the token each position predicts, -100 where none. Pass it to the model as `shift_labels`.
      Not named so here, because `Trainer` would count the targets of both streams.
    - `labels` (N, longest L): the examples' labels.
    - with `dense_mask=True`, `attention_mask` (N, 1, T, T): True where a token may attend, as `sdpa` reads it.
    - with `dense_mask=False`, what `batch_layout` reads: `stream_ids` (N, T), the stream of each token, and `grid_ids`
      (N, T), its position counted from the start of the block grid.

    Args:
        pad_token_id: id that fills rows.
        pad_to_multiple_of: pad T, and the width of `labels`, to a multiple of it.
        mask_token_id: id of the mask token.
        block_size: B.
        block_offset: `"fixed"`, or `"random"` to start each example's blocks at a random phase.
        dense_mask: whether to return the attention mask itself.

    Raises:
        ValueError: for a block size below 2, an unknown offset, and padding-free or packed examples.
    """

    mask_token_id: int = field(kw_only=True)
    block_size: int = field(kw_only=True)
    block_offset: str = field(default="fixed", kw_only=True)
    dense_mask: bool = field(default=True, kw_only=True)

    def __post_init__(self):
        if self.block_size < 2:
            raise ValueError(f"`block_size` must be at least 2, got {self.block_size}.")
        if self.block_offset not in BLOCK_OFFSETS:
            raise ValueError(f"`block_offset` must be one of {', '.join(BLOCK_OFFSETS)}, got {self.block_offset!r}.")
        if self.padding_free:
            raise ValueError("MARS does not train padding-free yet. Set `padding_free=False`.")

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        if "seq_lengths" in examples[0]:
            raise ValueError(
                "The examples are packed (they have `seq_lengths`), and MARS does not train on packed examples yet: "
                "the documents of an example would see each other. Use the examples before packing."
            )
        phases = torch.zeros(len(examples), dtype=torch.long)
        if self.block_offset == "random":
            # The global generator is seeded by the trainer, and differently in each worker.
            phases = torch.randint(self.block_size, phases.shape)
        labels = [_as_ids(example.get("labels", example["input_ids"])) for example in examples]
        rows = [
            self._two_streams(_as_ids(example["input_ids"]), row_labels, phase)
            for example, row_labels, phase in zip(examples, labels, phases, strict=True)
        ]
        padding = {
            "input_ids": self.pad_token_id,
            "position_ids": 0,
            "target_ids": -100,
            "stream_ids": PADDING,
            "grid_ids": 0,
        }
        batch = {key: self._pad([row[key] for row in rows], value) for key, value in padding.items()}
        batch["labels"] = self._pad(labels, -100)
        if self.dense_mask:
            batch["attention_mask"] = dense_mask(batch_layout(batch, self.block_size))
            del batch["stream_ids"], batch["grid_ids"]
        return batch

    def _two_streams(self, ids: Tensor, labels: Tensor, phase: Tensor) -> dict[str, Tensor]:
        """One row, unpadded; `ids` and `labels` are (L,), `phase` a scalar in 0..B-1."""
        position = torch.arange(len(ids))
        is_target = labels != -100
        is_target[:1] = False  # nothing predicts the first token
        target = torch.where(is_target, labels, -100).roll(-1)  # of the position that predicts it
        block = (position + phase) // self.block_size
        # The last position of each block that predicts a target, -1 for blocks that have none.
        scored = torch.where(target != -100, position, -1)
        last_scored = torch.full((len(ids) + 1,), -1).scatter_reduce(0, block, scored, "amax")
        masked = (position <= last_scored[block]).nonzero().squeeze(1)
        position_ids = torch.cat([position, position[masked]])
        return {
            "input_ids": torch.cat([ids, ids.masked_fill(is_target, self.mask_token_id)[masked]]),
            "position_ids": position_ids,
            "target_ids": torch.cat([target, target[masked]]),
            "stream_ids": torch.cat([torch.full_like(position, CLEAN), torch.full_like(masked, MASKED)]),
            "grid_ids": position_ids + phase,
        }

    def _pad(self, tensors: list[Tensor], value: int) -> Tensor:
        return pad(tensors, padding_value=value, padding_side="right", pad_to_multiple_of=self.pad_to_multiple_of)


def batch_layout(batch: dict[str, Tensor], block_size: int) -> Layout:
    """The layout of a batch made with `dense_mask=False`; all fields (N, T)."""
    return Layout(batch["stream_ids"], batch["position_ids"], batch["grid_ids"] // block_size)


def predicts_own_block(batch: dict[str, Tensor], block_size: int) -> Tensor:
    """Whether the next token of each position is of its own block: bool (N, T); see `batch_layout`."""
    return batch["grid_ids"] % block_size != block_size - 1


def _as_ids(ids: Any) -> Tensor:
    return torch.as_tensor(ids, dtype=torch.long)
