"""Who may attend to whom: the visibility rule of MARS, written once, as a dense mask and as flex attention reads it.

Shapes: N rows of a batch, L tokens of a sequence, T tokens of a two-stream sequence (clean and masked), Q queries,
K keys, B the MARS block size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from .checks import check_count

PADDING, CLEAN, MASKED = -1, 0, 1


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
