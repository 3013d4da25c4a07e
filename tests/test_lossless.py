"""Lossless decoding: the tokens of stock `generate`, in fewer forward passes."""

from __future__ import annotations

import pytest
import torch
from conftest import make_tokenizer
from decoding_models import EOS, FAMILIES, MASK, PAD, left_pad, random_prompts, tiny_model
from test_features import TailMatch
from test_generate_arguments import WIDTH, WORKS
from transformers import StoppingCriteriaList, TextIteratorStreamer

MAX_NEW = 24


def lossless(model, inputs, **kwargs):
    kwargs = {"max_new_tokens": MAX_NEW, "do_sample": False, "return_dict_in_generate": True, **kwargs}
    return model.generate(**inputs, mars_lossless=True, **kwargs)


def stock(model, inputs, **kwargs):
    kwargs = {"max_new_tokens": MAX_NEW, "do_sample": False, "suppress_tokens": [MASK], **kwargs}
    return model.generate(**inputs, **kwargs)


def agreeing_model(family: str = "llama", seed: int = 0, **overrides):
    """A model that often confirms its drafts: its text is ruled by the position, which a [MASK] knows as well."""
    model = tiny_model(family, seed=seed, **overrides)
    with torch.no_grad():
        # All tokens look alike but a little, so that what is attended to says more than what stands there.
        embedding = model.get_input_embeddings().weight
        embedding.copy_(embedding.mean(0) + 0.05 * embedding)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("draft_length", [1, 3, 5])
def test_equals_stock_generate(family, draft_length):
    model = agreeing_model(family)
    inputs = left_pad(random_prompts([5, 11, 3, 8]))
    output = lossless(model, inputs, mars_draft_length=draft_length)
    assert torch.equal(output.sequences, stock(model, inputs))
    assert output.accepted_lengths.max() <= draft_length + 1


@torch.no_grad()
def brute_force_lossless(model, prompt, draft_length, max_new=MAX_NEW):
    """Lossless decoding of one prompt from its definition, with plain causal forwards: tokens accepted per step."""

    def tokens_behind(text, count):
        logits = model(torch.tensor([text])).logits[0, -count:]
        return logits.index_fill(-1, torch.tensor(MASK), -torch.inf).argmax(-1).tolist()

    text, drafts, counts = prompt.tolist(), [], []
    while len(text) - len(prompt) < max_new and EOS not in text[len(prompt) :]:
        checked = tokens_behind(text + drafts, len(drafts) + 1)
        right = next((k for k, draft in enumerate(drafts) if checked[k] != draft), len(drafts))
        text, new = text + drafts[:right], checked[: right + 1]
        drafts = tokens_behind(text + [MASK] * draft_length, draft_length)
        text = text + new[right:]
        counts.append(right + 1)
    extra = len(text) - len(prompt) - max_new
    if EOS in text[len(prompt) :]:
        extra = len(text) - len(prompt) - text[len(prompt) :].index(EOS) - 1
    return [*counts[:-1], counts[-1] - max(extra, 0)]


@pytest.mark.parametrize("draft_length", [2, 4])
def test_every_step_accepts_what_the_definition_accepts(draft_length):
    model = agreeing_model(seed=5)
    prompts = random_prompts([5, 11, 3, 8, 6])
    output = lossless(model, left_pad(prompts), mars_draft_length=draft_length, mars_tree_budget=25)
    for row, prompt in enumerate(prompts):
        steps = output.accepted_lengths[row]
        assert steps[steps > 0].tolist() == brute_force_lossless(model, prompt, draft_length)
    assert output.tokens_per_forward.mean() > 1.25


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_confirmed(family):
    model = agreeing_model(family, seed=2)
    inputs = left_pad(random_prompts([5, 11, 3, 8]))
    output = lossless(model, inputs, eos_token_id=None)
    assert torch.equal(output.sequences, stock(model, inputs, eos_token_id=None))
    assert output.tokens_per_forward.mean() > 1.25


@pytest.mark.parametrize(
    "kwargs",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 9},
        {"bad_words_ids": [[17], [23, 5]]},
        {"eos_token_id": [EOS, 7, 11, 30]},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_new_tokens": 7},
    ],
)
def test_processors_and_limits_equal_stock_generate(kwargs):
    model = agreeing_model(seed=1)
    inputs = left_pad(random_prompts([6, 9, 4]), extra=3)
    output = lossless(model, inputs, **kwargs)
    assert torch.equal(output.sequences, stock(model, inputs, **kwargs))


@pytest.mark.parametrize("name", [name for name, settings in WORKS.items() if not settings.get("do_sample")])
def test_every_setting_equals_stock_generate(name):
    model = agreeing_model(seed=6)
    kwargs = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": PAD, "return_dict_in_generate": True}
    kwargs |= WORKS[name]
    inputs = left_pad(random_prompts([6, WIDTH, 4, 8, 7]))
    ours = lossless(model, inputs, **kwargs)
    theirs = stock(model, inputs, **{"suppress_tokens": [MASK], **kwargs})
    assert torch.equal(ours.sequences, theirs.sequences)
    # A bias that rules the text is none of what the [MASK]s know.
    assert ours.accepted_lengths.max() > 1 or name == "sequence_bias"
    for field in ("scores", "logits"):
        for mine, others in zip(getattr(ours, field) or (), getattr(theirs, field) or (), strict=True):
            torch.testing.assert_close(mine, others, atol=1e-3, rtol=1e-3)


