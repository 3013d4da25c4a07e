"""Linear layers for few tokens on a CPU: the transposed product is the same, and is used where it is faster."""

from __future__ import annotations

import time

import pytest
import torch
from decoding_models import left_pad, random_prompts, tiny_model
from torch import nn

from mars_hf import few_tokens
from mars_hf.few_tokens import few_token_products, is_transposed_faster, transposed_linear


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch):
    monkeypatch.setattr(few_tokens, "_IS_TRANSPOSED_FASTER", {})
    # The layers here are tiny.
    monkeypatch.setattr(few_tokens, "SMALLEST", 0)


@pytest.mark.parametrize("shape", [(1, 8), (3, 8), (2, 5, 8), (1, 1, 8)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_linear(shape, has_bias, dtype):
    torch.manual_seed(0)
    layer = nn.Linear(8, 6, bias=has_bias, dtype=dtype)
    inputs = torch.randn(shape, dtype=dtype)
    output = transposed_linear(inputs, layer.weight, layer.bias)
    assert output.is_contiguous()
    # In bfloat16 the two kernels may round the last bit of a sum another way.
    close = {} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 1.6e-2}
    torch.testing.assert_close(output, layer(inputs), **close)
    strided = torch.randn(*shape[:-1], 16, dtype=dtype)[..., ::2]
    torch.testing.assert_close(transposed_linear(strided, layer.weight, layer.bias), layer(strided), **close)


@pytest.mark.parametrize("slow", ["linear", "transposed_linear"])
def test_the_faster_product_is_chosen_and_measured_once(monkeypatch, slow):
    calls = []

    def slowed(inputs, weight):
        calls.append(weight.shape)
        time.sleep(0.002)
        return inputs @ weight.t()

    monkeypatch.setattr(few_tokens, slow, slowed)
    weights = [torch.randn(32, 16) for _ in range(3)]
    assert is_transposed_faster(weights, 3) == (slow == "linear")
    assert calls == [(32, 16)] * 3 * few_tokens.ROUNDS
    assert is_transposed_faster(weights, 4) == (slow == "linear")
    assert len(calls) == 3 * few_tokens.ROUNDS
    is_transposed_faster(weights, 5)
    assert len(calls) == 6 * few_tokens.ROUNDS


def test_a_measurement_walks_over_pieces_of_large_weights(monkeypatch):
    seen = []
    monkeypatch.setattr(few_tokens, "linear", lambda inputs, weight: seen.append(weight))
    monkeypatch.setattr(few_tokens, "PIECE", 4 * 8 * 100)
    monkeypatch.setattr(few_tokens, "WALK", 4 * 8 * 300)
    is_transposed_faster([torch.randn(1000, 8)], 2)
    assert [piece.shape for piece in seen] == [(100, 8)] * 3 * few_tokens.ROUNDS
    assert len({piece.data_ptr() for piece in seen}) == 3


class Doubled(nn.Linear):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


def test_only_plain_layers_and_few_tokens_without_gradients(monkeypatch):
    monkeypatch.setattr(few_tokens, "is_transposed_faster", lambda weights, tokens: True)
    calls = []
    monkeypatch.setattr(
        few_tokens, "transposed_linear", lambda x, w, b: (calls.append(x.shape), nn.functional.linear(x, w, b))[1]
    )
    own = nn.Linear(4, 4)
    own.forward = lambda inputs: inputs + 1
    model = nn.ModuleList([nn.Linear(4, 4), Doubled(4, 4), own, nn.Linear(4, 4, device="meta")])
    with torch.no_grad(), few_token_products(model):
        assert "forward" not in model[3].__dict__
        for tokens in (1, 2, 64, 65):
            for layer in list(model)[:3]:
                layer(torch.randn(tokens, 4))
        assert calls == [(2, 4), (64, 4)]
        with torch.autocast("cpu", torch.bfloat16):
            model[0](torch.randn(3, 4))
        with pytest.raises(RuntimeError, match="dtype"):
            model[0](torch.randn(3, 4, dtype=torch.bfloat16))
        with torch.enable_grad():
            model[0](torch.randn(3, 4)).sum().backward()
        assert len(calls) == 2
    assert model[0].weight.grad is not None


def test_small_layers_are_left_alone(monkeypatch):
    monkeypatch.setattr(few_tokens, "SMALLEST", 4 * 16)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    with few_token_products(model):
        assert ["forward" in layer.__dict__ for layer in model] == [True, False]


def test_layers_get_their_forward_back():
    layer, own = nn.Linear(4, 4), nn.Linear(4, 4)
    own.forward = kept = lambda inputs: inputs
    model = nn.Sequential(layer, own)
    with few_token_products(model):
        assert "forward" in layer.__dict__
        # A context within it, as of another thread, leaves to the outer one what that has begun.
        with few_token_products(model):
            pass
        assert "forward" in layer.__dict__
    assert "forward" not in layer.__dict__
    with pytest.raises(ZeroDivisionError), few_token_products(model):
        _ = 1 / 0
    assert "forward" not in layer.__dict__
    assert own.forward is kept


@pytest.mark.parametrize("arguments", [{"mars_threshold": 0.1}, {"mars_lossless": True}])
def test_generate_uses_them_and_gives_the_same_tokens(monkeypatch, arguments):
    model = tiny_model(eos_token_id=None)
    prompts = left_pad(random_prompts([9, 5]))
    count = []
    original = few_tokens.transposed_linear
    monkeypatch.setattr(few_tokens, "transposed_linear", lambda *a: (count.append(1), original(*a))[1])
    outputs = []
    for faster in (False, True):
        monkeypatch.setattr(few_tokens, "is_transposed_faster", lambda weights, tokens, faster=faster: faster)
        outputs.append(model.generate(**prompts, **arguments, max_new_tokens=12, do_sample=False))
        assert bool(count) == faster
    assert torch.equal(*outputs)
    assert not any("forward" in module.__dict__ for module in model.modules())
