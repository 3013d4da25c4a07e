"""Copies of weights in another layout: the same product, never that of weights which have changed, never too much."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from decoding_models import left_pad, random_prompts, tiny_model
from torch import nn

from mars_hf import few_tokens, prepacked
from mars_hf.few_tokens import PREPACKED, few_token_products
from mars_hf.prepacked import can_prepack, prepack, prepacked_linear

pytestmark = pytest.mark.skipif(not can_prepack(torch.float32), reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def always_prepacked(monkeypatch):
    def fastest(weights, tokens, may_prepack):
        return PREPACKED if may_prepack else few_tokens.PLAIN

    monkeypatch.setattr(few_tokens, "SMALLEST", 0)
    monkeypatch.setattr(few_tokens, "fastest_product", fastest)
    prepacked._KEPT.clear()


@pytest.mark.parametrize("shape", [(8,), (1, 8), (3, 8), (2, 5, 8), (1, 1, 8), (300, 8)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_linear(shape, has_bias):
    torch.manual_seed(0)
    layer = nn.Linear(8, 6, bias=has_bias)
    with torch.no_grad():
        for inputs in (torch.randn(shape), torch.randn(*shape[:-1], 16)[..., ::2]):
            output = prepacked_linear(inputs, prepack(layer.weight), layer.bias)
            assert output.is_contiguous()
            torch.testing.assert_close(output, layer(inputs))


def through(layer: nn.Linear, inputs: torch.Tensor, may_prepack: bool = True) -> torch.Tensor:
    with torch.no_grad(), few_token_products(layer, may_prepack):
        return layer(inputs)


def train(layer):
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    layer(torch.ones(1, 8)).sum().backward()
    optimizer.step()


def swap_rows(layer):
    layer.weight.data.copy_(layer.weight.data[[1, 0, 2, 3, 4, 5]])


def swap_columns(layer):
    layer.weight.data.copy_(layer.weight.data[:, [1, 0, 2, 3, 4, 5, 6, 7]])


def one_element(layer):
    layer.weight.data[3, 5] += 1e-4


def another_storage(layer):
    layer.weight.data = layer.weight.data + 1


def merge(layer):
    # As PEFT merges: neither the version of the parameter nor its storage is another one then.
    version, place = layer.weight._version, layer.weight.data_ptr()
    layer.weight.data += 0.1
    assert (layer.weight._version, layer.weight.data_ptr()) == (version, place)


def load(layer):
    layer.load_state_dict(nn.Linear(8, 6).state_dict())


def other_shape(layer):
    layer.weight = nn.Parameter(torch.randn(4, 8))
    layer.bias = None


@pytest.mark.parametrize(
    "change", [train, swap_rows, swap_columns, one_element, another_storage, merge, load, other_shape]
)
def test_weights_that_change_are_prepacked_anew(change):
    torch.manual_seed(0)
    layer, inputs = nn.Linear(8, 6), torch.randn(3, 8)
    # Whole numbers, whose sums are exact in any order.
    layer.weight.data = torch.randint(-9, 10, (6, 8)).float()
    before = through(layer, inputs)
    kept = prepacked._KEPT[layer]
    assert torch.equal(through(layer, inputs), before)
    assert prepacked._KEPT[layer] is kept
    change(layer)
    after = through(layer, inputs)
    assert prepacked._KEPT[layer] is not kept
    with torch.no_grad():
        torch.testing.assert_close(after, layer(inputs))
    assert not torch.equal(after, before)


def test_another_dtype_is_no_longer_prepacked():
    layer = nn.Linear(8, 6)
    through(layer, torch.randn(3, 8))
    layer.double()
    with torch.no_grad():
        prepacked.forget_changed([layer])
    assert layer not in prepacked._KEPT


def test_they_live_as_long_as_the_layer_and_are_no_part_of_it():
    layer = nn.Linear(8, 6)
    names = set(layer.__dict__), set(layer.state_dict())
    through(layer, torch.randn(3, 8))
    assert (set(layer.__dict__), set(layer.state_dict())) == names
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other not in prepacked._KEPT
    assert len(prepacked._KEPT) == 1
    del layer, other
    gc.collect()
    assert len(prepacked._KEPT) == 0


def test_only_as_much_as_fits_into_half_of_the_memory(monkeypatch):
    layers = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    needed = sum(layer.weight.nbytes for layer in layers)
    for available, fits in ((None, False), (2 * needed - 1, False), (2 * needed, True)):
        monkeypatch.setattr(prepacked, "available_memory", lambda available=available: available)
        through(layers, torch.randn(3, 8))
        assert [layer in prepacked._KEPT for layer in layers] == [fits, fits]


def test_what_is_kept_goes_on_where_the_rest_has_no_room(monkeypatch):
    layers = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    through(layers[0], torch.randn(3, 8))
    kept = prepacked._KEPT[layers[0]].weight
    monkeypatch.setattr(prepacked, "available_memory", lambda: 0)
    used, product = [], few_tokens.prepacked_linear
    monkeypatch.setattr(few_tokens, "prepacked_linear", lambda x, w, b: (used.append(w), product(x, w, b))[1])
    through(layers, torch.randn(3, 8))
    assert len(used) == 1
    assert used[0] is kept
    assert layers[1] not in prepacked._KEPT


def test_layers_whose_weights_a_forward_may_change_are_left_alone():
    hooked = nn.Linear(8, 6)
    hooked.register_forward_pre_hook(lambda layer, inputs: (layer.weight.data.add_(1.0), None)[1])
    inputs = torch.randn(3, 8)
    for _ in range(2):
        output = through(hooked, inputs)
        with torch.no_grad():
            torch.testing.assert_close(output, nn.functional.linear(inputs, hooked.weight, hooked.bias))
    assert hooked not in prepacked._KEPT


def test_adapters_that_peft_unmerges_in_the_forward():
    peft = pytest.importorskip("peft")
    model = tiny_model(eos_token_id=None)
    prompts = left_pad(random_prompts([9, 5]))
    settings = {**prompts, "mars_lossless": True, "max_new_tokens": 12, "do_sample": False}
    before = model.generate(**settings)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    adapted.merge_adapter()
    merged = adapted.generate(**settings)
    assert len(prepacked._KEPT) > 0
    assert not torch.equal(merged, before)
    with adapted.disable_adapter():
        assert torch.equal(adapted.generate(**settings), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_whatever_the_default_dtype(dtype):
    layer, inputs = nn.Linear(8, 6), torch.randn(3, 8)
    expected = through(layer, inputs)
    prepacked._KEPT.clear()
    try:
        torch.set_default_dtype(dtype)
        assert torch.equal(through(layer, inputs), expected)
        assert torch.equal(through(layer, inputs), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_threads_that_find_the_same_change(monkeypatch):
    layer = nn.Linear(8, 6)
    through(layer, torch.randn(3, 8))
    layer.weight.data += 1
    fingerprint = prepacked._fingerprint

    def while_another_thread_is_faster(weight):
        prepacked._KEPT.pop(layer, None)
        return fingerprint(weight)

    monkeypatch.setattr(prepacked, "_fingerprint", while_another_thread_is_faster)
    with torch.no_grad():
        prepacked.forget_changed([layer])
    assert layer not in prepacked._KEPT


def test_a_call_may_rule_them_out_and_frees_them():
    model = tiny_model(eos_token_id=None)
    prompts = left_pad(random_prompts([9, 5]))

    def generate(**arguments):
        model.generate(**prompts, mars_lossless=True, max_new_tokens=6, do_sample=False, **arguments)
        return len(prepacked._KEPT)

    assert generate(mars_prepack_weights=False) == 0
    assert generate() > 0
    assert generate(mars_prepack_weights=True) > 0
    assert generate(mars_prepack_weights=False) == 0
    assert generate() > 0
    # Where the stock loop decodes, too.
    model.generate(**prompts, mars_threshold=1.0, mars_prepack_weights=False, max_new_tokens=2)
    assert len(prepacked._KEPT) == 0
    model.generation_config.update(mars_prepack_weights=False, allow_custom_entries=True)
    assert generate() == 0
    assert generate(mars_prepack_weights=True) > 0


@pytest.mark.parametrize("arguments", [{"mars_threshold": 0.1}, {"mars_lossless": True}])
def test_generate_follows_a_model_that_trains_between_calls(arguments):
    model = tiny_model(eos_token_id=None)
    prompts = left_pad(random_prompts([9, 5]))
    settings = {**prompts, **arguments, "max_new_tokens": 12, "do_sample": False}
    before = model.generate(**settings)
    for parameter in model.parameters():
        parameter.data.mul_(1.0 + 0.5 * torch.rand_like(parameter))
    after = model.generate(**settings)
    assert torch.equal(after, model.generate(**settings, mars_prepack_weights=False))
    assert not torch.equal(after, before)
