"""A window that pays for itself: what still holds when it changes from step to step, and that it follows the cost."""

from __future__ import annotations

import itertools

import pytest
import torch
from decoding_models import EOS, MASK, PAD, brute_force, left_pad, random_prompts, tiny_model

from mars_hf import decoding
from mars_hf.pacing import costs_of

MAX_NEW = 60


def adaptive(model, inputs, tau, **kwargs):
    kwargs = {"max_new_tokens": MAX_NEW, "do_sample": False, "return_dict_in_generate": True, **kwargs}
    return model.generate(**inputs, mars_threshold=tau, mars_adaptive_window=True, **kwargs)


def windows_of(model, run):
    """The windows of the steps of a `generate` call, from the [MASK]s of its forwards, and the call's output."""
    windows = []

    def count(_, args, kwargs):
        # Every row ends with the same number of [MASK]s; a prompt holds none.
        windows.append(1 + int((kwargs["input_ids"][-1] == MASK).sum()))

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    output = run()
    hook.remove()
    return windows, output


class ScriptedClock:
    """A clock that stands still, but for what a forward of so many rows and tokens is said to cost."""

    def __init__(self, model, monkeypatch, cost):
        self.now, self.cost = 0.0, cost
        monkeypatch.setattr(decoding.time, "perf_counter", lambda: self.now)
        model.register_forward_pre_hook(self._tick, with_kwargs=True)

    def _tick(self, _, args, kwargs):
        # The tests' own forwards have positional arguments.
        if "input_ids" in kwargs:
            self.now += self.cost(*kwargs["input_ids"].shape)


@torch.no_grad()
def check_every_candidate(model, prompt, tokens, steps, windows, tau):
    """Each accepted token is the likeliest one, and but for the first of a step the model is sure of it, there."""
    text = prompt.tolist()
    for count, window in zip(steps, windows, strict=False):
        assert count <= window
        logits = model(torch.tensor([text + [MASK] * (count - 1)])).logits[0, len(text) - 1 :].float()
        for k in range(count):
            token = tokens[len(text) - len(prompt)]
            assert token == logits[k].index_fill(0, torch.tensor(MASK), -torch.inf).argmax()
            assert k == 0 or logits[k].softmax(-1)[token] >= tau - 1e-5
            text.append(token)
    assert text == prompt.tolist() + tokens


@pytest.mark.parametrize("cost", ["cheap", "dear"])
@pytest.mark.parametrize("tau", [0.05, 0.3])
def test_every_accepted_token_was_acceptable_where_it_was_proposed(cost, tau, monkeypatch):
    model = tiny_model(seed=2)
    price = {"cheap": lambda n, q: 1.0 + 1e-3 * q, "dear": lambda n, q: 1.0 * n * q}[cost]
    prompts = random_prompts([5, 11, 3, 8])
    ScriptedClock(model, monkeypatch, price)
    windows, output = windows_of(model, lambda: adaptive(model, left_pad(prompts), tau, mars_block_size=6))
    assert len(windows) == output.num_forwards
    assert windows[:3] == [6, 1, 1]
    for row, prompt in enumerate(prompts):
        length = int(output.accepted_lengths[row].sum())
        tokens = output.sequences[row, 11 : 11 + length].tolist()
        steps = output.accepted_lengths[row]
        check_every_candidate(model, prompt, tokens, steps[steps > 0].tolist(), windows, tau)
    if tau == 0.05:
        assert output.tokens_per_forward.max() > 1.1


def test_it_settles_on_the_window_that_the_brute_force_finds(monkeypatch):
    """At three prices of a token, the windows of long replies are among the fastest of all fixed ones."""
    for price, tau in ((1e-3, 0.02), (0.5, 0.02), (2.0, 0.15)):
        model = tiny_model(seed=3, eos_token_id=None)
        clock = ScriptedClock(model, monkeypatch, lambda n, q, price=price: 1.0 + price * n * q)
        inputs = left_pad(random_prompts([5, 9]))

        def speed(clock=clock, model=model, inputs=inputs, tau=tau, **kwargs):
            began = clock.now
            output = model.generate(
                **inputs,
                max_new_tokens=120,
                do_sample=False,
                mars_threshold=tau,
                return_dict_in_generate=True,
                **kwargs,
            )
            return int(output.accepted_lengths.sum()) / (clock.now - began)

        fixed = [speed(mars_block_size=window) for window in range(1, 6)]
        speed(mars_block_size=5, mars_adaptive_window=True)
        # The second call knows what forwards cost.
        assert speed(mars_block_size=5, mars_adaptive_window=True) > 0.87 * max(fixed), (price, tau)


