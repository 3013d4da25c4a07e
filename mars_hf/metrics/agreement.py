"""How far two token sequences agree."""

from __future__ import annotations

from collections.abc import Sequence


def prefix_agreement(own: Sequence[int], other: Sequence[int]) -> float:
    """Share of the longer sequence's tokens that stand before the first difference; 1 for two empty ones."""
    if not own and not other:
        return 1.0
    same = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other)))
    return same / max(len(own), len(other))
