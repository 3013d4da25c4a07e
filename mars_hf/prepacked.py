"""Weights of linear layers in the layout in which oneDNN's products read them, kept beside layers that do not change.

Shapes: T tokens of a forward, K inputs and N outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .memory import available_memory

# The layout is chosen for so many tokens; made for one, it is the layout that the weights have already.
TYPICAL_TOKENS = 8


class Prepacked(NamedTuple):
    """A weight in the other layout, and what tells whether it is still that of its layer."""

    weight: Tensor
    fingerprint: Tensor


# As long as the layers live. Not an attribute of theirs: that would be copied and pickled with them.
_KEPT: WeakKeyDictionary[nn.Module, Prepacked] = WeakKeyDictionary()


def prepack(weight: Tensor) -> Tensor:
    """A copy of a weight (N, K) in the other layout, for `prepacked_linear` only."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), TYPICAL_TOKENS)


def prepacked_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` with a prepacked weight, without gradients: (..., K) to (..., N)."""
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")


@cache
def can_prepack(dtype: torch.dtype) -> bool:
    """Whether this build of torch, on this processor, has such products of a dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        # What these operators take is torch's own business, so it is tried.
        ones = torch.ones(16, 16, dtype=dtype, device="cpu")
        return bool((prepacked_linear(ones, prepack(ones), ones[0]) == 17).all())
    except (AttributeError, RuntimeError):
        return False


def prepacked_weight(layer: nn.Linear) -> Tensor:
    """The weight of a layer in the other layout, made at the first call and kept."""
    kept = _KEPT.get(layer)
    if kept is None:
        kept = _KEPT[layer] = Prepacked(prepack(layer.weight), _fingerprint(layer.weight))
    return kept.weight


def _fingerprint(weight: Tensor) -> Tensor:
    """(1, N) numbers to which every element of a weight adds its own share.

    The weight must be read for that. Its version does not do: what changes `weight.data`, as the merging of adapters
    does, leaves the version as it was.
    """
    weight = weight.detach().float()
    shares = torch.linspace(0.5, 1.5, weight.shape[1], dtype=torch.float32, device="cpu")
    return prepacked_linear(shares[None], weight)


def is_prepacked(layer: nn.Module) -> bool:
    """Whether the weight of a layer is kept in the other layout."""
    return layer in _KEPT


def forget(modules: Iterable[nn.Module]) -> None:
    """Free what is kept for any of these modules."""
    for module in modules:
        _KEPT.pop(module, None)


def forget_changed(modules: Iterable[nn.Module]) -> None:
    """Free what is kept for those of these modules whose weights are no longer those that were prepacked."""
    for module in modules:
        kept = _KEPT.get(module)
        if kept is not None and not (isinstance(module.weight, Tensor) and _is_of(kept, module.weight)):
            # Another thread may have found the same, and been faster.
            _KEPT.pop(module, None)


def _is_of(kept: Prepacked, weight: Tensor) -> bool:
    # An equal fingerprint of another shape or dtype is another weight's.
    same_form = (weight.device.type, weight.shape, weight.dtype) == ("cpu", kept.weight.shape, kept.weight.dtype)
    return same_form and torch.equal(kept.fingerprint, _fingerprint(weight))


def have_room(layers: Iterable[nn.Linear]) -> bool:
    """Whether the copies that these layers lack fit into half of the memory that is available, if that is known."""
    lacking = sum(layer.weight.nbytes for layer in layers if layer not in _KEPT)
    return lacking == 0 or 2 * lacking <= (available_memory() or 0)
