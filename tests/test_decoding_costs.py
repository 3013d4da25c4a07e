"""What decoding does not pay for: memory, copies of the cache, rows that have ended, work outside the forward."""

from __future__ import annotations

import itertools

import pytest
import torch
from decoding_models import left_pad, random_prompts, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from mars_hf.cache import MarsCacheLayer


def cache_bytes(cache) -> int:
    return sum(
        buffer.numel() * buffer.element_size() for layer in cache.layers for buffer in (layer.keys, layer.values)
    )


@pytest.mark.parametrize("new_tokens", [40, 75, 130, 200])
def test_keys_and_values_take_little_more_memory_than_those_of_stock_generate(new_tokens):
    model = tiny_model(eos_token_id=None, max_position_embeddings=512)
    inputs = left_pad(random_prompts([150, 120, 160]))
    kwargs = {"max_new_tokens": new_tokens, "do_sample": False, "return_dict_in_generate": True}
    stock = model.generate(**inputs, **kwargs)
    ours = model.generate(**inputs, mars_threshold=0.1, **kwargs)
    assert cache_bytes(ours.cache) <= 1.15 * cache_bytes(stock.cache)


def test_the_cache_is_copied_when_it_grows_and_at_no_other_time(monkeypatch):
    model = tiny_model(eos_token_id=None, num_hidden_layers=1)
    buffers = []
    update = MarsCacheLayer.update

    def watched(layer, keys, values, *args, **kwargs):
        result = update(layer, keys, values, *args, **kwargs)
        assert result[0].data_ptr() == layer.keys.data_ptr()
        assert result[1].data_ptr() == layer.values.data_ptr()
        buffers.append((layer.keys.data_ptr(), layer.keys.shape[2]))
        return result

    monkeypatch.setattr(MarsCacheLayer, "update", watched)
    model.generate(**left_pad(random_prompts([40, 33])), mars_threshold=0.3, max_new_tokens=100, do_sample=False)
    changes = [(a, b) for a, b in itertools.pairwise(buffers) if a[0] != b[0]]
    assert len(changes) <= 8
    assert all(after[1] >= before[1] + 16 for before, after in changes)


def test_rows_that_end_are_not_fed_any_more():
    model = tiny_model(seed=6)
    rows = []
    model.register_forward_pre_hook(lambda m, a, kw: rows.append(kw["input_ids"].shape[0]), with_kwargs=True)
    output = model.generate(
        **left_pad(random_prompts([6, 9, 4, 7, 8])), mars_threshold=0.3, max_new_tokens=30, do_sample=False,
        eos_token_id=list(range(2, 9)), return_dict_in_generate=True,
    )  # fmt: skip
    assert rows == (output.accepted_lengths > 0).sum(0).tolist()
    assert rows[-1] < rows[0]


class OperationCounter(TorchDispatchMode):
    """Counts the tensor operations outside the model's forward, and how often the host there waits for the device."""

    def __init__(self, model, monkeypatch):
        super().__init__()
        self.count = self.waits = 0
        self.in_forward = False
        model.register_forward_pre_hook(lambda *_: self._enter(True))
        model.register_forward_hook(lambda *_: self._enter(False))
        tolist = torch.Tensor.tolist

        def watched(tensor):
            # On a CPU it reads the memory, without any operation.
            self.waits += not self.in_forward
            return tolist(tensor)

        monkeypatch.setattr(torch.Tensor, "tolist", watched)

    def _enter(self, inside):
        self.in_forward = inside

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.in_forward:
            self.count += 1
            self.waits += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("adaptive", [False, True])
def test_operations_outside_the_forward_per_step(rows, adaptive, monkeypatch):
    """However many rows: at a few microseconds each, far below a millisecond, and one wait for the device."""
    model = tiny_model(eos_token_id=None)
    inputs = left_pad(random_prompts([5 + row for row in range(rows)]))
    counts, waits, steps = [], [], []
    for new_tokens in (20, 80):
        with monkeypatch.context() as patch:
            counter = OperationCounter(model, patch)
            with counter:
                output = model.generate(
                    **inputs, mars_threshold=0.1, max_new_tokens=new_tokens, do_sample=False,
                    mars_adaptive_window=adaptive, return_dict_in_generate=True,
                )  # fmt: skip
        counts.append(counter.count)
        waits.append(counter.waits)
        steps.append(output.num_forwards)
    # What a call does once, however long its text, falls out of the differences.
    assert (counts[1] - counts[0]) / (steps[1] - steps[0]) < 75
    assert waits[1] - waits[0] == steps[1] - steps[0]
