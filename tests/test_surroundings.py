"""Decoding in a program of somebody's own: its default device, its threads, its pickles, its model classes."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch
from decoding_models import left_pad, random_prompts, tiny_model
from transformers import GenerationConfig, LlamaForCausalLM

from mars_hf import MarsGenerationMixin, get_mars_model
from mars_hf.refusals import refuse_model

PROMPTS = left_pad(random_prompts([5, 8, 3]))
MODES = {
    "cursor": {"mars_threshold": 0.05},
    "block": {"mars_threshold": 0.05, "mars_cache": "block"},
    "none": {"mars_threshold": 0.05, "mars_cache": "none"},
    "lossless": {"mars_lossless": True, "prompt_lookup_num_tokens": 3},
}


def generate(model, **kwargs):
    return model.generate(**PROMPTS, max_new_tokens=12, **kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        *MODES.values(),
        {"mars_threshold": [0.05, 0.5, 0.2]},
        {"mars_threshold": lambda step: 0.05 + 0.1 * (step.new_tokens % 2)},
        {"mars_threshold": 0.05, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
        {"mars_threshold": 0.05, "max_time": 60.0},
        {"mars_threshold": 1.0},
    ],
)
def test_the_default_device_is_not_where_the_host_counts(kwargs):
    model = tiny_model()
    kwargs = {**kwargs, "return_dict_in_generate": True}
    expected = generate(model, **kwargs)
    torch.set_default_device("meta")
    try:
        output = generate(model, **kwargs)
        with pytest.raises(ValueError, match=r"in \(0, 1\]"):
            generate(model, mars_threshold=1.5)
    finally:
        torch.set_default_device(None)
    assert torch.equal(output.sequences, expected.sequences)
    assert torch.equal(output.accepted_lengths, expected.accepted_lengths)
    assert torch.equal(output.tokens_per_forward, expected.tokens_per_forward)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved_whole(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [pickled, saved_whole, copy.deepcopy])
@pytest.mark.parametrize("is_adapter", [False, True])
def test_a_model_is_copied_with_its_generation(duplicate, is_adapter):
    model = tiny_model()
    if is_adapter:
        from peft import LoraConfig, get_peft_model

        model = get_mars_model(get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)))
    other = duplicate(model)
    assert type(other) is type(model)
    assert other is not model
    expected = generate(model, mars_threshold=0.05)
    assert torch.equal(generate(other, mars_threshold=0.05), expected)
    with torch.no_grad():
        next(other.parameters()).zero_()
    assert torch.equal(generate(model, mars_threshold=0.05), expected)


def test_threads_share_a_model():
    model = tiny_model()
    modes = [*MODES.values(), {}]
    expected = [generate(model, **mode) for mode in modes]
    found: list[list[torch.Tensor]] = [[] for _ in modes]

    def work(place: int) -> None:
        for _ in range(5):
            found[place].append(generate(model, **modes[place]))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(modes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outputs, wanted in zip(found, expected, strict=True):
        assert len(outputs) == 5
        assert all(torch.equal(output, wanted) for output in outputs)
    assert model.config._attn_implementation == "sdpa"


class Unnamed(LlamaForCausalLM):
    """Hands on whatever it gets."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Bare(LlamaForCausalLM):
    """Takes what `generate` cannot do without."""

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        inputs_embeds=None,
        use_cache=None,
        return_dict=None,
    ):
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=return_dict,
        )


class MixedIn(MarsGenerationMixin, Unnamed):
    pass


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_class", [Unnamed, Bare, MixedIn])
def test_a_forward_of_ones_own(model_class, mode):
    model = tiny_model()
    own = model_class(model.config).eval()
    own.load_state_dict(model.state_dict())
    own.generation_config = GenerationConfig.from_dict(model.generation_config.to_dict())
    own = own if model_class is MixedIn else get_mars_model(own)
    assert torch.equal(generate(own, **MODES[mode]), generate(model, **MODES[mode]))


@pytest.mark.parametrize("model_class", [Unnamed, Bare])
def test_training_does_not_refuse_a_forward_of_ones_own(model_class):
    refuse_model(model_class(tiny_model().config), torch.device("cpu"))
