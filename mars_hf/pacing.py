"""What a step costs and what it yields, and so how many candidates pay for themselves.

Units: seconds of the host's clock; the width of a forward in tokens fed per row, filler of shorter rows included;
rates are probabilities, and `rates[k - 1]` is that of candidate k being accepted once candidate k-1 is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median_low
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

# Measurements that a median is taken of, for each number of rows and width.
RECENT = 9
# How much of what is known of the acceptance a step keeps: the last ten or so decide.
MEMORY = 0.9
# Steps after which a wider window is tried again, and after which the cost of a single token is measured again.
WIDER_AFTER, SINGLE_AFTER = 32, 128


class CostMeter:
    """The measured seconds of forwards, by rows and width.

    A width that has not been measured lies between its neighbours, and no wider forward counts as cheaper than a
    narrower one. Beyond what was measured for a number of rows, the cost grows as for the nearest number of rows that
    was measured there, or not at all where there is none: trying shows better than guessing. The first forward of its
    kind does not count: it pays for what later ones find ready.
    """

    def __init__(self) -> None:
        self._recent: dict[tuple[int, int], deque[float]] = {}
        self._begun: set[tuple[int, int]] = set()
        self._curves: dict[int, tuple[list[int], list[float]]] = {}
        # Threads that generate with one model share its meter.
        self._lock = Lock()

    def record(self, rows: int, width: int, seconds: float) -> None:
        """Note a forward of `rows` rows that were fed `width` tokens each."""
        with self._lock:
            if (rows, width) not in self._begun:
                self._begun.add((rows, width))
                return
            self._recent.setdefault((rows, width), deque(maxlen=RECENT)).append(seconds)
            widths = sorted(measured for count, measured in self._recent if count == rows)
            self._curves[rows] = widths, monotone([median_low(self._recent[rows, width]) for width in widths])

    def is_measured(self, rows: int, width: int) -> bool:
        """Whether such a forward was seen, with half to double the rows."""
        with self._lock:
            return any(measured == width and rows <= 2 * count <= 4 * rows for count, measured in self._recent)

    def seconds(self, rows: int, width: float) -> float:
        """The estimated seconds of a forward; 1 for all as long as nothing is measured."""
        with self._lock:
            curves = dict(self._curves)
        if not curves:
            return 1.0
        nearest, *others = sorted(curves, key=lambda count: max(rows / count, count / rows))
        widths = curves[nearest][0]
        edge = min(max(width, widths[0]), widths[-1])
        seconds = interpolate(width, *curves[nearest])
        if edge == width:
            return seconds
        for other in others:
            curve = curves[other]
            if curve[0][0] <= width <= curve[0][-1]:
                return seconds * interpolate(width, *curve) / interpolate(edge, *curve)
        return seconds


# What forwards of a model cost is known to its next generation too, as long as the model lives.
_COSTS: WeakKeyDictionary[Any, CostMeter] = WeakKeyDictionary()


def costs_of(model: Any) -> CostMeter:
    """The meter of a model: always the same one."""
    return _COSTS.setdefault(model, CostMeter())


def monotone(values: Sequence[float]) -> list[float]:
    """The non-decreasing values closest to these in the squares: neighbours in the wrong order are averaged."""
    pools: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] * count >= total * pools[-1][1]:
            before, size = pools.pop()
            total, count = total + before, count + size
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


def interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """The line through the points (xs ascending) at x, level beyond both ends."""
    right = bisect_left(xs, x)
    if right == 0 or right == len(xs):
        return ys[min(right, len(xs) - 1)]
    share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


class AcceptanceMeter:
    """How often each candidate is accepted once the one before it is; recent steps count more.

    Args:
        depths: B-1, the candidates of the widest window but the first, which is always accepted.
    """

    def __init__(self, depths: int) -> None:
        # As if one candidate of two had been accepted, until there is more to go by.
        self._reached, self._passed = [1.0] * depths, [0.5] * depths

    @property
    def rates(self) -> list[float]:
        return [passed / reached for passed, reached in zip(self._passed, self._reached, strict=True)]

    def record(self, window: int, accepted: Sequence[int], ended: Sequence[int]) -> None:
        """Note a step of this window: the tokens that each row accepted, and whether (1) it ended with them."""
        for depth in range(1, window):
            # Where a row ended, nobody asked whether the next candidate was good.
            asked = sum(
                count > depth or (count == depth and not has_ended)
                for count, has_ended in zip(accepted, ended, strict=True)
            )
            if asked:
                passed = sum(count > depth for count in accepted)
                self._reached[depth - 1] = MEMORY * self._reached[depth - 1] + asked
                self._passed[depth - 1] = MEMORY * self._passed[depth - 1] + passed


def expected_step(rates: Sequence[float], rows: int, window: int) -> tuple[float, float]:
    """What steps of this window yield and feed, one after the other: (tokens per row, width of the forward).

    A step feeds what the row with the longest run accepted in the step before, and window - 1 [MASK]s.
    """
    tokens, width, reaches = 1.0, float(window), 1.0
    for rate in rates[: window - 1]:
        reaches *= rate
        tokens += reaches
        width += 1 - (1 - reaches) ** rows
    return tokens, width


def best_window(costs: CostMeter, rates: Sequence[float], rows: int) -> int:
    """The window, from 1 to len(rates) + 1, that yields the most tokens per second; the narrower one of two alike."""

    def speed(window: int) -> float:
        tokens, width = expected_step(rates, rows, window)
        return tokens / costs.seconds(rows, width)

    return max(range(1, len(rates) + 2), key=speed)


class WindowPacer:
    """Chooses the window of every step, from 1 up to the largest.

    Args:
        costs: what forwards cost, which may know of earlier generations with the same model.
        largest: B, the widest window.

    Attributes:
        window: of the step at hand; the first one, which reads the prompt, has the widest.
    """

    def __init__(self, costs: CostMeter, largest: int) -> None:
        self.costs, self.largest, self.window = costs, largest, largest
        self.acceptance = AcceptanceMeter(largest - 1)
        self._since_single = self._since_wider = 0
        self._factor = 2

    def choose(self, rows: int) -> int:
        """Choose the window of the next step, which so many rows take."""
        self._since_single += 1
        if not self.costs.is_measured(rows, 1) or self._since_single > SINGLE_AFTER:
            # A step feeds what the one before accepted, so it is the second of these that is a single token wide.
            self.window = 1
            return 1
        self.window = best_window(self.costs, self.acceptance.rates, rows)
        if self.window < self.largest:
            self._since_wider += 1
            if self._since_wider > WIDER_AFTER:
                self._since_wider, self.window = 0, self._wider(self.window)
        return self.window

    def _wider(self, window: int) -> int:
        """Twice the window, the next time four times, up to the largest: a little wider costs little to try."""
        wider = min(self._factor * window, self.largest)
        self._factor = 2 if wider == self.largest else 2 * self._factor
        return wider

    def record(self, accepted: Sequence[int], ended: Sequence[int], width: int | None, seconds: float) -> None:
        """Note the step: what each row accepted, whether it ended, and the forward's width (None: not to count)."""
        self.acceptance.record(self.window, accepted, ended)
        if width is not None:
            self.costs.record(len(accepted), width, seconds)
            if width == 1:
                self._since_single = 0
