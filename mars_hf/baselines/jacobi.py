"""Jacobi decoding of an ordinary causal LM (Santilli et al. 2023, arXiv 2305.10427): greedy text in fewer forwards.

A forward reads the last certain token and W-1 guesses behind it. Its choices at these W positions are the next
guesses; as far as the guesses it read equal its choices, they are what greedy decoding gives, and one token more is.

Shapes: N rows, P prompt columns, W the window, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..acceptance import accepted_length, cut_after_first
from ..cache import MarsCache
from ..checks import check_count
from ..few_tokens import few_token_products
from ..forward_arguments import decoding_arguments
from ..masks import decode_mask
from ..model_masks import masks_for_model
from ..model_refusals import refuse_architecture
from ..outputs import MarsGenerateOutput
from .arguments import check_prompts, end_tokens, finish


@torch.no_grad()
def jacobi_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int,
    window: int = 16,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    prepack_weights: bool = True,
) -> MarsGenerateOutput:
    """Generate what `model.generate(do_sample=False)` does without logits processors, in at most as many forwards.

    Every row accepts by itself, as far as its own guesses are right. As with any two kernels, logits that are closer
    than the number format can tell apart may change places.

    Args:
        model: any decoder-only model, in eval mode; it needs no training of its own.
        input_ids: (N, P) prompts, padded on the left.
        attention_mask: (N, P), zero for padding.
        max_new_tokens: the longest reply.
        window: W, tokens of a forward. 1 is plain greedy decoding.
        eos_token_id: ids that end a row; by default those of the generation config.
        pad_token_id: fills rows that end early; by default that of the generation config, else the first end token.
        prepack_weights: as `mars_prepack_weights` of `generate`: whether a CPU may keep copies in a faster layout.

    Returns:
        `sequences` (N, longest), right-padded; `num_forwards`; `accepted_lengths` (N, steps); `tokens_per_forward`
        (N,), per forward that the row took part in.

    Raises:
        ValueError: for arguments out of range, right-padded prompts, and models that cannot take such steps.
    """
    refuse_architecture(model)
    prompt_mask = check_prompts(model, input_ids, attention_mask, max_new_tokens)
    check_count("window", window, 1)
    stops = end_tokens(model, eos_token_id, input_ids.device)
    rows = JacobiRows(model, input_ids.long(), prompt_mask, max_new_tokens, window)
    going = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
    steps: list[Tensor] = []
    with few_token_products(model, prepack_weights):
        while going.any():
            choices, was_right = rows.forward()
            accepted = accepted_length(torch.nn.functional.pad(was_right, (1, 0), value=True))
            accepted = accepted.minimum(rows.end - rows.length)
            accepted, ended = cut_after_first(choices, accepted, stops)
            accepted = accepted * going
            rows.advance(choices, accepted)
            steps.append(accepted.cpu())
            going = going & ~ended & (rows.length < rows.end)
    replies = rows.tokens[:, input_ids.shape[1] : rows.end]
    return finish(model, input_ids, replies, torch.stack(steps, dim=-1), stops, pad_token_id)


class JacobiRows:
    """The rows of a batch, their guesses, and a cache in which each row has its own cursor.

    A guess that was right stays in the cache; a wrong one is overwritten by the next forward.

    Attributes:
        tokens: (N, columns) int64; behind the first `length` of a row stand its guesses.
        length: (N,) int64, columns of the prompt and of what is accepted.
        end: columns of a full row.
    """

    def __init__(
        self, model: PreTrainedModel, input_ids: Tensor, prompt_mask: Tensor, max_new_tokens: int, window: int
    ) -> None:
        self.model, self.window = model, window
        self.arguments = decoding_arguments(model, window)
        count, self.prompt = input_ids.shape
        self.end = self.prompt + max_new_tokens
        tail = max_new_tokens + window
        # The first guesses may be anything; the prompt's last token is one that the model knows.
        self.tokens = torch.cat([input_ids, input_ids[:, -1:].expand(-1, tail)], dim=-1)
        self.key_mask = torch.nn.functional.pad(prompt_mask, (0, tail), value=True)
        # Guesses behind the last allowed token are never accepted; their positions stay within the model's reach.
        position = (self.key_mask.cumsum(-1) - 1).clamp(min=0)
        self.position = position.minimum(position[:, self.end - 1 : self.end])
        self.length = torch.full((count,), self.prompt, device=input_ids.device)
        self.cache = MarsCache()
        self.cache.start(count, input_ids.device)
        self.offset = torch.arange(window, device=input_ids.device)
        self.has_read_prompt = False

    def forward(self) -> tuple[Tensor, Tensor]:
        """One forward: the model's choices (N, W), and whether each guess it read was right (N, W-1)."""
        columns = self.length[:, None] - 1 + self.offset
        fed, visible, first = columns, int(self.length.max()) - 1 + self.window, None
        if not self.has_read_prompt:
            fed, first = torch.arange(visible, device=columns.device).expand(len(columns), -1), 0
            self.has_read_prompt = True
        self.cache.plan_write(fed, visible, first)
        make_mask = partial(decode_mask, fed, self.key_mask[:, :visible])
        mask = masks_for_model(self.model.config, self.model.dtype, make_mask)
        logits = self.model(
            input_ids=self.tokens.gather(1, fed),
            position_ids=self.position.gather(1, fed),
            attention_mask=mask,
            cache=self.cache,
            use_cache=True,
            **self.arguments,
        ).logits
        choices = logits[:, -self.window :].float().argmax(-1)
        return choices, choices[:, :-1] == self.tokens.gather(1, columns[:, 1:])

    def advance(self, choices: Tensor, accepted: Tensor) -> None:
        """Write the choices of a forward: as far as they are accepted (N,) they stay, the others are guesses."""
        columns = self.length[:, None] + self.offset
        going = (accepted > 0)[:, None]
        self.tokens.scatter_(1, columns, choices.where(going, self.tokens.gather(1, columns)))
        self.length = self.length + accepted
