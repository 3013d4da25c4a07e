"""The `mars_*` arguments of `generate`: their defaults, their checks, and the throttle that may turn between steps.

Shapes: N rows of the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .acceptance import CONFIDENCES
from .checks import check_count
from .draft_options import DRAFT_ARGUMENTS, DraftOptions, check_draft_ranges, resolve_drafts

if TYPE_CHECKING:
    from transformers import GenerationConfig

# Arguments of `generate` and their values where neither the call nor a generation config sets them.
DEFAULTS: dict[str, Any] = {
    "mars_threshold": None,
    "mars_block_size": 4,
    "mars_mask_token_id": None,
    "mars_cache": "cursor",
    "mars_cache_block_size": 32,
    "mars_confidence": "probability",
    "mars_lossless": False,
    "mars_draft_length": None,
    "mars_draft_choices": 1,
    "mars_tree_budget": None,
    "mars_adaptive_window": False,
    "mars_prepack_weights": True,
}
CACHES = ("cursor", "block", "none")
NO_MASK = -1
# The way out of what MARS refuses, whichever way it is on: `mars_threshold=1.0` is none for `mars_lossless`, nor where
# the threshold is an entropy.
ONE_BY_ONE = "decode one token at a time, without `mars_threshold` and `mars_lossless`"


@dataclass
class MarsStep:
    """What a callable `mars_threshold` is told before each step.

    Attributes:
        index: number of the step, from 0.
        new_tokens: (N,) int64 on the host, tokens that each row of the batch has generated so far.
        accepted: (N,) int64 on the host, tokens that each row accepted in the step before; zeros at first.
        seconds: since decoding began.
    """

    index: int
    new_tokens: Tensor
    accepted: Tensor
    seconds: float


Threshold = float | Tensor | Callable[[MarsStep], float | Tensor]


@dataclass
class MarsOptions:
    """The checked `mars_*` arguments of one `generate` call.

    Attributes:
        threshold: a float, (N,) thresholds, or a callable asked before each step; None for lossless decoding.
        block_size: candidates of a step (B).
        mask_token_id: id of [MASK]; `NO_MASK` where none is known, which the stock loop needs none of.
        cache: one of `CACHES`.
        cache_block_size: tokens of a block of the block cache.
        confidence: a measure of `acceptance.confidence_of`.
        drafts: the arguments of lossless decoding; None for decoding by threshold.
        adaptive_window: whether a step may have fewer candidates, where fewer are faster.
        prepack_weights: whether a CPU may keep copies of weights in a faster layout.
    """

    threshold: Threshold | None
    block_size: int
    mask_token_id: int
    cache: str
    cache_block_size: int
    confidence: str
    drafts: DraftOptions | None = None
    adaptive_window: bool = False
    prepack_weights: bool = True

    @property
    def widest_step(self) -> int:
        """Most tokens that a row feeds in a step after the first."""
        if self.cache == "none":
            return sys.maxsize
        if self.drafts is not None:
            return self.drafts.widest_step
        return self.block_size - 1 + (self.cache_block_size if self.cache == "block" else self.block_size)

    @property
    def is_autoregressive(self) -> bool:
        """Whether no candidate but the first could ever be accepted, so that the stock loop does the same for less."""
        if self.drafts is not None or callable(self.threshold) or self.confidence == "entropy":
            return False
        if isinstance(self.threshold, Tensor):
            return bool((self.threshold >= 1.0).all())
        return self.threshold is not None and self.threshold >= 1.0


def resolve_options(config: GenerationConfig) -> MarsOptions:
    """Check the `mars_*` entries of a generation config, whatever set them.

    Raises:
        ValueError: for an entry that is out of range, or not available, and for an unknown mask token.
    """
    mask_token_id, block_size = config.mars_mask_token_id, config.mars_block_size
    ends = () if config.eos_token_id is None else torch.as_tensor(config.eos_token_id, device="cpu").flatten().tolist()
    if mask_token_id is None:
        # -1 as an end token is none to stock `generate`, either.
        mask_token_id, ends = NO_MASK, ()
    else:
        check_count("mars_mask_token_id", mask_token_id, 0)
    if mask_token_id in ends:
        raise ValueError(
            f"The [MASK] token {mask_token_id} is an `eos_token_id` too. It is never a token of the text, so no text "
            "would end with it. Set `mars_mask_token_id` to the id that the model was trained with."
        )
    check_ranges(config)
    cache_block_size = config.mars_cache_block_size
    options = MarsOptions(None, block_size, mask_token_id, config.mars_cache, cache_block_size, config.mars_confidence)
    options.prepack_weights = config.mars_prepack_weights
    if config.mars_lossless:
        options.drafts = resolve_drafts(config)
    elif callable(config.mars_threshold):
        options.threshold = config.mars_threshold
    else:
        options.threshold = check_threshold(config.mars_threshold, config.mars_confidence)
    if not options.is_autoregressive:
        refuse_unknown_mask(mask_token_id)
    if config.mars_adaptive_window and not config.mars_lossless:
        if config.mars_cache != "cursor":
            raise ValueError(
                f"`mars_adaptive_window=True` needs `mars_cache='cursor'`, got {config.mars_cache!r}: with another "
                "cache the cost of a step is not that of its window."
            )
        options.adaptive_window = True
    return options


def names_mars(sources: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a call or a generation config, each by its entries, asks for MARS, if only at a threshold of 1.0."""
    return any(source.get("mars_threshold") is not None or source.get("mars_lossless") for source in sources)


def refuse_unknown_mask(mask_token_id: int) -> None:
    """Refuse to decode several tokens at a time where no [MASK] is known.

    Raises:
        ValueError: for `NO_MASK`.
    """
    if mask_token_id == NO_MASK:
        raise ValueError(
            "MARS decoding needs the id of the [MASK] token, and `generation_config.mars_mask_token_id` is not set. "
            "Load a checkpoint that `MarsSFTTrainer` saved, or pass it: `get_mars_model(model, mask_token_id=...)`."
        )


