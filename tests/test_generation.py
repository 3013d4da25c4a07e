"""What `generate` refuses with MARS on, and the ways to give a model MARS generation."""

from __future__ import annotations

import copy

import pytest
import torch
from decoding_models import EOS, MASK, PAD, left_pad, random_prompts, tiny_model
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    DynamicCache,
    FalconConfig,
    GPTNeoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OpenAIGPTConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from mars_hf import AutoMarsModelForCausalLM, MarsCache, MarsGenerationMixin, get_mars_model

LOSSLESS = {"mars_lossless": True, "mars_threshold": None}
REFUSALS = {
    "threshold above one": ({"mars_threshold": 1.5}, r"`mars_threshold` must be in \(0, 1\]"),
    "threshold zero": ({"mars_threshold": 0.0}, r"`mars_threshold` must be in \(0, 1\]"),
    "threshold negative": ({"mars_threshold": -0.1}, r"`mars_threshold` must be in \(0, 1\]"),
    "threshold nan": ({"mars_threshold": float("nan")}, r"`mars_threshold` must be in \(0, 1\]"),
    "threshold text": ({"mars_threshold": "high"}, "must be a number, one number per row, or a callable"),
    "threshold true": ({"mars_threshold": True}, "must be a number, one number per row, or a callable"),
    "threshold per row": ({"mars_threshold": [0.5, 0.5, 0.5]}, "one per row of the batch"),
    "threshold matrix": ({"mars_threshold": torch.ones(2, 2)}, "one number or one per row"),
    "one threshold too many, of 1": ({"mars_threshold": [1.0, 1.0, 1.0]}, "one per row of the batch"),
    "callable": ({"mars_threshold": lambda step: 2.0}, r"must be in \(0, 1\]"),
    "entropy": ({"mars_confidence": "entropy", "mars_threshold": -1.0}, "a finite number of nats"),
    "confidence": ({"mars_confidence": "vibes"}, "`mars_confidence` must be one of probability, margin, entropy"),
    "block size": ({"mars_block_size": 0}, "`mars_block_size` must be an integer of at least 1"),
    "block size float": ({"mars_block_size": 4.0}, "`mars_block_size` must be an integer of at least 1"),
    "cache": ({"mars_cache": "paged"}, "`mars_cache` must be"),
    "lossless": ({"mars_lossless": True}, "`mars_lossless=True` accepts what the model itself confirms"),
    "draft length": ({**LOSSLESS, "mars_draft_length": 0}, "`mars_draft_length` must be an integer of at least 1"),
    "lossless cache": ({**LOSSLESS, "mars_cache": "block"}, "needs `mars_cache='cursor'`"),
    "beams": ({"num_beams": 2}, "`num_beams > 1` cannot be combined"),
    "beam sample": ({"num_beams": 2, "do_sample": True}, "`num_beams > 1` cannot be combined"),
    "assistant": ({"assistant_model": tiny_model()}, "Assisted generation .* cannot"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "Set `mars_lossless=True` instead of"),
    "custom generate": ({"custom_generate": lambda model, **kwargs: None}, "both replace the decoding loop"),
    "hidden": ({"output_hidden_states": True, "return_dict_in_generate": True}, "`output_hidden_states` is not supp"),
    "guidance": ({"guidance_scale": 1.5}, "`guidance_scale` is not supported"),
    "static": ({"cache_implementation": "static"}, "`cache_implementation` is not supported"),
    "prefill": ({"prefill_chunk_size": 2}, "`prefill_chunk_size` is not supported"),
    "use_cache": ({"use_cache": False}, "`use_cache=False` contradicts `mars_cache='cursor'`"),
    "synced": ({"synced_gpus": True}, "does not work with `synced_gpus`"),
    "own cache": ({"cache": DynamicCache()}, "MARS cannot continue a DynamicCache"),
    "cache without cache": ({"cache": MarsCache(), "mars_cache": "none"}, "uses no cache"),
    "mars cache off": ({"cache": MarsCache(), "mars_threshold": None}, "continued by MARS decoding only"),
    "cache block": (
        {"mars_cache": "block", "mars_cache_block_size": 3},
        "`mars_cache_block_size` must be an integer of at least 4",
    ),
    "no thresholds": ({"mars_threshold": []}, r"one per row of the batch, got shape \(0,\)"),
    "mask token beyond": ({"mars_mask_token_id": 61}, "`mars_mask_token_id` is 61, and the model has 61 tokens"),
    "mask token negative": ({"mars_mask_token_id": -1}, "`mars_mask_token_id` must be an integer of at least 0"),
    "mask token text": ({"mars_mask_token_id": "[MASK]"}, "`mars_mask_token_id` must be an integer of at least 0"),
    "choices": (
        {**LOSSLESS, "mars_draft_choices": 61, "mars_tree_budget": 8},
        "`mars_draft_choices` is 61, and besides .MASK. the model has 60 tokens",
    ),
    "wide mask": ({"attention_mask": torch.eye(2, 8)}, r"`attention_mask` must have .* \(2, 6\), got \(2, 8\)"),
    "narrow mask": ({"attention_mask": torch.eye(2, 3)}, r"`attention_mask` must have .* \(2, 6\), got \(2, 3\)"),
    "mask of one row": ({"attention_mask": torch.eye(1, 6)}, r"`attention_mask` must have .* got \(1, 6\)"),
    "wide mask of ones": ({"attention_mask": torch.ones(2, 8)}, r"must have .* \(2, 6\), got \(2, 8\)"),
    "positions": ({"position_ids": torch.arange(4)[None]}, r"`position_ids`, or .* \(2, 6\), got \(1, 4\)"),
    "no tokens": ({"input_ids": torch.ones(1, 0).long(), "attention_mask": None}, "There is no prompt to continue"),
    "no rows": ({"input_ids": torch.ones(0, 2).long(), "attention_mask": None}, "There is no prompt to continue"),
    "length": ({"max_new_tokens": 250}, "take 256 positions, and the model has 255"),
    "streamer": ({"streamer": BaseStreamer}, "A `streamer` takes one row"),
}


