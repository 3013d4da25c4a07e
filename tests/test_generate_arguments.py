"""Every argument of `generate` and every field of a generation config, with MARS on: it works or it raises."""

from __future__ import annotations

import inspect

import pytest
import torch
from decoding_models import EOS, MASK, PAD, left_pad, random_prompts, tiny_model
from transformers import (
    CompileConfig,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkingConfig,
)

from mars_hf.options import DEFAULTS, ONE_BY_ONE

WIDTH = 9
ON = {"mars_threshold": 0.5}
LOSSLESS = {"mars_lossless": True}
SAMPLE = {"do_sample": True, "top_k": 0}
# What must give the tokens of stock `generate` where only first candidates are accepted.
WORKS = {
    "max_length": {"max_length": WIDTH + 12, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 7},
    "min_length": {"min_length": WIDTH + 9, "eos_token_id": list(range(EOS, 50))},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(EOS, 50))},
    "do_sample": SAMPLE,
    "temperature": {**SAMPLE, "temperature": 0.6},
    "top_k": {"do_sample": True, "top_k": 3},
    "top_p": {**SAMPLE, "top_p": 0.6},
    "min_p": {**SAMPLE, "min_p": 0.1},
    "top_h": {**SAMPLE, "top_h": 0.5},
    "typical_p": {**SAMPLE, "typical_p": 0.5},
    "epsilon_cutoff": {**SAMPLE, "epsilon_cutoff": 0.05},
    "eta_cutoff": {**SAMPLE, "eta_cutoff": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 0.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[47], [41, 39]]},
    "renormalize_logits": {**SAMPLE, "top_k": 5, "renormalize_logits": True, "output_scores": True},
    "forced_bos_token_id": {"forced_bos_token_id": 7},
    "forced_eos_token_id": {"forced_eos_token_id": EOS},
    "remove_invalid_values": {"remove_invalid_values": True},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": EOS},
    "suppress_tokens": {"suppress_tokens": [*range(10, 30), MASK]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(5, 50))},
    "sequence_bias": {"sequence_bias": [[[7], 30.0], [[9, 11], 5.0]]},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "num_return_sequences": {**SAMPLE, "num_return_sequences": 2},
    "output_scores": {"output_scores": True},
    "output_logits": {"output_logits": True},
    "pad_token_id": {"pad_token_id": 5, "eos_token_id": list(range(EOS, 20))},
    "eos_token_id": {"eos_token_id": list(range(EOS, 20))},
    "use_cache": {"use_cache": True},
    "cache_implementation": {"cache_implementation": "dynamic"},
    "disable_compile": {"disable_compile": True},
}
# For loops that stock `generate` takes from the Hub, and asks for trust before anything else.
FROM_THE_HUB = {"trust_remote_code": True}
REFUSED = {
    "num_beams": {"num_beams": 2},
    "use_mtp": {"use_mtp": True},
    "use_cache": {"use_cache": False},
    "cache_implementation": {"cache_implementation": "offloaded"},
    "cache_implementation, paged": {"cache_implementation": "paged"},
    "cache_config": {"cache_config": {"backend": "quanto"}},
    "max_cache_len": {"max_cache_len": 64},
    "token_healing": {"token_healing": True},
    "guidance_scale": {"guidance_scale": 2.0},
    "watermarking_config, SynthID": {
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=3),
        "do_sample": True,
    },
    "output_attentions": {"output_attentions": True},
    "output_hidden_states": {"output_hidden_states": True},
    "is_assistant": {"is_assistant": True},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 2},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "compile_config": {"compile_config": CompileConfig()},
    "continuous_batching_config": {"continuous_batching_config": {"block_size": 4}},
    "penalty_alpha": {"penalty_alpha": 0.5, "top_k": 4, **FROM_THE_HUB},
    "dola_layers": {"dola_layers": "low", **FROM_THE_HUB},
    "num_beam_groups": {"num_beam_groups": 2, "num_beams": 2, **FROM_THE_HUB},
    "constraints": {"constraints": [1], **FROM_THE_HUB},
    "force_words_ids": {"force_words_ids": [[1]], **FROM_THE_HUB},
    "prefill_chunk_size": {"prefill_chunk_size": 2},
    "negative_prompt_ids": {"negative_prompt_ids": torch.tensor([[3], [4], [5]])},
    "negative_prompt_attention_mask": {"negative_prompt_attention_mask": torch.ones(3, 1)},
    "custom_generate": {"custom_generate": lambda model, **kwargs: None},
    "synced_gpus": {"synced_gpus": True},
    "assistant_model": {"assistant_model": tiny_model()},
    "logits_processor": {
        "logits_processor": LogitsProcessorList([UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0, tiny_model())])
    },
}
# What the refusal names, where that is not the argument.
NAMED = {
    "watermarking_config, SynthID": "`SynthIDTextWatermarkLogitsProcessor`",
    "penalty_alpha": "`contrastive_search`",
    "dola_layers": "`dola_generation`",
    "num_beam_groups": "`group_beam_search`",
    "constraints": "`constrained_beam_search`",
    "force_words_ids": "`constrained_beam_search`",
    "logits_processor": "`UnbatchedClassifierFreeGuidanceLogitsProcessor`",
}
# Tested elsewhere, where they need more than a value.
ELSEWHERE = {
    *("max_time", "stop_strings", "return_dict_in_generate"),
    *("inputs", "generation_config", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer"),
}
# Means nothing to stock greedy or sampled decoding of a decoder-only model either.
MEANINGLESS = {
    *("early_stopping", "length_penalty", "diversity_penalty", "low_memory", "decoder_start_token_id", "bos_token_id"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "speculation_type"),
    *("max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
}


def test_nothing_is_left_out():
    fields = {name for name in GenerationConfig().to_dict() if not name.startswith("_")} - {"transformers_version"}
    arguments = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    refused = {name.split(",")[0] for name in REFUSED}
    assert fields | arguments == set(WORKS) | refused | ELSEWHERE | MEANINGLESS


@pytest.mark.parametrize("name", WORKS)
def test_works_as_in_stock_generate(name):
    model = tiny_model(seed=4)
    kwargs = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "eos_token_id": None}
    kwargs |= {"pad_token_id": PAD, **WORKS[name]}
    inputs = left_pad(random_prompts([6, WIDTH, 4]))
    torch.manual_seed(0)
    stock = model.generate(**inputs, **{"suppress_tokens": [MASK], **kwargs})
    torch.manual_seed(0)
    # One row below 1, so that it is not the stock loop that decodes; draws come in its order for single candidates.
    window = 1 if kwargs["do_sample"] else 4
    ours = model.generate(**inputs, mars_threshold=[1.0, 1.0, 0.9999999], mars_block_size=window, **kwargs)
    assert torch.equal(ours.sequences, stock.sequences)
    for field in ("scores", "logits"):
        for mine, theirs in zip(getattr(ours, field) or (), getattr(stock, field) or (), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


# Nothing that a greedy text or a step would show.
SHOWS_NOTHING = {
    "use_cache",
    "cache_implementation",
    "disable_compile",
    "output_scores",
    "output_logits",
    "remove_invalid_values",
    "do_sample",
    "forced_bos_token_id",
}


@pytest.mark.parametrize("name", [name for name in WORKS if name not in SHOWS_NOTHING])
def test_what_works_does_something(name):
    model = tiny_model(seed=4)
    kwargs = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None, **WORKS[name]}
    plain = {key: value for key, value in kwargs.items() if key != name} | {"output_scores": False}
    if name in ("max_length", "max_new_tokens"):
        plain["max_new_tokens"] = 13
    if name == "eos_token_id":
        plain["eos_token_id"] = None
    inputs = left_pad(random_prompts([6, WIDTH, 4]))
    outputs = []
    for settings in (kwargs, plain):
        torch.manual_seed(0)
        output = model.generate(**inputs, mars_threshold=0.05, return_dict_in_generate=True, **settings)
        outputs.append(output)
    if name == "renormalize_logits":
        assert torch.allclose(outputs[0].scores[0].logsumexp(-1), torch.zeros(3), atol=1e-5)
    else:
        assert outputs[0].sequences.shape != outputs[1].sequences.shape or not torch.equal(
            outputs[0].sequences, outputs[1].sequences
        )


@pytest.mark.parametrize("turned_on_by", ["call", "model", "config"])
@pytest.mark.parametrize(
    ("name", "mode"),
    # A lossless step drafts by a lookup, too.
    [(name, mode) for name in REFUSED for mode in (ON, LOSSLESS) if mode is ON or name != "prompt_lookup_num_tokens"],
)
@pytest.mark.filterwarnings("ignore")
def test_is_refused_before_any_forward_pass(name, mode, turned_on_by):
    model = tiny_model()
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass before the refusal"))
    kwargs = {"max_new_tokens": 8, "return_dict_in_generate": True, **REFUSED[name]}
    if turned_on_by == "call":
        kwargs |= mode
    elif turned_on_by == "model":
        model.generation_config.update(**mode, allow_custom_entries=True)
    else:
        kwargs["generation_config"] = GenerationConfig(**mode)
    with pytest.raises(ValueError, match=NAMED.get(name, f"`{name.split(',')[0]}")) as raised:
        model.generate(**left_pad(random_prompts([6, WIDTH, 4])), **kwargs)
    # Setting it to 1.0 turns off neither lossless decoding nor a threshold of entropy.
    named = str(raised.value).replace(ONE_BY_ONE, "")
    assert "mars_threshold=1.0" not in named
    assert mode is ON or "mars_threshold" not in named


WITHOUT_EFFECT = {
    "draft length": ({**ON, "mars_draft_length": 3}, "`mars_draft_length=3` .* set `mars_lossless=True`"),
    "cursor": ({**ON, "mars_cache_block_size": 16}, "`mars_cache_block_size=16` .* set `mars_cache='block'`"),
    "none": ({**ON, "mars_cache": "none", "mars_cache_block_size": 16}, "`mars_cache_block_size=16` .* no effect"),
    "confidence": ({**LOSSLESS, "mars_confidence": "margin"}, "`mars_confidence='margin'` .* set `mars_threshold`"),
    "lossless block": ({**LOSSLESS, "mars_cache_block_size": 16}, "`mars_cache_block_size=16` .* no effect"),
    "window": ({**LOSSLESS, "mars_adaptive_window": True}, "`mars_adaptive_window=True` .* no effect"),
    "two lengths": ({**LOSSLESS, "mars_draft_length": 3, "mars_block_size": 5}, "`mars_block_size=5` .* no effect"),
    "off, block size": ({"mars_block_size": 5}, "`mars_block_size=5` .* set `mars_threshold`"),
    "off, cache": ({"mars_cache": "block"}, "`mars_cache='block'` .* set `mars_threshold`"),
    "off, confidence": ({"mars_confidence": "margin"}, "`mars_confidence='margin'` .* set `mars_threshold`, without"),
    "off, cache block": ({"mars_cache_block_size": 16}, "16` .* set `mars_cache='block'`, with `mars_threshold`"),
    "off, draft length": ({"mars_draft_length": 3}, r"`mars_draft_length=3` .* set `mars_lossless=True`\.$"),
    "off, budget": ({"mars_tree_budget": 3}, r"`mars_tree_budget=3` .* set `mars_lossless=True`\.$"),
    "off, window": ({"mars_adaptive_window": True}, "`mars_adaptive_window=True` .* set `mars_threshold`"),
    "off, prepacking": ({"mars_prepack_weights": False}, "`mars_prepack_weights=False` .* set `mars_threshold`"),
    "off, mask": ({"mars_mask_token_id": 5}, "`mars_mask_token_id=5` .* set `mars_threshold`"),
    "off, bogus cache": ({"mars_cache": "bogus"}, "`mars_cache` must be one of"),
    "off, bogus block size": ({"mars_block_size": 0}, "`mars_block_size` must be"),
    "bogus lossless": ({"mars_lossless": "yes"}, "`mars_lossless` must be True or False"),
    "bogus window": ({**ON, "mars_adaptive_window": 3}, "`mars_adaptive_window` must be True or False"),
    "bogus prepacking": ({**ON, "mars_prepack_weights": 3}, "`mars_prepack_weights` must be True or False"),
    "window, block": ({**ON, "mars_adaptive_window": True, "mars_cache": "block"}, "needs `mars_cache='cursor'`"),
}


@pytest.mark.parametrize("on", [{}, ON, LOSSLESS], ids=["off", "threshold", "lossless"])
def test_an_argument_at_its_default_asks_for_nothing(on):
    model, inputs = tiny_model(), left_pad(random_prompts([6]))
    defaults = {name: value for name, value in DEFAULTS.items() if value is not None and name not in on}
    plain, spelled_out = (model.generate(**inputs, max_new_tokens=6, **on, **more) for more in ({}, defaults))
    assert torch.equal(plain, spelled_out)


@pytest.mark.parametrize("case", WITHOUT_EFFECT)
def test_an_argument_without_effect_is_refused(case):
    kwargs, message = WITHOUT_EFFECT[case]
    with pytest.raises(ValueError, match=message):
        tiny_model().generate(**left_pad(random_prompts([6])), max_new_tokens=4, **kwargs)


@pytest.mark.parametrize("kwargs", [{}, ON, LOSSLESS, {"mars_threshold": 1.0}])
def test_what_a_generation_config_records_may_lie_idle(kwargs):
    model, inputs = tiny_model(), left_pad(random_prompts([6]))
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False, **kwargs)
    model.generation_config.update(mars_confidence="probability", mars_cache_block_size=16, allow_custom_entries=True)
    model.generation_config.update(mars_draft_length=3, mars_adaptive_window=False, allow_custom_entries=True)
    assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False, **kwargs), expected)


def test_a_misspelt_entry_of_a_generation_config_is_refused():
    model, inputs = tiny_model(), left_pad(random_prompts([6]))
    config = GenerationConfig(max_new_tokens=4, mars_treshold=0.5)
    with pytest.raises(ValueError, match=r"`mars_treshold`.*Known: mars_threshold"):
        model.generate(**inputs, generation_config=config)
    model.generation_config.mars_blocksize = 8
    with pytest.raises(ValueError, match="mars_blocksize"):
        model.generate(**inputs, max_new_tokens=4, mars_threshold=0.5)


def test_a_compiled_forward_is_refused():
    inputs = left_pad(random_prompts([6]))
    compiled, swapped = tiny_model(), tiny_model()
    compiled.compile(backend="eager")
    swapped.forward = torch.compile(swapped.forward, backend="eager")
    for model in (compiled, swapped):
        with pytest.raises(ValueError, match="no fixed shape"):
            model.generate(**inputs, max_new_tokens=4, mars_threshold=0.5)
