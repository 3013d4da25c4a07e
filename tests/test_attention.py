"""Attention with the query heads of a key-value head as further queries: the figures of `sdpa`, and no copy."""

from __future__ import annotations

import threading

import pytest
import torch
from decoding_models import left_pad, random_prompts, tiny_model
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mars_hf import attention
from mars_hf.attention import grouped_attention, grouped_heads


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("queries", [1, 5, 70])
def test_equals_sdpa(heads, queries):
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = heads[0] // heads[1]
    query, keys = torch.randn(3, heads[0], queries, 8), 80
    key, value = (torch.randn(3, heads[1], keys + 9, 8)[:, :, :keys] for _ in range(2))
    mask = torch.rand(3, 1, queries, keys) < 0.4
    mask[..., 0] = True
    added = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    for attention_mask in (mask, added, None):
        arguments = (module, query, key, value, attention_mask)
        ours, _ = grouped_attention(*arguments, scaling=0.3)
        stock, _ = sdpa_attention_forward(*arguments, scaling=0.3)
        torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)


def test_layers_share_the_other_form_of_the_mask_each_kind_its_own():
    torch.manual_seed(0)
    mask = torch.rand(2, 1, 3, 20) < 0.5
    mask[..., 0] = True
    for heads, dtype in ((4, torch.float32), (2, torch.float32), (4, torch.float64), (4, torch.float32)):
        module = torch.nn.Module()
        module.num_key_value_groups = heads // 2
        query = torch.randn(2, heads, 3, 8, dtype=dtype)
        key, value = (torch.randn(2, 2, 20, 8, dtype=dtype) for _ in range(2))
        ours, _ = grouped_attention(module, query, key, value, mask)
        stock, _ = sdpa_attention_forward(module, query, key, value, mask)
        torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)

    model = tiny_model(eos_token_id=None)
    forms = []
    fill = torch.Tensor.masked_fill_
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "masked_fill_", lambda *args: (forms.append(1), fill(*args))[1])
        output = model.generate(
            **left_pad(random_prompts([70, 50])), mars_threshold=0.5, max_new_tokens=9, return_dict_in_generate=True
        )
    assert model.config.num_hidden_layers > 1
    # The prompt of 70 tokens is none of its business.
    assert len(forms) == output.num_forwards - 1


def test_may_be_compiled():
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    mask = torch.ones(1, 1, 3, 20, dtype=torch.bool).tril(17)
    run = torch.compile(lambda *args: grouped_attention(torch.nn.Module(), *args)[0], backend="eager", fullgraph=True)
    for _ in range(2):
        expected, _ = grouped_attention(torch.nn.Module(), query, key, value, mask)
        torch.testing.assert_close(run(query, key, value, mask), expected)


def test_many_queries_are_left_to_sdpa(monkeypatch):
    left = []
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *args, **kwargs: left.append(args[1].shape[2]))
    for queries in (1, 64, 65):
        query, states = torch.randn(1, 4, queries, 8), torch.randn(1, 2, 80, 8)
        grouped_attention(torch.nn.Module(), query, states, states, torch.ones(1, 1, queries, 80, dtype=torch.bool))
    assert left == [65]


def test_steps_do_not_copy_the_cache_for_every_head(monkeypatch):
    model = tiny_model(eos_token_id=None)
    prompts = left_pad(random_prompts([70, 50]))
    expected = model.generate(**prompts, mars_threshold=0.1, mars_cache="none", max_new_tokens=20, do_sample=False)
    copies = []
    repeat = sdpa_attention.repeat_kv
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda states, n: (copies.append(1), repeat(states, n))[1])
    output = model.generate(**prompts, mars_threshold=0.1, max_new_tokens=20, do_sample=False)
    assert torch.equal(output, expected)
    # Keys and values of two layers, of the prompt only.
    assert len(copies) <= 4


def test_the_model_gets_its_attention_back():
    model = tiny_model()
    inputs = left_pad(random_prompts([6]))
    seen = []

    def throttle(step):
        seen.append(model.config._attn_implementation)
        if step.index == 2:
            raise RuntimeError("stop here")
        return 0.5

    with pytest.raises(RuntimeError, match="stop here"):
        model.generate(**inputs, mars_threshold=throttle, max_new_tokens=20)
    assert set(seen) == {"mars_grouped_sdpa"}
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    model.generate(**inputs, mars_threshold=0.5, max_new_tokens=8)
    assert model.config._attn_implementation == "eager"


def test_two_threads_leave_the_attention_as_it_was():
    model = tiny_model()
    inside, leave = threading.Event(), threading.Event()

    def other():
        with grouped_heads(model):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with grouped_heads(model):
        thread.start()
        inside.wait()
    leave.set()
    thread.join()
    assert model.config._attn_implementation == "sdpa"
