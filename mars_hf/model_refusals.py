"""The models that cannot decode with MARS on, said before any forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .forward_arguments import forward_arguments
from .model_masks import MaskForm
from .options import ONE_BY_ONE, MarsOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def refuse_models(model: PreTrainedModel, options: MarsOptions) -> None:
    """Refuse models whose steps could not be told apart from their [MASK]s, or not rolled back."""
    refuse_architecture(model)
    if model._compiled_call_impl is not None or hasattr(model.forward, "_torchdynamo_orig_callable"):
        raise ValueError(
            "MARS steps have no fixed shape, so a compiled forward would be compiled again and again. Load the model "
            f"without `torch.compile`, or {ONE_BY_ONE}."
        )
    if options.cache != "none":
        # A class of one's own may hand it on unnamed.
        taken = forward_arguments(type(model)) | forward_arguments(type(model.base_model))
        if not taken & {"cache", "past_key_values"}:
            raise ValueError(
                f"`{type(model).__name__}` takes no cache. Set `mars_cache='none'`, which recomputes the sequence in "
                "each step."
            )
        MaskForm(model.config, model.dtype)
    config = model.config.get_text_config()
    by_clock = options.adaptive_window or (options.drafts is not None and options.drafts.budget == "auto")
    if by_clock and (getattr(model, "_tp_size", None) or 1) > 1:
        raise ValueError(
            "`mars_adaptive_window=True` and `mars_tree_budget='auto'` follow the clock of each process, and those of "
            "a tensor-parallel model would take steps of different widths. Set `mars_adaptive_window=False`, or a "
            "number as `mars_tree_budget`."
        )
    if options.mask_token_id >= config.vocab_size:
        raise ValueError(
            f"`mars_mask_token_id` is {options.mask_token_id}, and the model has {config.vocab_size} tokens. Set the "
            "id of the mask token of the training; `add_mask_token(tokenizer, model)` makes one."
        )
    if options.drafts is not None and options.drafts.choices >= config.vocab_size:
        raise ValueError(
            f"`mars_draft_choices` is {options.drafts.choices}, and besides [MASK] the model has "
            f"{config.vocab_size - 1} tokens. Lower it; more than 2 rarely pays."
        )
    refuse_adapters(model)


def refuse_architecture(model: PreTrainedModel) -> None:
    """Refuse models that cannot say where the tokens of a row stand, or that let them see those behind them."""
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"Steps of several tokens take a decoder-only model, and `{model.config.model_type}` is an "
            f"encoder-decoder. Use a decoder-only model, or {ONE_BY_ONE}."
        )
    if "position_ids" not in forward_arguments(type(model)):
        raise ValueError(
            f"Steps of several tokens take a model whose forward takes `position_ids`, and `{type(model).__name__}` "
            f"does not. Use a model that takes them, or {ONE_BY_ONE}."
        )
    if hasattr(config, "add_cross_attention") and not getattr(config, "is_decoder", True):
        raise ValueError(
            f"This `{config.model_type}` is an encoder: its tokens see those behind them, [MASK]s too. Load it with "
            f"`is_decoder=True`, or {ONE_BY_ONE}."
        )
    if model.config.model_type == "paligemma":
        raise ValueError(
            "`paligemma` counts the positions of its prompts from 1, and steps of several tokens from 0. Use another "
            f"model, or {ONE_BY_ONE}."
        )
    if getattr(config, "alibi", False):
        raise ValueError(
            f"The ALiBi biases of `{config.model_type}` count the slots of the cache, which may hold [MASK]s and "
            f"rejected tokens too. Use a model with rotary or learned positions, or {ONE_BY_ONE}."
        )


def refuse_adapters(model: PreTrainedModel) -> None:
    """Refuse what PEFT puts in front of prompts, and adapters that it assigns to rows by their number."""
    # `PeftModel.generate` lends the base model its own method.
    wrapper: Any = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    if wrapper is not None and getattr(getattr(wrapper, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"{wrapper.active_peft_config.peft_type.value} puts virtual tokens in front of the prompt that MARS does "
            f"not know of. Use an adapter of the weights (LoRA), or {ONE_BY_ONE}."
        )
    if not hasattr(model, "peft_config"):
        return
    hooks = [
        (module._forward_pre_hooks, key)
        for module in model.modules()
        for key, hook in module._forward_pre_hooks.items()
        if {"adapter_names", "alora_offsets"} & set(getattr(hook, "keywords", None) or ())
    ]
    if hooks:
        # PEFT takes them away only where the call returns; left behind, they would break the next one.
        for of_module, key in hooks:
            del of_module[key]
        raise ValueError(
            "`adapter_names` and activated LoRA (`alora_invocation_tokens`) count the rows of a batch and their last "
            "tokens, and with MARS rows leave it when they end, and [MASK]s stand behind the prompt. Generate the "
            "prompts of each adapter by themselves, after `model.set_adapter(...)`; activated LoRA without MARS only."
        )
