"""`MarsGenerationMixin`: the `mars_*` arguments of `generate`, what is refused, and the way to the MARS decoder."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerationMode, MaxLengthCriteria

from .attention import grouped_heads
from .cache import MarsCache
from .decoding import MarsDecoder, length_limit
from .few_tokens import few_token_products
from .generation_refusals import refuse_arguments, refuse_inputs, refuse_modes, refuse_paged, refuse_processors
from .model_refusals import refuse_models
from .options import (
    DEFAULTS,
    MarsOptions,
    Threshold,
    check_ranges,
    expand_threshold,
    names_mars,
    refuse_unknown,
    refuse_unknown_mask,
    refuse_without_effect,
    resolve_options,
)
from .outputs import EndRecorder, MarsGenerateOutput
from .prepacked import forget


class MarsGenerationMixin(GenerationMixin):
    """Adds MARS decoding to `generate` of any decoder-only model: `class M(MarsGenerationMixin, Qwen2ForCausalLM)`.

    Without a `mars_threshold`, in the call or in `model.generation_config`, `generate` is the stock one.
    """

    def generate(
        self,
        *args: Any,
        mars_threshold: Threshold | list[float] | None = None,
        mars_block_size: int | None = None,
        mars_cache: str | None = None,
        mars_cache_block_size: int | None = None,
        mars_confidence: str | None = None,
        mars_lossless: bool | None = None,
        mars_draft_length: int | None = None,
        mars_draft_choices: int | None = None,
        mars_tree_budget: int | str | None = None,
        mars_adaptive_window: bool | None = None,
        mars_prepack_weights: bool | None = None,
        **kwargs: Any,
    ) -> Tensor | MarsGenerateOutput:
        """Generate as `transformers.GenerationMixin.generate` does, several tokens per forward pass.

        Every argument of the stock `generate` is accepted. Unset `mars_*` arguments come from the generation config.

        Args:
            mars_threshold: accept a candidate while the model's confidence in it is at least this, in (0, 1]. One
                float, one per prompt, or a callable that gets a `MarsStep` before each step and returns either. 1.0
                takes the stock decoding path. Higher is closer to the autoregressive text, lower is faster.
            mars_block_size: B, candidates per forward pass; by default the block size of training, else 4.
            mars_cache: "cursor", every row advances on its own in one pre-allocated KV buffer; "block", the paper's
                cache, which is written in blocks when all rows have filled theirs; "none", the whole sequence is
                recomputed each step. All three give the same tokens.
            mars_cache_block_size: tokens of a block of the block cache, 16 or 32 in the paper.
            mars_confidence: "probability" of the candidate, "margin" over the runner-up, or "entropy" in nats, which
                must not exceed the threshold.
            mars_lossless: let the model confirm its own drafts instead of trusting them by a threshold: greedy tokens
                are those of plain autoregressive decoding, sampled ones follow its distribution.
                `prompt_lookup_num_tokens` and `max_matching_ngram_size` add the n-grams of the row's own text as a
                second source of drafts, for any number of rows.
            mars_draft_length: drafts that the [MASK]s make for a lossless step; by default `mars_block_size - 1`.
            mars_draft_choices: likeliest tokens at each [MASK] that become drafts, one instead of the other; 1 by
                default.
            mars_tree_budget: most tokens that a row feeds in a lossless step, drafts and [MASK]s; the likeliest to be
                of use are kept. 24 by default, more than a whole tree of 3 drafts has; "auto" feeds as many as pay by
                the seconds measured.
            mars_adaptive_window: let the candidates of a step be as many as pay for themselves, from 1 to
                `mars_block_size`, by the acceptance so far and the measured cost of a forward, so that MARS is not
                slower than one token at a time. The text may differ from that of a fixed window, and from run to
                run, since a candidate may be proposed at another depth; each one that is accepted had the
                confidence at the depth at which it was proposed.
            mars_prepack_weights: whether, on a CPU, copies of weights may be kept while the model lives, in the layout
                in which products with several tokens are faster, if all fit into half of the available memory; True by
                default. False frees those of earlier calls.

        Returns:
            The sequences, or with `return_dict_in_generate=True` a `MarsGenerateOutput`.

        Raises:
            ValueError: for arguments that are out of range, that MARS cannot honour, or that would have no effect,
                before any forward pass.
        """
        given = {
            "mars_threshold": mars_threshold,
            "mars_block_size": mars_block_size,
            "mars_cache": mars_cache,
            "mars_cache_block_size": mars_cache_block_size,
            "mars_confidence": mars_confidence,
            "mars_lossless": mars_lossless,
            "mars_draft_length": mars_draft_length,
            "mars_draft_choices": mars_draft_choices,
            "mars_tree_budget": mars_tree_budget,
            "mars_adaptive_window": mars_adaptive_window,
            "mars_prepack_weights": mars_prepack_weights,
        }
        given = {name: value for name, value in given.items() if value is not None}
        arguments = inspect.signature(super().generate).bind_partial(*args, **kwargs).arguments
        configs = (arguments.get("generation_config"), self.generation_config)
        sources = [given, *(vars(config) for config in configs if config is not None)]
        if names_mars(sources):
            refuse_paged(arguments)
        if turns_on_mars(sources):
            refuse_arguments(arguments)
        return super().generate(*args, **given, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save as the stock class does: a MARS checkpoint is an ordinary checkpoint, whatever this class is called."""
        model: Any = self
        mars_class = type(self)
        model.__class__ = next(
            c for c in mars_class.__mro__ if issubclass(c, PreTrainedModel) and not issubclass(c, MarsGenerationMixin)
        )
        try:
            return model.save_pretrained(*args, **kwargs)
        finally:
            model.__class__ = mars_class

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        # Custom entries survive in a generation config, but as arguments they are only merged into one that has them.
        given = {name: kwargs.pop(name) for name in DEFAULTS if name in kwargs}
        if any(
            callable(getattr(config, "mars_threshold", None)) for config in (generation_config, self.generation_config)
        ):
            raise ValueError(
                "A generation config is copied for every call, and a callable `mars_threshold` in it, which then "
                "would not turn while a request runs. Pass it to the call, `generate(mars_threshold=...)`."
            )
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        refuse_unknown(generation_config)
        for name, default in DEFAULTS.items():
            value = given.get(name, getattr(generation_config, name, None))
            setattr(generation_config, name, default if value is None else value)
        generation_config._mars_given = list(given)
        if generation_config.mars_lossless:
            # To stock `generate` it is a decoding loop of its own; here it is a source of drafts.
            generation_config._mars_prompt_lookup = generation_config.prompt_lookup_num_tokens
            if kwargs.get("max_matching_ngram_size") is not None and generation_config._mars_prompt_lookup is None:
                raise ValueError(
                    "`max_matching_ngram_size` has no effect without `prompt_lookup_num_tokens`. Set both, or neither."
                )
            generation_config.prompt_lookup_num_tokens = None
        return generation_config, model_kwargs

    def _validate_generation_mode(
        self, generation_mode: GenerationMode, generation_config: GenerationConfig, generation_mode_kwargs: dict
    ) -> None:
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        generation_config._mars_options = None
        if generation_config._mars_given:
            check_ranges(generation_config)
            refuse_without_effect(generation_config, generation_config._mars_given)
        if generation_config.mars_threshold is None and not generation_config.mars_lossless:
            return
        options = resolve_options(generation_config)
        if options.is_autoregressive:
            generation_config._mars_options = options
            return
        refuse_modes(generation_mode, generation_config, generation_mode_kwargs)
        refuse_models(self, options)
        generation_config._mars_options = options

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        options: MarsOptions | None = generation_config._mars_options
        cache = model_kwargs.get("cache")
        if takes_stock_path(options, cache):
            if isinstance(cache, MarsCache):
                raise ValueError(
                    "A `MarsCache` is continued by MARS decoding only. Set `mars_threshold` (1.0 for one token at a "
                    "time), or pass the whole text without a `cache`."
                )
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            return
        assert options is not None
        if options.is_autoregressive:
            # The loop is that of MARS after all, since it continues its cache.
            refuse_unknown_mask(options.mask_token_id)
            refuse_modes(generation_mode, generation_config, {})
            refuse_models(self, options)
        if options.cache == "none":
            if cache is not None:
                raise ValueError("`mars_cache='none'` uses no cache, and `cache` is one. Leave one of them out.")
            return
        if cache is not None and not isinstance(cache, MarsCache):
            raise ValueError(
                f"MARS cannot continue a {type(cache).__name__}, whose rows all have one length. Pass the whole text "
                "without `cache`, or the `cache` of an output of MARS (with a threshold of 1.0 it is a stock one)."
            )
        if not generation_config.use_cache:
            raise ValueError(
                f"`use_cache=False` contradicts `mars_cache='{options.cache}'`. Set `mars_cache='none'` to recompute "
                "the sequence each step."
            )
        model_kwargs["cache"] = MarsCache() if cache is None else cache

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | MarsGenerateOutput:
        options: MarsOptions | None = generation_config._mars_options
        if options is None:
            return super()._sample(
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus,
                streamer,
                **model_kwargs,
            )
        # The stopping criteria have the tokenizer already; the model's forward does not want it.
        model_kwargs.pop("tokenizer", None)
        if isinstance(options.threshold, Tensor):
            options.threshold = expand_threshold(options.threshold, input_ids.shape[0], generation_config)
        if takes_stock_path(options, model_kwargs.get("cache")):
            if not options.prepack_weights:
                forget(self.modules())
            ends = EndRecorder(stopping_criteria)
            chunks = prompt_forwards(input_ids.shape[1], generation_config, model_kwargs)
            output = super()._sample(
                input_ids, logits_processor, ends, generation_config, synced_gpus, streamer, **model_kwargs
            )
            return ends.as_mars_output(output, chunks) if generation_config.return_dict_in_generate else output
        if options.is_autoregressive:
            options.block_size = 1
        refuse_processors(logits_processor)
        refuse_inputs(self.config, input_ids, length_limit(stopping_criteria), streamer, model_kwargs)
        may_stop_early = any(type(criterion) is not MaxLengthCriteria for criterion in stopping_criteria)
        if input_ids.shape[0] > 1 and may_stop_early and generation_config._pad_token_tensor is None:
            raise ValueError(
                "Rows that stop early are filled with a padding token, and none is known. Set `pad_token_id`."
            )
        decoder = MarsDecoder(
            self, input_ids, options, generation_config, logits_processor, stopping_criteria, streamer, model_kwargs
        )
        with grouped_heads(self), few_token_products(self, options.prepack_weights):
            return decoder.run()


