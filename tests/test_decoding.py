"""Decoding against independent oracles: the loop written from the definition, and stock `generate`."""

from __future__ import annotations

import pytest
import torch
from decoding_models import EOS, FAMILIES, MASK, PAD, brute_force, left_pad, random_prompts, tiny_model
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from mars_hf import MarsGenerateOutput, decoding

MAX_NEW = 20
# Thresholds at which the tiny random models accept all, some and almost none of their candidates.
TAUS = (1e-9, 0.1, 0.3, 0.9)


def generate(model, inputs, tau, **kwargs):
    kwargs = {"max_new_tokens": MAX_NEW, "do_sample": False, "return_dict_in_generate": True, **kwargs}
    return model.generate(**inputs, mars_threshold=tau, **kwargs)


def new_tokens(output, row: int, width: int) -> list[int]:
    count = int(output.accepted_lengths[row].sum())
    return output.sequences[row, width : width + count].tolist()


class ForwardCounter:
    def __init__(self, model):
        self.calls = 0
        self.handle = model.register_forward_hook(self._count)

    def _count(self, *_):
        self.calls += 1


@pytest.mark.parametrize("family", FAMILIES)
def test_cursor_and_none_equal_the_definition_row_by_row(family):
    model = tiny_model(family)
    prompts = random_prompts([5, 11, 3, 8])
    inputs = left_pad(prompts)
    width = inputs["input_ids"].shape[1]
    accepted_total = steps_total = 0
    for tau in TAUS:
        for cache in ({}, {"mars_cache": "none"}, {"mars_cache": "block", "mars_cache_block_size": 5}):
            output = generate(model, inputs, tau, **cache)
            for row, prompt in enumerate(prompts):
                tokens, accepted = brute_force(model, prompt, tau, max_new=MAX_NEW)
                assert new_tokens(output, row, width) == tokens, (tau, cache, row)
                steps = output.accepted_lengths[row]
                assert steps[steps > 0].tolist() == accepted
                assert (output.sequences[row, width + len(tokens) :] == PAD).all()
                if cache.get("mars_cache") != "block":
                    assert output.tokens_per_forward[row] == pytest.approx(len(tokens) / len(accepted))
                if tau < 0.3:
                    accepted_total, steps_total = accepted_total + len(tokens), steps_total + len(accepted)
    assert accepted_total / steps_total > 1.5


@pytest.mark.parametrize("window", [1, 2, 3, 7, 16])
def test_every_window_equals_the_definition(window):
    model = tiny_model()
    prompts = random_prompts([9, 4], seed=1)
    inputs = left_pad(prompts)
    output = generate(model, inputs, 0.1, mars_block_size=window)
    for row, prompt in enumerate(prompts):
        tokens, _ = brute_force(model, prompt, 0.1, window=window, max_new=MAX_NEW)
        assert new_tokens(output, row, inputs["input_ids"].shape[1]) == tokens
    assert (output.accepted_lengths.max() > 1) == (window > 1)


@pytest.mark.parametrize("mode", [{"mars_threshold": 0.1}, {"mars_lossless": True}])
def test_ids_of_32_bits_are_ids(mode):
    model, inputs = tiny_model(), left_pad(random_prompts([6, 9]))
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False, **mode)
    inputs["input_ids"] = inputs["input_ids"].int()
    assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False, **mode), expected)


def test_a_row_does_not_see_its_batch_or_its_padding():
    model = tiny_model(seed=3)
    prompts = random_prompts([6, 13, 2, 9, 7], seed=2)
    alone = [generate(model, left_pad([prompt]), 0.15) for prompt in prompts]
    for extra in range(18):
        inputs = left_pad(prompts, extra)
        batch = generate(model, inputs, 0.15)
        for row, prompt in enumerate(prompts):
            assert new_tokens(batch, row, inputs["input_ids"].shape[1]) == new_tokens(alone[row], 0, len(prompt))
    assert batch.tokens_per_forward.mean() > 1.2


