"""What MARS training cannot do, said before any work: each function raises a ValueError or returns None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from .forward_arguments import forward_arguments
from .mask_token import MaskToken, adapter_configs, embedding_rows, is_named
from .model_masks import attention_windows, refuse_attention

TRAINING_ATTENTION = ("sdpa", "eager", "flex_attention")
# Models from before masks were shared, which make theirs inside.
OWN_MASKS = ("openai-gpt", "xlm")


def refuse_arguments(
    args: TrainingArguments, data_collator: Callable | None = None, compute_loss_func: Callable | None = None
) -> None:
    """Refuse the arguments of `SFTTrainer` that two streams rule out.

    Raises:
        ValueError: says which argument, why, and what to set instead.
    """
    if data_collator is not None:
        raise ValueError(
            "MARS needs its own data collator, which builds the two streams. Leave `data_collator` unset, and give "
            "the examples `input_ids` and `labels` columns if you prepare them yourself."
        )
    if compute_loss_func is not None:
        raise ValueError(
            "`compute_loss_func` needs the logits, which MARS does not build. Leave it unset, or override "
            "`compute_loss` in a subclass."
        )
    if args.label_smoothing_factor > 0:
        raise ValueError(
            "Label smoothing needs the logits, which MARS does not build. Set `label_smoothing_factor=0.0`."
        )
    if args.activation_offloading and args.device.type == "cpu":
        raise ValueError(
            "Activation offloading takes activations off an accelerator, and there is none here. Set "
            "`activation_offloading=False`."
        )
    if args.use_liger_kernel and args.device.type == "cpu":
        raise ValueError(
            "Liger's kernels run on an accelerator, and there is none here. Set `use_liger_kernel=False`."
        )
    refuse_parallelism(args.parallelism_config)


def refuse_processor(processing_class: Any) -> None:
    """Refuse anything but a tokenizer.

    Raises:
        ValueError: for the processor of a vision-language model.
    """
    if not isinstance(processing_class, PreTrainedTokenizerBase):
        raise ValueError(
            f"MARS trains on text only, and `processing_class` is a `{type(processing_class).__name__}`. Pass a "
            "tokenizer; for the text side of a vision-language model that is `processor.tokenizer`."
        )


def refuse_parallelism(parallelism_config: Any) -> None:
    """Refuse an accelerate `ParallelismConfig` that splits sequences; None is fine.

    Raises:
        ValueError: under context or sequence parallelism.
    """
    if any(getattr(parallelism_config, name, False) for name in ("cp_enabled", "sp_enabled")):
        raise ValueError(
            "MARS does not train with context or sequence parallelism: they split a sequence between devices and drop "
            "its attention mask, which keeps the [MASK]s apart. Set `cp_size=1` and `sp_size=1`."
        )


def refuse_config(config: PreTrainedConfig, device: torch.device) -> None:
    """Refuse a model from its configuration alone, before its weights are loaded.

    Raises:
        ValueError: for an encoder-decoder, or layers or an attention implementation that take no custom mask.
    """
    if config.is_encoder_decoder:
        raise ValueError(
            f"MARS trains decoder-only models, and `{config.model_type}` is an encoder-decoder. Use a causal language "
            "model."
        )
    attention_windows(config)
    if config.model_type in OWN_MASKS:
        raise ValueError(
            f"MARS needs a model that takes a custom attention mask, and `{config.model_type}` takes no other mask "
            "than one of padding. Use a newer architecture."
        )
    implementation = config.get_text_config()._attn_implementation
    if implementation == "flex_attention" and device.type == "cpu":
        raise ValueError(
            "`flex_attention` has no backward pass on CPU, so nothing can be trained with it here. Load the model "
            "with `attn_implementation='sdpa'` (or 'eager'), or train on a GPU."
        )
    refuse_attention(implementation, TRAINING_ATTENTION)


def refuse_model(model: PreTrainedModel, device: torch.device) -> None:
    """Refuse a loaded model, not wrapped by PEFT.

    Args:
        device: where the model is trained.

    Raises:
        ValueError: for a model that cannot be told positions or whose logits are more than its LM head gives, and as
            `refuse_config`.
    """
    refuse_config(model.config, device)
    text_config = model.config.get_text_config()
    if "position_ids" not in forward_arguments(type(model)) or getattr(text_config, "alibi", False):
        raise ValueError(
            "MARS gives both streams the same positions, so it needs a model that reads `position_ids`, and "
            f"`{type(model).__name__}` does not. Use a model with rotary or learned positions."
        )
    head, backbone = model.get_output_embeddings(), model.base_model
    scored = {id(weight) for part in (backbone, head) if part is not None for weight in part.parameters()}
    further = [name for name, weight in model.named_parameters() if id(weight) not in scored]
    if head is None or backbone is model or further:
        between = f": it has more than these (`{further[0]}`)" if further else ": it does not keep them apart"
        raise ValueError(
            "MARS scores tokens by the LM head on the last hidden state of the backbone, and "
            f"`{type(model).__name__}` does not make its logits so{between}. Use a causal language model with a plain "
            "linear head."
        )


def refuse_optimizer(optimizer: Any, model: PreTrainedModel, mask_token: MaskToken) -> None:
    """Refuse an optimizer that was made before the embedding grew; None is fine.

    Raises:
        ValueError: if the mask token has no row in the embedding yet.
    """
    rows = embedding_rows(model)
    if optimizer is not None and mask_token.id >= rows:
        raise ValueError(
            f"The mask token {mask_token.text!r} has id {mask_token.id} and the embedding has {rows} rows, so it has "
            "to grow, and the optimizer in `optimizers` would go on with the old weights. Call "
            "`add_mask_token(tokenizer, model)` before you make the optimizer, or set `optimizer_cls_and_kwargs` "
            "instead."
        )


def refuse_copied_head(model: Any, peft_config: Any) -> None:
    """Refuse an adapter that trains a tied head as a copy beside single rows of the embedding.

    PEFT does train it so, and fails in the first forward after training.

    Args:
        model: the model, wrapped by PEFT or not.
        peft_config: the configuration it will be wrapped with, or None.

    Raises:
        ValueError: if the head is tied, and the embedding is not trained whole with it.
    """
    base_model = model.get_base_model() if is_peft_model(model) else model
    if not base_model.config.get_text_config().tie_word_embeddings:
        return
    parts = (base_model.get_input_embeddings(), base_model.get_output_embeddings())
    embedding, head = (next(name for name, module in base_model.named_modules() if module is part) for part in parts)
    for config in adapter_configs(model, peft_config):
        copied = getattr(config, "modules_to_save", None)
        has_rows = bool(getattr(config, "trainable_token_indices", None))
        if has_rows and is_named(copied, head) and not is_named(copied, embedding):
            name = embedding.rsplit(".", 1)[-1]
            raise ValueError(
                f"The head `{head}` is tied to the embedding and `modules_to_save` trains it as a copy, beside which "
                "PEFT cannot train single rows of the embedding (`trainable_token_indices`). Set "
                f"`modules_to_save=[{name!r}, {head!r}]`, or leave the head out."
            )


def refuse_new_tokens(peft_model: Any) -> None:
    """Refuse an adapter to which TRL added a tied head, for the tokens of a cloned chat template.

    Raises:
        ValueError: if the head is tied and copied beside trainable rows, see `refuse_copied_head`, which has refused
            what the user's own configuration asked for.
    """
    if not peft_model.get_base_model().config.get_text_config().tie_word_embeddings:
        return
    config = peft_model.peft_config[peft_model.active_adapter]
    if getattr(config, "trainable_token_indices", None) and "lm_head" in (config.modules_to_save or ()):
        raise ValueError(
            "The chat template of `chat_template_path` brought new tokens, for which TRL trains the head as a copy. "
            "It is tied to the embedding, and PEFT cannot do that beside single rows of the embedding. Set "
            "`chat_template_path` to a file with the template alone (`.jinja`), or train without `peft_config`."
        )
