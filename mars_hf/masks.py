"""Who may attend to whom: the visibility rule of MARS, written once, and the forms that attention backends read.

Shapes: N rows of a batch, L tokens of a sequence, T tokens of a two-stream sequence (clean and masked), Q queries,
K keys, B the MARS block size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedConfig, PreTrainedModel

from .checks import check_count

PADDING, CLEAN, MASKED = -1, 0, 1

# The names of our forms of `sdpa`, which take the same masks; `attention.py` and `tiled_attention.py` have them.
GROUPED, TILED = "mars_grouped_sdpa", "mars_tiled_sdpa"

# A model takes one mask for all its layers, or one per kind of layer where full and sliding attention alternate.
AttentionMask = Tensor | BlockMask | dict[str, Tensor] | dict[str, BlockMask]


class Layout(NamedTuple):
    """What the visibility rule needs to know of every token; all fields are int64 and broadcast against each other.

    Attributes:
        stream: `PADDING`, `CLEAN` or `MASKED`.
        position: position in the sequence, 0..L-1; both streams of a sequence carry the same ones.
        block: number of the MARS block the token belongs to, growing with the position.
        document: number of the document the token belongs to, where a row holds several.
    """

    stream: Tensor
    position: Tensor
    block: Tensor
    document: Tensor


def visible(query: Layout, key: Layout, window: int | None = None) -> Tensor:
    """The rule of MARS section "training": may `query` attend to `key`? Broadcasts the two layouts.

    A clean token sees the clean tokens up to itself. A masked-stream token sees its own block of the masked stream
    up to itself, and the clean tokens of the blocks before. `window` intersects the rule with sliding-window
    attention: a token sees positions less than `window` behind its own. Nobody sees padding or another document.
    """
    from_masked, to_masked = query.stream == MASKED, key.stream == MASKED
    from_clean, to_clean = query.stream == CLEAN, key.stream == CLEAN
    causal = key.position <= query.position
    allowed = from_clean & to_clean & causal
    allowed = allowed | (from_masked & to_masked & causal & (key.block == query.block))
    allowed = allowed | (from_masked & to_clean & (key.block < query.block))
    allowed = allowed & (key.document == query.document)
    if window is not None:
        allowed = allowed & (query.position - key.position < window)
    return allowed


def dense_mask(layout: Layout, window: int | None = None, rule: Callable[..., Tensor] = visible) -> Tensor:
    """A rule, by default that of MARS, as a bool tensor (N, 1, T, T) for a layout of (N, T) fields.

    Every token attends at least to itself: a padding row without any key gives NaN on some backends.
    """
    queries = Layout(*(field[:, :, None] for field in layout))
    keys = Layout(*(field[:, None, :] for field in layout))
    itself = torch.eye(layout.stream.shape[1], dtype=torch.bool, device=layout.stream.device)
    return (rule(queries, keys, window) | itself)[:, None]


def flex_mask_mod(layout: Layout, window: int | None = None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule as a `mask_mod` of flex attention, for `torch.nn.attention.flex_attention.create_block_mask`."""

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        queries = Layout(*(field[row, query] for field in layout))
        keys = Layout(*(field[row, key] for field in layout))
        return visible(queries, keys, window) | (query == key)

    return mask_mod


def block_mask(layout: Layout, window: int | None = None) -> BlockMask:
    """The rule as flex attention reads it, which skips the tiles where nobody sees anybody: (N, 1, T, T)."""
    rows, length = layout.stream.shape
    device = layout.stream.device
    # Compiled, it makes the tiles without the (T, T) mask; on CPU that is not worth the compilation.
    return create_block_mask(
        flex_mask_mod(layout, window), rows, None, length, length, device=device, _compile=device.type != "cpu"
    )


def full_layout(seq_length: int, block_size: int, stream: int) -> Layout:
    """The clean stream and behind it another one, both whole: fields (1, 2L).

    Args:
        seq_length: L, the length of the sequence in tokens.
        block_size: B; the last block is shorter where B does not divide L.
        stream: the number of the other stream.

    Raises:
        ValueError: if the length or the block size is not an integer of at least 1.
    """
    for name, value in (("seq_length", seq_length), ("block_size", block_size)):
        check_count(name, value, 1)
    position = torch.arange(seq_length).repeat(2)[None]
    streams = torch.tensor([CLEAN, stream]).repeat_interleave(seq_length)[None]
    return stream_layout(streams, position, block_size)


def stream_layout(stream: Tensor, position: Tensor, block_size: int) -> Layout:
    """The layout of rows of one document, whose blocks begin at position 0: (N, T) streams and positions."""
    return Layout(stream, position, block=position // block_size, document=torch.zeros_like(position))


def mars_attention_mask(seq_length: int, block_size: int) -> Tensor:
    """The two-stream mask of MARS in its full form, clean stream first: a bool tensor (2L, 2L), True where allowed.

    Args:
        seq_length: L, the length of the sequence in tokens.
        block_size: B; the last block is shorter where B does not divide L.

    Raises:
        ValueError: if either argument is not an integer of at least 1.
    """
    return dense_mask(full_layout(seq_length, block_size, MASKED))[0, 0]


def decode_mask(columns: Tensor, key_mask: Tensor, window: int | None = None) -> Tensor:
    """The mask of a decoding step over a cache whose slots are the columns of the (left-padded) sequences.

    Args:
        columns: (N, Q) column of every query; each sees the columns up to its own. Padding, which nobody sees, sees
            itself, so that no row of the softmax is empty.
        key_mask: (N, K) bool, False for padding columns.
        window: sliding window in tokens, or None.

    Returns:
        (N, 1, Q, K) bool.
    """
    keys = torch.arange(key_mask.shape[1], device=columns.device)
    behind = columns[:, :, None] - keys
    allowed = (behind >= 0) & key_mask[:, None, :]
    if window is not None:
        allowed = allowed & (behind < window)
    return (allowed | (behind == 0))[:, None]


def tree_mask(cursor: Tensor, key_mask: Tensor, tree: Tensor, depth: Tensor, window: int | None = None) -> Tensor:
    """The mask of a step whose tokens form a tree behind each row's committed tokens.

    Args:
        cursor: (N,) committed slots of each row; token i of the step stands in slot `cursor + i`.
        key_mask: (N, K) bool, False for padding columns.
        tree: (N, Q, Q) bool, which tokens of the step each of them sees, itself included.
        depth: (N, Q) positions of the step's tokens, counted from the first one.
        window: sliding window in tokens, or None.

    Returns:
        (N, 1, Q, K) bool.
    """
    step = torch.arange(key_mask.shape[1], device=cursor.device) - cursor[:, None]
    width = depth.shape[1]
    committed, in_step, place = step < 0, (step >= 0) & (step < width), step.clamp(0, width - 1)
    seen = tree.gather(2, place[:, None].expand(-1, width, -1))
    allowed = (committed & key_mask)[:, None] | (seen & in_step[:, None])
    if window is not None:
        key_depth = step.where(committed, depth.gather(1, place))
        allowed = allowed & (depth[:, :, None] - key_depth[:, None] < window)
    return allowed[:, None]


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
        if implementation not in ("sdpa", GROUPED, TILED, "eager"):
            raise ValueError(
                f"MARS needs an attention implementation that takes a custom mask, and `{implementation}` does not. "
                "Load the model with `attn_implementation='sdpa'` (or 'eager')."
            )
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
        masks = {kind: self._backend_form(make_mask(window)) for kind, window in self.windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

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
    masks = {kind: block_mask(layout, window) for kind, window in attention_windows(config).items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


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
