"""From logits to tokens: the processors, the draw, and never a [MASK]; what was chosen from is noted for the output.

Shapes: N rows still decoding of the batch's R, B the window (MARS block size), V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from .records import TokenRecord
from .state import DecodingState

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList

# Processors that look at one distribution alone may judge all candidates of a step at once.
PREFIX_FREE = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
# Those that ask at most which tokens a prefix holds may judge rows whose prefixes are of unequal length at once.
LENGTH_FREE = (*PREFIX_FREE, RepetitionPenaltyLogitsProcessor)


class Chooser:
    """Chooses tokens by a generation config.

    Attributes:
        needs_prefix: whether some processor looks at the text in front of a token, so that tokens are chosen one by
            one, with `one`; else all of a step are, with `all`.
        needs_length: whether some processor looks at more than which tokens that text holds, so that rows are asked
            about together only where their texts are equally long.
        scores, logits: the processed and the raw logits of every token, where the output shall have them.
    """

    def __init__(
        self,
        state: DecodingState,
        config: GenerationConfig,
        processors: LogitsProcessorList,
        mask_token_id: int,
    ) -> None:
        self.state, self.samples = state, config.do_sample
        self.processors = type(processors)(self._about_asked_rows(processor) for processor in processors)
        self.asked: set[int] = set()
        self.needs_prefix = not all(type(processor) in PREFIX_FREE for processor in processors)
        prompt = state.prompt - state.hidden
        self.needs_length = not all(
            type(processor) in LENGTH_FREE and _ignored_columns(processor) <= prompt for processor in processors
        )
        wants = config.return_dict_in_generate
        self.scores = TokenRecord(state) if wants and config.output_scores else None
        self.logits = TokenRecord(state) if wants and config.output_logits else None
        self.mask_token = torch.tensor([mask_token_id], device=state.device)

    def all(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """(N, B) candidates from raw logits (N, B, V), where no processor needs a prefix; their scores, if wanted."""
        wants_record = self.scores is not None or self.logits is not None
        if not (self.processors or wants_record or self.samples):
            # Banned in place and given back: a copy of all logits would cost more than the rest of the loop.
            of_mask = logits.index_select(-1, self.mask_token)
            tokens = logits.index_fill_(-1, self.mask_token, float("-inf")).argmax(-1)
            logits.index_copy_(-1, self.mask_token, of_mask)
            return tokens, None
        scores = self._ban_mask(logits)
        if self.processors:
            no_prefix = torch.empty(logits[..., 0].numel(), 0, dtype=torch.long, device=logits.device)
            scores = self.processors(no_prefix, scores.flatten(0, 1)).view_as(logits)
        return self._draw(scores), scores if wants_record else None

    def one(self, logits: Tensor, members: list[int], columns: list[int]) -> Tensor:
        """The tokens of M of the N rows, `members`, at these columns, (M,), from their raw logits (M, V).

        With `needs_length` the columns are all the same.
        """
        rows, ends = self.state.rows[members], torch.tensor(columns, device=self.state.device)
        scores = self._ban_mask(logits)
        if self.needs_prefix:
            scores = self._processed(scores, members, columns)
        elif self.processors:
            scores = self.processors(ends.new_empty(len(members), 0), scores)
        self.record(ends, logits[:, None], scores[:, None], rows)
        return self._draw(self._ban_mask(scores) if self.needs_prefix else scores)

    def _processed(self, scores: Tensor, members: list[int], columns: list[int]) -> Tensor:
        """The scores (M, V) of rows `members` at these columns behind processors that look at the text before.

        Processors get the whole batch in its order, since some know their rows by number. Rows that are not asked
        about show a shorter prefix or their last token again, and what comes back for them is not read.
        """
        state, rows = self.state, self.state.rows[members]
        self.asked = {state.host_rows[member] for member in members}
        of_batch = scores.new_zeros(state.batch, scores.shape[-1])
        of_batch[rows] = scores
        return self.processors(state.text(max(columns)), of_batch)[rows]

    def record(self, columns: Tensor, logits: Tensor, scores: Tensor, rows: Tensor | None = None) -> None:
        """Note logits and scores (N, B, V) of the columns from `columns` (N,) on, over those rejected before."""
        rows = self.state.rows if rows is None else rows
        for record, values in ((self.logits, logits), (self.scores, scores)):
            if record is not None:
                record.write(rows, columns - self.state.prompt, values)

    def _about_asked_rows(self, processor: Any) -> Any:
        """A `prefix_allowed_tokens_fn` knows what to say about texts, not about rows filled up to others' length."""
        if type(processor) is not PrefixConstrainedLogitsProcessor:  # a subclass does more than the stock one
            return processor
        allowed, rows_of_prompt = processor._prefix_allowed_tokens_fn, processor._num_beams
        return PrefixConstrainedLogitsProcessor(
            lambda row, text: allowed(row // rows_of_prompt, text) if row in self.asked else [0], num_beams=1
        )

    def _ban_mask(self, scores: Tensor) -> Tensor:
        """A [MASK] is never a token of the text."""
        return scores.index_fill(-1, self.mask_token, float("-inf"))

    def _draw(self, scores: Tensor) -> Tensor:
        """Tokens (...) from scores (..., V)."""
        if not self.samples:
            return scores.argmax(-1)
        return torch.multinomial(scores.softmax(-1).flatten(0, -2), 1).view(scores.shape[:-1])


def _ignored_columns(processor: Any) -> int:
    """First columns of a text that a repetition penalty leaves out; some of them may be new tokens."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    return int(ignored.max()) if isinstance(ignored, Tensor) else ignored or 0
