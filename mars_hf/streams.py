"""The two streams of a batch: from clean rows to rows with their masked stream behind them, on any device.

Shapes: N rows of a batch, L tokens of a clean row, T tokens of a two-stream row, B the MARS block size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .masks import CLEAN, MASKED, PADDING, Layout

# Odd multipliers of splitmix64 (Steele, Lea and Flood 2014), as signed numbers; products wrap around.
MIX = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def two_streams(
    clean: dict[str, Tensor],
    phases: Tensor,
    block_size: int,
    mask_token_id: int,
    pad_token_id: int,
    pad_to_multiple_of: int | None = None,
) -> dict[str, Tensor]:
    """Lay the masked stream of each row right behind its clean one.

    Args:
        clean: (N, L) each: `input_ids`, `labels`, `position_ids` and `document_ids` of rows that are padded on the
            right, and `is_real`, False where they are. What stands in the padding is not read.
        phases: (N, L), where in its block the first token of each token's document stands, 0..B-1.

    Returns:
        `input_ids`, `position_ids`, `target_ids`, `stream_ids`, `document_ids` and `grid_ids`, all (N, T), and
        `block_sizes` (N,), as `DataCollatorForMars` describes them.
    """
    ids, position, is_real = clean["input_ids"], clean["position_ids"], clean["is_real"]
    rows, width = ids.shape
    column = torch.arange(width, device=ids.device).expand(rows, -1)
    is_target = is_real & (clean["labels"] != -100) & (position > 0)  # nothing predicts a document's first token
    target = clean["labels"].masked_fill(~is_target, -100).roll(-1, 1)  # of the position that predicts it
    place = (position + phases) % block_size
    block = ((place == 0) | (position == 0)).cumsum(1) - 1
    # The last position of each block that predicts a target, -1 for blocks that have none.
    scored = torch.where(target != -100, column, -1)
    last_scored = torch.full_like(scored, -1).scatter_reduce(1, block.clamp(min=0), scored, "amax")
    needed = is_real & (column <= last_scored.gather(1, block.clamp(min=0)))

    lengths = is_real.sum(1, keepdim=True)
    multiple = pad_to_multiple_of or 1
    longest = int((lengths[:, 0] + needed.sum(1)).max())
    total = max(width, -(-longest // multiple) * multiple)
    # Where each masked-stream token goes; those that are not needed go to a column that is cut off.
    goes_to = torch.where(needed, lengths + needed.cumsum(1) - 1, total)

    def lay_out(first: Tensor, second: Tensor, padding: int) -> Tensor:
        row = first.new_full((rows, total + 1), padding)
        row[:, :width] = first.masked_fill(~is_real, padding)
        return row.scatter_(1, goes_to, second)[:, :total].contiguous()

    grid, document = block * block_size + place, clean["document_ids"]
    return {
        "input_ids": lay_out(ids, ids.masked_fill(is_target, mask_token_id), pad_token_id),
        "position_ids": lay_out(position, position, 0),
        "target_ids": lay_out(target, target, -100),
        "stream_ids": lay_out(torch.full_like(ids, CLEAN), torch.full_like(ids, MASKED), PADDING),
        "document_ids": lay_out(document, document, 0),
        "grid_ids": lay_out(grid, grid, 0),
        "block_sizes": torch.full_like(lengths[:, 0], block_size),
    }


def clean_rows(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The clean rows of a two-stream batch, as `two_streams` takes them; `labels` tell their width."""
    width = batch["labels"].shape[1]
    clean = {name: batch[name][:, :width] for name in ("input_ids", "labels", "position_ids", "document_ids")}
    return clean | {"is_real": batch["stream_ids"][:, :width] == CLEAN}


def random_phases(clean: dict[str, Tensor], block_size: int, seed: int, step: int) -> Tensor:
    """Draw a phase for each document from its tokens, the seed and the step, and from nothing else: int64 (N, L).

    So it does not matter which process or worker meets the document, in which batch, and what was drawn before.
    """
    place = clean["document_ids"].masked_fill(~clean["is_real"], 0)
    tokens = _mix(clean["input_ids"] * MIX[0] + clean["position_ids"] + 1).masked_fill(~clean["is_real"], 0)
    documents = torch.zeros_like(tokens).scatter_add(1, place, tokens)
    key = (seed * 2**32 + step + 2**63) % 2**64 - 2**63
    drawn = _mix(documents + _mix(torch.tensor(key, device=tokens.device)))
    return ((drawn >> 32) % block_size).gather(1, place)


def batch_layout(batch: dict[str, Tensor]) -> Layout:
    """The layout of a batch; all fields (N, T)."""
    block = batch["grid_ids"] // batch["block_sizes"][:, None]
    return Layout(batch["stream_ids"], batch["position_ids"], block, batch["document_ids"])


def predicts_own_block(batch: dict[str, Tensor]) -> Tensor:
    """Whether the next token of each position is of its own block: bool (N, T)."""
    return (batch["grid_ids"] + 1) % batch["block_sizes"][:, None] != 0


def _mix(numbers: Tensor) -> Tensor:
    """Scatter int64 numbers over the whole range, each to its own."""
    for multiplier in MIX:
        numbers = (numbers ^ (numbers >> 30)) * multiplier
    return numbers ^ (numbers >> 31)
