"""Measured by turns, so that whatever else the machine does meets all alike."""

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def by_turns(items: Sequence[Item], number: int) -> list[Item]:
    """The order of a round: that of the items, beginning with another one from round to round."""
    first = number % len(items)
    return [*items[first:], *items[:first]]
