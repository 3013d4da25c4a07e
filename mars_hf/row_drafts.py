"""What one row of a batch has for drafts, and how good its drafts were so far."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from .draft_options import DraftOptions
from .draft_tree import Leaf, Sources, best_first
from .lookup import NgramLookup


class Rate:
    """How often something was right in one text, and as long as there is little to count, what is usual."""

    WEIGHT = 4.0

    def __init__(self, usual: float) -> None:
        self.right, self.count = usual * self.WEIGHT, self.WEIGHT

    def record(self, is_right: bool) -> None:
        self.right += is_right
        self.count += 1

    @property
    def value(self) -> float:
        return self.right / self.count


class RowDrafts:
    """The drafts of one row, and how good those before were.

    All of it comes from the row's own text and its own logits, so that its trees do not depend on its batch.

    Args:
        options: the arguments of lossless decoding.
        text: the prompt.

    Attributes:
        text: the text so far.
        choices: by depth from 1, the choices at the [MASK]s behind the last certain token, as (token, confidence).
        followed: what followed the same n-gram before, in the step that is under way.
        ngram: the tokens of that n-gram; 0 if there is none.
    """

    def __init__(self, options: DraftOptions, text: list[int]) -> None:
        self.options = options
        self.text = NgramLookup(options.ngram_size if options.lookup else 0)
        self.text.extend(text)
        self.choices: list[list[tuple[int, float]]] = []
        self.followed: list[int] = []
        self.ngram = 0
        # What is usual on grade-school mathematics; with the first steps the row's own rates take over.
        self.group_rates = [Rate(0.6 * 0.7**depth) for depth in range(options.length)]
        self.lookup_rates = [Rate(min(0.3 + 0.2 * size, 0.9)) for size in range(1, options.ngram_size + 1)]

    def grow(self, deepest: int) -> Iterator[Leaf]:
        """What the row may feed in its next step, by falling gain, no deeper than `deepest`."""
        self.followed, self.ngram = self.text.propose(min(self.options.lookup, deepest))
        rate = self.lookup_rates[self.ngram - 1].value if self.ngram else 0.0
        group_rates = list(accumulate((rate.value for rate in self.group_rates), min))
        return best_first(self.text.text[-1], Sources(self.choices, self.followed, rate, group_rates), deepest)

    def learn(self, tokens: list[int]) -> None:
        """Take note of the tokens that a step has committed, and of which drafts were right."""
        right = True
        for depth, choices in enumerate(self.choices):
            if right and depth == len(tokens):
                break
            right = right and tokens[depth] == choices[0][0]
            self.group_rates[depth].record(right)
        for token, draft in zip(tokens, self.followed, strict=False):
            self.lookup_rates[self.ngram - 1].record(token == draft)
            if token != draft:
                break
        self.text.extend(tokens)