def turns_on_mars(sources: list[dict[str, Any]]) -> bool:
    """Whether the entries of a call and of generation configs, the first before the others, replace the stock loop."""

    def entry(name: str) -> Any:
        return next((source[name] for source in sources if source.get(name) is not None), None)

    threshold = entry("mars_threshold")
    if isinstance(threshold, int | float) and threshold >= 1 and entry("mars_confidence") != "entropy":
        threshold = None
    return threshold is not None or bool(entry("mars_lossless"))


def prompt_forwards(columns: int, config: GenerationConfig, model_kwargs: dict[str, Any]) -> int:
    """Forward passes that stock `generate` takes for a prompt of so many ids: one for each chunk of what it feeds."""
    chunk, cache, mask = config.prefill_chunk_size, model_kwargs.get("cache"), model_kwargs.get("attention_mask")
    if chunk is None:
        return 1
    # Ids that are as many as the mask are the whole text, and what a cache holds of it is not fed again.
    is_whole = columns == (getattr(config, "_mask_length", -1) if mask is None else mask.shape[1])
    known = int(cache.get_seq_length()) if cache is not None and is_whole else 0
    return max(1, -(-(columns - known) // chunk))


def takes_stock_path(options: MarsOptions | None, cache: Any) -> bool:
    """Whether the stock loop decodes; plain autoregression that continues a `MarsCache` does not."""
    return options is None or (options.is_autoregressive and not isinstance(cache, MarsCache))
