"""From tokenized examples to a batch of two-stream sequences.

Shapes: N rows of a batch, L tokens of an example, T tokens of a two-stream sequence (clean and masked), B the MARS
block size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trl import pack_dataset
from trl.data_utils import DatasetType
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import pad

from .masks import CLEAN, MASKED, PADDING, Layout, dense_mask

BLOCK_OFFSETS = ("fixed", "random")


class Document(NamedTuple):
    """A document's tokens, its labels (-100 where a token is no target), and the phase of its block grid, 0..B-1."""

    ids: Tensor
    labels: Tensor
    phase: int


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
      `document_ids` (N, T), its document, and `grid_ids` (N, T), its position counted from the start of the block
      grid; the grids of a row's documents follow each other, so that no two share a block.

    Args:
        pad_token_id: id that fills rows.
        padding_free: put all examples into one row, as its documents.
        pad_to_multiple_of: pad T, and the width of `labels`, to a multiple of it.
        mask_token_id: id of the mask token.
        block_size: B.
        block_offset: `"fixed"`, or `"random"` to start each document's blocks at a random phase.
        dense_mask: whether to return the attention mask itself.

    Raises:
        ValueError: for a block size below 2 and an unknown offset.
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

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        rows = [self._documents(example) for example in examples]
        if self.padding_free:
            rows = [list(chain.from_iterable(rows))]
        streams = [self._row(documents) for documents in rows]
        padding = {
            "input_ids": self.pad_token_id,
            "position_ids": 0,
            "target_ids": -100,
            "stream_ids": PADDING,
            "document_ids": 0,
            "grid_ids": 0,
        }
        batch = {key: self._pad([row[key] for row in streams], value) for key, value in padding.items()}
        batch["labels"] = self._pad([torch.cat([document.labels for document in row]) for row in rows], -100)
        if self.dense_mask:
            batch["attention_mask"] = dense_mask(batch_layout(batch, self.block_size))
            del batch["stream_ids"], batch["document_ids"], batch["grid_ids"]
        return batch

    def _documents(self, example: dict[str, Any]) -> list[Document]:
        """The documents of an example; several if it is packed."""
        ids = _as_ids(example["input_ids"])
        labels = _as_ids(example.get("labels", example["input_ids"])).clone()
        lengths = list(example.get("seq_lengths") or [len(ids)])
        if self.padding_free or "seq_lengths" in example:
            # As in `SFTTrainer`: nothing predicts them, and `Trainer` leaves out only the first of a row.
            labels[[sum(lengths[:i]) for i in range(len(lengths)) if lengths[i]]] = -100
        phases = [0] * len(lengths)
        if self.block_offset == "random":
            # The global generator is seeded by the trainer, and differently in each worker.
            phases = torch.randint(self.block_size, (len(lengths),)).tolist()
        parts = zip(ids.split(lengths), labels.split(lengths), phases, strict=True)
        return [Document(*part) for part in parts]

    def _row(self, documents: list[Document]) -> dict[str, Tensor]:
        """One row, unpadded: the clean streams of its documents, then their masked streams."""
        clean: list[dict[str, Tensor]] = []
        masked: list[dict[str, Tensor]] = []
        grid_start = 0
        for number, document in enumerate(documents):
            for stream, parts in zip(self._two_streams(document), (clean, masked), strict=True):
                stream["document_ids"] = torch.full_like(stream["input_ids"], number)
                stream["grid_ids"] = stream["position_ids"] + document.phase + grid_start
                parts.append(stream)
            num_blocks = (len(document.ids) + document.phase) // self.block_size + 1
            grid_start += num_blocks * self.block_size
        return {key: torch.cat([part[key] for part in clean + masked]) for key in clean[0]}

    def _two_streams(self, document: Document) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The clean and the masked stream of a document."""
        ids, labels, phase = document
        position = torch.arange(len(ids))
        is_target = labels != -100
        is_target[:1] = False  # nothing predicts the first token
        target = torch.where(is_target, labels, -100).roll(-1)  # of the position that predicts it
        block = (position + phase) // self.block_size
        # The last position of each block that predicts a target, -1 for blocks that have none.
        scored = torch.where(target != -100, position, -1)
        last_scored = torch.full((len(ids) + 1,), -1).scatter_reduce(0, block, scored, "amax")
        needed = position <= last_scored[block]

        def stream(kind: int, tokens: Tensor, kept: Tensor) -> dict[str, Tensor]:
            return {
                "input_ids": tokens[kept],
                "position_ids": position[kept],
                "target_ids": target[kept],
                "stream_ids": torch.full_like(position[kept], kind),
            }

        everything = torch.ones_like(needed)
        masked_ids = ids.masked_fill(is_target, self.mask_token_id)
        return stream(CLEAN, ids, everything), stream(MASKED, masked_ids, needed)

    def _pad(self, tensors: list[Tensor], value: int) -> Tensor:
        return pad(tensors, padding_value=value, padding_side="right", pad_to_multiple_of=self.pad_to_multiple_of)


def wrap_documents(dataset: DatasetType, length: int) -> DatasetType:
    """Cut the concatenated examples of a dataset into rows of one length, as packing of TRL's does by "wrapped".

    The rows have `seq_lengths` as well, so that the documents of a row can be told apart: a document that is cut goes
    on in the next row as another.

    Args:
        dataset: in memory or streaming, with columns that hold one list per token sequence, `input_ids` among them.
        length: the length of the rows; the last of a batch of examples may be shorter.
    """
    dataset = dataset.map(lambda example: {"positions": list(range(len(example["input_ids"])))})
    dataset = pack_dataset(dataset, length, "wrapped")

    def count(example: dict[str, Any]) -> dict[str, Any]:
        starts = [i for i, position in enumerate(example["positions"]) if i == 0 or position == 0]
        return {"seq_lengths": [end - start for start, end in pairwise([*starts, len(example["positions"])])]}

    return dataset.map(count, remove_columns=["positions"])


def batch_layout(batch: dict[str, Tensor], block_size: int) -> Layout:
    """The layout of a batch made with `dense_mask=False`; all fields (N, T)."""
    block = batch["grid_ids"] // block_size
    return Layout(batch["stream_ids"], batch["position_ids"], block, batch["document_ids"])


def predicts_own_block(batch: dict[str, Tensor], block_size: int) -> Tensor:
    """Whether the next token of each position is of its own block: bool (N, T); see `batch_layout`."""
    return batch["grid_ids"] % block_size != block_size - 1


def _as_ids(ids: Any) -> Tensor:
    return torch.as_tensor(ids, dtype=torch.long)
