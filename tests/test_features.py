"""What else `generate` offers, with MARS on: sampling, stopping, streaming, scores, embeddings, several turns."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from conftest import make_tokenizer
from decoding_models import EOS, MASK, PAD, brute_force, left_pad, random_prompts, tiny_model
from transformers import (
    AsyncTextIteratorStreamer,
    EosTokenCriteria,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

MAX_NEW = 20


def generate(model, inputs, tau, **kwargs):
    kwargs = {"max_new_tokens": MAX_NEW, "do_sample": False, "return_dict_in_generate": True, **kwargs}
    return model.generate(**inputs, mars_threshold=tau, **kwargs)


# --- outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.4}])
def test_scores_and_logits_have_one_entry_per_token(extra):
    """With everything rejected but the first candidate, they must be those of stock `generate`."""
    model = tiny_model()
    inputs = left_pad(random_prompts([6, 9, 4]))
    # The first row ends early, so that candidates behind its end have been scored.
    early = int(model.generate(**inputs, max_new_tokens=5, do_sample=False)[0, -1])
    kwargs = {"output_scores": True, "output_logits": True, "eos_token_id": [EOS, early], **extra}
    common = {"max_new_tokens": MAX_NEW, "do_sample": False, "return_dict_in_generate": True}
    stock = model.generate(**inputs, **common, suppress_tokens=[MASK], **kwargs)
    # One row at a threshold that rejects all, so that no row takes the stock path.
    ours = generate(model, inputs, [1.0, 1.0, 0.999999], **kwargs)
    assert torch.equal(ours.sequences, stock.sequences)
    assert len(ours.scores) == len(ours.logits) == len(stock.scores)
    lengths = ours.accepted_lengths.sum(-1)
    for step in range(len(stock.scores)):
        going = step < lengths
        torch.testing.assert_close(ours.logits[step][going], stock.logits[step][going], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.scores[step][going], stock.scores[step][going], atol=1e-4, rtol=1e-4)
        assert not ours.logits[step][~going].any()
    assert lengths.min() < lengths.max()


@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.4}])
def test_scores_of_accepted_runs_belong_to_their_tokens(extra):
    model = tiny_model()
    inputs = left_pad(random_prompts([6, 9, 4]))
    output = generate(model, inputs, 0.05, output_scores=True, output_logits=True, **extra)
    assert output.tokens_per_forward.max() > 2
    for row, length in enumerate(output.accepted_lengths.sum(-1)):
        chosen = torch.stack([output.scores[step][row].argmax() for step in range(length)])
        assert torch.equal(chosen, output.sequences[row, 9 : 9 + length])
        if not extra:
            raw = torch.stack([output.logits[step][row] for step in range(length)]).index_fill(
                -1, torch.tensor(MASK), -torch.inf
            )
            assert torch.equal(raw.argmax(-1), chosen)


def test_several_sequences_per_prompt():
    model = tiny_model()
    torch.manual_seed(0)
    output = generate(
        model, left_pad(random_prompts([6, 9])), [0.05, 1.0], do_sample=True, num_return_sequences=3, top_k=5
    )
    assert output.sequences.shape[0] == 6
    assert output.tokens_per_forward[:3].min() > 1
    assert output.tokens_per_forward[3:].tolist() == [1.0, 1.0, 1.0]


# --- embeddings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("cache", ["cursor", "block"])
def test_embeddings_give_the_tokens_of_their_ids(family, cache):
    model = tiny_model(family)
    inputs = left_pad(random_prompts([6, 9, 4]))
    expected = generate(model, inputs, 0.1)
    embeds = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])}
    embeds["attention_mask"] = inputs["attention_mask"]
    output = generate(model, embeds, 0.1, mars_cache=cache)
    assert torch.equal(output.sequences, expected.sequences[:, 9:])
    both = generate(model, {**embeds, "input_ids": inputs["input_ids"]}, 0.1, mars_cache=cache)
    assert torch.equal(both.sequences, expected.sequences)
    criterion = Recorder()
    generate(model, embeds, 0.1, stopping_criteria=StoppingCriteriaList([criterion]))
    assert max(seen.shape[1] for seen in criterion.seen) == output.sequences.shape[1]


def test_embeddings_that_cannot_work_are_refused():
    model = tiny_model()
    inputs = left_pad(random_prompts([6]))
    embeds = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])}
    with pytest.raises(ValueError, match="`inputs_embeds` need a cache"):
        generate(model, embeds, 0.1, mars_cache="none")
    with pytest.raises(ValueError, match="not the same prompt"):
        generate(model, {**embeds, "input_ids": inputs["input_ids"][:, :3]}, 0.1)


# --- several turns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["cursor", "block"])
@pytest.mark.parametrize("lengths", [[7], [6, 9, 4]])
def test_a_returned_cache_goes_into_the_next_turn(cache, lengths):
    model = tiny_model(seed=2)
    inputs = left_pad(random_prompts(lengths))
    width = max(lengths)
    first = generate(model, inputs, 0.1, mars_cache=cache)
    lengths = first.accepted_lengths.sum(-1)
    new_turn = torch.randint(3, MASK, (len(lengths), 5), generator=torch.Generator().manual_seed(3))
    replied = torch.arange(first.sequences.shape[1] - width) < lengths[:, None]
    mask = torch.cat([inputs["attention_mask"], replied.long(), torch.ones_like(new_turn)], dim=-1)
    second = {"input_ids": torch.cat([first.sequences, new_turn], dim=-1), "attention_mask": mask}
    fresh = generate(model, second, 0.1, mars_cache=cache)
    assert fresh.tokens_per_forward.max() > 1.2
    fed = []
    hook = model.register_forward_pre_hook(lambda m, a, kw: fed.append(kw["input_ids"].shape[1]), with_kwargs=True)
    again = generate(model, {**second, "cache": first.cache}, 0.1, mars_cache=cache)
    hook.remove()
    assert torch.equal(again.sequences, fresh.sequences)
    assert fed[0] < second["input_ids"].shape[1]


def test_plain_decoding_continues_a_mars_cache():
    model = tiny_model(seed=2)
    first = generate(model, left_pad(random_prompts([7])), 0.1)
    text = torch.cat([first.sequences, torch.tensor([[5, 6, 7]])], dim=-1)
    plain = model.generate(text, max_new_tokens=MAX_NEW, do_sample=False)
    output = generate(model, {"input_ids": text, "cache": first.cache}, 1.0)
    assert torch.equal(output.sequences, plain)
    assert output.tokens_per_forward.tolist() == [1.0]


def test_a_cache_with_only_the_new_turn_is_refused():
    model = tiny_model()
    first = generate(model, left_pad(random_prompts([7])), 0.1)
    with pytest.raises(ValueError, match="Pass the whole text"):
        generate(model, {"input_ids": torch.tensor([[5, 6, 7]]), "cache": first.cache}, 0.1)


# --- stopping --------------------------------------------------------------------------------------------------------


class Recorder(StoppingCriteria):
    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.clone())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class TailMatch(StoppingCriteria):
    """As lm-eval's: knows its rows by number, remembers which are done, and looks at the tail of what it is shown."""

    def __init__(self, wanted: list[list[int]], width: int):
        self.wanted, self.width, self.done = wanted, width, [False] * len(wanted)

    def __call__(self, input_ids, scores, **kwargs):
        for row, wanted in enumerate(self.wanted):
            tail = input_ids[row, self.width :][-len(wanted) :].tolist()
            self.done[row] = self.done[row] or tail == wanted
        return torch.tensor(self.done)


