"""The forward pass of a MARS step: what no forward has seen yet and the [MASK]s, against what the cache holds.

Shapes: N rows still decoding, B the window (MARS block size), W tokens of a forward, K columns that a forward sees,
V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .cache import MarsCache
from .masks import decode_mask, masks_for_model
from .state import DecodingState


class CursorProposer:
    """Proposes with the cursor cache: each row feeds its own pending tokens, and nothing twice.

    Attributes:
        num_forwards: forward passes so far.
    """

    def __init__(self, model: PreTrainedModel, window: int, cache: MarsCache, model_kwargs: dict[str, Any]) -> None:
        self.model, self.window, self.cache, self.model_kwargs = model, window, cache, model_kwargs
        self.num_forwards = 0

    def propose(self, state: DecodingState) -> Tensor:
        """(N, B, V) raw logits in float32, behind each row's last token and behind each [MASK]."""
        visible = max(state.host_length) + self.window - 1
        forward = self._pending if self.num_forwards else self._prompt
        logits = forward(state, visible)
        self.num_forwards += 1
        self.cache.commit(state.pending)
        return logits[:, -self.window :].to(device=state.device, dtype=torch.float32)

    def keep_rows(self, rows: list[int]) -> list[int]:
        """Keep these of the N rows; returns the order that they are in from now on."""
        return self.cache.keep_rows(rows)

    def _prompt(self, state: DecodingState, visible: int) -> Tensor:
        """The prompt and the first [MASK]s, prepared the way the model prepares its prompts."""
        columns = torch.arange(visible, device=state.device).expand(state.batch, -1)
        self.cache.plan_write(columns, visible, first=0)
        kwargs = dict(self.model_kwargs, cache=self.cache, logits_to_keep=self.window)
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = state.key_mask[:, :visible].long()
        kwargs["position_ids"] = state.positions[:, :visible]
        inputs = self.model.prepare_inputs_for_generation(state.tokens[:, :visible], is_first_iteration=True, **kwargs)
        return self.model(**inputs, return_dict=True).logits

    def _pending(self, state: DecodingState, visible: int) -> Tensor:
        """The pending tokens and the [MASK]s, right-aligned, so that the last B logits are the wanted ones.

        Rows with fewer tokens begin with filler: copies of their first pending token, whose logits are not read and
        whose keys go to a slot that nobody sees, so that every slot is written once.
        """
        longest = max(state.host_pending)
        width = longest + self.window - 1
        offset = torch.arange(width, device=state.device) - longest + state.pending[:, None]
        columns = self.cache.cursor[:, None] + offset.clamp(min=0)
        slots = columns.where(offset >= 0, visible)
        aligned = len(set(state.host_length)) == 1 and len(set(state.host_pending)) == 1
        self.cache.plan_write(slots, visible, first=state.host_length[0] - longest if aligned else None)
        key_mask = state.key_mask[state.rows, :visible]
        rows = state.rows[:, None]
        return self.model(
            input_ids=state.tokens[rows, columns],
            position_ids=state.positions[rows, columns],
            attention_mask=masks_for_model(
                self.model.config, self.model.dtype, lambda sliding: decode_mask(columns, key_mask, sliding)
            ),
            cache=self.cache,
            use_cache=True,
            logits_to_keep=self.window,
            return_dict=True,
        ).logits


class RecomputeProposer:
    """Proposes without any cache, from the whole sequences: slow, and as plain as the definition.

    Attributes:
        num_forwards: forward passes so far.
    """

    def __init__(self, model: PreTrainedModel, window: int) -> None:
        self.model, self.window = model, window
        self.num_forwards = 0

    def propose(self, state: DecodingState) -> Tensor:
        """(N, B, V) raw logits in float32, behind each row's last token and behind each [MASK]."""
        visible = max(state.host_length) + self.window - 1
        logits = self.model(
            input_ids=state.tokens[state.rows, :visible],
            position_ids=state.positions[state.rows, :visible],
            attention_mask=state.key_mask[state.rows, :visible].long(),
            use_cache=False,
            return_dict=True,
        ).logits
        self.num_forwards += 1
        wanted = state.length[:, None] - 1 + torch.arange(self.window, device=state.device)
        logits = logits.gather(1, wanted.to(logits.device)[..., None].expand(-1, -1, logits.shape[-1]))
        return logits.to(device=state.device, dtype=torch.float32)

    def keep_rows(self, rows: list[int]) -> list[int]:
        """Nothing to drop: rows are looked up afresh each step."""
        return rows
