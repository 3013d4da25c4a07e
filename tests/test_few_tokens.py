"""Linear layers for few tokens on a CPU: three products that are the same, and the one that is used is the fastest."""

from __future__ import annotations

import time

import pytest
import torch
from decoding_models import left_pad, random_prompts, tiny_model
from torch import nn

from mars_hf import few_tokens
from mars_hf.few_tokens import PLAIN, PREPACKED, TRANSPOSED, fastest_product, few_token_products, transposed_linear
from mars_hf.prepacked import can_prepack

needs_prepacking = pytest.mark.skipif(not can_prepack(torch.float32), reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch):
    monkeypatch.setattr(few_tokens, "_FASTEST", {})
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


@needs_prepacking
@pytest.mark.parametrize("slow", [(), (PLAIN,), (PLAIN, TRANSPOSED), (PLAIN, TRANSPOSED, PREPACKED)])
@pytest.mark.parametrize("may_prepack", [False, True])
def test_the_fastest_product_is_chosen_and_measured_once(monkeypatch, slow, may_prepack):
    measured = []

    def seconds(product, weights, inputs):
        name = {"linear": PLAIN, "transposed_linear": TRANSPOSED, "prepacked_linear": PREPACKED}[product.__name__]
        measured.append((name, [weight.shape for weight in weights], inputs.shape))
        # Those that are not slow are alike, but for what may be noise, and then the simplest is chosen.
        return {PLAIN: 1.0, TRANSPOSED: 0.95, PREPACKED: 0.91}[name] + 9 * (name in slow)

    monkeypatch.setattr(few_tokens, "_seconds", seconds)
    weights = [torch.randn(32, 16) for _ in range(3)]
    alone = slow == (PLAIN, TRANSPOSED) and not may_prepack
    best = PLAIN if alone else [PLAIN, TRANSPOSED, PREPACKED, PLAIN][len(slow)]
    for tokens in (3, 4):
        assert fastest_product(weights, tokens, may_prepack) == best
    names = [PLAIN, TRANSPOSED, *[PREPACKED] * may_prepack]
    assert measured == [(name, [(32, 16)] * 3, (4, 16)) for name in names] * few_tokens.ROUNDS
    fastest_product(weights, 5, may_prepack)
    assert measured[-1][2] == (8, 16)


def test_what_is_measured_is_the_time_of_the_product():
    def slow(inputs, weight):
        time.sleep(0.002)
        return inputs @ weight.t()

    weights = [torch.randn(32, 16) for _ in range(3)]
    assert few_tokens._seconds(slow, weights, torch.zeros(2, 16)) > 0.006


def test_a_measurement_walks_over_pieces_of_large_weights(monkeypatch):
    seen = []
    monkeypatch.setattr(few_tokens, "linear", lambda inputs, weight: seen.append(weight))
    monkeypatch.setattr(few_tokens, "PIECE", 4 * 8 * 100)
    monkeypatch.setattr(few_tokens, "WALK", 4 * 8 * 300)
    fastest_product([torch.randn(1000, 8)], 2, False)
    assert [piece.shape for piece in seen] == [(100, 8)] * 3 * few_tokens.ROUNDS
    assert len({piece.data_ptr() for piece in seen}) == 3


class Doubled(nn.Linear):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


def test_only_plain_layers_and_few_tokens_without_gradients(monkeypatch):
    monkeypatch.setattr(few_tokens, "fastest_product", lambda weights, tokens, may_prepack: TRANSPOSED)
    calls = []
    monkeypatch.setattr(
        few_tokens, "transposed_linear", lambda x, w, b: (calls.append(x.shape), nn.functional.linear(x, w, b))[1]
    )
    own = nn.Linear(4, 4)
    own.forward = lambda inputs: inputs + 1
    model = nn.ModuleList([nn.Linear(4, 4), Doubled(4, 4), own, nn.Linear(4, 4, device="meta")])
    with torch.no_grad(), few_token_products(model):
        assert "forward" not in model[3].__dict__
        for tokens in (0, 1, 2, 64, 65):
            for layer in list(model)[:3]:
                layer(torch.randn(tokens, 4))
        assert calls == [(1, 4), (2, 4), (64, 4)]
        with torch.autocast("cpu", torch.bfloat16):
            model[0](torch.randn(3, 4))
        with pytest.raises(RuntimeError, match="dtype"):
            model[0](torch.randn(3, 4, dtype=torch.bfloat16))
        with torch.enable_grad():
            model[0](torch.randn(3, 4)).sum().backward()
        assert len(calls) == 3
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


@needs_prepacking
@pytest.mark.parametrize("arguments", [{"mars_threshold": 0.1}, {"mars_lossless": True}])
def test_generate_uses_them_and_gives_the_same_tokens(monkeypatch, arguments):
    model = tiny_model(eos_token_id=None)
    prompts = left_pad(random_prompts([9, 5]))
    count = []
    for name in ("linear", "transposed_linear", "prepacked_linear"):
        original = getattr(few_tokens, name)
        monkeypatch.setattr(few_tokens, name, lambda *a, f=original, name=name: (count.append(name), f(*a))[1])
    outputs = []
    for product, name in ((PLAIN, "linear"), (TRANSPOSED, "transposed_linear"), (PREPACKED, "prepacked_linear")):
        monkeypatch.setattr(few_tokens, "fastest_product", lambda weights, tokens, may, product=product: product)
        count.clear()
        outputs.append(model.generate(**prompts, **arguments, max_new_tokens=12, do_sample=False))
        assert set(count) == {name}
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert not any("forward" in module.__dict__ for module in model.modules())
