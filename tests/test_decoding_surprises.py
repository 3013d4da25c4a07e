"""What a checkpoint's config, a batch or a call brings that a decoding step must not trip over."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from decoding_models import MASK, left_pad, random_prompts, tiny_model
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GemmaConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MllamaForCausalLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    RepetitionPenaltyLogitsProcessor,
    SiglipVisionConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import EosTokenCriteria
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from mars_hf import AutoMarsModelForCausalLM, MarsCache, get_mars_model
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


def with_sure_weights(model):
    """Random weights that are large enough to be sure of some tokens, and MARS generation."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.4)
    return get_mars_model(model.eval(), mask_token_id=MASK, block_size=4)


VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GEMMA = {**TEXT, "head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}


def llava():
    text, vision = LlamaConfig(**TEXT), CLIPVisionConfig(**VISION, image_size=8, patch_size=4)
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_index=59))


def gemma3():
    text, vision = Gemma3TextConfig(**GEMMA), SiglipVisionConfig(**VISION, image_size=8, patch_size=4)
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_id=59,
        boi_token_id=58,
        eoi_token_id=57,
    )
    return Gemma3ForConditionalGeneration(config)


def gemma4():
    """The last layers read the keys of earlier ones, and ask the model for the last tokens only."""
    shared = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61}
    return Gemma4ForCausalLM(Gemma4TextConfig(**GEMMA, global_head_dim=8, **shared))


@pytest.mark.parametrize("lengths", [[10], [7, 7], [6, 9, 4]], ids=str)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("make", [llava, gemma3, gemma4])
def test_models_that_could_read_images_and_layers_that_share_keys(make, mode, lengths):
    torch.manual_seed(1)
    model = with_sure_weights(make())
    inputs = left_pad(random_prompts(lengths))
    plain = {"suppress_tokens": [MASK], "eos_token_id": None}
    stock = generate(model, inputs, **plain).sequences
    # Sure of nothing, or confirmed: the tokens of stock.
    exact = mode if "mars_lossless" in mode else {**mode, "mars_threshold": [0.9999999] * len(lengths)}
    assert torch.equal(generate(model, inputs, **plain, **exact).sequences, stock)
    if "mars_lossless" not in mode:
        output, slow = (
            generate(model, inputs, **plain, **{**kind, "mars_threshold": 0.02}) for kind in (mode, MODES["none"])
        )
        assert torch.equal(output.sequences, slow.sequences)
        assert output.accepted_lengths.max() > 1


def test_a_model_that_counts_positions_from_one_is_refused():
    text = GemmaConfig(**{**TEXT, "head_dim": 8})
    vision = SiglipVisionConfig(**VISION, image_size=8, patch_size=4, projection_dim=32)
    model = PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=59, projection_dim=32)
    )
    with pytest.raises(ValueError, match="counts the positions of its prompts from 1"):
        generate(with_sure_weights(model), left_pad(random_prompts([6])), mars_threshold=0.5)


@pytest.mark.parametrize("mode", [MODES["cursor"], MODES["block"], MODES["lossless"]])
def test_a_cache_from_the_other_side_of_longrope_is_refused(mode):
    model = tiny_model("phi3", original_max_position_embeddings=16, sliding_window=None, rope_parameters=LONGROPE)
    mode = {**mode, "suppress_tokens": [MASK], "eos_token_id": None}
    further = torch.tensor([[5, 6, 7], [8, 9, 10]])

    def turn(lengths, new_tokens):
        inputs = left_pad(random_prompts(lengths))
        output = generate(model, inputs, max_new_tokens=new_tokens, **mode)
        ids = torch.cat([output.sequences, further], dim=-1)
        pad = torch.ones(2, ids.shape[1] - inputs["attention_mask"].shape[1])
        return output.cache, {
            "input_ids": ids,
            "attention_mask": torch.cat([inputs["attention_mask"], pad.long()], -1),
        }

    for lengths, new_tokens, more in (([5, 3], 4, 4), ([17, 20], 4, 4)):
        cache, inputs = turn(lengths, new_tokens)
        expected = generate(model, inputs, max_new_tokens=more, **mode).sequences
        assert torch.equal(generate(model, inputs, cache=cache, max_new_tokens=more, **mode).sequences, expected)
    # The text leaves the short side in its second turn.
    cache, inputs = turn([10, 4], 5)
    with pytest.raises(ValueError, match=r"crosses position 16.*without `cache`"):
        generate(model, inputs, cache=cache, max_new_tokens=4, **mode)
    # It was cut back to there.
    cache, inputs = turn([17, 20], 4)
    cache.crop(-16)
    inputs = {name: value[:, :13] for name, value in inputs.items()}
    with pytest.raises(ValueError, match="crosses position 16"):
        generate(model, inputs, cache=cache, max_new_tokens=1, **mode)


