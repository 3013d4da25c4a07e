"""The visibility rule in all its forms against loops over the rule of the paper."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from conftest import make_model

from mars_hf.masks import (
    CLEAN,
    MASKED,
    PADDING,
    Layout,
    block_mask,
    decode_mask,
    dense_mask,
    flex_mask_mod,
    mars_attention_mask,
)
from mars_hf.model_masks import attention_windows, masks_for_model, training_masks


def brute_force_mask(length: int, block_size: int) -> torch.Tensor:
    """The three cases of the paper, one pair of tokens at a time: (2L, 2L), clean stream first."""
    allowed = torch.zeros(2 * length, 2 * length, dtype=torch.bool)
    for query in range(2 * length):
        for key in range(2 * length):
            i, j = query % length, key % length
            query_masked, key_masked = query >= length, key >= length
            if not query_masked and not key_masked:
                allowed[query, key] = j <= i
            elif query_masked and key_masked:
                allowed[query, key] = i // block_size == j // block_size and j <= i
            elif query_masked:
                allowed[query, key] = j // block_size < i // block_size
    return allowed


def full_layout(length: int, block_size: int) -> Layout:
    position = torch.arange(length).repeat(2)[None]
    stream = torch.tensor([CLEAN, MASKED]).repeat_interleave(length)[None]
    return Layout(stream, position, position // block_size, torch.zeros_like(position))


def flex_mask(layout: Layout, window: int | None = None) -> torch.Tensor:
    """Ask the flex predicate for every pair of tokens, with scalar indices as flex attention does."""
    rows, length = layout.stream.shape
    mask_mod = flex_mask_mod(layout, window)
    allowed = torch.zeros(rows, length, length, dtype=torch.bool)
    for row in range(rows):
        for query in range(length):
            for key in range(length):
                allowed[row, query, key] = mask_mod(*map(torch.tensor, (row, 0, query, key)))
    return allowed


@pytest.mark.parametrize("block_size", range(1, 6))
@pytest.mark.parametrize("length", range(1, 10))
def test_every_form_equals_the_loops(length, block_size):
    expected = brute_force_mask(length, block_size)
    assert torch.equal(mars_attention_mask(length, block_size), expected)
    assert torch.equal(dense_mask(full_layout(length, block_size))[0, 0], expected)
    assert torch.equal(flex_mask(full_layout(length, block_size))[0], expected)


@pytest.mark.parametrize("window", [1, 2, 5])
def test_window_and_padding_in_both_forms(window):
    length, block_size = 7, 3
    layout = full_layout(length, block_size)
    padded = Layout(*(torch.nn.functional.pad(field, (0, 2)) for field in layout))
    padded.stream[:, -2:] = PADDING
    expected = torch.eye(2 * length + 2, dtype=torch.bool)
    for query in range(2 * length):
        for key in range(2 * length):
            near = query % length - key % length < window
            expected[query, key] = brute_force_mask(length, block_size)[query, key] and near
    assert torch.equal(dense_mask(padded, window)[0, 0], expected)
    assert torch.equal(flex_mask(padded, window)[0], expected)


def test_documents_in_both_forms():
    # Two documents of 5 and 4 tokens: clean streams, then masked ones; positions and blocks are each document's own.
    lengths, block_size = (5, 4), 3
    fields = [
        (stream, position, position // block_size, document)
        for stream in (CLEAN, MASKED)
        for document, length in enumerate(lengths)
        for position in range(length)
    ]
    layout = Layout(*torch.tensor(fields).T[:, None])
    expected = torch.zeros(18, 18, dtype=torch.bool)
    for document, length in enumerate(lengths):
        own = torch.tensor([field[3] == document for field in fields])
        expected[own.outer(own)] = brute_force_mask(length, block_size).flatten()
    assert torch.equal(dense_mask(layout)[0, 0], expected)
    assert torch.equal(flex_mask(layout)[0], expected)


def test_flex_attention_takes_the_predicate():
    from torch.nn.attention.flex_attention import create_mask

    layout = full_layout(9, 4)
    mask = create_mask(flex_mask_mod(layout), 1, 1, 18, 18, device="cpu")
    assert torch.equal(mask, dense_mask(layout))


@pytest.mark.parametrize("window", [None, 40])
def test_block_mask_skips_tiles_that_nobody_needs(window):
    # Three tiles of 128 a side, and a last one that is not full.
    length, block_size = 200, 8
    layout = full_layout(length, block_size)
    mask = block_mask(layout, window)
    assert mask.shape == (1, 1, 2 * length, 2 * length)
    tiles = torch.nn.functional.pad(dense_mask(layout, window)[0, 0], (0, 112, 0, 112)).unflatten(1, (4, 128))
    needed = tiles.unflatten(0, (4, 128)).any(-1).any(1)
    assert torch.equal(mask.to_dense()[0, 0].bool(), needed)
    assert needed.sum() < 16


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_flex_attention_gives_the_logits_of_sdpa(name):
    torch.manual_seed(0)
    layout = full_layout(12, 4)
    layout.document[:, [*range(6, 12), *range(18, 24)]] = 1
    ids = torch.randint(0, 256, (1, 24))
    logits = []
    for attention in ("sdpa", "flex_attention"):
        model = make_model(name, attention)
        mask = training_masks(model.config, torch.float32, layout)
        # The uncompiled form of flex attention: it warns that it is slow.
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings(action="ignore"):
            logits.append(model(ids, attention_mask=mask, position_ids=layout.position, use_cache=False).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arguments", [(0, 4), (4, 0), (4.0, 2), (4, -1)])
def test_sizes_must_be_positive_integers(arguments):
    with pytest.raises(ValueError, match="must be an integer of at least 1"):
        mars_attention_mask(*arguments)


def test_windows_of_models():
    assert attention_windows(make_model("llama").config) == {"full_attention": None}
    assert attention_windows(make_model("qwen2").config) == {"full_attention": None}
    assert attention_windows(make_model("mistral").config) == {"sliding_attention": 6}
    assert attention_windows(make_model("gemma3").config) == {"full_attention": None, "sliding_attention": 6}


def test_mask_for_each_backend():
    layout = full_layout(9, 4)

    def make_mask(window):
        return dense_mask(layout, window)

    sdpa = masks_for_model(make_model("llama").config, torch.float32, make_mask)
    assert sdpa.dtype == torch.bool
    assert torch.equal(sdpa, dense_mask(layout))
    eager = masks_for_model(make_model("llama", "eager").config, torch.bfloat16, make_mask)
    assert eager.dtype == torch.bfloat16
    assert torch.equal(eager == 0, sdpa)
    assert (eager[~sdpa] == torch.finfo(torch.bfloat16).min).all()
    mixed = masks_for_model(make_model("gemma3").config, torch.float32, make_mask)
    assert torch.equal(mixed["full_attention"], dense_mask(layout))
    assert torch.equal(mixed["sliding_attention"], dense_mask(layout, 6))
    config = make_model().config
    config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"`flash_attention_2` does not. Load the model with `attn_implementation="):
        masks_for_model(config, torch.float32, make_mask)
    config = make_model("qwen2").config
    config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"has linear_attention layers"):
        attention_windows(config)


@pytest.mark.parametrize("window", [None, 3])
def test_decode_mask_is_its_definition(window):
    columns = torch.tensor([[4, 5, 6, 7], [0, 1, 2, 3], [2, 2, 6, 7]])
    key_mask = torch.ones(3, 8, dtype=torch.bool)
    key_mask[1, :2] = key_mask[2, :5] = False
    mask = decode_mask(columns, key_mask, window)
    assert mask.shape == (3, 1, 4, 8)
    for row, query, key in itertools.product(range(3), range(4), range(8)):
        column = int(columns[row, query])
        is_behind = key <= column and (window is None or key > column - window)
        assert mask[row, 0, query, key] == ((is_behind and key_mask[row, key]) or key == column)
    assert mask.any(-1).all(), "an empty row of a softmax"