@pytest.fixture
def untouchable():
    """A model whose forward must not be called: refusals come before any work."""
    model = tiny_model(max_position_embeddings=255)
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass before the refusal"))
    return model


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_before_any_forward_pass(case, untouchable):
    kwargs, message = copy.copy(REFUSALS[case][0]), REFUSALS[case][1]
    if case == "streamer":
        kwargs["streamer"] = type("Silent", (BaseStreamer,), {"put": lambda *_: None, "end": lambda *_: None})()
    with pytest.raises(ValueError, match=message):
        untouchable.generate(
            **{**left_pad(random_prompts([6, 4])), "mars_threshold": 0.5, "max_new_tokens": 8, **kwargs}
        )


@pytest.mark.parametrize("eos", [7, [2, 7], torch.tensor([2, 7])])
def test_a_mask_that_ends_texts_is_refused(untouchable, eos):
    untouchable.generation_config.mars_mask_token_id = 7
    with pytest.raises(ValueError, match="is an `eos_token_id` too"):
        untouchable.generate(**left_pad(random_prompts([6])), mars_threshold=0.5, eos_token_id=eos, max_new_tokens=8)


def test_a_callable_in_a_generation_config_is_refused(untouchable):
    untouchable.generation_config.mars_threshold = lambda step: 0.5
    with pytest.raises(ValueError, match="Pass it to the call"):
        untouchable.generate(**left_pad(random_prompts([6])), max_new_tokens=8)


def test_right_padding_is_refused(untouchable):
    inputs = {name: value.flip(-1) for name, value in left_pad(random_prompts([6, 4])).items()}
    with pytest.raises(ValueError, match="padded on the right"):
        untouchable.generate(**inputs, mars_threshold=0.5, max_new_tokens=8)


def test_unknown_mask_token_is_refused():
    model = get_mars_model(AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=20, hidden_size=8, **SMALL)))
    with pytest.raises(ValueError, match=r"`generation_config\.mars_mask_token_id` is not set"):
        model.generate(torch.tensor([[3, 4]]), mars_threshold=0.5)


SMALL = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    "wrong", [{"mask_token_id": 20}, {"mask_token_id": -1}, {"block_size": 0}, {"block_size": 2.5}]
)
def test_get_mars_model_checks_its_arguments(wrong):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, hidden_size=8, **SMALL))
    with pytest.raises(ValueError, match=r"`(mask_token_id|block_size)` must be"):
        get_mars_model(model, **wrong)


def test_encoder_decoders_and_linear_attention_are_refused():
    bart = BartConfig(
        vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8, decoder_ffn_dim=8,
        encoder_attention_heads=2, decoder_attention_heads=2)  # fmt: skip
    with pytest.raises(ValueError, match="decoder-only"):
        get_mars_model(BartForConditionalGeneration(bart))
    hybrid = get_mars_model(
        AutoModelForCausalLM.from_config(
            Qwen3NextConfig(vocab_size=20, hidden_size=16, num_experts=2, num_experts_per_tok=1, **SMALL)
        ),
        mask_token_id=19,
    )
    with pytest.raises(ValueError, match="linear_attention layers"):
        hybrid.generate(torch.tensor([[3, 4]]), mars_threshold=0.5)


MODELS = {
    "encoder": (BertConfig, {}, "is an encoder: its tokens see those behind them"),
    "no cache": (OpenAIGPTConfig, {}, "takes no cache. Set `mars_cache='none'`"),
    "local": (GPTNeoConfig, {"attention_types": [[["local"], 1]]}, "has local_attention layers"),
    "alibi": (FalconConfig, {"alibi": True}, "ALiBi biases of `falcon` count the slots of the cache"),
}


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_models_that_cannot_decode_with_mars_are_refused(case):
    config_class, settings, message = MODELS[case]
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2}
    if config_class is GPTNeoConfig:
        shape = {"num_layers": 1, "num_heads": 2}
    config = config_class(vocab_size=20, hidden_size=16, intermediate_size=16, **shape, **settings)
    model = get_mars_model(AutoModelForCausalLM.from_config(config), mask_token_id=19)
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass before the refusal"))
    for mode in ({"mars_threshold": 0.5}, LOSSLESS):
        with pytest.raises(ValueError, match=message):
            model.generate(torch.tensor([[3, 4]]), max_new_tokens=4, **mode)


