"""What a checkpoint's config, a batch or a call brings that a decoding step must not trip over."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from decoding_models import MASK, left_pad, random_prompts, tiny_model
from transformers import AutoModelForCausalLM, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList

from mars_hf import AutoMarsModelForCausalLM, MarsCache
from mars_hf.baselines import jacobi_generate

MODES = {
    "cursor": {"mars_threshold": 0.05},
    "block": {"mars_threshold": 0.05, "mars_cache": "block"},
    "none": {"mars_threshold": 0.05, "mars_cache": "none"},
    "lossless": {"mars_lossless": True, "prompt_lookup_num_tokens": 3},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [9.0] * 4,
    "original_max_position_embeddings": 16,
}


def generate(model, inputs, **kwargs):
    kwargs = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, **kwargs}
    return model.generate(**inputs, **kwargs)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_experts_whose_config_asks_for_the_router(mode):
    """As training with a router loss leaves it in the config."""
    plain, asking = tiny_model("qwen3_moe"), tiny_model("qwen3_moe", output_router_logits=True)
    inputs = left_pad(random_prompts([6, 9, 4]))
    expected, output = (generate(model, inputs, **mode) for model in (plain, asking))
    assert torch.equal(output.sequences, expected.sequences)
    assert output.tokens_per_forward.max() > 1


def test_jacobi_of_experts_whose_config_asks_for_the_router():
    inputs = left_pad(random_prompts([6, 9, 4]))
    expected, output = (
        jacobi_generate(tiny_model("qwen3_moe", output_router_logits=asks), **inputs, max_new_tokens=8, window=4)
        for asks in (False, True)
    )
    assert torch.equal(output.sequences, expected.sequences)


@pytest.mark.parametrize(("rows", "is_few"), [(2, True), (40, False)])
@pytest.mark.parametrize("mode", [MODES["cursor"], {"mars_lossless": True, "mars_tree_budget": 8}])
def test_weights_of_experts_are_copied_for_few_tokens_only(mode, rows, is_few, monkeypatch):
    """On an accelerator `_optimize_model_for_decode` copies the weights of a token's experts: never for a prompt."""
    inside, forwards = [0], []

    @contextmanager
    def count(self):
        inside[0] += 1
        yield
        inside[0] -= 1

    model = tiny_model("qwen3_moe")
    monkeypatch.setattr(type(model), "_optimize_model_for_decode", count)
    model.register_forward_pre_hook(lambda *_: forwards.append(inside[0]))
    generate(model, left_pad(random_prompts([5] * rows)), **mode)
    assert forwards[0] == 0
    assert set(forwards[1:]) == {int(is_few)}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_text_does_not_cross_where_longrope_changes(mode):
    model = tiny_model("phi3", original_max_position_embeddings=16, sliding_window=None, rope_parameters=LONGROPE)
    plain = {"suppress_tokens": [MASK], "eos_token_id": None}
    for lengths, new_tokens in (([10, 4], 6), ([17, 20], 20)):
        inputs = left_pad(random_prompts(lengths))
        stock = generate(model, inputs, max_new_tokens=new_tokens, **plain).sequences
        # Sure of nothing, or confirmed: the tokens of stock.
        exact = mode if "mars_lossless" in mode else {**mode, "mars_threshold": [0.9999999, 1.0]}
        assert torch.equal(generate(model, inputs, max_new_tokens=new_tokens, **plain, **exact).sequences, stock)
    for lengths, new_tokens in (([10, 4], 7), ([17, 16], 1), ([17, 3], 8)):
        with pytest.raises(ValueError, match="crosses position 16, from which on the `longrope`"):
            generate(model, left_pad(random_prompts(lengths)), max_new_tokens=new_tokens, **mode)
    with pytest.raises(ValueError, match="crosses position 16"):
        jacobi_generate(model, random_prompts([10])[0][None], max_new_tokens=7)