def test_forwards_that_write_a_block_count_for_the_rows_in_it():
    model, block = tiny_model(eos_token_id=None), {"mars_cache": "block", "mars_cache_block_size": 4}
    one = generate(model, left_pad(random_prompts([10])), mars_threshold=0.05, max_new_tokens=40, **block)
    assert one.num_forwards > one.accepted_lengths.shape[1]
    assert one.tokens_per_forward.tolist() == pytest.approx([40 / one.num_forwards])
    # Several rows, of which some have left: a forward that writes a block asks for one logit of each that is in it.
    rows_written = []

    def note(module, args, kwargs):
        if kwargs["logits_to_keep"] == 1:
            rows_written.append(len(kwargs["input_ids"]))

    model.register_forward_pre_hook(note, with_kwargs=True)
    stop = int(one.sequences[0, 20])
    inputs = left_pad(random_prompts([10, 6, 8]))
    output = generate(
        model, inputs, mars_threshold=0.05, max_new_tokens=40, eos_token_id=stop, pad_token_id=0, **block
    )
    steps = output.accepted_lengths.gt(0).sum(-1)
    forwards = output.accepted_lengths.sum(-1) / output.tokens_per_forward
    assert (forwards - steps).sum().item() == pytest.approx(sum(rows_written), abs=1e-3)
    assert len(set(rows_written)) > 1


@pytest.mark.parametrize("chunk", [2, 3, 50])
def test_forwards_of_a_prompt_in_chunks_are_counted(chunk):
    model, calls = tiny_model(eos_token_id=None), []
    model.register_forward_hook(lambda *_: calls.append(None))
    options = {"mars_threshold": 1.0, "prefill_chunk_size": chunk, "max_new_tokens": 4}
    output = generate(model, left_pad(random_prompts([10, 7])), **options)
    assert output.num_forwards == len(calls)
    assert output.tokens_per_forward.tolist() == pytest.approx([4 / len(calls)] * 2)


def test_a_threshold_of_one_takes_what_stock_takes():
    model, inputs = tiny_model(), left_pad(random_prompts([6]))
    guided = {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[5, 6]])}
    expected = generate(model, inputs, **guided).sequences
    assert torch.equal(generate(model, inputs, mars_threshold=1.0, **guided).sequences, expected)
    with pytest.raises(ValueError, match="negative_prompt_ids"):
        generate(model, inputs, mars_threshold=1.0, mars_confidence="entropy", **guided)
    unknown = tiny_model()
    unknown.generation_config.mars_mask_token_id = None
    plain = generate(unknown, inputs).sequences
    assert torch.equal(generate(unknown, inputs, mars_threshold=1.0).sequences, plain)
    for refused in ({"mars_threshold": 0.9}, {"mars_threshold": [0.9]}, {"mars_lossless": True}):
        with pytest.raises(ValueError, match=r"needs the id of the \[MASK\] token"):
            generate(unknown, inputs, **refused)
    with pytest.raises(ValueError, match=r"needs the id of the \[MASK\] token"):
        generate(
            unknown,
            left_pad(random_prompts([20])),
            mars_threshold=1.0,
            cache=generate(model, inputs, **MODES["cursor"]).cache,
        )
    model.generation_config.mars_lossless = True

    def loop(model, input_ids, **kwargs):
        return input_ids

    given = {"custom_generate": loop, "max_new_tokens": 4}
    assert torch.equal(model.generate(**inputs, mars_lossless=False, **given), inputs["input_ids"])
    with pytest.raises(ValueError, match="both replace the decoding loop"):
        model.generate(**inputs, **given)


