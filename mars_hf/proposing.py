"""The forward pass of a MARS step: the tokens that the cache lacks and the [MASK]s, against what the cache holds.

Shapes: N rows still decoding, P prompt columns, B the window (MARS block size), C the block of the block cache, W
tokens of a forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import move_to_device

from .cache import MarsCache
from .forward_arguments import decoding_arguments
from .masks import decode_mask
from .model_masks import MaskForm
from .state import DecodingState


class Proposer:
    """Proposes without any cache, from the whole sequences: slow, and as plain as the definition.

    Attributes:
        window: B, which may change from step to step.
        num_forwards: forward passes so far.
        further_forwards: forward passes of each row that were no step of its own, (R,) int64, or (1,) for all alike.
        width: W of the last forward, where that one is a step's like any other, else None.
    """

    def __init__(self, model: PreTrainedModel, window: int) -> None:
        self.model, self.window = model, window
        self.num_forwards = 0
        self.further_forwards = torch.zeros(1, dtype=torch.long, device="cpu")
        self.width: int | None = None
        self.arguments = decoding_arguments(model, 0)

    def waiting(self, state: DecodingState) -> list[bool]:
        """Which of the N rows sit this step out."""
        return [False] * len(state.host_rows)

    @property
    def reach(self) -> int:
        """Most tokens that a row may accept in this step."""
        return self.window

    def place_behind(self, row: int, place: int, token: int) -> int | None:
        """Where the next candidate of one of the N rows stands among its logits, if this one is `token`, or None."""
        return place + 1

    def confirmed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Which candidates are one text, where the candidates (N, T) form a tree: see `TreeBatch.confirmed`."""
        raise NotImplementedError

    def propose(self, state: DecodingState) -> Tensor:
        """(N, B, V) raw logits in float32, behind each row's last token and behind each [MASK]."""
        visible = max(state.host_length) + self.window - 1
        logits = self.forward(
            input_ids=state.tokens[state.rows, :visible],
            position_ids=state.positions[state.rows, :visible],
            attention_mask=state.key_mask[state.rows, :visible].long(),
            use_cache=False,
        )
        wanted = state.length[:, None] - 1 + torch.arange(self.window, device=state.device)
        logits = logits.gather(1, wanted.to(logits.device)[..., None].expand(-1, -1, logits.shape[-1]))
        return logits.to(device=state.device, dtype=torch.float32)

    def forward(self, keep: int = 0, **inputs: Any) -> Tensor:
        """One forward pass of the model; its logits, on the model's device: the last `keep`, 0 for all."""
        self.num_forwards += 1
        if "logits_to_keep" in self.arguments:
            self.arguments["logits_to_keep"] = keep
        return self.model(**{**self.on_device(inputs), **self.arguments}).logits

    def on_device(self, inputs: Any) -> Any:
        """Inputs where the model takes them: as in stock `generate`, prompts may be on the host."""
        device = self.model.device
        return inputs if device.type == "meta" else move_to_device(inputs, device)

    def settle(self, state: DecodingState, accepted: Tensor) -> None:
        """Take note of what each of the N rows accepted (N,), before rows that have ended leave."""

    def keep_rows(self, rows: list[int]) -> list[int]:
        """Keep these of the N rows; returns the order that they are in from now on."""
        return rows