def test_pad_equal_to_eos_changes_nothing_even_with_an_eos_in_the_prompt():
    model = tiny_model(seed=4)
    prompts = random_prompts([8, 5], seed=5)
    prompts[0][3] = EOS
    width = 8
    ordinary = generate(model, left_pad(prompts), 0.2)
    same_token = generate(model, left_pad(prompts, pad=EOS), 0.2, pad_token_id=EOS)
    for row in range(2):
        assert new_tokens(ordinary, row, width) == new_tokens(same_token, row, width)
    assert new_tokens(ordinary, 0, width) == brute_force(model, prompts[0], 0.2)[0]


def ending_model():
    """A model that ends most of its replies early, in the middle of an accepted run."""
    model = tiny_model(seed=6)
    text, _ = brute_force(model, random_prompts([6], seed=7)[0], 1e-9, max_new=MAX_NEW, eos=())
    return model, text


def test_nothing_follows_the_first_eos_inside_an_accepted_run():
    model, text = ending_model()
    prompt = random_prompts([6], seed=7)[0]
    for stop in (text[0], text[1], text[2], text[5]):
        output = generate(model, left_pad([prompt]), 1e-9, eos_token_id=[stop, EOS])
        tokens, accepted = brute_force(model, prompt, 1e-9, max_new=MAX_NEW, eos=(stop, EOS))
        assert new_tokens(output, 0, 6) == tokens
        assert output.sequences[0, 6:].tolist() == tokens
        assert tokens[-1] == stop
        assert stop not in tokens[:-1]
        assert output.accepted_lengths[0].tolist() == accepted


@pytest.mark.parametrize("max_new", [1, 2, 3, 4, 5, 9])
def test_exactly_max_new_tokens(max_new):
    model = tiny_model()
    model.generation_config.eos_token_id = None
    inputs = left_pad(random_prompts([4, 7]))
    output = generate(model, inputs, 1e-9, max_new_tokens=max_new)
    assert output.sequences.shape == (2, 7 + max_new)
    by_length = model.generate(**inputs, mars_threshold=1e-9, do_sample=False, max_length=7 + max_new)
    assert torch.equal(by_length, output.sequences)
    criteria = StoppingCriteriaList([MaxLengthCriteria(7 + max_new)])
    by_criterion = model.generate(
        **inputs, mars_threshold=1e-9, do_sample=False, max_new_tokens=50, stopping_criteria=criteria
    )
    assert torch.equal(by_criterion, output.sequences)


def test_learned_positions_are_used_to_the_last_one():
    # A [MASK] behind the last allowed token would need a position that GPT-2 does not have.
    model = tiny_model("gpt2", n_positions=24, eos_token_id=None)
    prompts = random_prompts([12, 7])
    for cache in ("cursor", "none"):
        output = generate(model, left_pad(prompts), 1e-9, max_new_tokens=12, mars_cache=cache)
        assert output.sequences.shape == (2, 24)
    assert new_tokens(output, 1, 12) == brute_force(model, prompts[1], 1e-9, max_new=12, eos=())[0]


def test_min_new_tokens_is_kept():
    model, text = ending_model()
    prompt = random_prompts([6], seed=7)[0]
    stop = text[1]
    assert len(new_tokens(generate(model, left_pad([prompt]), 1e-9, eos_token_id=stop), 0, 6)) == 2
    output = generate(model, left_pad([prompt]), 1e-9, eos_token_id=stop, min_new_tokens=7)
    assert stop not in output.sequences[0, 6:13].tolist()
    assert output.accepted_lengths.max() > 1


@pytest.mark.parametrize(("tau", "preferred"), [(1e-9, 15.0), (1e-9, 100.0), (0.3, 100.0)])
def test_mask_never_comes_out_even_if_it_is_the_likeliest_token(tau, preferred):
    model = tiny_model(eos_token_id=None)
    with torch.no_grad():
        # A head that prefers [MASK] everywhere, by so much that nothing else is accepted behind one, or by less.
        head = model.get_output_embeddings()
        head.bias = torch.nn.Parameter(torch.zeros(head.weight.shape[0]))
        head.bias[MASK] = preferred
        logits = model(**left_pad(random_prompts([7]))).logits
    assert (logits.argmax(-1) == MASK).all()
    prompts = random_prompts([4, 7])
    for cache in ("cursor", "block", "none"):
        for sample in (False, True):
            output = generate(model, left_pad(prompts), tau, mars_cache=cache, do_sample=sample)
            assert MASK not in output.sequences
            assert (output.accepted_lengths.max() > 1) == (preferred < 100)
            if not sample:
                for row, prompt in enumerate(prompts):
                    expected, _ = brute_force(model, prompt, tau, eos=())
                    assert new_tokens(output, row, 7)[: len(expected)] == expected