def test_same_object_and_stock_name():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, hidden_size=8, **SMALL))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    same = get_mars_model(get_mars_model(model, mask_token_id=19), block_size=8)
    assert same is model
    assert isinstance(model, MarsGenerationMixin)
    assert isinstance(model, LlamaForCausalLM)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert (model.generation_config.mars_mask_token_id, model.generation_config.mars_block_size) == (19, 8)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


class MixedIn(MarsGenerationMixin, Qwen2ForCausalLM):
    pass


@pytest.mark.parametrize("kind", ["swapped", "mixed in"])
def test_save_and_load_back_as_an_ordinary_checkpoint(kind, tmp_path):
    config = Qwen2Config(vocab_size=61, hidden_size=16, eos_token_id=EOS, pad_token_id=PAD, bos_token_id=1, **SMALL)
    torch.manual_seed(0)
    model = get_mars_model(
        MixedIn(config).eval() if kind == "mixed in" else Qwen2ForCausalLM(config).eval(), MASK, block_size=3
    )
    model.save_pretrained(tmp_path)
    assert isinstance(model, MarsGenerationMixin)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(plain) is Qwen2ForCausalLM
    assert plain.config.architectures == ["Qwen2ForCausalLM"]
    loaded = AutoMarsModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.generation_config.mars_mask_token_id, loaded.generation_config.mars_block_size) == (MASK, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    inputs = left_pad(random_prompts([6, 4]))
    text = [m.generate(**inputs, max_new_tokens=12, do_sample=False) for m in (model, plain, loaded)]
    assert torch.equal(text[0], text[1])
    assert torch.equal(text[0], text[2])
    several = [m.generate(**inputs, max_new_tokens=12, do_sample=False, mars_threshold=1e-9) for m in (model, loaded)]
    assert torch.equal(*several)


def test_peft_models_generate(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    base = tiny_model()
    inputs = left_pad(random_prompts([6, 4]))
    without = base.generate(**inputs, max_new_tokens=12, do_sample=False, mars_threshold=0.1)
    model = peft.get_peft_model(LlamaForCausalLM(base.config).eval(), config)
    model.get_base_model().load_state_dict(
        {
            name.replace("_proj.", "_proj.base_layer."): value
            for name, value in base.state_dict().items()
            if "q_proj" in name or "v_proj" in name
        }
        | {name: value for name, value in base.state_dict().items() if "q_proj" not in name and "v_proj" not in name},
        strict=False,
    )
    assert get_mars_model(model, mask_token_id=MASK, block_size=4) is model
    output = model.generate(
        **inputs, max_new_tokens=12, do_sample=False, mars_threshold=1e-9, return_dict_in_generate=True
    )
    assert output.tokens_per_forward.max() > 1.5
    with model.disable_adapter():
        off = model.generate(**inputs, max_new_tokens=12, do_sample=False, mars_threshold=0.1)
    assert torch.equal(off, without)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_of_peft_are_refused(kind):
    peft = pytest.importorskip("peft")
    adapter = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_mars_model(peft.get_peft_model(tiny_model(), adapter))
    inputs = left_pad(random_prompts([6, 4]))
    for mode in ({"mars_threshold": 0.5}, {"mars_threshold": 0.5, "mars_cache": "none"}, LOSSLESS):
        with pytest.raises(ValueError, match="puts virtual tokens in front of the prompt"):
            model.generate(**inputs, max_new_tokens=4, **mode)


def test_adapters_by_row_are_refused():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    inputs, adapters = left_pad(random_prompts([6, 4])), {"adapter_names": ["default", "__base__"]}
    get_mars_model(model).eval()
    with pytest.raises(ValueError, match=r"`adapter_names` and activated LoRA .* count the rows of a batch"):
        model.generate(**inputs, **adapters, max_new_tokens=4, mars_threshold=0.5)
    model.generate(**inputs, max_new_tokens=4, mars_threshold=0.5)


class Decoder:
    """A tokenizer that a streamer can use: every id is a word."""

    def decode(self, ids, **kwargs):
        return "".join(f"{int(token)} " for token in ids)


def test_streamed_text_is_the_text(capsys):
    model = tiny_model()
    inputs = left_pad(random_prompts([6]))
    output = model.generate(
        **inputs, max_new_tokens=20, do_sample=False, mars_threshold=0.1, return_dict_in_generate=True,
        streamer=TextStreamer(Decoder(), skip_prompt=True),
    )  # fmt: skip
    assert output.tokens_per_forward > 1.5
    assert capsys.readouterr().out.split() == [str(token) for token in output.sequences[0, 6:].tolist()]


def test_auto_class_is_not_instantiated():
    with pytest.raises(OSError, match="from_pretrained"):
        AutoMarsModelForCausalLM()
