"""Give a loaded model another class in place: the object, its weights and the name of its class stay."""

from __future__ import annotations

import copyreg
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
    plain: Any = stock

    def reduce(self: Any, protocol: int) -> Any:
        # A pickle names the class, and under this name another one is found: the stock class.
        function, arguments, *state = plain.__reduce_ex__(self, max(protocol, 2))
        if function is copyreg.__newobj__ and type(self) is combined:  # type: ignore[attr-defined]
            function, arguments = _new_object, (mixins, stock, *arguments[1:])
        return function, arguments, *state

    # `architectures` of a saved config, pipelines and auto classes all go by the class name.
    entries = {"__module__": stock.__module__, "__doc__": stock.__doc__, "__reduce_ex__": reduce}
    combined = type(stock.__name__, (*mixins, stock), entries)
    return combined


def _new_object(mixins: tuple[type, ...], stock: type, *arguments: Any) -> Any:
    """An object of a swapped class, as `pickle` and `copy` make them: `__init__` is not called."""
    combined = _combined_class(mixins, stock)
    return combined.__new__(combined, *arguments)
