"""The sampler with vLLM's own processors and bookkeeping, but no engine: logits are made up."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

# Not "vllm" alone, which is the folder of these tests too.
pytest.importorskip("vllm.v1", reason="runs in vLLM's environment: .ci/vllm")

with warnings.catch_warnings():
    # vLLM and its dependencies warn of themselves.
    warnings.simplefilter("ignore")
    from vllm import SamplingParams
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from mars_hf.vllm.counters import MarsCounters
    from mars_hf.vllm.sampler import MarsSampler
    from mars_hf.vllm.settings import MarsSettings
    from mars_hf.vllm.worker import without_generators

pytestmark = pytest.mark.filterwarnings("default")
VOCABULARY, MASK, PROMPT, OUTPUT = 12, 11, [1, 2, 3], [4, 5]
LOW = {"mars_threshold": 1e-9}


def batch(params: list[SamplingParams], seeds: dict[int, int] | None = None) -> SimpleNamespace:
    """A runner whose batch holds a request for each of `params`, of the same prompt and output."""
    count, names = len(params), [f"request {index}" for index in range(len(params))]
    greedy = all(each.temperature == 0 for each in params)
    each_penalty = {
        name: torch.tensor([getattr(each, name) for each in params])
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")
    }
    no_penalties = all(not each.any() for name, each in each_penalty.items() if name != "repetition_penalty")
    no_penalties &= bool((each_penalty["repetition_penalty"] == 1).all())
    generators = {index: torch.Generator().manual_seed(seed) for index, seed in (seeds or {}).items()}
    sampling = SamplingMetadata(
        temperature=None if greedy else torch.tensor([each.temperature for each in params]),
        all_greedy=greedy,
        all_random=False,
        top_p=None,
        top_k=None,
        generators=generators,
        max_num_logprobs=None,
        no_penalties=no_penalties,
        prompt_token_ids=torch.tensor([PROMPT] * count),
        frequency_penalties=each_penalty["frequency_penalty"],
        presence_penalties=each_penalty["presence_penalty"],
        repetition_penalties=each_penalty["repetition_penalty"],
        output_token_ids=[list(OUTPUT) for _ in params],
        allowed_token_ids_mask=None,
        bad_words_token_ids={i: each.bad_words_token_ids for i, each in enumerate(params) if each.bad_words_token_ids},
        logitsprocs=LogitsProcessors(),
    )
    length = len(PROMPT) + len(OUTPUT)
    states = {
        name: SimpleNamespace(sampling_params=each, num_prompt_tokens=len(PROMPT), output_token_ids=list(OUTPUT))
        for name, each in zip(names, params, strict=True)
    }
    return SimpleNamespace(
        input_batch=SimpleNamespace(
            num_reqs=count,
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            generators=generators,
            sampling_metadata=sampling,
            vocab_size=VOCABULARY,
            num_tokens_no_spec=np.full(count, length),
            token_ids_cpu=np.zeros((count, 64), dtype=int),
            is_token_ids=np.zeros((count, 64), dtype=bool),
        ),
        requests=states,
        rejection_sampler=RejectionSampler(Sampler()),
        discard_request_mask=SimpleNamespace(np=np.zeros(count, dtype=bool)),
        max_model_len=64,
    )


def sampler(runner: SimpleNamespace) -> MarsSampler:
    return MarsSampler(runner, MarsSettings(MASK, 3), MarsCounters(publish=False))


def step(mars: MarsSampler, logits: torch.Tensor, drafts: list[list[int]]) -> list[list[int]]:
    """The tokens of a step in which every request was fed its drafts."""
    metadata = SpecDecodeMetadata.make_dummy(drafts, logits.device) if any(drafts) else None
    if metadata is not None:
        metadata.draft_token_ids = torch.tensor([token for each in drafts for token in each], dtype=torch.int32)
    return [[t for t in row if t != -1] for row in mars.sample(logits, metadata).sampled_token_ids.tolist()]


def best_behind(row: torch.Tensor, text: list[int], params: SamplingParams) -> int:
    """The best token by a row of logits behind a text, by the definitions of the penalties and of bad words."""
    row = row.clone()
    row[MASK] = -torch.inf
    for token in range(VOCABULARY):
        if token in PROMPT or token in text:
            row[token] *= 1 / params.repetition_penalty if row[token] > 0 else params.repetition_penalty
        row[token] -= params.frequency_penalty * text.count(token) + params.presence_penalty * (token in text)
    for word in params.bad_words_token_ids or []:
        if text[len(text) - len(word) + 1 :] == word[:-1]:
            row[word[-1]] = -torch.inf
    return int(row.argmax())


PENALTIES = {
    "repetition": {"repetition_penalty": 1.6},
    "presence and frequency": {"presence_penalty": 1.2, "frequency_penalty": 0.8},
    "bad words": {"_bad_words_token_ids": [[a, b] for a in range(10) for b in range(10) if (a + b) % 2]},
}


@pytest.mark.parametrize("kind", PENALTIES)
def test_candidates_of_a_window_are_penalised_behind_each_other(kind: str):
    differ = 0
    for seed in range(20):
        params = SamplingParams(temperature=0, max_tokens=40, extra_args=LOW)
        for name, value in PENALTIES[kind].items():
            setattr(params, name, value)
        # Beside a request that is lossless, with no penalty, and fed less.
        runner = batch([SamplingParams(temperature=0, max_tokens=40), params])
        mars = sampler(runner)
        torch.manual_seed(seed)
        logits = torch.randn(4 + 3, VOCABULARY)
        drafts = [[MASK, MASK], [MASK, MASK, MASK]]
        tokens = step(mars, logits, drafts)
        text, blind = list(OUTPUT), []
        for k in range(4):
            blind.append(best_behind(logits[3 + k], [*OUTPUT, *[MASK] * k], params))
            text.append(best_behind(logits[3 + k], text, params))
        plan = mars.plans["request 1"]
        assert tokens[1] + plan.drafts == text[len(OUTPUT) :]
        assert tokens[0] == [best_behind(logits[0], [], SamplingParams())]
        differ += blind != text[len(OUTPUT) :]
    assert differ > 5


def test_a_seed_gives_one_text_whatever_the_scheduler_adds():
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=40)
    torch.manual_seed(0)
    logits = torch.randn(2 * 7, VOCABULARY)

    def text(first_drafts: list[int], chunks: int) -> list[int]:
        runner = batch([params], seeds={0: 7})
        mars = sampler(runner)
        for _ in range(chunks):
            runner.discard_request_mask.np[:] = True
            step(mars, logits[:1], [[]])
        runner.discard_request_mask.np[:] = False
        first = step(mars, logits[: len(first_drafts) + 1], [first_drafts])
        return first[0] + step(mars, logits[7:10], [[MASK, MASK]])[0]

    texts = {tuple(text(drafts, chunks)) for drafts in ([], [-1] * 6) for chunks in (0, 1, 3)}
    assert len(texts) == 1
    assert len(texts.pop()) == 2


def test_seeded_requests_may_be_read_in_chunks():
    runner = batch([SamplingParams(temperature=1.0, seed=7)] * 2, seeds={0: 7, 1: 8})
    runner.discard_request_mask.np[:] = [True, False]
    runner.use_async_scheduling = False
    runner._to_list = torch.Tensor.tolist
    runner._get_prompt_logprobs_dict = lambda *args: {}
    runner._bookkeeping_sync = GPUModelRunner._bookkeeping_sync.__get__(runner)
    generators = dict(runner.input_batch.generators)
    states = [generator.get_state() for generator in generators.values()]
    sampled = SamplerOutput(torch.tensor([[3], [4]], dtype=torch.int32), None)
    scheduled = SimpleNamespace(num_scheduled_tokens={})
    result = without_generators(runner)(scheduled, sampled, None, torch.zeros(2, 1), 2)
    assert result[3] == [[], [4]]
    assert runner.input_batch.generators == generators
    assert runner.input_batch.generators is runner.input_batch.sampling_metadata.generators
    assert all(torch.equal(generators[i].get_state(), state) for i, state in enumerate(states))


def test_a_new_turn_of_a_session_starts_without_drafts():
    runner = batch([SamplingParams(temperature=0, max_tokens=40, extra_args=LOW)])
    mars = sampler(runner)
    torch.manual_seed(0)
    step(mars, torch.randn(4, VOCABULARY), [[MASK] * 3])
    plan = mars.plans["request 0"]
    assert plan.certain
    assert len(plan.drafts) == 3
    # Its second turn is as long as the first one was with its token.
    runner.input_batch.num_tokens_no_spec[:] = plan.position
    mars.drop_drafts(["request 0", "another"])
    logits = torch.eye(VOCABULARY)[[token := (plan.drafts or [0])[0] + 1]]
    assert step(mars, logits, [[]]) == [[token]]
    assert (mars.plans["request 0"].tokens, mars.plans["request 0"].forwards) == (2, 2)
