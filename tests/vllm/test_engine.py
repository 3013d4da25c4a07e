"""The plug-in in an engine: the tokens of the definition, alone and together, with all that a request may ask for."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from definition import decode
from serving import (
    BLOCK_SIZE,
    NEW_TOKENS,
    THRESHOLDS,
    generate,
    needs_vllm,
    prompts,
    reference,
    start_engine,
    stock_model,
    tokens,
    wanted,
)

pytestmark = needs_vllm
SETTINGS = ("lossless", "1.0", *THRESHOLDS)


@pytest.fixture(scope="module")
def engine():
    return start_engine()


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_are_those_of_the_definition_alone_and_together(engine, setting):
    alone = [tokens(generate(engine, [prompt], setting))[0] for prompt in prompts()]
    assert alone == wanted(setting)
    assert tokens(generate(engine, prompts(), setting)) == wanted(setting)


def test_settings_mix_in_a_batch(engine):
    settings = [SETTINGS[index % len(SETTINGS)] for index in range(len(prompts()))]
    texts = tokens(generate(engine, prompts(), settings))
    assert texts == [wanted(setting)[index] for index, setting in enumerate(settings)]
    assert not any(reference()["mask"] in text for text in texts)


@pytest.mark.parametrize("setting", SETTINGS)
def test_counts_tell_the_truth(engine, setting):
    # The engine hears of a request's end in its next step, so one more request goes before and after.
    generate(engine, prompts()[:1], "1.0", max_tokens=1)
    before = engine.collective_rpc("mars_counts")[0]
    texts = tokens(generate(engine, prompts(), setting))
    generate(engine, prompts()[:1], "1.0", max_tokens=1)
    after = engine.collective_rpc("mars_counts")[0]
    finished = [counts for request, counts in after["finished"].items() if request not in before["finished"]]
    assert sorted(count for count, _ in finished) == sorted([1, *map(len, texts)])
    assert after["tokens"] - before["tokens"] == sum(map(len, texts)) + 1
    forwards = after["forwards"] - before["forwards"] - 1
    assert forwards == sum(count for _, count in finished) - 1
    if setting in THRESHOLDS:
        # Tokens of a window come with the next forward, so a text may need one more than the definition.
        least = sum(case["wanted"][setting][1] for case in reference()["cases"])
        assert least <= forwards <= least + len(texts)
    if setting == "1.0":
        assert forwards == sum(map(len, texts))
    else:
        assert sum(map(len, texts)) > 1.5 * forwards


@pytest.mark.parametrize("setting", ["lossless", "0.5"])
def test_logprobs_are_those_behind_the_true_prefix(engine, setting):
    completions = generate(engine, prompts()[:6], setting, logprobs=3)
    assert tokens(completions) == wanted(setting)[:6]
    for prompt, completion in zip(prompts(), completions, strict=False):
        text = prompt + list(completion.token_ids)
        with torch.no_grad():
            log_probs = stock_model()(torch.tensor([text])).logits[0].log_softmax(-1)[len(prompt) - 1 :]
        assert len(completion.logprobs) == len(completion.token_ids)
        for entries, token, row in zip(completion.logprobs, completion.token_ids, log_probs, strict=False):
            assert entries[token].logprob == pytest.approx(row[token].item(), abs=1e-3)
            assert {row.argmax().item()} <= set(entries)


@pytest.mark.parametrize("setting", ["lossless", "0.8"])
def test_stop_strings_cut_the_text(engine, setting):
    tokenizer = engine.get_tokenizer()
    for prompt, full in zip(prompts()[:8], wanted(setting), strict=False):
        text = tokenizer.decode(full, skip_special_tokens=True)
        stop = text[len(text) // 2 : len(text) // 2 + 2]
        completion = generate(engine, [prompt], setting, stop=[stop])[0]
        assert completion.text == text[: text.index(stop)]
        assert completion.finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_is_never_a_token(engine, temperature):
    # Two tokens are allowed, and of these [MASK] may be the likelier one.
    allowed = [reference()["mask"], 5]
    for setting in ("lossless", "1.0", "0.5"):
        texts = tokens(generate(engine, prompts()[:4], setting, temperature=temperature, allowed_token_ids=allowed))
        assert all(set(text) == {5} for text in texts)


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_no_more_tokens_than_asked_for(engine, limit):
    for setting in SETTINGS:
        texts = tokens(generate(engine, prompts()[:4], setting, max_tokens=limit))
        assert texts == [text[:limit] for text in wanted(setting)[:4]]


def test_end_of_text_may_be_ignored_or_put_off(engine):
    stop = reference()["stop"]
    for setting in ("lossless", "0.5"):
        ignoring = tokens(generate(engine, prompts()[:6], setting, ignore_eos=True))
        assert all(len(text) == NEW_TOKENS for text in ignoring)
        put_off = tokens(generate(engine, prompts()[:6], setting, min_tokens=40))
        assert all(len(text) >= 40 and stop not in text[:39] for text in put_off)


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"bad_words": ["has", "in all"]},
    ],
    ids=("repetition", "presence", "bad_words"),
)
def test_lossless_decoding_goes_together_with_penalties(engine, params):
    autoregressive = tokens(generate(engine, prompts(), "1.0", **params))
    assert tokens(generate(engine, prompts(), "lossless", **params)) == autoregressive
    assert autoregressive != wanted("1.0")


@pytest.mark.parametrize("setting", THRESHOLDS)
def test_penalties_go_together_with_a_threshold(engine, setting):
    stop, mask = reference()["stop"], reference()["mask"]
    texts = tokens(generate(engine, prompts()[:8], setting, repetition_penalty=1.3))
    for prompt, text in zip(prompts(), texts, strict=False):
        model = stock_model()
        assert text == decode(model, prompt, float(setting), stop, mask, BLOCK_SIZE, NEW_TOKENS, penalty=1.3)[0]
    assert texts != wanted(setting)[:8]


def test_a_seed_gives_the_same_text_when_the_prompt_is_in_the_cache(engine):
    # All but one token of it are in whole blocks of the cache.
    prompt = (prompts()[-1] * 2)[:129]
    first, again = (
        [tokens(generate(engine, [prompt], "lossless", temperature=1.5, seed=seed))[0] for seed in range(4)]
        for _ in range(2)
    )
    assert first == again
    assert len(set(map(tuple, first))) > 2


@pytest.mark.parametrize("setting", ["lossless", "0.5", "0.95"])
def test_second_turn_meets_the_prefix_cache(engine, setting):
    texts = tokens(generate(engine, prompts()[:6], setting))
    second = [prompt + text + prompts()[7] for prompt, text in zip(prompts()[:6], texts, strict=True)]
    tau = 1.0 if setting == "lossless" else float(setting)
    from vllm import SamplingParams

    extra_args = {} if setting == "lossless" else {"mars_threshold": tau}
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, extra_args=extra_args)
    outputs = engine.generate([{"prompt_token_ids": text} for text in second], params, use_tqdm=False)
    assert all(output.num_cached_tokens >= 32 for output in outputs)
    for text, output in zip(second, outputs, strict=True):
        stop, mask = reference()["stop"], reference()["mask"]
        assert (
            list(output.outputs[0].token_ids)
            == decode(stock_model(), text, tau, stop, mask, BLOCK_SIZE, NEW_TOKENS)[0]
        )


def spread_prefix() -> list[int]:
    """A prompt and the start of an answer, such that the tokens two and three further on are far from certain."""
    with torch.no_grad():
        for prompt, text in zip(prompts(), wanted("1.0"), strict=True):
            probs = stock_model()(torch.tensor([prompt + text])).logits[0].softmax(-1)[len(prompt) - 1 :]
            sure = [probs[place].max().item() for place in range(len(text))]
            for place, (first, second) in enumerate(pairwise(sure)):
                if place > 2 and first > 0.9 and second < 0.6:
                    return prompt + text[: place - 1]
    raise AssertionError("no such place")


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.5, "top_k": 5}, {"temperature": 1.5, "top_p": 0.9}], ids=("1", "top_k", "top_p")
)
def test_sampled_texts_follow_the_autoregressive_distribution(engine, params):
    # Chi-square of the joint distribution of four tokens, of which drafts give the last ones.
    prefix, count, length = spread_prefix(), 3000, 4
    seen = Counter(
        tuple(completion.token_ids)
        for completion in generate(
            engine, [prefix], "lossless", **{"temperature": 1.0, **params}, n=count, max_tokens=length, ignore_eos=True
        )
    )
    expected = {text: count * probability_of(prefix, text, **params) for text, _ in seen.most_common()}
    frequent = {text: value for text, value in expected.items() if value >= 5}
    assert len(frequent) > 2
    rest = count - sum(frequent.values()), count - sum(seen[text] for text in frequent)
    statistic = sum((seen[text] - value) ** 2 / value for text, value in frequent.items())
    statistic += (rest[1] - rest[0]) ** 2 / max(rest[0], 1.0)
    # Six standard deviations above the mean of a chi-square of that many degrees of freedom.
    assert statistic < len(frequent) + 6 * (2 * len(frequent)) ** 0.5


def probability_of(prefix, text, temperature=1.0, top_k=None, top_p=None) -> float:
    """What the autoregressive model gives a text, under the warpers, [MASK] banned."""
    with torch.no_grad():
        logits = stock_model()(torch.tensor([prefix + list(text)])).logits[0, len(prefix) - 1 : -1]
    logits = logits.index_fill(-1, torch.tensor(reference()["mask"]), -torch.inf) / temperature
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p is not None:
        ordered, order = logits.softmax(-1).sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
    return logits.softmax(-1).gather(-1, torch.tensor(text)[:, None]).prod().item()


@pytest.mark.parametrize("setting", ["lossless", "0.8"])
def test_a_seed_gives_the_same_text_alone_and_in_a_batch(engine, setting):
    texts = [tokens(generate(engine, prompts()[:1], setting, temperature=1.5, seed=seed))[0] for seed in range(8)]
    assert len(set(map(tuple, texts))) > 4
    for seed in (0, 5):
        assert tokens(generate(engine, prompts(), setting, temperature=1.5, seed=seed))[0] == texts[seed]


@pytest.mark.parametrize(
    ("params", "extra_args", "message"),
    [
        ({}, {"mars_threshold": 0.0}, "must be a number in"),
        ({}, {"mars_threshold": 1.5}, "must be a number in"),
        ({}, {"mars_treshold": 0.9}, "Unknown mars_treshold"),
        ({"thinking_token_budget": 0}, {}, "thinking_token_budget"),
    ],
)
def test_what_cannot_work_is_refused(engine, params, extra_args, message):
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=message):
        engine.generate([{"prompt_token_ids": prompts()[0]}], SamplingParams(**params, extra_args=extra_args))
