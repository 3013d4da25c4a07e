"""Linear layers of a decoding step on a CPU: few tokens, so the weights must be read once and where they lie.

For a product with one token a BLAS reads the weights once. For several it may first repack them, which costs more than
the product. It is spared that if it is asked for the transposed product, or if the weights are kept in the layout of
the product. Which is the fastest depends on the library and the processor, so it is measured, once per process.

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

from .prepacked import (
    can_prepack,
    forget,
    forget_changed,
    have_room,
    is_prepacked,
    prepack,
    prepacked_linear,
    prepacked_weight,
)

# Beyond so many tokens the repacking no longer counts.
MOST = 64
# Bytes of a weight from which on it counts: smaller ones lie in a core's own cache, where repacking costs little.
SMALLEST = 2**18
# A measurement walks over so many bytes of weights, in pieces: more than a cache of the processor holds of them.
PIECE, WALK = 2**22, 2**25
ROUNDS = 3
# What a product must save of the time of a simpler one to be chosen: less may be noise.
SAVING = 0.1

PLAIN, TRANSPOSED, PREPACKED = "plain", "transposed", "prepacked"
# By dtype, K, N, the largest T that the measurement stands for, threads, and whether prepacked weights take part.
_FASTEST: dict[tuple[torch.dtype, int, int, int, int, bool], str] = {}


def transposed_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` by way of the transposed product: (..., K), (N, K) and (N,) to (..., N)."""
    tokens = inputs.reshape(-1, inputs.shape[-1])
    product = weight @ tokens.t() if bias is None else torch.addmm(bias[:, None], weight, tokens.t())
    return product.t().reshape(*inputs.shape[:-1], weight.shape[0]).contiguous()


def fastest_product(weights: list[Tensor], tokens: int, may_prepack: bool) -> str:
    """`PLAIN`, `TRANSPOSED` or `PREPACKED`, for so many tokens and layers of this shape (each (N, K))."""
    bucket = 1 << (tokens - 1).bit_length()
    first = weights[0]
    key = (first.dtype, first.shape[1], first.shape[0], bucket, torch.get_num_threads(), may_prepack)
    if key not in _FASTEST:
        rows = max(1, PIECE // (first.shape[1] * first.element_size()))
        pieces = [piece.detach() for weight in weights for piece in weight.split(rows)]
        pieces = pieces[: max(1, WALK // pieces[0].nbytes)]
        inputs = torch.zeros(bucket, first.shape[1], dtype=first.dtype, device="cpu")
        products: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[Tensor]]] = {
            PLAIN: (linear, pieces),
            TRANSPOSED: (transposed_linear, pieces),
        }
        if may_prepack and can_prepack(first.dtype):
            products[PREPACKED] = prepacked_linear, [prepack(piece) for piece in pieces]
        # By turns, so that whatever else the machine does meets all of them.
        rounds = [{name: _seconds(*product, inputs) for name, product in products.items()} for _ in range(ROUNDS)]
        seconds = {name: min(measured[name] for measured in rounds) for name in products}
        fastest = PLAIN
        # The last one takes memory, so it must save something over both of the others.
        for name in products:
            if seconds[name] < (1 - SAVING) * seconds[fastest]:
                fastest = name
        _FASTEST[key] = fastest
    return _FASTEST[key]


def _seconds(product: Callable[[Tensor, Tensor], Tensor], weights: list[Tensor], inputs: Tensor) -> float:
    began = time.perf_counter()
    for weight in weights:
        product(inputs, weight)
    return time.perf_counter() - began


@contextmanager
def few_token_products(model: nn.Module, may_prepack: bool = True) -> Iterator[None]:
    """Let the linear layers on the CPU use the fastest product for few tokens, for as long as the context lasts.

    Layers that are small or not plain (subclasses, quantised weights, a `forward` of their own) are left as they are.

    Args:
        model: the model whose layers these are.
        may_prepack: whether copies of the weights may be kept in another layout, as long as the layers live. They are
            made where they are faster, and only as long as all that are lacking fit into half of the memory that is
            available. False frees those that earlier contexts have made.
    """
    modules = list(model.modules())
    layers = [module for module in modules if _is_plain(module)]
    if may_prepack:
        forget_changed(modules)
        changing = _changing(modules)
        steady = [layer for layer in layers if layer not in changing]
        prepacks = set(steady if have_room(steady) else filter(is_prepacked, steady))
    else:
        forget(modules)
        prepacks = set()
    alike: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
    for layer in layers:
        weights = alike.setdefault((layer.weight.shape, layer.weight.dtype), [])
        weights.append(layer.weight)
        layer.__dict__["forward"] = partial(_forward, layer, weights, layer in prepacks)
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


def _changing(modules: list[nn.Module]) -> set[nn.Module]:
    """Modules whose weights a forward may change: by a hook, or where PEFT has put off to unmerge its adapters."""
    hooked = {module for module in modules if module._forward_pre_hooks}
    merged = (
        m for m in modules if getattr(m, "merged", False) is True and getattr(m, "disable_adapters", False) is True
    )
    return hooked.union(*(module.modules() for module in merged))


def _forward(layer: nn.Linear, alike: list[Tensor], may_prepack: bool, inputs: Tensor) -> Tensor:
    tokens = inputs.numel() // inputs.shape[-1]
    few = 1 <= tokens <= MOST and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    if few and inputs.dtype == layer.weight.dtype:
        product = fastest_product(alike, tokens, may_prepack)
        if product == PREPACKED:
            return prepacked_linear(inputs, prepacked_weight(layer), layer.bias)
        if product == TRANSPOSED:
            return transposed_linear(inputs, layer.weight, layer.bias)
    return linear(inputs, layer.weight, layer.bias)
