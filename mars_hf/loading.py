"""A model and its tokenizer before `SFTTrainer` sees them: loaded by its rules, and given the mask token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoProcessor, BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig
from trl.trainer.utils import create_model_from_path, get_config_model_id

from .mask_token import add_mask_token, find_mask_token, train_mask_row
from .refusals import refuse_config, refuse_copied_head, refuse_optimizer, refuse_processor


def load_model(path: str, args: SFTConfig, quantization_config: BitsAndBytesConfig | None) -> PreTrainedModel:
    """Load a model by the rules of `SFTTrainer`, because the mask token must be there before PEFT wraps it.

    Raises:
        ValueError: if its configuration rules out MARS, before the weights are loaded; or if the quantization is
            given twice.
    """
    kwargs = dict(args.model_init_kwargs or {})
    if quantization_config is not None:
        if "quantization_config" in kwargs:
            raise ValueError(
                "`quantization_config` is set both as a trainer argument and in `model_init_kwargs`. Set it once, "
                "preferably as a trainer argument."
            )
        kwargs["quantization_config"] = quantization_config
    # A launcher places each process's model itself.
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        kwargs["device_map"] = None
    kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    config = AutoConfig.from_pretrained(
        path, revision=kwargs.get("revision"), trust_remote_code=kwargs["trust_remote_code"]
    )
    config._attn_implementation = kwargs.get("attn_implementation") or "sdpa"
    refuse_config(config, args.device)
    return create_model_from_path(path, **kwargs)


@contextmanager
def init_kwargs_used_up(args: SFTConfig, is_loaded: bool) -> Iterator[None]:
    """Within it, the arguments have no `model_init_kwargs` if a model has been loaded with them.

    `SFTTrainer` would warn that a loaded model ignores them.
    """
    model_init_kwargs = args.model_init_kwargs
    if is_loaded:
        args.model_init_kwargs = None
    try:
        yield
    finally:
        args.model_init_kwargs = model_init_kwargs


def look_for_unused_parameters(args: SFTConfig, model: PreTrainedModel) -> None:
    """Let DDP look for parameters without a gradient where text leaves a vision tower without any.

    `SFTTrainer` does it where it is given a processor, which MARS is not.

    Args:
        model: wrapped by PEFT or not.
    """
    is_reentrant = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    has_towers = model.config.get_text_config() is not model.config
    if has_towers and args.ddp_find_unused_parameters is None and not is_reentrant:
        args.ddp_find_unused_parameters = True


def load_tokenizer(model: PreTrainedModel, args: SFTConfig, is_loaded: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model by the rules of `SFTTrainer`.

    Args:
        is_loaded: whether the model was loaded with the `model_init_kwargs` of `args`, which count only then.

    Raises:
        ValueError: if the model comes with the processor of a vision-language model.
    """
    processor = AutoProcessor.from_pretrained(
        get_config_model_id(model.config),
        revision=(args.model_init_kwargs or {}).get("revision") if is_loaded else None,
        trust_remote_code=args.trust_remote_code,
    )
    refuse_processor(processor)
    return processor


def give_mask_token(
    model: PreTrainedModel,
    args: SFTConfig,
    tokenizer: PreTrainedTokenizerBase,
    mask_token: str | None,
    peft_config: Any,
    optimizer: torch.optim.Optimizer | None,
) -> tuple[Any, int]:
    """Give a tokenizer and a model the mask token, once nothing speaks against it.

    Args:
        model: wrapped by PEFT or not.
        mask_token: the mask token; None takes the tokenizer's own, or adds one.
        peft_config: the configuration that the model will be wrapped with, or None.
        optimizer: one that the user has made, or None.

    Returns:
        The PEFT configuration, which trains the mask token's embedding, and the id of the mask token.

    Raises:
        ValueError: if the token has another meaning, or its embedding would not be trained.
    """
    token = find_mask_token(tokenizer, mask_token, eos_token=args.eos_token, pad_token=args.pad_token)
    refuse_optimizer(optimizer, model, token)
    peft_config = train_mask_row(model, peft_config, token)
    refuse_copied_head(model, peft_config)
    # An adapter is loaded on the base model, which PEFT grows to just the tokenizer's length.
    pad_to_multiple_of = 64 if peft_config is None else None
    return peft_config, add_mask_token(tokenizer, model, token.text, pad_to_multiple_of)
