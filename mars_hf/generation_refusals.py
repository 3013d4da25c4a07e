"""What calls of `generate` cannot ask for with MARS on, said before any forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.generation import (
    ClassifierFreeGuidanceLogitsProcessor,
    GenerationMode,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from .options import ONE_BY_ONE

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList

# What a MARS step knows how to feed; any other model input would be lost after the first step.
KNOWN_INPUTS = {"attention_mask", "position_ids", "inputs_embeds", "cache", "use_cache", "logits_to_keep"}

# Processors that keep a state of their own for each call, and count on one call per token for the whole batch.
STEPWISE_PROCESSORS = (
    ClassifierFreeGuidanceLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


def refuse_arguments(arguments: dict[str, Any]) -> None:
    """Refuse arguments of `generate` that never reach a decoding loop, or none of ours."""
    if arguments.get("custom_generate") is not None:
        raise ValueError(
            "MARS and `custom_generate` both replace the decoding loop. Leave one of them out; a generation config "
            "may turn MARS on, too."
        )
    for name in ("negative_prompt_ids", "negative_prompt_attention_mask"):
        if arguments.get(name) is not None:
            raise ValueError(f"`{name}` belongs to `guidance_scale`, which MARS does not support. Leave it out.")


def refuse_paged(arguments: dict[str, Any]) -> None:
    """Refuse the stock engine that reads generation configs its own way, whatever the value of a threshold."""
    if arguments.get("kwargs", {}).get("cache_implementation") == "paged":
        raise ValueError(
            f"`cache_implementation='paged'` is continuous batching, a loop of its own. Unset it, or {ONE_BY_ONE}."
        )


def refuse_processors(processors: LogitsProcessorList) -> None:
    """Refuse logits processors that must see exactly one token of every row per call."""
    for processor in processors:
        if isinstance(processor, STEPWISE_PROCESSORS):
            raise ValueError(
                f"`{type(processor).__name__}` counts on one call per token for the whole batch, and MARS asks about "
                f"several tokens a step. Leave it out, or {ONE_BY_ONE}."
            )


def refuse_modes(generation_mode: GenerationMode, config: GenerationConfig, generation_mode_kwargs: dict) -> None:
    """Refuse what replaces the decoding loop, and outputs that a step of several tokens does not have."""
    mars = "mars_lossless" if config.mars_lossless else "mars_threshold"
    if generation_mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        if config.prompt_lookup_num_tokens is not None and generation_mode_kwargs.get("assistant_model") is None:
            raise ValueError(
                "`prompt_lookup_num_tokens` drafts tokens for the model to confirm, and `mars_threshold` confirms "
                "none. Set `mars_lossless=True` instead of `mars_threshold`, or unset `prompt_lookup_num_tokens`."
            )
        cause = {
            GenerationMode.ASSISTED_GENERATION: "Assisted generation (`assistant_model`, `prompt_lookup_num_tokens`, "
            "`assistant_early_exit`, `use_mtp`)",
            GenerationMode.BEAM_SEARCH: "`num_beams > 1`",
            GenerationMode.BEAM_SAMPLE: "`num_beams > 1`",
        }.get(generation_mode, f"Generation mode `{generation_mode.value}`")
        raise ValueError(
            f"{cause} cannot be combined with `{mars}`: MARS proposes and accepts several tokens of one greedy or "
            "sampled sequence. Unset one of them."
        )
    if generation_mode_kwargs.get("synced_gpus"):
        raise ValueError(
            f"`{mars}` does not work with `synced_gpus` (DeepSpeed ZeRO-3 or FSDP over several processes): the "
            f"processes would take different numbers of steps. Gather the weights, or {ONE_BY_ONE}."
        )
    wanted = {
        "output_attentions": config.output_attentions,
        "output_hidden_states": config.output_hidden_states,
        "prefill_chunk_size": config.prefill_chunk_size,
        "guidance_scale": config.guidance_scale not in (None, 1),
        "cache_implementation": config.cache_implementation not in (None, "dynamic"),
        "cache_config": config.cache_config,
        "max_cache_len": config.max_cache_len,
        "compile_config": config.compile_config,
        "continuous_batching_config": config.continuous_batching_config,
        "token_healing": config.token_healing,
        "is_assistant": config.is_assistant,
    }
    if refused := [name for name, value in wanted.items() if value]:
        raise ValueError(
            f"`{'`, `'.join(refused)}` is not supported together with `{mars}`. Unset it, or {ONE_BY_ONE}."
        )


def refuse_inputs(
    model_config: Any, input_ids: Tensor, max_length: int, streamer: Any, model_kwargs: dict[str, Any]
) -> None:
    """Refuse what would give wrong text, before the first forward pass.

    Args:
        max_length: columns of a full sequence, counted as `input_ids` are.
    """
    columns = (
        input_ids.shape[1] if model_kwargs.get("inputs_embeds") is None else model_kwargs["inputs_embeds"].shape[1]
    )
    if input_ids.shape[0] == 0 or columns == 0:
        raise ValueError("There is no prompt to continue. Pass at least one row of at least one token.")
    # Stock `generate` hands the empty outputs of encoders to a model that could read images too.
    given = {k for k, v in model_kwargs.items() if v is not None and not (isinstance(v, dict) and not v)}
    if unknown := sorted(given - KNOWN_INPUTS):
        raise ValueError(
            f"MARS decoding does not know how to continue the model inputs {', '.join(unknown)}. Leave them out, or "
            f"{ONE_BY_ONE}."
        )
    if streamer is not None and input_ids.shape[0] > 1:
        raise ValueError(
            "A `streamer` takes one row: rows of a MARS batch accept different numbers of tokens. Generate one prompt."
        )
    refuse_prompts(input_ids, model_kwargs)
    attention_mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    shape = (input_ids.shape[0], columns)
    if attention_mask is not None and attention_mask.shape != shape:
        raise ValueError(
            f"`attention_mask` must have one entry per token of the prompts, {shape}, got "
            f"{tuple(attention_mask.shape)}."
        )
    if positions is not None and positions.ndim > 2:
        raise ValueError(
            f"`{model_config.model_type}` counts its positions in several dimensions, {tuple(positions.shape)}, and "
            f"steps of several tokens in one. Use another model, or {ONE_BY_ONE}."
        )
    if positions is not None and positions.shape not in (shape, (1, columns)):
        raise ValueError(
            f"`position_ids`, or the `attention_mask` that they are counted from, must have one entry per token of "
            f"the prompts, {shape}, got {tuple(positions.shape)}."
        )
    if attention_mask is not None and bool((attention_mask[:, -1] == 0).any()):
        raise ValueError(
            "The prompts are padded on the right, so new tokens would follow padding. Set "
            "`tokenizer.padding_side = 'left'`."
        )
    lengths = [input_ids.shape[1]] if positions is None else (positions[..., -1] + 1).tolist()
    cached = cached_lengths(model_kwargs.get("cache"), [columns - length for length in lengths])
    refuse_positions(model_config.get_text_config(), lengths, max_length - input_ids.shape[1], cached)


def cached_lengths(cache: Any, padding: list[int]) -> list[int]:
    """Positions that the texts of a cache take, and those that the longest text took that it was ever written with.

    Args:
        padding: columns in front of each row, or of every row alike.
    """
    if cache is None or not cache.order:
        return []
    kept = min(cache.host_cursor)
    return [columns - pad for pad in padding for columns in (kept, cache.longest) if kept > pad]


def position_limit(config: Any) -> int | None:
    """Positions that a language model has, by its config; None if that is not said."""
    limit, rope = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None) or {}
    if limit is not None and rope.get("rope_type") == "yarn" and rope.get("original_max_position_embeddings") == limit:
        # The usual way to stretch a model: the entry is added to its config, and the limit left as it was.
        return int(limit * rope["factor"])
    return limit


def refuse_positions(config: Any, lengths: list[int], new_tokens: int, cached: Sequence[int] = ()) -> None:
    """Refuse texts that leave the positions that the model has, or that its rotary embedding treats alike.

    Args:
        config: of the language model.
        lengths: positions that the rows' prompts take.
        new_tokens: most tokens that are added to each.
        cached: positions of texts that were written before.
    """
    limit, longest = position_limit(config), max(lengths)
    total = longest + new_tokens
    if limit is not None and total > limit:
        raise ValueError(
            f"The prompt and its new tokens take {total} positions, and the model has {limit} "
            "(`max_position_embeddings`). Shorten the prompt or lower `max_new_tokens`."
        )
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if not isinstance(rope, dict) or rope.get("rope_type") != "longrope":
            continue
        switch = rope["original_max_position_embeddings"]
        shortest, longest = min([*lengths, *cached]), max([total, *cached])
        if shortest <= switch < longest:
            raise ValueError(
                f"The text of {shortest} to {longest} positions crosses position {switch}, from which on the "
                "`longrope` of this model rotates all keys differently, those in the cache too. [MASK]s would get "
                f"there earlier than one token at a time. Keep prompt and new tokens within {switch}, or every prompt "
                "longer than that, pass the whole text without `cache` if that was written on the other side, or "
                f"{ONE_BY_ONE}."
            )


def refuse_prompts(input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Refuse prompts that do not fit together with embeddings or a cache of the turn before."""
    embeds, cache = model_kwargs.get("inputs_embeds"), model_kwargs.get("cache")
    if embeds is not None and cache is None:
        raise ValueError("`inputs_embeds` need a cache: `mars_cache='none'` recomputes the prompt from its ids.")
    if embeds is not None and input_ids.shape[1] not in (0, embeds.shape[1]):
        raise ValueError(
            f"`input_ids` ({input_ids.shape[1]} columns) and `inputs_embeds` ({embeds.shape[1]}) are not the same "
            "prompt. Pass one of them."
        )
    if cache is None or not cache.order:
        return
    if cache.hidden:
        raise ValueError(
            "The `cache` began with `inputs_embeds` that had no ids, so a text of ids cannot be told to continue it. "
            "Pass the whole text without `cache`, or in the first turn `input_ids` beside `inputs_embeds`."
        )
    if embeds is not None:
        raise ValueError("MARS continues a cache with `input_ids` only. Leave out `inputs_embeds` or `cache`.")
    if len(cache.order) != input_ids.shape[0] or max(cache.host_cursor) >= input_ids.shape[1]:
        raise ValueError(
            f"The `cache` holds {len(cache.order)} rows of up to {max(cache.host_cursor)} tokens, and the prompt is "
            f"{tuple(input_ids.shape)}. Pass the whole text: the sequences of the turn before, and the new turn."
        )