@pytest.mark.parametrize("tau", [1e-9, 0.1])
def test_stateful_criteria_stop_each_row_where_ar_would(tau):
    model = tiny_model(seed=13)
    model.generation_config.eos_token_id = None
    prompts = random_prompts([6, 9, 4, 7])
    inputs = left_pad(prompts)
    texts = [brute_force(model, prompt, tau, max_new=MAX_NEW, eos=())[0] for prompt in prompts]
    wanted = [text[place : place + 2] for text, place in zip(texts, (1, 6, 11, 4), strict=True)]
    output = generate(model, inputs, tau, stopping_criteria=StoppingCriteriaList([TailMatch(wanted, 9)]))
    for row, text in enumerate(texts):
        end = next(k for k in range(2, len(text) + 1) if text[k - 2 : k] == wanted[row])
        length = int(output.accepted_lengths[row].sum())
        assert output.sequences[row, 9 : 9 + length].tolist() == text[:end]
        assert (output.sequences[row, 9 + length :] == PAD).all()
    assert output.accepted_lengths.max() > 1


class EndsNever(EosTokenCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class LengthByRow(MaxLengthCriteria):
    def __init__(self, lengths: list[int]):
        super().__init__(max_length=200)
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.lengths


@pytest.mark.parametrize("tau", [1e-9, 0.1])
def test_a_subclass_of_a_stock_criterion_is_asked(tau):
    model = tiny_model(seed=13)
    inputs = left_pad(random_prompts([6, 9]))
    plain = generate(model, inputs, tau, eos_token_id=None)
    criteria = StoppingCriteriaList([EndsNever(int(plain.sequences[0, 13])), LengthByRow([14, 19])])
    output = generate(model, inputs, tau, eos_token_id=None, stopping_criteria=criteria)
    assert output.accepted_lengths.sum(-1).tolist() == [5, 10]
    assert torch.equal(output.sequences[0, :14], plain.sequences[0, :14])
    assert torch.equal(output.sequences[1], plain.sequences[1, :19])


def test_stop_strings_and_max_time():
    tokenizer = make_tokenizer()
    model = tiny_model(vocab_size=300, eos_token_id=None)
    model.generation_config.mars_mask_token_id = 299
    letters = set(tokenizer("abcdefghijklmnopqrstuvwxyz")["input_ids"])
    kwargs = {"tokenizer": tokenizer, "suppress_tokens": [token for token in range(299) if token not in letters]}
    inputs = tokenizer(["hello world", "abc"], return_tensors="pt", padding=True, padding_side="left")
    width = inputs["input_ids"].shape[1]
    free = [tokenizer.decode(row[width:]) for row in generate(model, inputs, 1e-9, **kwargs).sequences]
    stops = [free[0][5:8], free[1][10:12]]
    output = generate(model, inputs, 1e-9, stop_strings=stops, **kwargs)
    assert output.accepted_lengths.max() > 1
    for row, text in enumerate(free):
        end = min(text.index(stop) + len(stop) for stop in stops if stop in text)
        length = int(output.accepted_lengths[row].sum())
        assert tokenizer.decode(output.sequences[row, width : width + length]) == text[:end]
    timed = generate(model, inputs, 1e-9, max_time=0.0)
    assert timed.sequences.shape[1] == width + 1


def test_rows_that_stop_without_any_padding_token_are_refused():
    model = tiny_model(eos_token_id=None, pad_token_id=None)
    criteria = StoppingCriteriaList([Recorder()])
    with pytest.raises(ValueError, match="`pad_token_id`"):
        generate(model, left_pad(random_prompts([5, 5])), 0.1, stopping_criteria=criteria)


# --- streaming -------------------------------------------------------------------------------------------------------


def text_model():
    tokenizer = make_tokenizer()
    model = tiny_model(vocab_size=300, eos_token_id=None)
    model.generation_config.mars_mask_token_id = 299
    return model, tokenizer, tokenizer("hello", return_tensors="pt")


def test_iterator_streamer_gives_the_text():
    model, tokenizer, inputs = text_model()
    output = generate(model, inputs, 0.02)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    thread = threading.Thread(target=lambda: generate(model, inputs, 0.02, streamer=streamer))
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert output.tokens_per_forward > 1.2
    assert text == tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :])


