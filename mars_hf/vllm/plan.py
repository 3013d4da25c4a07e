"""What a request is fed behind its last token, and what has come of it. Plain Python; no vLLM, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Plan:
    """One request's next step, and its counts.

    A draft of a threshold stands as soon as it is made: it will be the token of its place, whatever becomes of the
    step (the scheduler may shorten it, or preempt the request). A draft of lossless decoding is a guess.

    Attributes:
        position: place of the first draft, counted from the start of the prompt.
        drafts: what comes next, as far as it is known or guessed.
        certain: whether the drafts stand.
        fed: drafts to feed.
        masks: [MASK]s to feed behind the drafts.
        tokens, forwards: so far, as `generate` counts them: a forward is a step that gave the request a token.
    """

    position: int = 0
    drafts: list[int] = field(default_factory=list)
    certain: bool = False
    fed: int = 0
    masks: int = 0
    tokens: int = 0
    forwards: int = 0

    def forced(self, position: int, count: int) -> list[int | None]:
        """The tokens that stand for `count` places from `position` on, None where nothing does."""
        if not self.certain:
            return [None] * count
        places = range(position - self.position, position - self.position + count)
        return [self.drafts[place] if 0 <= place < len(self.drafts) else None for place in places]

    def left_behind(self, position: int, last: int) -> list[int]:
        """Certain drafts from `position` on, if the token before it is what they say it is."""
        place = position - self.position
        if not self.certain or not 0 < place < len(self.drafts) or self.drafts[place - 1] != last:
            return []
        return self.drafts[place:]

    def feed(self, position: int, drafts: list[int], certain: bool, masks: int, remaining: int) -> None:
        """Plan the next step: no more drafts and [MASK]s than the tokens that may still come.

        Args:
            position: place of the token that comes next.
            drafts, certain, masks: see the attributes.
            remaining: tokens that the request may still have; the step gives one more than drafts at most.
        """
        self.position, self.drafts, self.certain = position, drafts, certain
        self.fed = min(len(drafts), max(remaining - 1, 0))
        self.masks = min(masks, max(remaining - 1 - self.fed, 0))

    @property
    def value(self) -> float:
        """What drafts are worth to a step, in tokens: the gain over one token a step, seen so far.

        It is the relative value of having drafts in the average-reward sense; a little prior knowledge keeps the
        first steps from swaying it.
        """
        return (self.tokens + 2) / (self.forwards + 1) - 1


def cut_after_stop(tokens: Sequence[int], stops: frozenset[int]) -> list[int]:
    """The tokens up to the first one that ends the text, that one included."""
    for count, token in enumerate(tokens, 1):
        if token in stops:
            return list(tokens[:count])
    return list(tokens)


def useful_drafts(confidences: Sequence[float], value: float) -> int:
    """How many drafts a lossless step should try.

    A wrong draft makes the [MASK]s behind it worthless, and the next step then has no drafts. With P_D the probability
    that all of D drafts are right, D drafts yield P_1 + ... + P_D tokens now and, with probability P_D, drafts for the
    next step, worth `value` tokens.
    """
    best, best_yield, sum_of_all, all_right = 0, value, 0.0, 1.0
    for count, confidence in enumerate(confidences, 1):
        all_right *= confidence
        sum_of_all += all_right
        if sum_of_all + all_right * value > best_yield:
            best, best_yield = count, sum_of_all + all_right * value
    return best