@pytest.mark.parametrize(
    "extra", [{}, {"min_new_tokens": 5}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}]
)
def test_tau_one_and_mars_off_are_stock_generate(extra, tmp_path):
    model = tiny_model(seed=8)
    model.save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    inputs = left_pad(random_prompts([5, 9, 2]))
    expected = stock.generate(**inputs, max_new_tokens=MAX_NEW, do_sample=False, **extra)
    off = model.generate(**inputs, max_new_tokens=MAX_NEW, do_sample=False, **extra)
    one = generate(model, inputs, 1.0, **extra)
    assert torch.equal(off, expected)
    assert torch.equal(one.sequences, expected)
    assert isinstance(one, MarsGenerateOutput)
    assert one.num_forwards == expected.shape[1] - 9
    assert one.tokens_per_forward.tolist() == [1.0, 1.0, 1.0]
    ends = [(row == EOS).nonzero() for row in expected[:, 9:]]
    lengths = [int(end[0]) + 1 if len(end) else expected.shape[1] - 9 for end in ends]
    assert one.accepted_lengths.sum(-1).tolist() == lengths


def test_float32_probability_of_exactly_one_is_still_autoregression_at_tau_one():
    model = tiny_model()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1000)
    inputs = left_pad(random_prompts([5, 9]))
    per_row = generate(model, inputs, [1.0, 0.999])
    assert per_row.tokens_per_forward[0] == 1.0
    assert per_row.tokens_per_forward[1] > 1.5


@pytest.mark.parametrize("cache", ["cursor", "none"])
def test_num_forwards_is_what_a_counter_sees(cache):
    model = tiny_model()
    inputs = left_pad(random_prompts([5, 9, 3]))
    for tau in (1e-9, 0.3, 1.0):
        counter = ForwardCounter(model)
        output = generate(model, inputs, tau, mars_cache=cache)
        counter.handle.remove()
        assert output.num_forwards == counter.calls == output.accepted_lengths.shape[1]


@pytest.mark.parametrize(("measure", "tau"), [("margin", 0.3), ("entropy", 2.5), ("probability", 0.3)])
def test_confidence_measures(measure, tau):
    model = tiny_model()
    prompts = random_prompts([6, 10], seed=9)
    inputs = left_pad(prompts)
    output = generate(model, inputs, tau, mars_confidence=measure)
    for row, prompt in enumerate(prompts):
        tokens, accepted = brute_force(model, prompt, tau, max_new=MAX_NEW, measure=measure)
        assert new_tokens(output, row, 10) == tokens
        steps = output.accepted_lengths[row]
        assert steps[steps > 0].tolist() == accepted
    assert 1.1 < output.tokens_per_forward.mean() < 3.9


def test_threshold_per_row_equals_each_row_with_its_threshold():
    model = tiny_model()
    prompts = random_prompts([6, 10, 4], seed=9)
    taus = [0.05, 1.0, 0.5]
    output = generate(model, left_pad(prompts), torch.tensor(taus))
    for row, (prompt, tau) in enumerate(zip(prompts, taus, strict=True)):
        assert new_tokens(output, row, 10) == brute_force(model, prompt, tau, max_new=MAX_NEW)[0]


def test_callable_threshold_is_asked_before_every_step_and_obeyed():
    model = tiny_model()
    model.generation_config.eos_token_id = None
    seen = []

    def throttle(step):
        seen.append((step.index, step.new_tokens.tolist(), step.accepted.tolist()))
        return 1.0 if step.index < 3 else 1e-9

    output = generate(model, left_pad(random_prompts([6, 4])), throttle)
    assert output.accepted_lengths[:, :3].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert output.accepted_lengths[:, 3:-1].eq(4).all()
    assert [entry[0] for entry in seen] == list(range(output.num_forwards))
    assert seen[0][1:] == ([0, 0], [0, 0])
    assert seen[4][1:] == ([7, 7], [4, 4])


