"""Attention of a decoding step that reads the cache where it lies, without a copy for every query head.

Shapes: N rows, H query heads, G of them to a key-value head, Q queries, K keys, D head size.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .model_masks import GROUPED, added_form, use_attention

# Beyond so many queries attention is not about reading the cache, and the mask is what becomes large.
MOST_QUERIES = 64


def grouped_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """`sdpa` with the query heads of a key-value head as further queries, where stock `sdpa` would copy the cache.

    Args:
        query: (N, H, Q, D).
        key: (N, H / G, K, D), and `value` alike.
        attention_mask: bool, or what is added to the scores, (N, 1, Q, K); or None.

    Returns:
        (N, Q, H, D), and None where other implementations return the attention weights.
    """
    rows, heads, queries = query.shape[:3]
    groups = heads // key.shape[1]
    unusual = {name for name, value in kwargs.items() if name in ("softcap", "position_bias") and value is not None}
    if attention_mask is None or attention_mask.shape[1] != 1 or queries > MOST_QUERIES or unusual:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, key.shape[1], groups * queries, query.shape[3]),
        key,
        value,
        _folded_form(attention_mask, groups, query.dtype),
        kwargs.get("dropout", 0.0),
        scale=kwargs.get("scaling"),
    )
    return output.reshape(rows, heads, queries, value.shape[3]).transpose(1, 2).contiguous(), None


def _folded_form(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """The mask as attention adds it to its scores, for G query heads at once: (N, 1, Q, K) to (N, 1, G * Q, K).

    All layers of a forward get the same mask, so its other form is made once, and kept with it.
    """
    known = {} if torch.compiler.is_compiling() else mask.__dict__.setdefault("_mars_added", {})
    if (groups, dtype) not in known:
        if mask.dtype is torch.bool:
            mask = added_form(mask, dtype)
        known[groups, dtype] = mask.repeat(1, 1, groups, 1)
    return known[groups, dtype]


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


def grouped_heads(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Let a model whose attention is `sdpa` use `grouped_attention`, for as long as the context lasts.

    Models whose layers share keys (Gemma 4), or attend to an index of them (DeepSeek V3.2), keep theirs: they do
    something else where their attention has another name.
    """
    config = model.config.get_text_config()
    if any(getattr(config, name, None) for name in ("num_kv_shared_layers", "index_topk")):
        return nullcontext()
    return use_attention(model, GROUPED)
