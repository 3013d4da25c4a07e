"""What the forward pass of a model takes, and what decoding gives it."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import PreTrainedModel


def forward_arguments(model_class: type) -> set[str]:
    """The names that `forward` takes; one that hands on whatever it gets takes those of the class above, too."""
    names: set[str] = set()
    for parent in model_class.__mro__:
        if "forward" in vars(parent):
            parameters = inspect.signature(vars(parent)["forward"]).parameters
            names |= set(parameters)
            if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
                break
    return names


def decoding_arguments(model: PreTrainedModel, logits: int) -> dict[str, Any]:
    """The arguments that every forward of decoding has, as far as the model takes them.

    Args:
        logits: how many of the last logits are wanted, 0 for all. A model that does not take `logits_to_keep` returns
            all.
    """
    taken = forward_arguments(type(model))
    arguments: dict[str, Any] = {"return_dict": True}
    if "output_router_logits" in taken:
        # Training leaves it on in the config, and the router's loss would take the mask for one of padding.
        arguments["output_router_logits"] = False
    if "logits_to_keep" in taken:
        arguments["logits_to_keep"] = logits
    return arguments