def test_settings_come_from_the_generation_config_and_arguments_win():
    model = tiny_model()
    inputs = left_pad(random_prompts([6, 4]))
    model.generation_config.mars_threshold = 0.2
    recorded = model.generate(**inputs, max_new_tokens=MAX_NEW, return_dict_in_generate=True)
    assert torch.equal(recorded.sequences, generate(tiny_model(), inputs, 0.2).sequences)
    argument = model.generate(**inputs, max_new_tokens=MAX_NEW, return_dict_in_generate=True, mars_threshold=1.0)
    assert argument.tokens_per_forward.tolist() == [1.0, 1.0]
    config = GenerationConfig(max_new_tokens=MAX_NEW, return_dict_in_generate=True, eos_token_id=EOS, pad_token_id=PAD)
    config.mars_threshold = 1e-9
    passed = model.generate(**inputs, generation_config=config)
    assert torch.equal(passed.sequences, generate(tiny_model(), inputs, 1e-9).sequences)
    assert model.generation_config.mars_threshold == 0.2


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_eager_attention_gives_the_same_tokens(family):
    inputs = left_pad(random_prompts([6, 9, 4]))
    sdpa, eager = tiny_model(family), tiny_model(family)
    eager.set_attn_implementation("eager")
    for kwargs in ({"mars_threshold": 0.1}, {"mars_lossless": True}):
        outputs = [
            model.generate(**inputs, max_new_tokens=MAX_NEW, do_sample=False, **kwargs) for model in (sdpa, eager)
        ]
        assert torch.equal(*outputs)


@pytest.mark.parametrize("implementation", ["flex_attention", "flash_attention_2"])
def test_attention_without_custom_masks_is_refused(implementation):
    model = tiny_model()
    model.config._attn_implementation_internal = implementation
    with pytest.raises(ValueError, match=f"`{implementation}`"):
        generate(model, left_pad(random_prompts([6])), 0.5)


def test_bfloat16_decodes_several_tokens_a_step():
    output = generate(tiny_model(dtype=torch.bfloat16), left_pad(random_prompts([6, 4])), 0.2)
    assert output.tokens_per_forward.mean() > 1.2


class StopAfter(StoppingCriteria):
    """Ends a row behind a token of its own; remembers every prefix that it was shown."""

    def __init__(self, wanted: int, width: int):
        self.wanted, self.width, self.seen = wanted, width, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids[:, self.width :].tolist())
        return input_ids[:, -1] == self.wanted


def test_a_stopping_criterion_sees_every_accepted_token_in_order():
    model, text = ending_model()
    prompt = random_prompts([6], seed=7)[0]
    criterion = StopAfter(text[5], 6)
    output = generate(model, left_pad([prompt]), 1e-9, stopping_criteria=StoppingCriteriaList([criterion]))
    end = text.index(text[5]) + 1
    assert new_tokens(output, 0, 6) == text[:end]
    assert criterion.seen == [[text[: k + 1]] for k in range(end)]
    assert output.accepted_lengths.max() > 1


def greedy_reference(model, prompt, tau, processors, max_new=MAX_NEW):
    """As `brute_force`, with logits processors that look at the true prefix of each candidate."""
    text, counts = prompt.tolist(), []
    while len(text) - len(prompt) < max_new and EOS not in text[len(prompt) :]:
        with torch.no_grad():
            logits = model(torch.tensor([text + [MASK] * 3])).logits[0, len(text) - 1 :].float()
        count = 0
        for k in range(4):
            scores = processors(torch.tensor([text]), logits[k : k + 1].clone())[0]
            scores[MASK] = -torch.inf
            token = scores.argmax().item()
            if k and logits[k].softmax(-1)[token] < tau:
                break
            text.append(token)
            count += 1
            if token == EOS or len(text) - len(prompt) == max_new:
                break
        counts.append(count)
    return text[len(prompt) :], counts


