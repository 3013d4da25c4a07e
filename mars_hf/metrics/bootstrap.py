"""Percentile bootstrap: how far a figure would move if other examples, and other seeds, had been drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def ratio(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum of the values over the sum of the weights, along the last axis."""
    return values.sum(-1) / weights.sum(-1)


def bootstrap_interval(
    values: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    groups: Sequence[int] | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """The interval of sum(values) / sum(weights), by default of the mean of the values.

    Args:
        values: one number per example.
        weights: one number per example; for tokens per forward, values are tokens and weights forwards.
        groups: the seed, or any other cluster, of each example. Then groups are drawn first, and examples within the
            groups drawn, so that the interval is about new seeds as well as new examples.
        level: share of the bootstrap distribution that the interval holds.
        resamples: how many times the examples are drawn anew.
        seed: of the draws; equal arguments give equal intervals.

    Returns:
        Lower and upper end.

    Raises:
        ValueError: for no example, lengths that differ, or a level outside (0, 1).
    """
    own = np.asarray(values, dtype=np.float64)
    other = np.ones_like(own) if weights is None else np.asarray(weights, dtype=np.float64)
    if own.ndim != 1 or own.size == 0 or other.shape != own.shape:
        raise ValueError(f"Needs one value and one weight per example, got shapes {own.shape} and {other.shape}.")
    if not 0 < level < 1:
        raise ValueError(f"`level` must be between 0 and 1, got {level!r}.")
    rng = np.random.default_rng(seed)
    if groups is None:
        draws = rng.integers(own.size, size=(resamples, own.size))
        figures = ratio(own[draws], other[draws])
    else:
        members = np.asarray(groups)
        if members.shape != own.shape:
            raise ValueError(f"Needs one group per example, got shapes {members.shape} and {own.shape}.")
        figures = _two_stage(own, other, members, resamples, rng)
    low, high = np.quantile(figures, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _two_stage(
    values: NDArray[np.float64],
    weights: NDArray[np.float64],
    groups: NDArray[np.int64],
    resamples: int,
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """Figures of so many draws of groups and of examples within them."""
    rows = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    figures = np.empty(resamples)
    for i in range(resamples):
        drawn = rng.integers(len(rows), size=len(rows))
        index = np.concatenate([rng.choice(rows[group], size=len(rows[group])) for group in drawn])
        figures[i] = ratio(values[index], weights[index])
    return figures
