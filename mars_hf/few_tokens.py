"""Linear layers of a decoding step on a CPU: few tokens, so the weights must be read once and where they lie.

For a product with one token a BLAS reads the weights once. For several it may first repack them, which costs more than
the product, unless it is asked for the transposed product. Which of the two is the faster depends on the library and
the processor, so it is measured, once per process.

Shapes: T tokens of a forward, K inputs and N outputs of a layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

# For one token nothing is repacked, and beyond so many the repacking no longer counts.
FEWEST, MOST = 2, 64
# Bytes of a weight from which on it counts: smaller ones lie in a core's own cache, where repacking costs little.
SMALLEST = 2**18
# A measurement walks over so many bytes of weights, in pieces: more than a cache of the processor holds of them.
PIECE, WALK = 2**22, 2**25
ROUNDS = 3
# What the transposed product must save to be chosen: less may be noise.
SAVING = 0.1

# By dtype, K, N, the largest T that the measurement stands for, and threads.
_IS_TRANSPOSED_FASTER: dict[tuple[torch.dtype, int, int, int, int], bool] = {}


def transposed_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` by way of the transposed product: (..., K), (N, K) and (N,) to (..., N)."""
    tokens = inputs.reshape(-1, inputs.shape[-1])
    product = weight @ tokens.t() if bias is None else torch.addmm(bias[:, None], weight, tokens.t())
    return product.t().reshape(*inputs.shape[:-1], weight.shape[0]).contiguous()


def is_transposed_faster(weights: list[Tensor], tokens: int) -> bool:
    """Whether `transposed_linear` beats `linear` for so many tokens and layers of this shape (each (N, K))."""
    bucket = 1 << (tokens - 1).bit_length()
    size = weights[0].shape
    key = (weights[0].dtype, size[1], size[0], bucket, torch.get_num_threads())
    if key not in _IS_TRANSPOSED_FASTER:
        rows = max(1, PIECE // (size[1] * weights[0].element_size()))
        pieces = [piece for weight in weights for piece in weight.split(rows)]
        pieces = pieces[: max(1, WALK // (pieces[0].numel() * pieces[0].element_size()))]
        inputs = torch.zeros(bucket, size[1], dtype=weights[0].dtype, device="cpu")
        # By turns, so that whatever else the machine does meets both.
        rounds = [
            [_seconds(product, inputs, pieces) for product in (linear, transposed_linear)] for _ in range(ROUNDS)
        ]
        plain, transposed = (min(seconds) for seconds in zip(*rounds, strict=True))
        _IS_TRANSPOSED_FASTER[key] = transposed < (1 - SAVING) * plain
    return _IS_TRANSPOSED_FASTER[key]


def _seconds(product: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, pieces: list[Tensor]) -> float:
    began = time.perf_counter()
    for piece in pieces:
        product(inputs, piece)
    return time.perf_counter() - began


@contextmanager
def few_token_products(model: nn.Module) -> Iterator[None]:
    """Let the linear layers on the CPU use the faster product for few tokens, for as long as the context lasts.

    Layers that are small or not plain (subclasses, quantised weights, a `forward` of their own) are left as they are.
    """
    layers = [module for module in model.modules() if _is_plain(module)]
    alike: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
    for layer in layers:
        weights = alike.setdefault((layer.weight.shape, layer.weight.dtype), [])
        weights.append(layer.weight)
        layer.__dict__["forward"] = partial(_forward, layer, weights)
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and type(module.weight.data) is Tensor
        and module.weight.device.type == "cpu"
        and module.weight.is_floating_point()
        and module.weight.nbytes >= SMALLEST
        and "forward" not in module.__dict__
    )


def _forward(layer: nn.Linear, alike: list[Tensor], inputs: Tensor) -> Tensor:
    tokens = inputs.numel() // inputs.shape[-1]
    few = FEWEST <= tokens <= MOST and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    if few and inputs.dtype == layer.weight.dtype and is_transposed_faster(alike, tokens):
        return transposed_linear(inputs, layer.weight, layer.bias)
    return linear(inputs, layer.weight, layer.bias)
