"""The clean streams of a batch as `SFTTrainer` would give them to the model: what `compute_metrics` sees.

Shapes: N rows of a batch, L tokens of the longest clean stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .masks import CLEAN, PADDING, Layout
from .model_masks import AttentionMask
from .streams import clean_rows


def clean_batch(
    batch: dict[str, Tensor], pad_token_id: int, make_mask: Callable[[Layout], AttentionMask]
) -> dict[str, Any]:
    """Take the clean streams out of a two-stream batch.

    Args:
        batch: of `DataCollatorForMars`, with `dense_mask=False`.
        pad_token_id: fills the rows.
        make_mask: the mask of a layout of (N, L) fields, in the form that the model's attention reads.

    Returns:
        `input_ids` (N, L) and `attention_mask` (N, L), 1 for tokens; for rows of several documents the mask that keeps
        these apart, and `position_ids` (N, L).
    """
    clean = clean_rows(batch)
    is_real, positions, documents = clean["is_real"], clean["position_ids"], clean["document_ids"]
    input_ids = clean["input_ids"].masked_fill(~is_real, pad_token_id)
    if not documents.masked_fill(~is_real, 0).any():
        return {"input_ids": input_ids, "attention_mask": is_real.long()}
    stream = torch.full_like(positions, PADDING).masked_fill(is_real, CLEAN)
    layout = Layout(stream, positions, torch.zeros_like(positions), documents)
    return {"input_ids": input_ids, "attention_mask": make_mask(layout), "position_ids": positions}
