"""How many tokens of a tree pay for themselves, by what the machine was measured to take for them."""

from __future__ import annotations

from collections.abc import Sequence

from .draft_options import WIDEST
from .pacing import CostMeter

# Widths whose cost is measured before it counts, and again after so many steps, one after the other.
PROBES = (1, 2, 4, 8, 16, 32, WIDEST)
PROBE_AFTER = 48


class PayingWidth:
    """Chooses the width of every step: the one that promises the most tokens per second.

    Args:
        costs: what forwards cost, which may know of earlier generations with the same model.
    """

    def __init__(self, costs: CostMeter) -> None:
        self.costs = costs
        self._steps = 0

    def choose(self, gains: Sequence[Sequence[float]]) -> int:
        """The width for rows whose best tokens are expected to commit so many tokens each, by falling gain."""
        rows, longest = len(gains), max(len(of_row) for of_row in gains)
        self._steps += 1
        probes = [width for width in PROBES if width <= longest]
        if (turn := self._steps % (PROBE_AFTER * len(PROBES))) % PROBE_AFTER == 0:
            return probes[turn // PROBE_AFTER % len(probes)]
        if unknown := [width for width in probes if not self.costs.is_measured(rows, width)]:
            return unknown[-1]
        total, speed, best = 0.0, 0.0, 1
        for width in range(1, longest + 1):
            total += sum(of_row[width - 1] for of_row in gains if len(of_row) >= width)
            if total / self.costs.seconds(rows, width) > speed:
                speed, best = total / self.costs.seconds(rows, width), width
        return best
