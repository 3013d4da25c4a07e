"""The masks that a model's layers and its attention backend take, and the attention that it uses.

Shapes: N rows of a batch, T tokens of a two-stream sequence, Q queries, K keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedConfig, PreTrainedModel

from .masks import Layout, block_mask, dense_mask

# The names of our forms of `sdpa`, which take the same masks; `attention.py` and `tiled_attention.py` have them.
GROUPED, TILED = "mars_grouped_sdpa", "mars_tiled_sdpa"

# A model takes one mask for all its layers, or one per kind of layer where full and sliding attention alternate.
AttentionMask = Tensor | BlockMask | dict[str, Tensor] | dict[str, BlockMask]


def attention_windows(config: PreTrainedConfig) -> dict[str, int | None]:
    """The kinds of attention layer of a model and the sliding window of each, None for full attention.

    Models whose layers are all alike have one entry. The order is not significant.

    Raises:
        ValueError: for layers that cannot take a custom mask (linear attention, convolution, chunked attention).
    """
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if "local" in (getattr(config, "attention_layers", None) or ()):
        # GPT-Neo's layers add a window of their own, which counts places in the sequence or the cache, not positions.
        kinds = kinds | {"local_attention"}
    if getattr(config, "attention_chunk_size", None) is not None:
        kinds = kinds or {"chunked_attention"}
    if not kinds:
        kinds = {"full_attention" if window is None else "sliding_attention"}
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(
            "MARS needs full or sliding-window attention in every layer, because [MASK]s must be kept from the tokens "
            f"that may not see them; `{config.model_type}` has {', '.join(sorted(unknown))} layers. Use a model "
            "without them."
        )
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def mask_per_kind(
    windows: Mapping[str, int | None], make_mask: Callable[[int | None], Tensor | BlockMask]
) -> AttentionMask:
    """One mask for layers that are all alike, or a dict by kind of layer, from the sliding window of each kind."""
    masks: Any = {kind: make_mask(window) for kind, window in windows.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def refuse_attention(implementation: str, taken: Collection[str]) -> None:
    """Refuse an attention implementation that is none of those `taken`, which read a mask of ours.

    Raises:
        ValueError: says which ones do.
    """
    if implementation not in taken:
        on_gpu = "; or 'flex_attention', on a GPU" if "flex_attention" in taken else ""
        raise ValueError(
            f"MARS needs an attention implementation that takes a custom mask, and `{implementation}` does not. Load "
            f"the model with `attn_implementation='sdpa'` (or 'eager'{on_gpu})."
        )


class MaskForm:
    """The masks that a model's layers and its attention backend read; looks the model up once for many masks.

    Args:
        config: the model's configuration; its layer types and attention implementation decide the form.
        dtype: the dtype attention runs in; `eager` adds the mask to the scores in it.

    Raises:
        ValueError: for an attention implementation, or layers, that take no such mask.
    """

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        implementation = config.get_text_config()._attn_implementation
        refuse_attention(implementation, ("sdpa", GROUPED, TILED, "eager"))
        self.is_added, self.dtype = implementation == "eager", dtype
        self.windows = attention_windows(config)

    def masks(self, make_mask: Callable[[int | None], Tensor]) -> AttentionMask:
        """The masks of one forward pass.

        Args:
            make_mask: from a sliding window, or None, to the bool mask (N, 1, Q, K).

        Returns:
            One tensor, or a dict by layer type for models that mix full and sliding layers. Bool for `sdpa`; 0 and
            the dtype's minimum for `eager`, which adds its mask and would silently take True for 1.
        """
        return mask_per_kind(self.windows, lambda window: self._backend_form(make_mask(window)))

    def _backend_form(self, mask: Tensor) -> Tensor:
        return added_form(mask, self.dtype, torch.finfo(self.dtype).min) if self.is_added else mask


def added_form(mask: Tensor, dtype: torch.dtype, hidden: float = float("-inf")) -> Tensor:
    """A bool mask as it is added to the scores: 0 where a token may attend, `hidden` elsewhere."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, hidden)


def masks_for_model(
    config: PreTrainedConfig, dtype: torch.dtype, make_mask: Callable[[int | None], Tensor]
) -> AttentionMask:
    """`MaskForm.masks` for a single forward pass."""
    return MaskForm(config, dtype).masks(make_mask)


def training_masks(config: PreTrainedConfig, dtype: torch.dtype, layout: Layout) -> AttentionMask:
    """Make the masks of a two-stream batch in the form that a model's layers and its attention backend read.

    As `masks_for_model`, and block masks for `flex_attention`.

    Raises:
        ValueError: for an attention implementation that takes no such mask.
    """
    if config.get_text_config()._attn_implementation != "flex_attention":
        return masks_for_model(config, dtype, lambda window: dense_mask(layout, window))
    return mask_per_kind(attention_windows(config), lambda window: block_mask(layout, window))


@contextmanager
def use_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let a model whose attention is `sdpa` use a registered form of it, for as long as the context lasts.

    Models that do not look their attention up by its name (Falcon compares it with "sdpa") keep theirs.
    """
    config = model.config.get_text_config()
    if config._attn_implementation not in ("sdpa", name) or not model._supports_attention_backend:
        yield
        return
    config._attn_implementation = name
    try:
        yield
    finally:
        # Not what stood there before: another thread may have begun while this one was at it.
        config._attn_implementation = "sdpa"
