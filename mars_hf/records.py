"""Scores and logits of a generation, one entry per new token, though rows come to their tokens at different steps.

Shapes: R rows of the batch, N of them still decoding, B the window (MARS block size), V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .state import DecodingState


class TokenRecord:
    """One vector (V,) per row and new token, kept in a buffer that grows as tokens come."""

    def __init__(self, state: DecodingState) -> None:
        self.batch, self.limit = state.batch, state.tokens.shape[1] - state.prompt
        self.values: Tensor | None = None

    def write(self, rows: Tensor, first: Tensor, values: Tensor) -> None:
        """Write values (N, B, V) of `rows` (N,) at the tokens from `first` (N,) on."""
        window = values.shape[1]
        if self.values is None:
            self.values = values.new_zeros(self.batch, 0, values.shape[2])
        tokens = first[:, None] + torch.arange(window, device=first.device)
        missing = int(tokens.max()) + 1 - self.values.shape[1]
        if missing > 0:
            extra = min(max(missing, 64), self.limit - self.values.shape[1])
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, extra))
        self.values[rows[:, None], tokens] = values

    def entries(self, count: int, lengths: Tensor | None = None) -> tuple[Tensor, ...]:
        """The first `count` tokens' values, (R, V) each, as `generate` returns them.

        With `lengths` (R,) they are zero behind a row's end; without, rejected candidates may stand there.
        """
        assert self.values is not None
        values = self.values[:, :count]
        if lengths is not None:
            is_token = torch.arange(count, device=values.device) < lengths.to(values.device)[:, None]
            values = values.where(is_token[..., None], 0.0)
        return values.unbind(1)
