"""Checkpoints as others save them: the paper's authors, PEFT, and who records the mask token in `config.json` only."""

from __future__ import annotations

import json
import os
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import cached_file

# The paper's code trains stock architectures under these names: `a2d-qwen2`, `a2d-qwen3`, `a2d-llama`.
AUTHORS_PREFIX = "a2d-"
AUTHORS_MASK_TOKEN = "<|mask|>"
HUB_KWARGS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")

# Where PEFT saves the magnitudes of DoRA; transformers, loading an adapter, leaves them as they were before training.
MAGNITUDE = ".lora_magnitude_vector"
PEFT_PREFIX = "base_model.model."


def load_checkpoint(path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
    """Load what `AutoModelForCausalLM.from_pretrained` loads, and the adapters that it does not load as trained.

    These are adapters whose base has fewer embedding rows, and DoRA's. A `revision` and a `subfolder` are those of the
    adapter; where `adapter_kwargs` names others for it, they are those of its base, as in transformers.
    """
    kwargs = known_kwargs(path, kwargs)
    if kwargs.get("gguf_file") is not None:
        return AutoModelForCausalLM.from_pretrained(path, *args, **kwargs)
    origin = _adapter_origin(kwargs)
    own = kwargs.pop("adapter_kwargs", None) or {}
    shapes = _adapter_shapes(path, origin)
    if not shapes:
        # Forcing the download of an adapter that is not there would hide what else is wrong.
        place = {k: v for k, v in origin.items() if k != "force_download"}
        return AutoModelForCausalLM.from_pretrained(path, *args, **kwargs, adapter_kwargs=place)
    kwargs = {k: v for k, v in kwargs.items() if k not in ("revision", "subfolder") or k in own}
    adapter = _read_json(path, "adapter_config.json", origin)
    base, rows = adapter["base_model_name_or_path"], _trained_rows(adapter)
    has_magnitudes = any(name.endswith(MAGNITUDE) for name in shapes)
    if not (has_magnitudes or _has_more_rows(shapes, rows, base, kwargs)):
        # Without these transformers would look for an adapter in the root only, and in the default cache.
        return AutoModelForCausalLM.from_pretrained(path, *args, **kwargs, adapter_kwargs=origin)
    loaded = AutoModelForCausalLM.from_pretrained(base, *args, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    # transformers would load the adapter into a base without the rows that training added.
    embedding = model.get_input_embeddings()
    place = PEFT_PREFIX + next(name for name, module in model.named_modules() if module is embedding) + "."
    saved_rows = [shape[0] for name, shape in shapes.items() if name.startswith(place) and _is_whole(name, shape)]
    rows = max([rows, *saved_rows])
    if rows > embedding.weight.shape[0]:
        model.resize_token_embeddings(rows, mean_resizing=False)
    model.load_adapter(str(path), adapter_kwargs=origin)
    if has_magnitudes:
        from peft import set_peft_model_state_dict

        weights = load_file(_adapter_file(path, origin))
        set_peft_model_state_dict(model, {name.removeprefix(PEFT_PREFIX): value for name, value in weights.items()})
    return loaded


def _trained_rows(adapter: dict[str, Any]) -> int:
    """Tokens that a base must have for those whose embedding an adapter trains by their numbers.

    PEFT, training on a base from the Hub without a way to it, saves no more than these of an embedding that has grown.
    """
    indices = adapter.get("trainable_token_indices") or []
    rows = [row for of_layer in indices.values() for row in of_layer] if isinstance(indices, dict) else indices
    return max(rows, default=-1) + 1


def _has_more_rows(shapes: dict[str, list[int]], rows: int, base: str, kwargs: dict[str, Any]) -> bool:
    """Whether an adapter needs that many rows, or holds a whole layer with more, and its base has fewer tokens."""
    config = AutoConfig.from_pretrained(
        base, **_hub_kwargs(kwargs), trust_remote_code=kwargs.get("trust_remote_code", False)
    )
    known = config.get_text_config().vocab_size
    return rows > known or any(_is_whole(name, shape) and shape[0] > known for name, shape in shapes.items())


def _is_whole(name: str, shape: list[int]) -> bool:
    """Whether a tensor of an adapter is the weight of a layer, and not what PEFT adds to one."""
    return name.endswith(".weight") and len(shape) == 2 and ".lora_" not in name


def _adapter_origin(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Where in its repository an adapter is looked for: as all files are, unless `adapter_kwargs` says otherwise."""
    return _hub_kwargs(kwargs) | (kwargs.get("adapter_kwargs") or {})


def _adapter_shapes(path: str | os.PathLike[str], origin: dict[str, Any]) -> dict[str, list[int]]:
    """The shapes of an adapter's tensors by name; empty for all else."""
    if not _has_file(path, "adapter_config.json", origin):
        return {}
    with safe_open(_adapter_file(path, origin), "pt") as weights:
        return {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118


def _adapter_file(path: str | os.PathLike[str], kwargs: dict[str, Any]) -> str:
    return cached_file(path, "adapter_model.safetensors", **_hub_kwargs(kwargs))


def _read_json(path: str | os.PathLike[str], name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    with open(cached_file(path, name, **_hub_kwargs(kwargs))) as file:
        return json.load(file)


def known_kwargs(path: str | os.PathLike[str], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments for `AutoModelForCausalLM.from_pretrained`: safetensors only, and a stock config for the authors'.

    Raises:
        ValueError: for `use_safetensors=False`, and for an adapter that has no safetensors.
    """
    kwargs = dict(kwargs)
    if kwargs.get("use_safetensors") is False:
        raise ValueError(
            "`use_safetensors=False` would load a pickle, which can run code. Convert the checkpoint to safetensors: "
            "load it with `AutoModelForCausalLM` where you trust it, and `save_pretrained` it."
        )
    if kwargs.get("gguf_file") is not None:
        return kwargs
    kwargs["use_safetensors"] = True
    # transformers takes that for the base model only, and falls back to an adapter's pickle.
    origin = _adapter_origin(kwargs)
    if _has_file(path, "adapter_config.json", origin) and not _has_file(path, "adapter_model.safetensors", origin):
        raise ValueError(
            f"The adapter {path} has no `adapter_model.safetensors`, and loading a pickle can run code. Save it again "
            "with `safe_serialization=True` where you trust it."
        )
    if "config" not in kwargs and (config := _authors_config(path, kwargs)) is not None:
        kwargs["config"] = config
    return kwargs


def _authors_config(path: str | os.PathLike[str], kwargs: dict[str, Any]) -> PreTrainedConfig | None:
    """The stock config of a checkpoint whose `model_type` is `a2d-` and a stock type; None for any other."""
    try:
        entries, _ = PreTrainedConfig.get_config_dict(path, **_hub_kwargs(kwargs))
    except OSError:  # an adapter, or nothing there, which loading says better
        return None
    stock = str(entries.get("model_type", "")).removeprefix(AUTHORS_PREFIX)
    if stock == entries.get("model_type", "") or stock not in CONFIG_MAPPING:
        return None
    # What names the authors' classes is left out, with the code that `auto_map` would ask for.
    entries = {k: v for k, v in entries.items() if k not in ("architectures", "auto_map", "model_type")}
    config = CONFIG_MAPPING[stock].from_dict(entries)
    config.mask_token_id = entries.get("mask_token_id", _authors_mask_token_id(path, kwargs))
    return config


def _authors_mask_token_id(path: str | os.PathLike[str], kwargs: dict[str, Any]) -> int | None:
    tokenizer = AutoTokenizer.from_pretrained(path, **_hub_kwargs(kwargs))
    return tokenizer.get_vocab().get(tokenizer.mask_token or AUTHORS_MASK_TOKEN)


def recorded_entries(model: Any, path: str | os.PathLike[str], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What training recorded and a loaded model's own generation config does not have.

    It stands beside an adapter, whose model takes the generation config of its base: the `mars_*` entries, and the
    tokens that end a text and fill a row, which are those of the training. Elsewhere the mask token may stand in
    `config.json`.
    """
    is_known = getattr(model.generation_config, "mars_mask_token_id", None) is not None
    is_adapter = _has_file(path, "adapter_config.json", _adapter_origin(kwargs))
    if is_known and not is_adapter:
        return {}
    origin = _adapter_origin(kwargs) if is_adapter else _hub_kwargs(kwargs)
    try:
        beside = GenerationConfig.from_pretrained(path, **origin).to_dict()
    except OSError:
        beside = {}
    found = {name: value for name, value in beside.items() if name.startswith("mars_")}
    if is_adapter:
        found |= {name: beside[name] for name in ("eos_token_id", "pad_token_id") if beside.get(name) is not None}
    mask_token_id = getattr(model.config, "mask_token_id", None)
    if not is_known and "mars_mask_token_id" not in found and mask_token_id is not None:
        found["mars_mask_token_id"] = mask_token_id
    return found


def _has_file(path: str | os.PathLike[str], name: str, origin: dict[str, Any]) -> bool:
    found = {k: v for k, v in _hub_kwargs(origin).items() if k != "force_download"}
    quiet = ("gated_repo", "missing_entries", "connection_errors")
    try:
        return (
            cached_file(path, name, **found, **{f"_raise_exceptions_for_{part}": False for part in quiet}) is not None
        )
    except OSError:  # no such repository, or no way to it, which loading says better
        return False


def _hub_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in HUB_KWARGS if name in kwargs}