def test_two_hundred_prompts_in_batches_of_eight():
    model = agreeing_model(seed=6)
    lengths = torch.randint(1, 24, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = random_prompts(lengths)
    tokens = forwards = 0.0
    for first in range(0, 200, 8):
        inputs = left_pad(prompts[first : first + 8])
        output = lossless(model, inputs)
        assert torch.equal(output.sequences, stock(model, inputs))
        tokens += float(output.accepted_lengths.sum())
        forwards += float((output.accepted_lengths > 0).sum())
    assert tokens / forwards > 1.25


def test_stop_strings_streams_and_time():
    tokenizer, model = make_tokenizer(), agreeing_model(seed=2, vocab_size=300, eos_token_id=None)
    model.generation_config.mars_mask_token_id = 299
    letters = set(tokenizer("abcdefghijklmnopqrstuvwxyz")["input_ids"])
    kwargs = {"tokenizer": tokenizer, "suppress_tokens": [token for token in range(300) if token not in letters]}
    inputs = tokenizer(["hello world", "abc"], return_tensors="pt", padding=True, padding_side="left")
    width = inputs["input_ids"].shape[1]
    free = [tokenizer.decode(row[width:]) for row in stock(model, inputs, **kwargs)]
    # The first three letters of each text, from its tenth on, that did not stand there before.
    kwargs["stop_strings"] = [
        next(text[k : k + 3] for k in range(10, 20) if text.index(text[k : k + 3]) == k) for text in free
    ]
    output, expected = lossless(model, inputs, **kwargs), stock(model, inputs, **kwargs)
    assert output.accepted_lengths.max() > 1
    # Without an end token the stock loop goes on with a row that has stopped until all have.
    ends = [width + int(count) for count in output.accepted_lengths.sum(-1)]
    assert max(ends) == expected.shape[1] < width + MAX_NEW
    for row, end in enumerate(ends):
        assert torch.equal(output.sequences[row, :end], expected[row, :end])
        assert any(tokenizer.decode(expected[row, width:end]).endswith(stop) for stop in kwargs["stop_strings"])

    alone = tokenizer("hello world", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    kwargs.pop("stop_strings")
    streamed = lossless(model, alone, streamer=streamer, **kwargs)
    assert streamed.accepted_lengths.max() > 1
    assert "".join(streamer) == tokenizer.decode(stock(model, alone, **kwargs)[0, alone["input_ids"].shape[1] :])
    assert lossless(model, alone, max_time=0.0).num_forwards == 1


def test_stateful_criteria_equal_stock_generate():
    model = agreeing_model(seed=2, eos_token_id=None)
    inputs = left_pad(random_prompts([6, 9, 4]))
    free = stock(model, inputs)[:, 9:]
    wanted = [free[0, 3:5].tolist(), free[1, 8:10].tolist(), free[2, 14:16].tolist()]
    ours = lossless(model, inputs, stopping_criteria=StoppingCriteriaList([TailMatch(wanted, 9)]))
    assert ours.accepted_lengths.max() > 1
    for row, text in enumerate(free.tolist()):
        end = next(k for k in range(2, len(text) + 1) if text[k - 2 : k] == wanted[row])
        length = int(ours.accepted_lengths[row].sum())
        assert ours.sequences[row, 9 : 9 + length].tolist() == text[:end]
        assert (ours.sequences[row, 9 + length :] == PAD).all()


def test_next_turn_and_embeddings():
    model = agreeing_model(seed=3)
    first = lossless(model, left_pad(random_prompts([7])))
    text = torch.cat([first.sequences, torch.tensor([[5, 6, 7]])], dim=-1)
    second = lossless(model, {"input_ids": text, "cache": first.cache})
    assert torch.equal(second.sequences, stock(model, {"input_ids": text}))
    embeds = model.get_input_embeddings()(text)
    assert torch.equal(lossless(model, {"inputs_embeds": embeds}).sequences, second.sequences[:, text.shape[1] :])


def test_num_forwards_and_scores():
    model = agreeing_model()
    inputs = left_pad(random_prompts([6, 9]))
    calls = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    output = lossless(model, inputs, output_scores=True)
    hook.remove()
    assert output.num_forwards == len(calls) == output.accepted_lengths.shape[1]
    expected = stock(model, inputs, output_scores=True, return_dict_in_generate=True)
    for step, (ours, theirs) in enumerate(zip(output.scores, expected.scores, strict=True)):
        going = output.accepted_lengths.sum(-1) > step
        torch.testing.assert_close(ours[going], theirs[going], atol=1e-3, rtol=1e-3)


def test_sampling_follows_the_ar_distribution():
    model = agreeing_model(vocab_size=61)
    prompt = left_pad(random_prompts([6]))
    many = {key: value.expand(3000, -1) for key, value in prompt.items()}
    kwargs = {"do_sample": True, "temperature": 0.7, "top_k": 4, "max_new_tokens": 3, "eos_token_id": None}
    torch.manual_seed(0)
    ours = lossless(model, many, **kwargs)
    torch.manual_seed(1)
    theirs = stock(model, many, **kwargs)
    assert ours.tokens_per_forward.mean() > 1.05
    for draws in (lambda s: s[:, 6], lambda s: s[:, 7], lambda s: s[:, 7] * 61 + s[:, 8]):
        size = 61 * 61
        a = torch.bincount(draws(ours.sequences), minlength=size) / 3000
        b = torch.bincount(draws(theirs), minlength=size) / 3000
        assert 0.5 * (a - b).abs().sum() < 0.05