def test_what_a_throttle_is_told_is_its_own():
    def spoil(step):
        step.accepted.add_(1)
        step.new_tokens.zero_()
        return 0.05

    model, inputs = tiny_model(), left_pad(random_prompts([6, 9]))
    expected = generate(model, inputs, mars_threshold=0.05)
    output = generate(model, inputs, mars_threshold=spoil)
    assert torch.equal(output.sequences, expected.sequences)
    assert torch.equal(output.accepted_lengths, expected.accepted_lengths)


def test_a_length_of_the_calls_own_is_the_one_that_positions_must_do_for():
    model, inputs = tiny_model("gpt2", n_positions=24, eos_token_id=None), left_pad(random_prompts([12, 7]))
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass before the refusal"))
    criteria = StoppingCriteriaList([MaxLengthCriteria(30)])
    with pytest.raises(ValueError, match="take 30 positions, and the model has 24"):
        generate(model, inputs, mars_threshold=0.1, max_new_tokens=4, stopping_criteria=criteria)


@pytest.mark.parametrize("mode", [MODES["cursor"], MODES["block"], MODES["none"]])
def test_a_repetition_penalty_may_leave_the_prompt_alone(mode):
    """And the first new tokens: the last of a text that is behind the others must not count for being shown again."""
    model, prompts = tiny_model(tie_word_embeddings=True, eos_token_id=None), random_prompts([12] * 6)
    penalty = RepetitionPenaltyLogitsProcessor(5.0, prompt_ignore_length=15)
    mode = {**mode, "logits_processor": [penalty], "max_new_tokens": 6}
    # Rows that are as far apart as can be.
    thresholds = [1e-9, 0.9999999] * 3
    output = generate(model, {"input_ids": torch.stack(prompts)}, **{**mode, "mars_threshold": thresholds})
    alone = [
        generate(model, {"input_ids": prompt[None]}, **{**mode, "mars_threshold": threshold}).sequences[0]
        for prompt, threshold in zip(prompts, thresholds, strict=True)
    ]
    assert torch.equal(output.sequences, torch.stack(alone))
    assert output.accepted_lengths[:, 0].tolist() == [4, 1] * 3


def test_an_end_token_without_a_dimension():
    model, inputs = tiny_model(eos_token_id=None), left_pad(random_prompts([6]))
    end = int(generate(model, inputs, mars_threshold=0.05).sequences[0, 9])
    criteria = StoppingCriteriaList([EosTokenCriteria(torch.tensor(end))])
    output = generate(model, inputs, mars_threshold=0.05, stopping_criteria=criteria, pad_token_id=0)
    assert output.sequences[0, -1] == end


def test_positions_of_several_dimensions_are_refused():
    model, inputs = tiny_model(), left_pad(random_prompts([6]))
    with pytest.raises(ValueError, match="counts its positions in several dimensions"):
        generate(model, inputs, mars_threshold=0.1, position_ids=torch.arange(6).expand(3, 1, -1))


class ByTable(LogitsProcessor):
    """Looks every last token up in a table of the tokens that a text can hold."""

    def __init__(self):
        self.table = {token: (token * 7) % MASK for token in range(MASK)}

    def __call__(self, ids, scores):
        scores = scores.clone()
        for row, text in enumerate(ids.tolist()):
            scores[row, self.table[text[-1]]] += 1.0
        return scores


