"""Attention of a training step on a CPU that leaves out what no query of a tile may see.

Of the (2L, 2L) pairs of two streams the rule of MARS allows about a quarter, and `sdpa` with a mask computes them all.
On a GPU this is the business of `flex_attention`.

Shapes: N rows, H query heads, T tokens of a two-stream sequence, D head size, K keys that a tile sees.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .model_masks import TILED, added_form, use_attention

# Queries of a tile: fewer leave out more, and cost more calls.
TILE = 128
# The share of all pairs that the tiles may still have, for them to pay for their calls.
MOST = 0.8


class Tile(NamedTuple):
    """Some queries and what they see.

    Attributes:
        queries: which of the T tokens.
        keys: (K,) int64, the tokens that any of them sees in any row.
        mask: (N, 1, queries, K), as `sdpa` adds it to the scores.
    """

    queries: slice
    keys: Tensor
    mask: Tensor


def tiled_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """`sdpa`, tile by tile: (N, H, T, D) queries, and keys and values of T tokens, to (N, T, H, D)."""
    tiles = [] if attention_mask is None else tiles_of(attention_mask, query.dtype)
    if not tiles:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    outputs = [
        sdpa_attention_forward(
            module,
            query[:, :, tile.queries],
            key.index_select(2, tile.keys),
            value.index_select(2, tile.keys),
            tile.mask,
            **kwargs,
        )[0]
        for tile in tiles
    ]
    return torch.cat(outputs, dim=1), None


def tiles_of(mask: Tensor, dtype: torch.dtype) -> list[Tile]:
    """The tiles of a bool mask (N, 1, T, T), none where they would not pay; made once for all layers, kept with it."""
    if torch.compiler.is_compiling() or mask.device.type != "cpu" or mask.dtype is not torch.bool:
        return []
    known: dict[torch.dtype, list[Tile]] = mask.__dict__.setdefault("_mars_tiles", {})
    if dtype not in known:
        known[dtype] = _make_tiles(mask, dtype)
    return known[dtype]


def _make_tiles(mask: Tensor, dtype: torch.dtype) -> list[Tile]:
    length = mask.shape[2]
    parts = [slice(start, min(start + TILE, length)) for start in range(0, length, TILE)]
    seen = [mask[:, :, part].flatten(0, 2).any(0).nonzero()[:, 0] for part in parts]
    pairs = sum((part.stop - part.start) * len(keys) for part, keys in zip(parts, seen, strict=True))
    if pairs > MOST * length * mask.shape[3]:
        return []
    return [
        Tile(part, keys, added_form(mask[:, :, part].index_select(3, keys), dtype))
        for part, keys in zip(parts, seen, strict=True)
    ]


def tiled(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Let a model whose attention is `sdpa` compute it in tiles, for as long as the context lasts."""
    return use_attention(model, TILED)


AttentionInterface.register(TILED, tiled_attention)
AttentionMaskInterface.register(TILED, sdpa_mask)
