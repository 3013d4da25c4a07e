"""The arguments of MARS training."""

from __future__ import annotations

import copy
import math
import numbers
from dataclasses import dataclass, field, fields
from typing import Any

from transformers import TrainingArguments
from trl import SFTConfig

from .checks import check_count
from .collator import BLOCK_OFFSETS


@dataclass
class MarsSFTConfig(SFTConfig):
    """`SFTConfig` with what MARS adds.

    Args:
        mars_block_size: number of tokens in a block, B: the most tokens a decoding step can accept.
        mars_ar_weight: weight of the clean stream, the ordinary SFT loss.
        mars_mask_weight: weight of the masked stream. 0 trains exactly as `SFTTrainer` does.
        mars_mask_token: the mask token. None takes the tokenizer's own, or adds `<|mask|>`.
        mars_block_offset: `"fixed"` starts the blocks at each sequence's first token, `"random"` at a random phase
            drawn anew each time an example is trained on, from the seed, the step and the example's tokens; evaluation
            gives an example the same phase each time.
        mars_block_curriculum: the share of the training steps over which blocks grow from 2 tokens to
            `mars_block_size`, through every size between for equally long. 0 trains with `mars_block_size` throughout.

    Raises:
        ValueError: for a value out of range.
    """

    mars_block_size: int = field(
        default=4,
        metadata={"help": "Number of tokens in a MARS block: the most tokens that a decoding step can accept."},
    )
    mars_ar_weight: float = field(
        default=1.0,
        metadata={"help": "Weight of the loss of the clean stream, which is the ordinary SFT loss."},
    )
    mars_mask_weight: float = field(
        default=1.0,
        metadata={"help": "Weight of the loss of the masked stream. 0 trains exactly as `SFTTrainer` does."},
    )
    mars_mask_token: str | None = field(
        default=None,
        metadata={
            "help": "The mask token. If not set, the tokenizer's own mask token is used, or `<|mask|>` is added to it."
        },
    )
    mars_block_offset: str = field(
        default="fixed",
        metadata={
            "help": "Where the blocks of a sequence start: 'fixed' at its first token, 'random' at a random phase "
            "drawn anew each time an example is seen, so that a token is met at every depth over the epochs.",
            "choices": list(BLOCK_OFFSETS),
        },
    )
    mars_block_curriculum: float = field(
        default=0.0,
        metadata={
            "help": "Share of the training steps over which blocks grow from 2 tokens to `mars_block_size`, through "
            "every size between for equally long. 0 trains with `mars_block_size` throughout."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        check_count("mars_block_size", self.mars_block_size, 2, " (`mars_mask_weight=0` is ordinary SFT)")
        for name in ("mars_ar_weight", "mars_mask_weight"):
            weight = getattr(self, name)
            if not _is_number(weight) or weight < 0:
                raise ValueError(f"`{name}` must be a finite number of at least 0, got {weight!r}.")
        if self.mars_ar_weight == 0 and self.mars_mask_weight == 0:
            raise ValueError("`mars_ar_weight` and `mars_mask_weight` are both 0: nothing would be trained. Set one.")
        if self.mars_block_offset not in BLOCK_OFFSETS:
            raise ValueError(
                f"`mars_block_offset` must be one of {', '.join(BLOCK_OFFSETS)}, got {self.mars_block_offset!r}."
            )
        if self.mars_mask_token is not None and (
            not isinstance(self.mars_mask_token, str) or not self.mars_mask_token
        ):
            raise ValueError(
                f"`mars_mask_token` must be the text of a token, got {self.mars_mask_token!r}. Leave it unset to take "
                "the tokenizer's own mask token, or to add one."
            )
        if not _is_number(self.mars_block_curriculum) or not 0 <= self.mars_block_curriculum < 1:
            raise ValueError(
                "`mars_block_curriculum` must be at least 0 and below 1, or blocks never reach `mars_block_size`; "
                f"got {self.mars_block_curriculum!r}."
            )

    def to_dict(self) -> dict[str, Any]:
        """As `SFTConfig` does, which takes whatever ends in `_token` for a secret: the mask token is none."""
        return {**super().to_dict(), "mars_mask_token": self.mars_mask_token}

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: `Trainer` writes its arguments into every checkpoint, and a token must not travel along."""
        return {**self.__dict__, "hub_token": None}

    def __copy__(self) -> MarsSFTConfig:
        """A copy in memory keeps the token."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> MarsSFTConfig:
        """As `__copy__`."""
        memo[id(self)] = new = object.__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def block_size_at(args: TrainingArguments, step: int, max_steps: int) -> int:
    """The block size at a step of the training, 0 the first, by `mars_block_size` and `mars_block_curriculum`.

    Evaluation, and what the checkpoint records, has the final one.
    """
    growth = args.mars_block_curriculum * max_steps
    if step >= growth:
        return args.mars_block_size
    return 2 + int(step / growth * (args.mars_block_size - 2))


def as_mars_config(args: TrainingArguments | None, model_name: str) -> TrainingArguments:
    """Turn what `SFTTrainer` takes as `args` into arguments that have every field of `MarsSFTConfig`.

    A plain `SFTConfig` is copied, with the MARS fields at their defaults; None and plain `TrainingArguments` go the
    way they go in `SFTTrainer`.
    """
    if args is None:
        return MarsSFTConfig(f"{model_name.split('/')[-1]}-MARS")
    if isinstance(args, MarsSFTConfig):
        return args
    if not isinstance(args, SFTConfig):
        return MarsSFTConfig(**{**args.to_dict(), "hub_token": args.hub_token})  # `to_dict` hides the token
    # A copy, not a new object from `to_dict`: that loses what is no field, and reads derived values as given ones.
    mars_args = copy.copy(args)
    if type(args) is SFTConfig:
        mars_args.__class__ = MarsSFTConfig
    for option in fields(MarsSFTConfig):
        if option.name.startswith("mars_") and not hasattr(args, option.name):
            setattr(mars_args, option.name, option.default)
    return mars_args