@pytest.mark.parametrize("mode", [MODES["cursor"], MODES["lossless"]])
def test_prefix_allowed_tokens_of_several_sequences_per_prompt(mode):
    def allowed(prompt, text):
        asked.add(prompt)
        return [20 + prompt, 30 + prompt]

    asked = set()
    output = generate(
        tiny_model(),
        left_pad(random_prompts([6, 9])),
        num_return_sequences=3,
        do_sample=True,
        prefix_allowed_tokens_fn=allowed,
        **mode,
    )
    assert asked == {0, 1}
    assert set(output.sequences[:3, 9:].flatten().tolist()) <= {20, 30}
    assert set(output.sequences[3:, 9:].flatten().tolist()) <= {21, 31}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs another device than the host")
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_prompts_on_the_host(mode):
    model, inputs = tiny_model().cuda(), left_pad(random_prompts([6, 9, 4]))
    output = generate(model, inputs, **mode)
    assert output.sequences.device.type == "cpu"
    on_device = {name: value.cuda() for name, value in inputs.items()}
    assert torch.equal(output.sequences, generate(model, on_device, **mode).sequences.cpu())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", [MODES["cursor"], MODES["block"], MODES["lossless"]])
def test_a_cache_without_text_begins_anew(mode, attention):
    model = tiny_model(attn_implementation=attention)
    new = left_pad(random_prompts([5, 11, 7], seed=5))
    expected = generate(model, new, **mode).sequences
    cropped = generate(model, left_pad(random_prompts([6, 9, 4])), **mode).cache
    cropped.crop(-1000)
    assert torch.equal(generate(model, new, cache=cropped, **mode).sequences, expected)
    emptied = generate(model, left_pad(random_prompts([6, 4])), **mode).cache
    emptied.crop(-1000)
    assert torch.equal(generate(model, new, cache=emptied, **mode).sequences, expected), "another number of rows"
    failed = MarsCache()

    def fail(*_):
        raise InterruptedError

    hook = model.register_forward_hook(fail)
    with pytest.raises(InterruptedError):
        generate(model, left_pad(random_prompts([6, 9, 4])), cache=failed, **mode)
    hook.remove()
    assert torch.equal(generate(model, new, cache=failed, **mode).sequences, expected)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("limit", [1, 4, 9])
def test_a_length_limit_below_the_prompt_gives_one_token(limit, mode):
    inputs = left_pad(random_prompts([6, 9]))
    kwargs = {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(limit)]), "suppress_tokens": [MASK]}
    model = tiny_model()
    stock, output = (generate(model, inputs, **kwargs, **more) for more in ({}, mode))
    assert stock.sequences.shape == (2, 10)
    assert torch.equal(output.sequences, stock.sequences)
    assert output.tokens_per_forward.tolist() == [1.0, 1.0]


def test_a_cache_continued_one_token_at_a_time_refuses_what_mars_refuses():
    model, inputs = tiny_model(), left_pad(random_prompts([6, 9]))
    first = generate(model, inputs, **MODES["cursor"])
    longer = {"input_ids": torch.cat([first.sequences, torch.full((2, 1), 5)], dim=-1)}
    for refused in ({"prefill_chunk_size": 2}, {"output_hidden_states": True}):
        with pytest.raises(ValueError, match="is not supported together with `mars_threshold`"):
            generate(model, longer, cache=first.cache, mars_threshold=1.0, **refused)


@pytest.mark.parametrize("clocked", [{"mars_adaptive_window": True, "mars_threshold": 0.5}, {"mars_lossless": True}])
def test_processes_of_one_model_do_not_follow_their_own_clocks(clocked):
    model, inputs = tiny_model(), left_pad(random_prompts([6, 9]))
    generate(model, inputs, **clocked)
    if "mars_lossless" in clocked:
        clocked = {**clocked, "mars_tree_budget": "auto"}
    model._tp_size = 2
    with pytest.raises(ValueError, match="follow the clock of each process"):
        generate(model, inputs, **clocked)


def test_activated_lora_is_refused():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["q_proj"], init_lora_weights=False, alora_invocation_tokens=[7, 8], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(tiny_model(), config).eval()
    inputs = {"input_ids": torch.tensor([[3, 4, 7, 8, 5]])}
    with pytest.raises(ValueError, match="activated LoRA"):
        model.generate(**inputs, max_new_tokens=4, mars_threshold=0.5)
    model.generate(**inputs, max_new_tokens=4)


def test_a_new_adapter_has_the_last_word(tmp_path):
    peft = pytest.importorskip("peft")
    tiny_model().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    GenerationConfig(mars_block_size=8).save_pretrained(tmp_path / "adapter")
    model = AutoMarsModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert model.generation_config.mars_block_size == 8
    assert model.generation_config.mars_mask_token_id == MASK


def test_loading_info_comes_along(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    model, info = AutoMarsModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert generate(model, left_pad(random_prompts([6])), **MODES["cursor"]).num_forwards > 0
