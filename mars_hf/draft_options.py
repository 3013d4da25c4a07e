"""The arguments of `generate` that shape the drafts of lossless decoding, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .checks import check_count

if TYPE_CHECKING:
    from transformers import GenerationConfig

# What has an effect together with `mars_lossless` only.
DRAFT_ARGUMENTS = ("mars_draft_length", "mars_draft_choices", "mars_tree_budget")
# The longest n-gram of a prompt lookup where `max_matching_ngram_size` is not set, as in stock `generate`.
NGRAM_SIZE = 2
# Most tokens of a tree where `mars_tree_budget` is not set: of a larger one most are not of use.
DEFAULT_BUDGET = 24
# The widest step that "auto" takes.
WIDEST = 64


@dataclass
class DraftOptions:
    """The checked arguments of lossless decoding.

    Attributes:
        length: drafts that the [MASK]s behind a token make, one after the other.
        choices: drafts that one [MASK] makes, one instead of the other.
        lookup: drafts that the row's own n-grams make; 0 for none.
        ngram_size: the longest n-gram that is looked up.
        budget: most tokens that a row feeds in a step; "auto" for as many as pay.
    """

    length: int
    choices: int = 1
    lookup: int = 0
    ngram_size: int = NGRAM_SIZE
    budget: int | str = DEFAULT_BUDGET

    @property
    def widest_step(self) -> int:
        """Most tokens that a row feeds in a step."""
        limit = self.budget if isinstance(self.budget, int) else WIDEST
        has_branches = self.lookup or self.choices > 1
        return limit if has_branches else min(limit, (self.length + 1) ** 2)

    @property
    def reach(self) -> int:
        """Most tokens that a step commits."""
        return max(self.length, self.lookup) + 1


def check_draft_ranges(config: GenerationConfig) -> None:
    """Check each entry by itself.

    Raises:
        ValueError: for the first that is out of range.
    """
    if config.mars_draft_length is not None:
        check_count("mars_draft_length", config.mars_draft_length, 1)
    check_count("mars_draft_choices", config.mars_draft_choices, 1)
    if config.mars_tree_budget not in (None, "auto"):
        check_count("mars_tree_budget", config.mars_tree_budget, 1, " or 'auto'")


def resolve_drafts(config: GenerationConfig) -> DraftOptions:
    """Check what goes together with `mars_lossless`; the drafts of a step are one fewer than the window by default.

    Raises:
        ValueError: for a threshold, a cache without cursors, or a lookup out of range.
    """
    if config.mars_threshold is not None:
        raise ValueError(
            "`mars_lossless=True` accepts what the model itself confirms, and `mars_threshold` what it is sure of. "
            "Unset one of them (also in `model.generation_config`)."
        )
    if config.mars_cache != "cursor":
        raise ValueError(f"`mars_lossless=True` needs `mars_cache='cursor'`, got {config.mars_cache!r}.")
    draft_length = config.mars_draft_length
    if draft_length is None:
        draft_length = max(config.mars_block_size - 1, 1)
    budget = DEFAULT_BUDGET if config.mars_tree_budget is None else config.mars_tree_budget
    drafts = DraftOptions(draft_length, config.mars_draft_choices, budget=budget)
    if (lookup := getattr(config, "_mars_prompt_lookup", None)) is not None:
        check_count("prompt_lookup_num_tokens", lookup, 1)
        drafts.lookup = lookup
        if (size := config.max_matching_ngram_size) is not None:
            check_count("max_matching_ngram_size", size, 1)
            drafts.ngram_size = size
    return drafts
