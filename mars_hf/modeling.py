"""MARS generation for any decoder-only model: the class is swapped, the object and its weights stay."""

from __future__ import annotations

import os
import sys
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from .checks import check_count
from .class_swap import swap_class
from .generation import MarsGenerationMixin
from .hub import MarsCheckpointMixin, base_model
from .mask_token import record_mask_token
from .pretrained import load_checkpoint, recorded_entries


def get_mars_model(model: Any, mask_token_id: int | None = None, block_size: int | None = None) -> Any:
    """Give a loaded model MARS generation.

    Args:
        model: a decoder-only `PreTrainedModel`, quantised or not, or a `PeftModel` around one.
        mask_token_id: id of [MASK]; needed only where the checkpoint does not record it.
        block_size: candidates per forward pass; by default what the checkpoint records.

    Returns:
        The same object. `generate` takes `mars_threshold` from now on; all else is as before, and the class keeps its
        name, so that the model saves, and is looked up, as the stock class.

    Raises:
        ValueError: if the model is not a decoder-only language model, or an argument is out of range.
    """
    base = base_model(model)
    if not isinstance(base, PreTrainedModel) or not base.can_generate() or base.config.is_encoder_decoder:
        raise ValueError(
            f"`get_mars_model` needs a decoder-only transformers model that can generate, got {type(base).__name__}."
        )
    if mask_token_id is not None:
        check_count("mask_token_id", mask_token_id, 0)
        rows = base.get_input_embeddings().weight.shape[0]
        if mask_token_id >= rows:
            raise ValueError(
                f"`mask_token_id` must be the id of a token with an embedding row (0 to {rows - 1}), got "
                f"{mask_token_id!r}. `add_mask_token(tokenizer, model)` makes one."
            )
    if block_size is not None:
        check_count("block_size", block_size, 1)
    _drop_remote_generate(base)
    swap_class(base, MarsCheckpointMixin, MarsGenerationMixin)
    if base is not model:
        swap_class(model, MarsCheckpointMixin)
    if mask_token_id is not None:
        record_mask_token(base, mask_token_id)
    if block_size is not None:
        base.generation_config.mars_block_size = block_size
    if mask_token_id is not None or block_size is not None:
        # A generation config that was derived from the model config drops custom entries when it is saved.
        base.generation_config._from_model_config = False
    return model


def _drop_remote_generate(model: PreTrainedModel) -> None:
    """Let the library decode where `from_pretrained(..., trust_remote_code=True)` has put a repository's `generate`.

    Raises:
        ValueError: if that is not the one of a MARS checkpoint.
    """
    replacement = vars(model).get("generate")
    if replacement is None:
        return
    function = getattr(replacement, "func", replacement)
    if not hasattr(sys.modules.get(function.__module__), MarsGenerationMixin.__name__):
        raise ValueError(
            "The repository of this model brings its own `generate`, and MARS is another. Load the model without "
            "`trust_remote_code=True`."
        )
    del vars(model)["generate"]


class AutoMarsModelForCausalLM:
    """`AutoModelForCausalLM` whose models have MARS generation."""

    def __init__(self) -> None:
        raise OSError(
            "AutoMarsModelForCausalLM is used through `AutoMarsModelForCausalLM.from_pretrained(path_or_repo)` or "
            "`AutoMarsModelForCausalLM.from_config(config)`."
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint as `AutoModelForCausalLM.from_pretrained` does, with all its arguments.

        An adapter loads with its base, which gets the embedding rows that training added. Weights are read from
        safetensors only. Checkpoints of the paper's authors (`model_type` `a2d-qwen2` and the
        like) load as the stock model that they are.

        Raises:
            ValueError: for `use_safetensors=False`; otherwise what `AutoModelForCausalLM` raises.
        """
        path = pretrained_model_name_or_path
        loaded = load_checkpoint(path, *args, **kwargs)
        # With `output_loading_info=True` a pair.
        model = get_mars_model(loaded[0] if isinstance(loaded, tuple) else loaded)
        for name, value in recorded_entries(model, path, kwargs).items():
            setattr(model.generation_config, name, value)
            model.generation_config._from_model_config = False
        return loaded

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """Make a model with random weights, as `AutoModelForCausalLM.from_config` does."""
        return get_mars_model(AutoModelForCausalLM.from_config(config, **kwargs))
