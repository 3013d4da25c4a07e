"""From tokenized examples to a batch of two-stream sequences.

Shapes: N rows of a batch, L tokens of an example, T tokens of a two-stream sequence (clean and masked), B the MARS
block size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import pad

from .checks import check_count
from .masks import dense_mask
from .streams import batch_layout, clean_rows, random_phases, two_streams

BLOCK_OFFSETS = ("fixed", "random")


@dataclass
class DataCollatorForMars(DataCollatorForLanguageModeling):
    """Collator for MARS training: each row is an example's clean stream with its masked stream right behind it.

    The masked stream holds only what the loss needs: of each block that scores a target, the tokens up to the last
    position that does. Its supervised targets are replaced by the mask token. Rows are padded on the right, to the
    longest.

    An example needs `input_ids`, and may have `labels`, -100 where a token is no target; without them every token is
    one. A packed example has the lengths of its documents in `seq_lengths`: positions and blocks start anew in each,
    and its first token is no target. Keys of the batch:
    - `input_ids` (N, T), `position_ids` (N, T): clean stream, then masked stream, with the same positions.
    - `target_ids` (N, T): the token each position predicts, -100 where none. Pass it to the model as `shift_labels`.
      Not named so here, because `Trainer` would count the targets of both streams.
    - `labels` (N, longest L): the examples' labels.
    - with `dense_mask=True`, `attention_mask` (N, 1, T, T): True where a token may attend, as `sdpa` reads it.
    - with `dense_mask=False`, what `batch_layout` reads: `stream_ids` (N, T), the stream of each token,
      `document_ids` (N, T), its document, `grid_ids` (N, T), its block times B plus its place in it, and
      `block_sizes` (N,), B. No two documents of a row share a block.

    Args:
        pad_token_id: id that fills rows.
        padding_free: put all examples into one row, as its documents.
        pad_to_multiple_of: pad T, and the width of `labels`, to a multiple of it.
        mask_token_id: id of the mask token.
        block_size: B.
        block_offset: `"fixed"`, or `"random"` to start each document's blocks at a random phase. It is drawn from the
            document's tokens and `seed`, so a document has the same in every batch; `regrid` draws anew.
        seed: of the phases.
        dense_mask: whether to return the attention mask itself.

    Raises:
        ValueError: for a block size below 2, another argument out of range, and an unknown offset; and of an example
            whose labels or documents are not as long as its tokens.
    """

    mask_token_id: int = field(kw_only=True)
    block_size: int = field(kw_only=True)
    block_offset: str = field(default="fixed", kw_only=True)
    seed: int = field(default=0, kw_only=True)
    dense_mask: bool = field(default=True, kw_only=True)

    def __post_init__(self):
        for name, least in (("block_size", 2), ("mask_token_id", 0), ("pad_to_multiple_of", 1)):
            value = getattr(self, name)
            if value is not None or name != "pad_to_multiple_of":
                check_count(name, value, least)
        if self.block_offset not in BLOCK_OFFSETS:
            raise ValueError(f"`block_offset` must be one of {', '.join(BLOCK_OFFSETS)}, got {self.block_offset!r}.")

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        parts = [self._parts(example) for example in examples]
        rows = [[part] for part in parts] if not self.padding_free else [parts]
        padding = {
            "input_ids": self.pad_token_id,
            "labels": -100,
            "position_ids": 0,
            "document_ids": 0,
            "is_real": False,
        }
        streams = [_clean_row(row) for row in rows]
        clean = {key: self._pad([stream[key] for stream in streams], value) for key, value in padding.items()}
        batch = self._two_streams(clean, self.block_size, step=0)
        if self.dense_mask:
            batch["attention_mask"] = dense_mask(batch_layout(batch))
            for key in ("stream_ids", "document_ids", "grid_ids", "block_sizes"):
                del batch[key]
        return batch

    def regrid(self, batch: dict[str, Tensor], step: int, block_size: int | None = None) -> dict[str, Tensor]:
        """Lay the masked stream of a batch out anew, with the phases of another step or in blocks of another size.

        Args:
            batch: made by this collator with `dense_mask=False`.
            step: number of the optimizer step, from which random phases are drawn as well; batches are collated as
                of step 0.
            block_size: B; None takes the collator's.
        """
        return self._two_streams(clean_rows(batch), block_size or self.block_size, step)

    def _two_streams(self, clean: dict[str, Tensor], block_size: int, step: int) -> dict[str, Tensor]:
        phases = torch.zeros_like(clean["position_ids"])
        if self.block_offset == "random":
            phases = random_phases(clean, block_size, self.seed, step)
        tokens = (self.mask_token_id, self.pad_token_id)
        batch = two_streams(clean, phases, block_size, *tokens, self.pad_to_multiple_of)
        return {**batch, "labels": clean["labels"]}

    def _parts(self, example: dict[str, Any]) -> tuple[Tensor, Tensor, list[int]]:
        """The tokens and labels of an example, and the lengths of its documents."""
        ids = _as_ids(example["input_ids"])
        labels = _as_ids(example.get("labels", example["input_ids"])).clone()
        given = example.get("seq_lengths")
        # Datasets that are formatted as tensors give the lengths as one.
        lengths = [len(ids)] if given is None or len(given) == 0 else [int(length) for length in given]
        for name, length in (("labels", len(labels)), ("seq_lengths", sum(lengths))):
            if length != len(ids):
                raise ValueError(
                    f"An example has {len(ids)} `input_ids`, and its `{name}` are of {length}. Each token needs one "
                    "label, and the lengths of the documents must add up to that of the row."
                )
        if self.padding_free or "seq_lengths" in example:
            # As in `SFTTrainer`: nothing predicts them, and `Trainer` leaves out only the first of a row.
            labels[[sum(lengths[:i]) for i in range(len(lengths)) if lengths[i]]] = -100
        return ids, labels, lengths

    def _pad(self, tensors: list[Tensor], value: int) -> Tensor:
        return pad(tensors, padding_value=value, padding_side="right", pad_to_multiple_of=self.pad_to_multiple_of)


def _clean_row(parts: list[tuple[Tensor, Tensor, list[int]]]) -> dict[str, Tensor]:
    """A row of one or several examples, unpadded, as `streams.two_streams` reads it."""
    ids, labels, lengths = zip(*parts, strict=True)
    documents = list(chain.from_iterable(lengths))
    input_ids = torch.cat(ids)
    return {
        "input_ids": input_ids,
        "labels": torch.cat(labels),
        "position_ids": torch.cat([torch.arange(length) for length in documents]),
        "document_ids": torch.arange(len(documents)).repeat_interleave(torch.tensor(documents)),
        "is_real": torch.ones_like(input_ids, dtype=torch.bool),
    }


def _as_ids(ids: Any) -> Tensor:
    return torch.as_tensor(ids, dtype=torch.long)
