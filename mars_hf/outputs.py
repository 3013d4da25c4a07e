"""What `generate` returns with MARS on, and the same of a stock `generate` that did the work.

Shapes: R rows of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput


@dataclass
class MarsGenerateOutput(GenerateDecoderOnlyOutput):
    """Output of `generate` with a `mars_threshold` and `return_dict_in_generate=True`.

    Attributes:
        num_forwards: forward passes of the model that the call took.
        accepted_lengths: (R, steps) int64, tokens that each row accepted in each step; 0 once the row has
            ended, and with the block cache while it waits for the others.
        tokens_per_forward: (R,) float32, new tokens of each row per forward pass that the row took part in: its steps,
            and with the block cache the forwards that write a block, but not those in which it waits for other rows.
    """

    num_forwards: int | None = None
    accepted_lengths: Tensor | None = None
    tokens_per_forward: Tensor | None = None


class EndRecorder(StoppingCriteriaList):
    """Stopping criteria that remember how long each row of a stock `generate` became."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        super().__init__(criteria)
        self.going: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        ended = super().__call__(input_ids, scores, **kwargs)
        before = self.going[-1] if self.going else torch.ones_like(ended)
        self.going.append(before & ~ended)
        return ended

    def as_mars_output(self, output: Any, prompt_forwards: int = 1) -> MarsGenerateOutput:
        """A stock output with the counts of plain autoregression: one token per row and forward pass.

        Args:
            prompt_forwards: forward passes that the prompt took, for one token.
        """
        steps = len(self.going)
        going = torch.stack([torch.ones_like(self.going[0]), *self.going[:-1]], dim=-1).long().cpu()
        tokens = going.sum(-1)
        return MarsGenerateOutput(
            **output,
            num_forwards=steps + prompt_forwards - 1,
            accepted_lengths=going,
            tokens_per_forward=tokens / (tokens + prompt_forwards - 1),
        )