def test_async_streamer_gives_the_text():
    model, tokenizer, inputs = text_model()
    expected = tokenizer.decode(generate(model, inputs, 0.02).sequences[0, inputs["input_ids"].shape[1] :])

    async def collect():
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True)
        threading.Thread(target=lambda: generate(model, inputs, 0.02, streamer=streamer)).start()
        return "".join([piece async for piece in streamer])

    assert asyncio.run(collect()) == expected


# --- processors and sampling -----------------------------------------------------------------------------------------


class RowNumbers(LogitsProcessor):
    """Forces row r to emit token 10 + r at every even new token."""

    def __init__(self, width: int):
        self.width = width

    def __call__(self, input_ids, scores):
        if (input_ids.shape[1] - self.width) % 2 == 0:
            scores = torch.full_like(scores, -torch.inf)
            scores[torch.arange(len(scores)), 10 + torch.arange(len(scores))] = 0.0
        return scores


def test_processors_know_their_rows():
    model = tiny_model()
    output = generate(
        model, left_pad(random_prompts([6, 9, 4])), 1e-9, logits_processor=LogitsProcessorList([RowNumbers(9)])
    )
    for row in range(3):
        length = int(output.accepted_lengths[row].sum())
        assert (output.sequences[row, 9 : 9 + length : 2] == 10 + row).all()


