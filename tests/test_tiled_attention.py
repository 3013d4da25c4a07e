"""Attention of training in tiles: the figures and gradients of `sdpa`, without the pairs that nobody needs."""

from __future__ import annotations

import pytest
import torch
from conftest import make_model
from test_losses import make_batch
from test_sft_trainer import CHAT, ONE_STEP, PROMPT, assert_same_weights, make_trainer, train
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mars_hf import tiled_attention
from mars_hf.masks import dense_mask
from mars_hf.streams import batch_layout
from mars_hf.tiled_attention import tiles_of


def two_stream_mask(lengths, window=None):
    examples = [
        {"input_ids": list(range(5, 5 + n)), "labels": [-100] * (n // 3) + [7] * (n - n // 3)} for n in lengths
    ]
    return dense_mask(batch_layout(make_batch(examples)), window)


def results(attention, mask, dtype, heads):
    """Output and gradients, for the same random inputs."""
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = heads[0] // heads[1]
    rows, length = len(mask), mask.shape[2]
    states = [
        torch.randn(rows, count, length, 8, dtype=dtype, requires_grad=True) for count in (heads[0], *heads[1:] * 2)
    ]
    output, _ = attention(module, *states, mask, scaling=0.4)
    output.backward(torch.randn_like(output))
    return [output, *(state.grad for state in states)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_equals_sdpa(heads, window, dtype):
    mask = two_stream_mask((210, 60, 137), window)
    assert tiles_of(mask, dtype)
    ours = results(tiled_attention.tiled_attention, mask, dtype, heads)
    stock = results(sdpa_attention_forward, mask, dtype, heads)
    for mine, theirs in zip(ours, stock, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)


def test_tiles_leave_out_what_nobody_sees_and_nothing_else():
    mask = two_stream_mask((210, 60))
    tiles = tiles_of(mask, torch.float32)
    assert tiles is tiles_of(mask, torch.float32)
    again = torch.zeros_like(mask)
    covered = []
    for tile in tiles:
        covered += range(*tile.queries.indices(mask.shape[2]))
        for key in tile.keys.tolist():
            assert mask[:, :, tile.queries, key].any()
        again[:, :, tile.queries] = again[:, :, tile.queries].index_copy(3, tile.keys, tile.mask == 0)
        assert set(tile.mask.unique().tolist()) <= {0.0, float("-inf")}
    assert covered == list(range(mask.shape[2]))
    assert torch.equal(again, mask)
    pairs = sum(tile.mask[0].numel() for tile in tiles)
    assert pairs < 0.65 * mask[0].numel()


@pytest.mark.parametrize(
    "mask",
    [
        two_stream_mask((20, 30)),  # one tile
        torch.ones(1, 1, 400, 400, dtype=torch.bool),
        torch.zeros(1, 1, 400, 400),  # of another form
    ],
)
def test_no_tiles_where_they_do_not_pay(mask):
    assert tiles_of(mask, torch.float32) == []


def count_tiles(monkeypatch):
    """Small tiles, and the number of `sdpa` calls with a mask that they come to."""
    monkeypatch.setattr(tiled_attention, "TILE", 16)
    calls = []
    stock = tiled_attention.sdpa_attention_forward

    def counted(*args, **kwargs):
        calls.append(args[1].shape[2])
        return stock(*args, **kwargs)

    monkeypatch.setattr(tiled_attention, "sdpa_attention_forward", counted)
    return calls


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("data", [PROMPT, CHAT])
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"packing": True, "max_length": 64}])
def test_training_is_the_same(tmp_path, monkeypatch, name, data, options):
    model = make_model(name)
    options = {"mars_block_size": 3, **ONE_STEP, **options}
    with monkeypatch.context() as patch:
        patch.setattr(tiled_attention, "MOST", 0.0)  # never in tiles
        weights, logs = train(make_trainer(tmp_path, model, data, **options))
    calls = count_tiles(monkeypatch)
    tiled_weights, tiled_logs = train(make_trainer(tmp_path, model, data, **options))
    assert len(calls) > 2 * model.config.num_hidden_layers
    assert max(calls) == 16
    assert tiled_logs[0]["loss"] == pytest.approx(logs[0]["loss"], rel=1e-5)
    assert_same_weights(tiled_weights, weights, 2e-5)


def test_evaluation_is_the_same(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, mars_block_size=3, eval_dataset=None)
    expected = trainer.evaluate(trainer.train_dataset)
    calls = count_tiles(monkeypatch)
    metrics = trainer.evaluate(trainer.train_dataset)
    assert max(calls) == 16
    for metric in ("eval_loss", "eval_mask_loss", "eval_mask_accuracy"):
        assert metrics[metric] == pytest.approx(expected[metric], rel=1e-5)


def test_the_model_gets_its_attention_back(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, mars_block_size=3, max_steps=1)
    seen = []

    def fail(*args, **kwargs):
        seen.append(trainer.model.config._attn_implementation)
        raise RuntimeError("stop here")

    monkeypatch.setattr(trainer, "compute_loss", fail)
    with pytest.raises(RuntimeError, match="stop here"):
        trainer.train()
    assert seen == ["mars_tiled_sdpa"]
    assert trainer.model.config._attn_implementation == "sdpa"


def test_without_a_masked_stream_attention_is_the_stock_one(tmp_path, monkeypatch):
    calls = count_tiles(monkeypatch)
    train(make_trainer(tmp_path, mars_mask_weight=0.0, max_steps=1))
    assert calls == []
