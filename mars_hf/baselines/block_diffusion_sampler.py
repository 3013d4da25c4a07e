"""Sample from a block-diffusion model: block after block, each filled in the order of the model's confidence.

Shapes: N rows, B the block size, V vocabulary. Rows are padded on the left to whole blocks, so that all rows work on
the same block of columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache import MarsCache
from ..checks import check_count
from ..few_tokens import few_token_products
from ..forward_arguments import decoding_arguments
from ..masks import CLEAN, PADDING, Layout, stream_layout
from ..model_masks import masks_for_model
from ..outputs import MarsGenerateOutput
from .arguments import check_mask_token, check_prompts, end_tokens, finish
from .block_diffusion import sees


@torch.no_grad()
def block_diffusion_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    mask_token_id: int,
    block_size: int,
    max_new_tokens: int,
    threshold: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    prepack_weights: bool = True,
) -> MarsGenerateOutput:
    """Generate greedily with a model that `BlockDiffusionTrainer` has trained.

    A forward looks at the block that is being filled, in both directions, and at all blocks before. Every masked
    position whose likeliest token has at least the probability `threshold` takes it; if there is none, the surest one
    does. When the block is full, the next one begins; a row has ended when a full block holds an end token.

    Args:
        model: the model, in eval mode.
        input_ids: (N, P) prompts, padded on the left.
        attention_mask: (N, P), zero for padding.
        mask_token_id: id of [MASK]; never a token of the text.
        block_size: B, that of the training. Blocks are counted from each prompt's first token.
        max_new_tokens: the longest reply; a block that reaches beyond it is filled and cut.
        threshold: in (0, 1]; 1.0 fills one position of each row per forward.
        eos_token_id: ids that end a row; by default those of the generation config.
        pad_token_id: fills rows that end early; by default that of the generation config, else the first end token.
        prepack_weights: as `mars_prepack_weights` of `generate`: whether a CPU may keep copies in a faster layout.

    Returns:
        `sequences` (N, longest), right-padded; `num_forwards`; `accepted_lengths` (N, steps), positions each row
        filled in each forward, those behind its end included; `tokens_per_forward` (N,), tokens of the reply per
        forward that the row took part in.

    Raises:
        ValueError: for arguments out of range, right-padded prompts, and prompts with [MASK]s, which would be filled.
    """
    check_count("block_size", block_size, 1)
    prompt_mask = check_prompts(model, input_ids, attention_mask, max_new_tokens, block_size)
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold <= 1:
        raise ValueError(f"`threshold` must be in (0, 1], got {threshold!r}.")
    stops = end_tokens(model, eos_token_id, input_ids.device)
    check_mask_token(model, mask_token_id, input_ids[prompt_mask], stops)
    sampler = BlockSampler(model, input_ids.long(), prompt_mask, mask_token_id, block_size, max_new_tokens)
    filled: list[Tensor] = []
    with few_token_products(model, prepack_weights):
        while not sampler.done(stops):
            filled += sampler.fill_block(threshold)
    return finish(model, input_ids, sampler.replies(), torch.stack(filled, -1), stops, pad_token_id)


class BlockSampler:
    """The rows of a batch, aligned at block boundaries, and the cache of their full blocks.

    A full block enters the cache together with the first forward of the next one: no forward is spent on it alone.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        prompt_mask: Tensor,
        mask_token_id: int,
        block_size: int,
        max_new_tokens: int,
    ) -> None:
        self.model, self.mask_token_id, self.block_size = model, mask_token_id, block_size
        self.arguments = decoding_arguments(model, block_size)
        lengths = prompt_mask.sum(-1)
        self.whole = lengths // block_size * block_size  # tokens of each prompt that stand in full blocks
        self.begin = int(self.whole.max())  # the column where the block that is being filled starts
        blocks = int((lengths - self.whole).max()) + max_new_tokens + block_size - 1
        width = self.begin + blocks // block_size * block_size
        shift = self.begin - self.whole
        self.first = lengths + shift  # the column of each row's first new token
        position = torch.arange(width, device=input_ids.device) - shift[:, None]
        # Other rows may go on when a row's last block is full, and its model may have no positions behind that.
        last = (lengths + max_new_tokens + block_size - 1) // block_size * block_size - 1
        self.key_mask, self.position = position >= 0, position.clamp(min=0).minimum(last[:, None])
        in_prompt = self.key_mask & (position < lengths[:, None])
        self.tokens = torch.full_like(position, mask_token_id)
        self.tokens[in_prompt] = input_ids[prompt_mask]
        self.tokens[~self.key_mask] = 0 if mask_token_id else 1
        self.max_new_tokens, self.cached = max_new_tokens, 0
        self.ended = torch.zeros_like(lengths, dtype=torch.bool)
        self.cache = MarsCache()
        self.cache.start(len(lengths), input_ids.device)

    def done(self, stops: Tensor | None) -> bool:
        """Whether no row needs another block; notes which rows are full, or have an end token in their full blocks."""
        column = torch.arange(self.begin, device=self.tokens.device)
        self.ended = self.begin >= self.first + self.max_new_tokens
        if stops is not None:
            is_end = torch.isin(self.tokens[:, : self.begin], stops) & (column >= self.first[:, None])
            self.ended = self.ended | is_end.any(-1)
        return bool(self.ended.all())

    def fill_block(self, threshold: float) -> list[Tensor]:
        """Fill the current block of the rows that have not ended: positions (N,) that each forward filled."""
        end = self.begin + self.block_size
        block = self.tokens[:, self.begin : end]
        filled = []
        while (empty := (block == self.mask_token_id) & ~self.ended[:, None]).any():
            confidence, choice = self._predict(end)
            confidence = confidence.where(empty, -1.0)
            surest = confidence >= confidence.amax(-1, keepdim=True)
            surest = surest & (surest.cumsum(-1) == 1)
            take = empty & (surest | ((confidence >= threshold) & (threshold < 1)))
            block[take] = choice[take]
            filled.append(take.sum(-1).cpu())
        self.begin = end
        return filled

    def _predict(self, end: int) -> tuple[Tensor, Tensor]:
        """Probability and id of the likeliest token at each place of the current block: (N, B) each."""
        start = self.cached
        window_mask = masks_for_model(
            self.model.config, self.model.dtype, lambda window: self._mask(start, end, window)
        )
        columns = torch.arange(start, end, device=self.tokens.device).expand(len(self.tokens), -1)
        self.cache.plan_write(columns, end, first=start)
        logits = (
            self.model(
                input_ids=self.tokens[:, start:end],
                position_ids=self.position[:, start:end],
                attention_mask=window_mask,
                cache=self.cache,
                use_cache=True,
                **self.arguments,
            )
            .logits[:, -self.block_size :]
            .float()
        )
        # What stands before the current block is final now; the block itself is written anew by the next forward.
        self.cached = self.begin
        banned = logits.index_fill(-1, torch.tensor(self.mask_token_id, device=logits.device), float("-inf"))
        choice = banned.argmax(-1)
        return logits.softmax(-1).gather(-1, choice[..., None])[..., 0], choice

    def _mask(self, start: int, end: int, window: int | None) -> Tensor:
        """(N, 1, Q, K) bool for the columns from `start` to `end`, against all columns up to `end`."""
        position, known = self.position[:, :end], self.key_mask[:, :end]
        stream = torch.where(known, CLEAN, PADDING)
        layout = stream_layout(stream, position, self.block_size)
        queries = Layout(*(field[:, start:, None] for field in layout))
        keys = Layout(*(field[:, None, :] for field in layout))
        itself = torch.eye(end, dtype=torch.bool, device=stream.device)[start:]
        return (sees(queries, keys, window) | itself)[:, None]

    def replies(self) -> Tensor:
        """(N, max_new_tokens) what follows each prompt; [MASK]s where a row had ended."""
        columns = self.first[:, None] + torch.arange(self.max_new_tokens, device=self.tokens.device)
        return self.tokens.gather(1, columns)
