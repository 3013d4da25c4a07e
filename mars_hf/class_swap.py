"""Give a loaded model another class in place: the object, its weights and the name of its class stay."""

from __future__ import annotations

from functools import cache
from typing import Any


def swap_class(model: Any, *mixins: type) -> None:
    """Put mixins in front of the class of a model, those that it does not have yet."""
    missing = tuple(mixin for mixin in mixins if not isinstance(model, mixin))
    if missing:
        stock: type = type(model)
        model.__class__ = _combined_class(missing, stock)


@cache
def _combined_class(mixins: tuple[type, ...], stock: type) -> type:
    # `architectures` of a saved config, pipelines and auto classes all go by the class name.
    return type(stock.__name__, (*mixins, stock), {"__module__": stock.__module__, "__doc__": stock.__doc__})