class CursorProposer(Proposer):
    """Proposes with the cursor cache: a row feeds what it has accepted since its last forward, and nothing twice."""

    def __init__(self, model: PreTrainedModel, window: int, cache: MarsCache, model_kwargs: dict[str, Any]) -> None:
        super().__init__(model, window)
        self.cache, self.model_kwargs = cache, model_kwargs
        self.mask_form = MaskForm(model.config, model.dtype)

    def propose(self, state: DecodingState) -> Tensor:
        if self.num_forwards == 0:
            logits = self.read_prompt(state, self.window - 1)
        else:
            cursor = self.cache.cursor[: len(state.host_rows)]
            logits = self.feed(state, cursor, self.cache.host_cursor, self.window - 1)
        self.cache.commit(state.length, state.host_length)
        return self.last(logits, state)

    def last(self, logits: Tensor, state: DecodingState) -> Tensor:
        """The logits of the candidates, where the rows are: the last B of a forward, in float32."""
        return logits[:, -self.window :].to(device=state.device, dtype=torch.float32)

    def keep_rows(self, rows: list[int]) -> list[int]:
        return self.cache.keep_rows(rows)

    def read_prompt(self, state: DecodingState, masks: int) -> Tensor:
        """The first forward: the prompt and so many [MASK]s, prepared the way the model prepares its prompts."""
        self.cache.start(state.batch, state.device)
        cached = min(self.cache.host_cursor)
        if cached:
            start = torch.full_like(state.length, cached)
            return self.feed(state, start, [cached] * state.batch, masks)
        self.cache.hidden = state.hidden
        visible = state.prompt + masks
        columns = torch.arange(visible, device=state.device).expand(state.batch, -1)
        self.cache.plan_write(columns, visible, first=0)
        kwargs = dict(self.model_kwargs, cache=self.cache)
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = state.key_mask[:, :visible].long()
        if (embeds := kwargs.get("inputs_embeds")) is not None:
            embeds = self.on_device(embeds)
            mask_ids = state.tokens[:, state.prompt : visible].to(embeds.device)
            mask_embeds = self.model.get_input_embeddings()(mask_ids)
            kwargs["inputs_embeds"] = torch.cat([embeds, mask_embeds.to(embeds)], dim=1)
        kwargs["position_ids"] = state.positions[:, :visible]
        inputs = self.model.prepare_inputs_for_generation(state.tokens[:, :visible], is_first_iteration=True, **kwargs)
        return self.forward(masks + 1, **inputs)

    def feed(self, state: DecodingState, start: Tensor, host_start: list[int], masks: int) -> Tensor:
        """Feed each row's columns from `start` (N,) on and so many [MASK]s, right-aligned; masks + 1 logits.

        Rows with fewer tokens begin with filler: copies of their first token, whose logits are not read and whose keys
        go to a slot that nobody sees, so that every slot is written once.
        """
        fed = [length - begin for length, begin in zip(state.host_length, host_start, strict=False)]
        width, visible = max(fed) + masks, max(state.host_length) + masks
        # The first forward reads a prompt, if only the end of one.
        self.width = width if self.num_forwards else None
        if min(fed) == max(fed) and len(set(state.host_length)) == 1:
            columns = torch.arange(host_start[0], visible, device=state.device).expand(len(fed), -1)
            self.cache.plan_write(columns, visible, first=host_start[0])
        else:
            offset = torch.arange(width, device=state.device) - width + masks + (state.length - start)[:, None]
            columns = start[:, None] + offset.clamp(min=0)
            self.cache.plan_write(columns.where(offset >= 0, visible), visible)
        key_mask = state.key_mask[state.rows, :visible]
        ids = state.tokens[state.rows[:, None], columns]
        return self.forward_columns(state, ids, columns, masks + 1, partial(decode_mask, columns, key_mask))

    def forward_columns(
        self, state: DecodingState, ids: Tensor, columns: Tensor, keep: int, make_mask: Callable[[int | None], Tensor]
    ) -> Tensor:
        """Feed these tokens (N, W), which stand at these columns (N, W), against the cache; the last `keep` logits."""
        return self.forward(
            keep,
            input_ids=ids,
            position_ids=state.positions[state.rows[:, None], columns],
            attention_mask=self.mask_form.masks(make_mask),
            cache=self.cache,
            use_cache=True,
        )


class BlockProposer(CursorProposer):
    """Proposes with the block cache of the paper: the cache is frozen at block boundaries of C tokens.

    The first forward reads the prompt and the first [MASK]s. Within a block a step feeds the block's accepted tokens
    and the [MASK]s; a row that has filled the block waits; when all rows have, one forward writes the block into the
    cache. What a row accepts beyond the boundary belongs to its next block.
    """

    def __init__(
        self, model: PreTrainedModel, window: int, cache: MarsCache, model_kwargs: dict[str, Any], cache_block: int
    ) -> None:
        super().__init__(model, window, cache, model_kwargs)
        self.cache_block, self.frozen = cache_block, 0

    def waiting(self, state: DecodingState) -> list[bool]:
        return [length - self.frozen >= self.cache_block for length in state.host_length]

    def propose(self, state: DecodingState) -> Tensor:
        if self.num_forwards == 0:
            self.frozen = state.prompt
            self.further_forwards = torch.zeros(state.batch, dtype=torch.long, device="cpu")
            return super().propose(state)
        if all(self.waiting(state)):
            self._close_block(state)
        # Where a row has nothing in the block yet, its last token is fed again: its logit is the first candidate's.
        start = (state.length - 1).clamp(max=self.frozen)
        host_start = [min(self.frozen, length - 1) for length in state.host_length]
        logits = self.feed(state, start, host_start, self.window - 1)
        self.cache.commit(start, host_start)
        return self.last(logits, state)

    def _close_block(self, state: DecodingState) -> None:
        """Write the block that every row has filled into the cache."""
        end = self.frozen + self.cache_block
        columns = torch.arange(self.frozen, end, device=state.device).expand(len(state.host_rows), -1)
        self.cache.plan_write(columns, end, first=self.frozen)
        ids = state.tokens[state.rows[:, None], columns]
        self.forward_columns(state, ids, columns, 1, partial(decode_mask, columns, state.key_mask[state.rows, :end]))
        self.further_forwards[state.host_rows] += 1
        self.frozen = end
