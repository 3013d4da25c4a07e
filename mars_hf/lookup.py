"""What a text itself says comes next: it has had these last tokens before."""

from __future__ import annotations

from collections.abc import Sequence


class NgramLookup:
    """The n-grams of one text and what followed them, kept up to date as the text grows.

    Where an n-gram came more than once, its last time counts: what a text repeats, it repeats soon.

    Args:
        size: the longest n-gram, in tokens.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.text: list[int] = []
        self._followed_at: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end of the text."""
        for token in tokens:
            end = len(self.text)
            for size in range(1, min(self.size, end) + 1):
                self._followed_at[tuple(self.text[end - size :])] = end
            self.text.append(token)

    def propose(self, count: int) -> tuple[list[int], int]:
        """What followed the longest n-gram that the text ends with, and that n; ([], 0) if none came before.

        A continuation that reaches the end of the text goes on with itself: "a b a b" is followed by "a b a b ...".
        """
        for size in range(min(self.size, len(self.text)), 0, -1):
            start = self._followed_at.get(tuple(self.text[-size:]))
            if start is not None:
                followed = self.text[start : start + count]
                while len(followed) < count:
                    followed += followed[: count - len(followed)]
                return followed, size
        return [], 0