class EndsBehind(StoppingCriteria):
    """Looks every token of a text up, and ends behind some of them."""

    def __init__(self):
        self.table = dict.fromkeys(range(MASK), False) | {7: True, 21: True, 40: True}

    def __call__(self, ids, scores, **kwargs):
        return torch.tensor([[self.table[token] for token in text][-1] for text in ids.tolist()])


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_what_a_call_brings_is_never_shown_a_mask(mode):
    model, inputs = tiny_model(), left_pad(random_prompts([6, 9, 4, 7], seed=3))
    kwargs = {"max_new_tokens": 20, "suppress_tokens": [MASK]}
    kwargs["logits_processor"] = LogitsProcessorList([ByTable()])
    kwargs["stopping_criteria"] = StoppingCriteriaList([EndsBehind()])
    stock = generate(model, inputs, **kwargs).sequences
    exact = mode if "mars_lossless" in mode else {**mode, "mars_threshold": 0.9999999}
    assert torch.equal(generate(model, inputs, **kwargs, **exact).sequences, stock)
    output = generate(model, inputs, **kwargs, **mode)
    assert len(set(output.accepted_lengths.sum(-1).tolist())) > 1, "rows of unequal length"
    assert output.tokens_per_forward.max() > 1


def test_a_prompt_with_a_mask_is_shown_as_it_is():
    inputs = left_pad(random_prompts([6, 9]))
    inputs["input_ids"][:, -3] = MASK
    seen = []

    def look(_, text):
        seen.append(text.tolist())
        return list(range(3, MASK))

    generate(tiny_model(), inputs, prefix_allowed_tokens_fn=look, mars_threshold=0.05)
    assert {text[6] for text in seen} == {MASK}
    assert all(MASK not in text[9:] for text in seen)


def test_positions_that_yarn_adds_are_the_models():
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
    stretched = tiny_model(max_position_embeddings=32, rope_parameters=rope, eos_token_id=None)
    told = tiny_model(max_position_embeddings=64, rope_parameters=rope, eos_token_id=None)
    inputs = left_pad(random_prompts([40, 33]))
    stock = generate(stretched, inputs, max_new_tokens=24, suppress_tokens=[MASK]).sequences
    assert torch.equal(generate(stretched, inputs, max_new_tokens=24, mars_lossless=True).sequences, stock)
    for model in (stretched, told, tiny_model(max_position_embeddings=64)):
        with pytest.raises(ValueError, match=r"take 65 positions, and the model has 64 "):
            generate(model, inputs, max_new_tokens=25, mars_threshold=0.5)
    dynamic = tiny_model(max_position_embeddings=32, rope_parameters={**rope, "rope_type": "dynamic"})
    with pytest.raises(ValueError, match="the model has 32 "):
        generate(dynamic, inputs, max_new_tokens=2, mars_threshold=0.5)


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_lossless_step_has_24_tokens_at_most_by_default(block_size):
    model, widths = tiny_model(eos_token_id=None), []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    generate(model, left_pad(random_prompts([6])), max_new_tokens=60, mars_lossless=True, mars_block_size=block_size)
    assert max(widths[1:]) == {4: 16, 16: 24}[block_size]


def test_lossless_steps_need_no_float64():
    """Apple's GPUs have none."""
    model, inputs = tiny_model(), left_pad(random_prompts([6, 9, 4]))
    expected = generate(model, inputs, **MODES["lossless"])

    class NoDoubles(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            assert not (isinstance(result, torch.Tensor) and result.dtype is torch.float64), function
            return result

    with NoDoubles():
        output = generate(model, inputs, **MODES["lossless"])
    assert torch.equal(output.sequences, expected.sequences)
    assert output.num_forwards == expected.num_forwards


def test_branches_of_a_model_that_skips_layers():
    """Llama 3.2 Vision leaves its cross-attention out of a text without pictures; its cache has a layer for it."""
    config = MllamaTextConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, cross_attention_layers=[1],
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    torch.manual_seed(0)
    model = MllamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    model = get_mars_model(model, mask_token_id=MASK, block_size=4)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8] * 6])}
    stock = generate(model, inputs, max_new_tokens=60, suppress_tokens=[MASK]).sequences
    copied = []
    copy_slots = MarsCache.copy_slots
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MarsCache, "copy_slots", lambda *args: (copied.append(1), copy_slots(*args)))
        both = {"mars_draft_choices": 2, "prompt_lookup_num_tokens": 4}
        output = generate(model, inputs, max_new_tokens=60, mars_lossless=True, **both)
    assert torch.equal(output.sequences, stock)
    assert copied, "no branch but the first was confirmed"
