"""MARS decoding: propose a window of tokens with one forward, accept from left to right, commit; every row by itself.

Shapes: N rows still decoding of the batch's R, B the window (MARS block size), V vocabulary.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from .acceptance import accepted_length, confidence_of, cut_after_first, is_confident
from .choosing import Chooser
from .drafting import DraftProposer
from .options import MarsOptions, MarsStep, check_threshold
from .outputs import MarsGenerateOutput
from .pacing import WindowPacer, costs_of
from .proposing import BlockProposer, CursorProposer, Proposer
from .state import DecodingState

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer


# Tokens of a forward that is like one of stock decoding: that of a batch of so many rows.
FEW_TOKENS = 64
# Logits of a step, all but the first of each row, from which on a CPU looks at one candidate after the other: most are
# never reached, and a pass over them takes longer than the calls that spare it.
DEAR = 2**18
# What processors and a draw cost, in passes: top-p sorts.
MANY_PASSES = 16


class MarsDecoder:
    """One `generate` call with MARS on: the loop of propose, accept, commit."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        options: MarsOptions,
        generation_config: GenerationConfig,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.model, self.options, self.config, self.streamer = model, options, generation_config, streamer
        self.device = input_ids.device
        # What these two say of all candidates at once is known here; a subclass may say anything, and is asked.
        stops = [c.eos_token_id.to(self.device).reshape(-1) for c in criteria if type(c) is EosTokenCriteria]
        self.stop_tokens = torch.cat(stops) if stops else None
        self.other_criteria = type(criteria)(
            c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)
        )
        embeds = model_kwargs.get("inputs_embeds")
        self.state = DecodingState(
            input_ids,
            # As in stock `generate`, a limit is looked at once there is a token.
            max(length_limit(criteria), input_ids.shape[1] + 1),
            options.block_size if options.drafts is None else options.drafts.reach,
            options.mask_token_id,
            model_kwargs.get("attention_mask"),
            model_kwargs.get("position_ids"),
            hidden=0 if embeds is None else embeds.shape[1] - input_ids.shape[1],
        )
        self.proposer = make_proposer(model, options, model_kwargs)
        self.pacer = WindowPacer(costs_of(model), options.block_size) if options.adaptive_window else None
        self.chooser = Chooser(self.state, generation_config, processors, options.mask_token_id)
        self.cache = model_kwargs.get("cache")
        self.last_threshold = float("nan")
        self.new_tokens = torch.zeros(self.state.batch, dtype=torch.long, device="cpu")
        self.started = time.perf_counter()

    def run(self) -> Tensor | MarsGenerateOutput:
        """Decode until every row has ended."""
        self._step()
        # As in stock `generate` behind the prompt: for few tokens a copy of the weights of their experts is faster.
        few = self.state.batch * self.options.widest_step <= FEW_TOKENS
        with self.model._optimize_model_for_decode() if few else nullcontext():
            while self.state.host_rows:
                self._step()
        return self._output()

    def _step(self) -> None:
        began = time.perf_counter()
        if self.pacer is not None and self.proposer.num_forwards:
            self.proposer.window = self.pacer.choose(len(self.state.host_rows))
        threshold = self._threshold()
        logits = self.proposer.propose(self.state)
        tokens, accepted, ended = self._accept(logits, threshold)
        host_accepted, host_ended = self._commit(tokens, accepted, ended)
        if self.pacer is not None:
            self.pacer.record(host_accepted, host_ended, self.proposer.width, time.perf_counter() - began)

    def _threshold(self) -> Tensor | None:
        """(N, 1) thresholds of this step; None where the drafts decide."""
        state, threshold = self.state, self.options.threshold
        if threshold is None:
            return None
        if callable(threshold):
            accepted = state.accepted_lengths[-1] if state.accepted_lengths else torch.zeros_like(self.new_tokens)
            self.new_tokens = self.new_tokens + accepted
            seconds = time.perf_counter() - self.started
            # Copies, since what it is told is what the rows are counted by.
            told = self.new_tokens.clone(), accepted.clone()
            step = MarsStep(len(state.accepted_lengths), *told, seconds)
            threshold = check_threshold(threshold(step), self.options.confidence, state.batch)
        if isinstance(threshold, Tensor):
            return threshold.to(self.device)[state.rows, None]
        if threshold != self.last_threshold:
            self.last_threshold = threshold
            self.one_threshold = torch.full((1, 1), threshold, dtype=torch.float32, device=self.device)
        return self.one_threshold.expand(len(state.host_rows), 1)

    def _accept(self, logits: Tensor, threshold: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the candidates and cut them: tokens (N, B), accepted (N,) and ended (N,)."""
        # On the host nobody waits for a device, and what a large vocabulary costs is better looked at first.
        passes = MANY_PASSES if self.chooser.processors or self.chooser.samples else 1
        is_dear = logits.device.type == "cpu" and logits[:, 1:].numel() * passes > DEAR
        if self.other_criteria or self.chooser.needs_prefix or is_dear:
            return self._accept_one_by_one(logits, threshold)
        tokens, scores = self.chooser.all(logits)
        accepted = torch.ones_like(tokens[:, 0])
        if threshold is None:
            # The candidates that follow one another, out of all that the tree has judged.
            path, accepted = self.proposer.confirmed(tokens)
            tokens = tokens.gather(1, path)
            if scores is not None:
                along = path[..., None].expand(-1, -1, logits.shape[-1])
                logits, scores = logits.gather(1, along), scores.gather(1, along)
        elif tokens.shape[1] > 1:
            further = self._is_sure(logits[:, 1:], tokens[:, 1:], threshold)
            accepted = accepted_length(torch.nn.functional.pad(further, (1, 0), value=True))
        if scores is not None:
            self.chooser.record(self.state.length, logits, scores)
        accepted = accepted.minimum(self.state.max_length - self.state.length)
        accepted, ended = cut_after_first(tokens, accepted, self.stop_tokens)
        waiting = self.proposer.waiting(self.state)
        if any(waiting):
            going = ~torch.tensor(waiting, device=self.device)
            accepted, ended = accepted * going, ended & going
        return tokens, accepted, ended | (self.state.length + accepted >= self.state.max_length)

    def _is_sure(self, logits: Tensor, tokens: Tensor, threshold: Tensor) -> Tensor:
        """(N, K) bool, whether the model is sure of candidates (N, K) by logits (N, K, V)."""
        confidence = confidence_of(logits, tokens, self.options.confidence)
        return is_confident(confidence, threshold, self.options.confidence)

    def _accept_one_by_one(self, logits: Tensor, threshold: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """As `_accept`, showing every processor and every stopping criterion the true prefix of every token.

        Candidate k of a row is looked at only once candidate k-1 is accepted and has not ended the row.
        """
        count, window = len(logits), self.proposer.reach
        lengths = self.state.host_length
        # Where the candidate that a row is asked about stands among its logits.
        places = [0] * count
        tokens = torch.full((count, window), self.options.mask_token_id, device=self.device)
        accepted = torch.zeros(count, dtype=torch.long, device="cpu")
        ended = torch.zeros(count, dtype=torch.bool, device="cpu")
        alive = [row for row, waits in enumerate(self.proposer.waiting(self.state)) if not waits]
        for k in range(window):
            if not alive:
                break
            for members in self._groups(alive):
                judged = logits[members, [places[row] for row in members]]
                tokens[members, k] = self.chooser.one(judged, members, [lengths[row] + k for row in members])
                keep = members
                if k > 0 and threshold is not None:
                    sure = self._is_sure(logits[members, k, None], tokens[members, k, None], threshold[members])
                    keep = [row for row, is_sure in zip(members, sure[:, 0].tolist(), strict=True) if is_sure]
                accepted[keep] += 1
                ended[keep] = self._take(keep, tokens[:, k], [lengths[row] + k for row in keep])
            alive = [row for row in alive if accepted[row] == k + 1 and not ended[row]]
            chosen = tokens[:, k].tolist()
            following = {row: self.proposer.place_behind(row, places[row], chosen[row]) for row in alive}
            # Behind a wrong draft no candidate has a true prefix.
            alive = []
            for row, place in following.items():
                if place is not None:
                    places[row] = place
                    alive.append(row)
        return tokens, accepted.to(self.device), ended.to(self.device)

    def _groups(self, alive: list[int]) -> list[list[int]]:
        """The rows that may be asked about together."""
        if not (self.other_criteria or self.chooser.needs_length):
            return [alive]
        lengths = self.state.host_length
        return [[row for row in alive if lengths[row] == length] for length in sorted({lengths[row] for row in alive})]

    def _take(self, keep: list[int], chosen: Tensor, columns: list[int]) -> Tensor:
        """Write accepted tokens at these columns and ask the stopping criteria about them: ended, (len(keep),) bool.

        With other criteria than a length and end tokens the columns are all the same.
        """
        if not keep:
            return torch.zeros(0, dtype=torch.bool, device="cpu")
        rows, places = self.state.rows[keep], torch.tensor(columns, device=self.device)
        self.state.tokens[rows, places] = chosen[keep]
        ended = places + 1 >= self.state.max_length
        if self.stop_tokens is not None:
            ended = ended | torch.isin(chosen[keep], self.stop_tokens)
        if self.other_criteria:
            column, record = columns[0], self.chooser.scores
            scores = None if record is None else record.entries(column + 1 - self.state.prompt)
            ended = ended | self.other_criteria(self.state.text(column + 1), scores)[rows]
        return ended.cpu()

    def _commit(self, tokens: Tensor, accepted: Tensor, ended: Tensor) -> tuple[list[int], list[int]]:
        """Write the accepted tokens, stream them, and let ended rows leave the batch; what `advance` returns."""
        before = self.state.host_length[0]
        host_accepted, host_ended = self.state.advance(tokens, accepted, ended)
        self.proposer.settle(self.state, accepted)
        if self.streamer is not None:
            for token in self.state.tokens[0, before : self.state.host_length[0]].cpu():
                self.streamer.put(token[None])
        if any(host_ended):
            going = [row for row, has_ended in enumerate(host_ended) if not has_ended]
            self.state.keep_rows(self.proposer.keep_rows(going))
        return host_accepted, host_ended

    def _output(self) -> Tensor | MarsGenerateOutput:
        if self.streamer is not None:
            self.streamer.end()
        sequences = self.state.sequences(self.config._pad_token_tensor)
        if not self.config.return_dict_in_generate:
            return sequences
        accepted = torch.stack(self.state.accepted_lengths, dim=-1)
        new_tokens = accepted.sum(-1)
        count = int(new_tokens.max())
        scores, logits = self.chooser.scores, self.chooser.logits
        return MarsGenerateOutput(
            sequences=sequences,
            scores=None if scores is None else scores.entries(count, new_tokens),
            logits=None if logits is None else logits.entries(count, new_tokens),
            cache=self.cache,
            num_forwards=self.proposer.num_forwards,
            accepted_lengths=accepted,
            tokens_per_forward=new_tokens / ((accepted > 0).sum(-1) + self.proposer.further_forwards),
        )


def length_limit(criteria: StoppingCriteriaList) -> int:
    """Columns of a full sequence. A criterion of the call's own takes the place of the one from `max_new_tokens`."""
    return min(c.max_length for c in criteria if type(c) is MaxLengthCriteria)


def make_proposer(model: PreTrainedModel, options: MarsOptions, model_kwargs: dict[str, Any]) -> Proposer:
    """The forward of a step, by what it proposes and by the kind of cache."""
    if options.cache == "none":
        return Proposer(model, options.block_size)
    cache = model_kwargs["cache"]
    if options.drafts is not None:
        return DraftProposer(model, options.drafts, cache, model_kwargs)
    if options.cache == "block":
        return BlockProposer(model, options.block_size, cache, model_kwargs, options.cache_block_size)
    return CursorProposer(model, options.block_size, cache, model_kwargs)
