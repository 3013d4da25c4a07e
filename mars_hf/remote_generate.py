"""`generate` of a saved checkpoint for whoever has transformers only: it becomes `custom_generate/generate.py`.

transformers runs it in place of `model.generate`, with the model and every argument of the call, for a model loaded
with `trust_remote_code=True`, and for `model.generate(custom_generate=repo, trust_remote_code=True)`.
"""

from __future__ import annotations

from typing import Any

from .class_swap import swap_class
from .generation import MarsGenerationMixin


def generate(*args: Any, model: Any, **kwargs: Any) -> Any:
    """Generate as `MarsGenerationMixin.generate` does, with all its arguments.

    transformers passes the model by its name, so that a prompt may come first, as in `model.generate(input_ids)`.
    """
    swap_class(model, MarsGenerationMixin)
    # On the class: `from_pretrained` has put this function in the way of the model's own `generate`.
    return type(model).generate(model, *args, **kwargs)
