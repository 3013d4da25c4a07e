"""The cache of an output, edited as the caches of transformers are, and continued in the next turn."""

from __future__ import annotations

import copy

import pytest
import torch
from decoding_models import MASK, left_pad, random_prompts, tiny_model

from mars_hf import MarsCache

MODES = [{"mars_threshold": 0.1}, {"mars_threshold": 0.1, "mars_cache": "block"}, {"mars_lossless": True}]
WIDTH = 9


def generate(model, inputs, mode, **kwargs):
    return model.generate(**inputs, max_new_tokens=20, do_sample=False, return_dict_in_generate=True, **mode, **kwargs)


def turn(model, mode):
    """The output of a first turn, and the inputs of a second one."""
    inputs = left_pad(random_prompts([6, WIDTH, 4]))
    output = generate(model, inputs, mode)
    new = torch.randint(3, MASK, (3, 5), generator=torch.Generator().manual_seed(3))
    replied = torch.arange(output.sequences.shape[1] - WIDTH) < output.accepted_lengths.sum(-1)[:, None]
    mask = torch.cat([inputs["attention_mask"], replied.long(), torch.ones_like(new)], dim=-1)
    return output, {"input_ids": torch.cat([output.sequences, new], dim=-1), "attention_mask": mask}


def first_forward(model, inputs, mode, cache):
    """The output, and how many tokens of a row the first forward was fed."""
    fed = []
    hook = model.register_forward_pre_hook(lambda m, a, kw: fed.append(kw["input_ids"].shape[1]), with_kwargs=True)
    output = generate(model, inputs, mode, cache=cache)
    hook.remove()
    return output, fed[0]


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_of_inference_mode_is_continued_outside(mode):
    model = tiny_model(seed=2)
    with torch.inference_mode():
        first, second = turn(model, mode)
    second = {name: value.clone() for name, value in second.items()}
    expected = generate(model, second, mode).sequences
    assert torch.equal(generate(model, second, mode, cache=first.cache).sequences, expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_cropped_cache_is_continued_with_another_text(mode):
    model = tiny_model(seed=2)
    first, second = turn(model, mode)
    held = first.cache.get_seq_length()
    assert held == max(first.cache.host_cursor)
    first.cache.crop(-4)
    assert first.cache.get_seq_length() == held - 4
    # The last 4 tokens that the cache held, and what follows, are others now; so are paddings, which become text.
    second["input_ids"][:, held - 4 :] = second["input_ids"][:, held - 4 :].flip(-1)
    second["attention_mask"][:, held - 4 :] = 1
    expected = generate(model, second, mode)
    output, fed = first_forward(model, second, mode, first.cache)
    assert torch.equal(output.sequences, expected.sequences)
    assert fed < second["input_ids"].shape[1]
    with pytest.raises(ValueError, match="as a negative number, got 3"):
        first.cache.crop(3)


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_a_cache_are_selected_and_repeated(mode):
    model = tiny_model(seed=2)
    first, second = turn(model, mode)
    fork = copy.deepcopy(first.cache)
    rows = torch.tensor([2, 0])
    first.cache.batch_select_indices(rows)
    chosen = {name: value[rows] for name, value in second.items()}
    expected = generate(model, chosen, mode).sequences
    output, fed = first_forward(model, chosen, mode, first.cache)
    assert torch.equal(output.sequences, expected)
    assert fed < second["input_ids"].shape[1]
    masked = copy.deepcopy(fork)
    masked.batch_select_indices(torch.tensor([True, False, True]))
    kept = {name: value[[0, 2]] for name, value in second.items()}
    expected = generate(model, kept, mode).sequences
    assert torch.equal(generate(model, kept, mode, cache=masked).sequences, expected)
    fork.batch_repeat_interleave(2)
    repeated = {name: value.repeat_interleave(2, dim=0) for name, value in second.items()}
    expected = generate(model, repeated, mode).sequences
    assert torch.equal(generate(model, repeated, mode, cache=fork).sequences, expected)
    fork.reorder_cache(torch.arange(6).flip(0))
    assert fork.order == list(range(6))


def test_a_cache_that_was_reset_is_empty():
    model, mode = tiny_model(seed=2), MODES[0]
    first, second = turn(model, mode)
    first.cache.reset()
    assert first.cache.get_seq_length() == 0
    other = {name: value[:2, WIDTH:] for name, value in second.items()}
    other["attention_mask"] = torch.ones_like(other["input_ids"])
    expected = generate(model, other, mode).sequences
    assert torch.equal(generate(model, other, mode, cache=first.cache).sequences, expected)


def test_a_cache_of_embeddings_without_ids_is_not_continued():
    model, mode = tiny_model(seed=2), MODES[0]
    ids = random_prompts([7])[0][None]
    first = generate(model, {"inputs_embeds": model.get_input_embeddings()(ids)}, mode)
    reply = torch.cat([first.sequences, torch.randint(3, MASK, (1, 12))], dim=-1)
    for text in (reply, torch.cat([ids, reply], dim=-1)):
        with pytest.raises(ValueError, match="began with `inputs_embeds` that had no ids"):
            generate(model, {"input_ids": text}, mode, cache=first.cache)


def test_a_forward_that_is_not_of_mars_does_not_write_the_cache():
    model = tiny_model(seed=2)
    first, _ = turn(model, MODES[0])
    for cache in (MarsCache(), first.cache):
        with pytest.raises(ValueError, match="is written by MARS decoding only"):
            model(torch.tensor([[3], [4], [5]]), cache=cache)