def check_ranges(config: GenerationConfig) -> None:
    """Check each entry by itself, as far as it has a meaning of its own.

    Raises:
        ValueError: for the first that is out of range.
    """
    check_count("mars_block_size", config.mars_block_size, 1)
    if config.mars_cache not in CACHES:
        raise ValueError(f"`mars_cache` must be one of {', '.join(CACHES)}, got {config.mars_cache!r}.")
    # A run of accepted tokens may cross one boundary of the block cache, never two.
    check_count(
        "mars_cache_block_size",
        config.mars_cache_block_size,
        config.mars_block_size if config.mars_cache == "block" else 1,
    )
    if config.mars_confidence not in CONFIDENCES:
        raise ValueError(f"`mars_confidence` must be one of {', '.join(CONFIDENCES)}, got {config.mars_confidence!r}.")
    check_draft_ranges(config)
    for name in ("mars_lossless", "mars_adaptive_window", "mars_prepack_weights"):
        if not isinstance(value := getattr(config, name), bool):
            raise ValueError(f"`{name}` must be True or False, got {value!r}.")


def refuse_unknown(config: GenerationConfig) -> None:
    """Refuse entries that look like settings of MARS and are none: a generation config takes any name in silence.

    Raises:
        ValueError: if there are such entries.
    """
    if unknown := sorted(name for name in vars(config) if name.startswith("mars") and name not in DEFAULTS):
        raise ValueError(
            f"The generation config holds `{'`, `'.join(unknown)}`, which MARS does not know. Known: "
            f"{', '.join(DEFAULTS)}."
        )


def refuse_without_effect(config: GenerationConfig, given: Collection[str]) -> None:
    """Refuse arguments of the call that would change nothing.

    What a generation config records may lie idle, and so may an argument at its default, which asks for nothing.

    Args:
        config: the settings, from wherever they come.
        given: names of the `mars_*` arguments that the call itself sets.

    Raises:
        ValueError: for the first such argument.
    """
    is_lossless = config.mars_lossless
    by_threshold = config.mars_threshold is not None and not is_lossless
    # Where these arguments do something, and what to set so that they do; the others do wherever MARS is on.
    effective = {
        **dict.fromkeys(DRAFT_ARGUMENTS, (is_lossless, "`mars_lossless=True`")),
        "mars_block_size": (
            not is_lossless or config.mars_draft_length is None,
            "no `mars_draft_length`, which says more",
        ),
        "mars_confidence": (by_threshold, "`mars_threshold`, without `mars_lossless`"),
        "mars_adaptive_window": (by_threshold, "`mars_threshold`, without `mars_lossless`"),
        "mars_cache_block_size": (
            by_threshold and config.mars_cache == "block",
            "`mars_cache='block'`, with `mars_threshold`",
        ),
    }
    is_on = (by_threshold or is_lossless, "`mars_threshold`, or `mars_lossless=True`")
    for name in given:
        if name in ("mars_threshold", "mars_lossless") or getattr(config, name) == DEFAULTS[name]:
            continue
        for has_effect, instead in (effective.get(name, is_on), is_on):
            if not has_effect:
                value = getattr(config, name)
                raise ValueError(f"`{name}={value!r}` has no effect here. Leave it out, or set {instead}.")


def check_threshold(threshold: Any, confidence: str, batch: int | None = None) -> float | Tensor:
    """A valid threshold: a float, or a float32 tensor (N,) where one is given per row.

    Args:
        threshold: a number, a sequence of numbers or a tensor.
        confidence: the measure it is for.
        batch: N, where it is known, which is where it was checked without it, or comes from a callable.

    Raises:
        ValueError: for thresholds outside (0, 1] (entropy: negative or infinite), NaN, or a wrong number of them.
    """
    try:
        if isinstance(threshold, bool):
            raise TypeError("True is no number of its own")
        # Named, since `torch.set_default_device` would move it.
        device = threshold.device if isinstance(threshold, Tensor) else "cpu"
        values = torch.as_tensor(threshold, dtype=torch.float32, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"`mars_threshold` must be a number, one number per row, or a callable, got {threshold!r}."
        ) from error
    if values.ndim > 1 or values.numel() == 0 or (values.ndim == 1 and batch not in (None, values.shape[0])):
        rows = "" if batch is None else f" ({batch} rows)"
        raise ValueError(
            f"`mars_threshold` must be one number or one per row of the batch{rows}, got shape {tuple(values.shape)}."
        )
    # Looking at values that live on an accelerator makes the host wait for it: once, but not each step.
    if batch is None or values.device.type == "cpu":
        if confidence == "entropy":
            valid, allowed = (values >= 0) & values.isfinite(), "a finite number of nats, 0 or more"
        else:
            valid, allowed = (values > 0) & (values <= 1), "in (0, 1]; 1.0 is plain autoregressive decoding"
        if not bool(valid.all()):
            raise ValueError(f"`mars_threshold` must be {allowed}, got {threshold!r}.")
    return float(values) if values.ndim == 0 else values


def expand_threshold(threshold: Tensor, batch: int, config: GenerationConfig) -> Tensor:
    """Thresholds per prompt, repeated for `num_return_sequences` as `generate` repeats the prompts.

    Raises:
        ValueError: if there is not one threshold per prompt.
    """
    if threshold.shape[0] * config.num_return_sequences == batch:
        threshold = threshold.repeat_interleave(config.num_return_sequences)
    checked = check_threshold(threshold, config.mars_confidence, batch)
    assert isinstance(checked, Tensor)
    return checked