@pytest.mark.parametrize("mode", [{"mars_threshold": 0.3}, {"mars_lossless": True}])
def test_rows_of_unequal_length_are_penalised_together(mode, monkeypatch):
    """A repetition penalty asks which tokens a text holds, so a step calls it once for each place of its window."""
    calls = []
    stock = RepetitionPenaltyLogitsProcessor.__call__
    monkeypatch.setattr(RepetitionPenaltyLogitsProcessor, "__call__", lambda *a: calls.append(None) or stock(*a))
    model, prompts = tiny_model(), random_prompts([6, 9, 4, 7])
    kwargs = {"max_new_tokens": MAX_NEW, "do_sample": False, "repetition_penalty": 1.3, "eos_token_id": None}
    output = model.generate(**left_pad(prompts), **kwargs, **mode, return_dict_in_generate=True)
    # A threshold asks about the first candidate that it rejects, too.
    asked = (output.accepted_lengths.amax(0) + ("mars_threshold" in mode)).clamp(max=4)
    assert len(calls) <= asked.sum()
    lengths = output.accepted_lengths.cumsum(-1)
    assert (lengths != lengths[:1]).any(), "the rows are of one length all the way"
    assert output.tokens_per_forward.max() > 1
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt[None], **kwargs, **mode)
        assert output.sequences[row, 9:].tolist() == alone[0, len(prompt) :].tolist()


def test_prefix_allowed_tokens():
    model = tiny_model()
    output = generate(
        model,
        left_pad(random_prompts([6, 9])),
        1e-9,
        prefix_allowed_tokens_fn=lambda row, text: [20 + row, 30 + len(text) % 7],
    )
    for row in range(2):
        for place in range(9, 9 + int(output.accepted_lengths[row].sum())):
            assert output.sequences[row, place] in (20 + row, 30 + place % 7)


@pytest.mark.parametrize("mode", [{"mars_threshold": 1e-9}, {"mars_lossless": True, "prompt_lookup_num_tokens": 4}])
def test_prefix_allowed_tokens_knows_only_what_it_has_allowed(mode):
    """As the tries of constrained decoding: nothing follows a text that they have not let come."""

    def allowed(row, text):
        if not set(text[9:].tolist()) <= {10 + row, 20 + row}:
            return []
        return [10 + row, 20 + row] if len(text) < 15 + 3 * row else [EOS]

    model, inputs = tiny_model(), left_pad(random_prompts([6, 9, 4]))
    kwargs = {"max_new_tokens": MAX_NEW, "do_sample": False, "prefix_allowed_tokens_fn": allowed}
    output = model.generate(**inputs, **kwargs, return_dict_in_generate=True, **mode)
    assert output.accepted_lengths.sum(-1).tolist() == [7, 10, 13]
    assert output.tokens_per_forward.max() > 1
    for row, length in enumerate([7, 10, 13]):
        assert set(output.sequences[row, 9 : 8 + length].tolist()) <= {10 + row, 20 + row}


def test_a_subclass_of_the_prefix_processor_is_kept():
    class OnlySeven(PrefixConstrainedLogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, float("-inf")).index_fill(-1, torch.tensor([7]), 0.0)

    own = LogitsProcessorList([OnlySeven(lambda row, text: [8], num_beams=1)])
    output = tiny_model().generate(
        **left_pad(random_prompts([6])), mars_threshold=0.1, max_new_tokens=5, do_sample=False, logits_processor=own
    )
    assert output[0, 6:].tolist() == [7] * 5