@pytest.mark.parametrize(
    "kwargs", [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[17], [23, 5]]}]
)
def test_processors_see_the_true_prefix_of_every_token(kwargs):
    model = tiny_model(seed=10)
    prompts = random_prompts([6, 9, 4], seed=11)
    inputs = left_pad(prompts)
    for tau in (1e-9, 0.2):
        output = generate(model, inputs, tau, **kwargs)
        config = GenerationConfig(**kwargs)
        config._eos_token_tensor = torch.tensor([EOS])
        for row, prompt in enumerate(prompts):
            # Stock `generate` shows processors the padded row, so the oracle does too.
            processors = model._get_logits_processor(config, input_ids_seq_length=9, device="cpu")
            padded = inputs["input_ids"][row]
            expected = greedy_reference_padded(model, padded, len(prompt), tau, processors)
            assert new_tokens(output, row, 9) == expected
    assert output.tokens_per_forward.mean() > 1.1


def greedy_reference_padded(model, padded, real, tau, processors):
    class Padded:
        def __call__(self, ids, scores):
            return processors(torch.cat([padded[None, : len(padded) - real], ids], dim=-1), scores)

    return greedy_reference(model, padded[len(padded) - real :], tau, Padded())[0]


def test_sampling_follows_the_seed_and_the_first_token_of_a_step_follows_ar():
    model = tiny_model(seed=12)
    inputs = left_pad(random_prompts([6]))
    with torch.no_grad():
        expected = (model(**inputs).logits[0, -1] / 0.7).index_fill(0, torch.tensor(MASK), -torch.inf).softmax(-1)
    torch.manual_seed(0)
    many = {key: value.expand(4000, -1) for key, value in inputs.items()}
    draws = generate(model, many, 0.2, do_sample=True, temperature=0.7, top_k=0, max_new_tokens=2).sequences[:, 6]
    found = torch.bincount(draws, minlength=len(expected)) / len(draws)
    assert 0.5 * (found - expected).abs().sum() < 0.04
    torch.manual_seed(5)
    first = generate(model, inputs, 0.2, do_sample=True, temperature=0.7).sequences
    torch.manual_seed(5)
    assert torch.equal(first, generate(model, inputs, 0.2, do_sample=True, temperature=0.7).sequences)


@pytest.mark.parametrize("extra", [{}, {"temperature": 0.7, "top_k": 1, "do_sample": True}])
@pytest.mark.parametrize(
    "mode",
    [
        {"mars_threshold": 0.2},
        {"mars_threshold": [0.2, 0.9, 1.0, 0.05]},
        {"mars_threshold": 1.5, "mars_confidence": "entropy"},
        {"mars_threshold": 0.2, "mars_confidence": "margin", "mars_cache": "block"},
        {"mars_lossless": True, "prompt_lookup_num_tokens": 3},
    ],
)
def test_looking_at_one_candidate_after_the_other_changes_nothing(mode, extra, monkeypatch):
    """As a CPU does with a large vocabulary. Where it samples, there is one token to draw."""
    model, inputs = tiny_model(seed=3), left_pad(random_prompts([6, 9, 4, 7]))
    kwargs = {"max_new_tokens": 24, "do_sample": False, **extra, "output_scores": True, "output_logits": True}
    kwargs |= {"return_dict_in_generate": True, "pad_token_id": 0}
    expected = model.generate(**inputs, **mode, **kwargs)
    assert expected.tokens_per_forward.max() > 1
    asked = []
    one = decoding.Chooser.one
    monkeypatch.setattr(decoding, "DEAR", 0)
    monkeypatch.setattr(decoding.Chooser, "one", lambda *args: asked.append(None) or one(*args))
    output = model.generate(**inputs, **mode, **kwargs)
    assert asked
    assert torch.equal(output.sequences, expected.sequences)
    assert torch.equal(output.accepted_lengths, expected.accepted_lengths)
    for name in ("scores", "logits"):
        for own, other in zip(getattr(output, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(own, other)
