"""From the logits of a step of vLLM to its tokens, and to the drafts of the next step.

A request is fed its last token, its drafts and some [MASK]s; row j of its logits is for the place behind the j-th of
these. A [MASK] is banned as a token, so vLLM sees it rejected like any wrong draft and takes its slots back; the rows
behind it are the candidates of the next step.

Shapes: R rows of all requests, one behind the other; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from ..acceptance import confidence_of, is_confident
from .counters import MarsCounters
from .plan import Plan, cut_after_stop, useful_drafts
from .settings import MarsSettings, threshold_of

# vLLM's mark for "no token here"; below this temperature it decodes greedily.
NO_TOKEN, GREEDY_BELOW = -1, 1e-5


@dataclass
class StepRows:
    """Which rows are whose.

    Attributes:
        drafts: what each request was fed behind its last token, [MASK]s included.
        counts: rows of each request, one more than its drafts.
        starts: first row of each request.
    """

    drafts: list[list[int]]
    counts: list[int]
    starts: list[int]

    @classmethod
    def of(cls, metadata: SpecDecodeMetadata | None, requests: int) -> StepRows:
        lengths = [0] * requests if metadata is None else metadata.num_draft_tokens
        flat = [] if metadata is None else metadata.draft_token_ids.tolist()
        ends = list(accumulate(lengths))
        drafts = [flat[end - length : end] for length, end in zip(lengths, ends, strict=True)]
        counts = [length + 1 for length in lengths]
        return cls(drafts, counts, [0, *accumulate(counts)][:-1])

    def with_masks_filled(self, chosen: list[int], mask_token_id: int) -> list[list[int]]:
        """The drafts with each [MASK] replaced by the token that was chosen (R,) for its place."""
        return [
            [chosen[start + k] if draft == mask_token_id else draft for k, draft in enumerate(drafts)]
            for drafts, start in zip(self.drafts, self.starts, strict=True)
        ]


class MarsSampler:
    """Samples the tokens of a step in place of vLLM's samplers, and plans the next one.

    Args:
        runner: vLLM's V1 model runner, whose batch and whose logits processors are used.
        settings: of the engine.
        counters: where tokens and forwards are counted.
    """

    def __init__(self, runner: Any, settings: MarsSettings, counters: MarsCounters) -> None:
        self.runner, self.settings, self.counters = runner, settings, counters
        self.processors = runner.rejection_sampler
        self.plans: dict[str, Plan] = {}

    def sample(self, logits: Tensor, metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        """Choose the tokens of a step from its logits (R, V); takes the place of the runner's `_sample`."""
        batch = self.runner.input_batch
        rows = StepRows.of(metadata, batch.num_reqs)
        sampling = batch.sampling_metadata
        raw = logits.float()
        noise = self._noise(raw, rows, sampling)
        scores, best, chosen = self._choose(raw, rows.drafts, noise, rows, sampling)
        for _ in range(self._corrections(rows, sampling)):
            # Each time one more candidate of a window has been chosen behind the tokens that it will stand behind.
            prefixes = rows.with_masks_filled(chosen.tolist(), self.settings.mask_token_id)
            scores, best, chosen = self._choose(raw, prefixes, noise, rows, sampling)
        thresholds, is_lossless = self._thresholds(rows, raw.device)
        # A guess that is to be confirmed is the likeliest token; a token that is to stand is drawn like any other.
        proposed = torch.where(is_lossless, best, chosen)
        confidence = confidence_of(raw, proposed, "probability")
        sure = is_confident(confidence[:, None], thresholds[:, None], "probability")[:, 0]
        tokens = self._walk(rows, torch.stack([chosen, proposed, sure.long()]).tolist(), confidence.tolist())
        width = max(map(len, tokens))
        padded = [row + [NO_TOKEN] * (width - len(row)) for row in tokens]
        output = torch.tensor(padded, dtype=torch.int32, device=raw.device)
        return SamplerOutput(output, self._logprobs(raw, scores, output, rows, sampling.max_num_logprobs))

    def next_drafts(self, sampled: list[list[int]]) -> list[list[int]]:
        """What each request of the batch is fed next behind its last token; nothing while its prompt is being read."""
        plans = [
            self.plans[request] if tokens else Plan()
            for request, tokens in zip(self._requests(), sampled, strict=True)
        ]
        return [plan.drafts[: plan.fed] + [self.settings.mask_token_id] * plan.masks for plan in plans]

    def drop_drafts(self, requests: Iterable[str]) -> None:
        """Forget what was to come next of requests whose prompt is new; a session's next turn has the same id."""
        for request in requests:
            if request in self.plans:
                self.plans[request].drafts = []

    def forget(self, finished: set[str]) -> None:
        """Let go of requests that have ended, and count them."""
        for request in finished:
            plan = self.plans.pop(request, None)
            if plan is not None:
                self.counters.finish(request, plan.tokens, plan.forwards)

    def _requests(self) -> list[str]:
        return self.runner.input_batch.req_ids

    def _threshold_by_request(self) -> list[float | None]:
        return [threshold_of(self.runner.requests[request].sampling_params) for request in self._requests()]

    def _choose(
        self, raw: Tensor, prefixes: list[list[int]], noise: Tensor | None, rows: StepRows, sampling: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(R, V) scores behind the drafts in `prefixes`, and of every row (R,) the best token and the chosen one."""
        scores = self._scores(raw, prefixes, sampling)
        best = scores.argmax(-1)
        drawn = best if noise is None else self._draw(scores, best, noise, rows, sampling)
        return scores, best, self._force(drawn, scores, rows)

    def _corrections(self, rows: StepRows, sampling: Any) -> int:
        """How often to choose again, so that penalties see the tokens that a window's candidates stand behind."""
        sees_prefix = not sampling.no_penalties or sampling.bad_words_token_ids
        if not sees_prefix or all(threshold is None for threshold in self._threshold_by_request()):
            return 0
        return max(drafts.count(self.settings.mask_token_id) for drafts in rows.drafts)

    def _scores(self, raw: Tensor, prefixes: list[list[int]], sampling: Any) -> Tensor:
        """(R, V) logits with all that the requests ask for applied, and [MASK] banned.

        vLLM judges the last row of a request apart, by its plain sampler. Here that one is a [MASK]'s like those
        before it, so all rows go the way of draft tokens, as if one more draft had been fed.
        """
        counts = torch.tensor([len(drafts) + 1 for drafts in prefixes])
        as_drafts = SpecDecodeMetadata.make_dummy([[*drafts, 0] for drafts in prefixes], raw.device)
        fed = replace(sampling, spec_token_ids=[[*drafts, 0] for drafts in prefixes])
        scores = self.processors.apply_logits_processors(raw.clone(), fed, as_drafts)
        scores[:, self.settings.mask_token_id] = float("-inf")
        if sampling.all_greedy:
            return scores

        def by_row(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.repeat_interleave(counts.to(values.device))

        temperature = by_row(sampling.temperature)
        assert temperature is not None
        scores.div_(torch.where(temperature < GREEDY_BELOW, 1.0, temperature)[:, None])
        return apply_top_k_top_p(scores, by_row(sampling.top_k), by_row(sampling.top_p))

    def _noise(self, raw: Tensor, rows: StepRows, sampling: Any) -> Tensor | None:
        """(R, V) exponential noise, None where all requests are greedy.

        What a request's own generator gives must depend on its text alone. So it gives nothing to the chunk of a
        prompt that is not the last, and nothing behind vLLM's fill-in for drafts that a request does not have, with
        which it makes a prompt found in the cache as long as a step with drafts.
        """
        if sampling.all_greedy:
            return None
        noise = torch.empty_like(raw).exponential_()
        reads_prompt = self.runner.discard_request_mask.np
        for index, generator in sampling.generators.items():
            if not reads_prompt[index]:
                start, drafts = rows.starts[index], rows.drafts[index]
                count = drafts.index(NO_TOKEN) + 1 if NO_TOKEN in drafts else rows.counts[index]
                noise[start : start + count].exponential_(generator=generator)
        return noise

    def _draw(self, scores: Tensor, best: Tensor, noise: Tensor, rows: StepRows, sampling: Any) -> Tensor:
        """(R,) a token for every row: the best one, or one drawn where the temperature is not 0.

        Every row is drawn on its own, and a draft stands if the token drawn at its place equals it. For a draft that
        was not drawn itself this is rejection sampling: it stands with its probability, and others have the rest.
        """
        drawn = scores.softmax(-1).div_(noise).argmax(-1)
        counts = torch.tensor(rows.counts, device=scores.device)
        return torch.where((sampling.temperature < GREEDY_BELOW).repeat_interleave(counts), best, drawn)

    def _force(self, chosen: Tensor, scores: Tensor, rows: StepRows) -> Tensor:
        """Put the tokens that stand in their places, unless a request (a grammar, say) has come to forbid one."""
        batch = self.runner.input_batch
        forced: list[int] = []
        for index, (request, count) in enumerate(zip(batch.req_ids, rows.counts, strict=True)):
            plan = self.plans.get(request) or Plan()
            position = int(batch.num_tokens_no_spec[index])
            forced += [NO_TOKEN if token is None else token for token in plan.forced(position, count)]
        wanted = torch.tensor(forced, device=chosen.device)
        allowed = scores.gather(-1, wanted.clamp(min=0)[:, None])[:, 0] > float("-inf")
        return torch.where((wanted != NO_TOKEN) & allowed, wanted, chosen)

    def _thresholds(self, rows: StepRows, device: torch.device) -> tuple[Tensor, Tensor]:
        """(R,) float32 thresholds, 1 where there is none, and (R,) bool, whether there is none."""
        thresholds = self._threshold_by_request()
        counts = torch.tensor(rows.counts, device=device)
        values = torch.tensor([1.0 if value is None else value for value in thresholds], device=device)
        lossless = torch.tensor([value is None for value in thresholds], device=device)
        return values.repeat_interleave(counts), lossless.repeat_interleave(counts)

    def _walk(self, rows: StepRows, by_row: list[list[int]], confidence: list[float]) -> list[list[int]]:
        """The tokens of every request: as far as its drafts are right, and one more. Plans its next step."""
        batch, tokens = self.runner.input_batch, []
        reads_prompt = self.runner.discard_request_mask.np
        for index, (request, drafts, start) in enumerate(zip(batch.req_ids, rows.drafts, rows.starts, strict=True)):
            chosen, proposed, sure = (values[start : start + len(drafts) + 1] for values in by_row)
            right = next((k for k, draft in enumerate(drafts) if chosen[k] != draft), len(drafts))
            run = chosen[: right + 1]
            if not reads_prompt[index]:
                # Rows behind the first [MASK] know the true text as long as that is where the run ended.
                is_valid = right < len(drafts) and drafts[right] == self.settings.mask_token_id
                behind = slice(right + 1, None) if is_valid else slice(0)
                candidates = proposed[behind], sure[behind], confidence[start : start + len(drafts) + 1][behind]
                run = self._plan_next(request, int(batch.num_tokens_no_spec[index]), run, *candidates)
            tokens.append(run)
        return tokens

    def _plan_next(
        self, request: str, known: int, run: list[int], proposed: list[int], sure: list[int], confidence: list[float]
    ) -> list[int]:
        """Take a run behind `known` others, and plan the step behind it from the candidates: the run, cut."""
        state = self.runner.requests[request]
        params, plan = state.sampling_params, self.plans.setdefault(request, Plan())
        stops = frozenset([params.eos_token_id, *(params.stop_token_ids or ())])
        run = cut_after_stop(run, stops)
        self.counters.step(len(run))
        plan.tokens, plan.forwards = plan.tokens + len(run), plan.forwards + 1
        threshold = threshold_of(params)
        if threshold is None:
            drafts = proposed[: useful_drafts(confidence, plan.value)]
        else:
            accepted = sure.index(0) if 0 in sure else len(sure)
            drafts = plan.left_behind(known + len(run), run[-1]) or proposed[:accepted]
        masks = self.settings.draft_length if threshold is None or threshold < 1 else 0
        limit = self.runner.max_model_len if params.max_tokens is None else params.max_tokens
        remaining = limit - (known + len(run) - state.num_prompt_tokens)
        plan.feed(known + len(run), cut_after_stop(drafts, stops), threshold is not None, masks, remaining)
        return run

    def _logprobs(
        self, raw: Tensor, scores: Tensor, tokens: Tensor, rows: StepRows, count: int | None
    ) -> LogprobsTensors | None:
        """Log-probabilities of the tokens (requests, width), each under the logits that have its true prefix."""
        if count is None:
            return None
        starts = torch.tensor(rows.starts, device=tokens.device)
        places = starts[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        logits = scores if self.processors.is_processed_logprobs_mode else raw
        values = logits[places.flatten().clamp(max=len(logits) - 1)]
        if not self.processors.is_logits_logprobs_mode:
            values = values.log_softmax(-1)
        # What is written for places without a token is left out by vLLM.
        return self.processors.sampler.gather_logprobs(values, count, tokens.flatten().clamp(min=0).long())