@pytest.mark.parametrize(
    "warper", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"typical_p": 0.7}, {"temperature": 0.5}]
)
def test_warpers_at_once_and_one_by_one_allow_the_same_tokens(warper):
    """The fast path warps a whole window; a criterion that never stops forces the slow path."""
    model = tiny_model()
    inputs = {key: value.expand(64, -1) for key, value in left_pad(random_prompts([6])).items()}
    kwargs = {"do_sample": True, "top_k": 0, "output_scores": True, "max_new_tokens": 6, **warper}
    torch.manual_seed(0)
    fast = generate(model, inputs, 0.05, **kwargs)
    torch.manual_seed(0)
    slow = generate(model, inputs, 0.05, stopping_criteria=StoppingCriteriaList([Recorder()]), **kwargs)
    torch.testing.assert_close(fast.scores[0], slow.scores[0])
    for output in (fast, slow):
        for step, scores in enumerate(output.scores):
            going = output.accepted_lengths.sum(-1) > step
            tokens = output.sequences[going, 6 + step]
            assert scores[going].gather(1, tokens[:, None]).isfinite().all()
    assert fast.tokens_per_forward.mean() > 1.1


# --- the block cache -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [4, 5, 16, 32])
def test_forwards_of_the_block_cache(block):
    """One forward per step, and one for each block that all rows still decoding have filled."""
    model = tiny_model(eos_token_id=None)
    calls = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    cache = {"mars_cache": "block", "mars_cache_block_size": block}
    output = generate(model, left_pad(random_prompts([6, 9, 4])), 0.3, max_new_tokens=40, **cache)
    hook.remove()
    frozen = writes = 0
    for before in output.accepted_lengths.cumsum(-1).T[:-1].tolist():
        if all(length - frozen >= block for length in before if length < 40):
            frozen, writes = frozen + block, writes + 1
    assert writes >= 1
    assert output.num_forwards == len(calls) == output.accepted_lengths.shape[1] + writes
    waits = (output.accepted_lengths == 0) & (output.accepted_lengths.cumsum(-1) < 40)
    assert waits.any()


def test_rows_of_a_block_wait_and_rows_of_the_cursor_do_not():
    model = tiny_model(eos_token_id=None)
    inputs = left_pad(random_prompts([6, 9, 4]))
    cursor = generate(model, inputs, 0.1, max_new_tokens=40)
    block = generate(model, inputs, 0.1, max_new_tokens=40, mars_cache="block", mars_cache_block_size=4)
    assert torch.equal(cursor.sequences, block.sequences)
    assert cursor.num_forwards < block.num_forwards
    ends = (cursor.accepted_lengths > 0).sum(-1)
    for row, end in enumerate(ends):
        assert (cursor.accepted_lengths[row, :end] > 0).all()


# --- random everything -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_random_prompts_windows_thresholds_and_stops(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    model = tiny_model(("llama", "mistral", "gemma3_text")[seed % 3], seed=seed)
    prompts = random_prompts([draw(1, 15) for _ in range(draw(1, 6))], seed=seed)
    window, max_new, tau = draw(1, 9), draw(1, 30), (1e-9, 0.05, 0.2, 0.6)[draw(0, 4)]
    stops = [EOS, draw(3, MASK), draw(3, MASK)]
    block = {"mars_cache": "block", "mars_cache_block_size": window + draw(0, 9)}
    cache = ({}, block)[draw(0, 2)]
    inputs = left_pad(prompts, extra=draw(0, 18))
    width = inputs["input_ids"].shape[1]
    output = generate(model, inputs, tau, max_new_tokens=max_new, eos_token_id=stops, mars_block_size=window, **cache)
    for row, prompt in enumerate(prompts):
        tokens, _ = brute_force(model, prompt, tau, window=window, max_new=max_new, eos=stops)
        length = int(output.accepted_lengths[row].sum())
        assert output.sequences[row, width : width + length].tolist() == tokens
        assert (output.sequences[row, width + length :] == PAD).all()