def test_a_window_of_one_takes_single_tokens_and_no_masks(monkeypatch):
    model = tiny_model(seed=2, eos_token_id=None)
    ScriptedClock(model, monkeypatch, lambda n, q: float(n * q))
    inputs = left_pad(random_prompts([5, 9]))
    windows, output = windows_of(model, lambda: adaptive(model, inputs, 0.9))
    assert windows.count(1) >= len(windows) - 4
    plain = model.generate(**inputs, max_new_tokens=MAX_NEW, do_sample=False, suppress_tokens=[MASK])
    several = [k for k in range(len(windows)) if output.accepted_lengths[:, k].max() > 1]
    if not several:
        assert torch.equal(output.sequences, plain)


@pytest.mark.parametrize("seed", range(8))
def test_stops_and_lengths_hold(seed, monkeypatch):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    model = tiny_model(("llama", "gemma3_text")[seed % 2], seed=seed)
    prices = iter(itertools.cycle([0.01, 3.0, 0.2, 0.5]))
    ScriptedClock(model, monkeypatch, lambda n, q: 1.0 + next(prices) * q)
    prompts = random_prompts([draw(1, 15) for _ in range(draw(1, 6))], seed=seed)
    max_new, stops = draw(1, 50), [EOS, draw(3, MASK)]
    inputs = left_pad(prompts, extra=draw(0, 9))
    width = inputs["input_ids"].shape[1]
    output = adaptive(model, inputs, 0.05, max_new_tokens=max_new, eos_token_id=stops, mars_block_size=draw(2, 8))
    lengths = output.accepted_lengths.sum(-1)
    for row, length in enumerate(lengths.tolist()):
        tokens = output.sequences[row, width : width + length].tolist()
        assert MASK not in tokens
        assert not set(tokens[:-1]) & set(stops)
        assert length == max_new or tokens[-1] in stops
        assert (output.sequences[row, width + length :] == PAD).all()
    counted = (output.accepted_lengths > 0).sum(-1)
    assert torch.allclose(output.tokens_per_forward, lengths / counted)


@pytest.mark.parametrize("extra", [{"repetition_penalty": 1.3}, {"do_sample": True, "output_scores": True}])
def test_processors_sampling_and_scores(extra):
    model = tiny_model(seed=2)
    inputs = left_pad(random_prompts([5, 9, 4]))
    output = adaptive(model, inputs, 0.05, **extra)
    lengths = output.accepted_lengths.sum(-1)
    assert output.sequences.shape[1] == 9 + lengths.max()
    if "output_scores" in extra:
        assert len(output.scores) == lengths.max()
        for row, length in enumerate(lengths.tolist()):
            for k in range(length):
                assert output.scores[k][row, output.sequences[row, 9 + k]].isfinite()


def test_a_next_turn_and_a_window_of_one_to_begin_with():
    model = tiny_model(seed=2)
    first = adaptive(model, left_pad(random_prompts([7])), 0.1)
    text = torch.cat([first.sequences, torch.tensor([[5, 6, 7]])], dim=-1)
    second = adaptive(model, {"input_ids": text, "cache": first.cache}, 0.1)
    assert second.sequences[0, : text.shape[1]].tolist() == text[0].tolist()
    narrow = adaptive(model, left_pad(random_prompts([7])), 0.1, mars_block_size=1)
    tokens = brute_force(model, random_prompts([7])[0], 0.1, window=1, max_new=MAX_NEW)[0]
    assert narrow.sequences[0, 7:].tolist() == tokens


def test_costs_belong_to_the_model():
    model, other = tiny_model(), tiny_model()
    adaptive(model, left_pad(random_prompts([5])), 0.5, eos_token_id=None)
    assert costs_of(model).is_measured(1, 1)
    assert costs_of(model) is costs_of(model)
    assert not costs_of(other).is_measured(1, 1)
