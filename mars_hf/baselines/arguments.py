"""What the baselines' `generate` functions have in common: prompts checked, end tokens found, the output put together.

Shapes: N rows, P prompt columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..checks import check_count
from ..generation_refusals import refuse_positions
from ..outputs import MarsGenerateOutput


def check_prompts(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    max_new_tokens: int,
    block_size: int = 1,
) -> Tensor:
    """The prompts' mask, bool (N, P), True where there is a token.

    Args:
        block_size: a block that the text begins is computed to its end.

    Raises:
        ValueError: for prompts that are empty, padded on the right or with holes, and for a reply of no token or one
            that the model has no positions for, or none of one kind.
    """
    check_count("max_new_tokens", max_new_tokens, 1)
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise ValueError(f"`input_ids` must be (rows, tokens), neither empty, got {tuple(input_ids.shape)}.")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape:
        raise ValueError(f"`attention_mask` must be of the shape of `input_ids`, got {tuple(mask.shape)}.")
    mask = mask.bool()
    if not bool(mask[:, -1].all()) or bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ValueError("The prompts must be padded on the left only. Set `tokenizer.padding_side = 'left'`.")
    lengths = mask.sum(-1).tolist()
    missing = -(max(lengths) + max_new_tokens) % block_size
    refuse_positions(model.config.get_text_config(), lengths, max_new_tokens + missing)
    return mask


def end_tokens(
    model: PreTrainedModel, eos_token_id: int | Sequence[int] | None, device: torch.device
) -> Tensor | None:
    """The ids that end a row: those given, else those of the generation config; None if there are none."""
    ids: Any = model.generation_config.eos_token_id if eos_token_id is None else eos_token_id
    if ids is None:
        return None
    return torch.tensor([ids] if isinstance(ids, int) else list(ids), device=device)


def check_mask_token(model: PreTrainedModel, mask_token_id: int, prompts: Tensor, stops: Tensor | None) -> None:
    """Check the id of [MASK] against the tokens of the prompts, in any shape, and the ids that end a row.

    Raises:
        ValueError: for an id without an embedding row, that ends a row, or that a prompt holds.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    if isinstance(mask_token_id, bool) or not isinstance(mask_token_id, int) or not 0 <= mask_token_id < rows:
        raise ValueError(f"`mask_token_id` must be an id from 0 to {rows - 1}, got {mask_token_id!r}.")
    if stops is not None and mask_token_id in stops.tolist():
        raise ValueError(f"`mask_token_id` {mask_token_id} is an `eos_token_id` too, so no text would end with it.")
    if bool((prompts == mask_token_id).any()):
        raise ValueError(f"The prompts hold [MASK] ({mask_token_id}), and the sampler would fill it. Leave it out.")


def padding_token(model: PreTrainedModel, stops: Tensor | None, pad_token_id: int | None) -> int | None:
    """The id that fills rows which end early: the one given, else that of the generation config, else an end token."""
    if pad_token_id is None:
        pad_token_id = model.generation_config.pad_token_id
    return int(stops[0]) if pad_token_id is None and stops is not None else pad_token_id


def finish(
    model: PreTrainedModel,
    input_ids: Tensor,
    replies: Tensor,
    filled: Tensor,
    stops: Tensor | None,
    pad_token_id: int | None,
) -> MarsGenerateOutput:
    """Cut the replies (N, M) behind their first end token and count, from the positions (N, steps) filled a step."""
    length = torch.full((len(replies),), replies.shape[1], device=replies.device)
    if stops is not None:
        before_end = torch.isin(replies, stops).long().cumsum(-1) == 0
        length = (before_end.long().sum(-1) + 1).clamp(max=replies.shape[1])
    column = torch.arange(int(length.max()), device=replies.device)
    replies = replies[:, : len(column)]
    pad = padding_token(model, stops, pad_token_id)
    if pad is not None:
        replies = replies.where(column < length[:, None], pad)
    return MarsGenerateOutput(
        sequences=torch.cat([input_ids, replies], dim=-1),
        num_forwards=filled.shape[1],
        accepted_lengths=filled,
        tokens_per_forward=length.cpu() / (filled > 0).sum(-1),
    )
