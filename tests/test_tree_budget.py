"""How wide a lossless step is where the clock decides, at costs that are made up."""

from __future__ import annotations

import pytest

from mars_hf.pacing import CostMeter
from mars_hf.tree_budget import PROBE_AFTER, PROBES, PayingWidth

# Seconds of a forward of (rows, tokens per row).
COSTS = {
    "dear": lambda rows, width: 1e-3 * rows * width,
    "free": lambda rows, width: 1e-2,
    "stair": lambda rows, width: 1e-2 if width <= 4 else 2e-2,
    "mixed": lambda rows, width: 1e-2 + 1e-3 * rows * width,
}
# What the tokens of a row promise, by falling gain: a sure row, a doubtful one, a short one.
SURE, DOUBTFUL, SHORT = [0.95**k for k in range(20)], [0.4**k for k in range(20)], [1.0, 0.8, 0.5]


def measured(cost, rows: int) -> CostMeter:
    meter = CostMeter()
    for width in range(1, 65):
        meter.record(rows, width, 99.0)  # the first of its kind, which does not count
        meter.record(rows, width, cost(rows, width))
    return meter


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("gains", [[SURE], [DOUBTFUL], [SHORT], [SURE, DOUBTFUL, SHORT]])
def test_the_width_is_the_one_of_most_tokens_per_second(cost, gains):
    chosen = PayingWidth(measured(COSTS[cost], len(gains))).choose(gains)

    def speed(width: int) -> float:
        return sum(sum(of_row[:width]) for of_row in gains) / COSTS[cost](len(gains), width)

    assert speed(chosen) == pytest.approx(max(speed(width) for width in range(1, max(map(len, gains)) + 1)))


def test_what_is_not_known_is_tried_first_the_widest_before():
    meter = CostMeter()
    paying = PayingWidth(meter)
    tried = []
    for _ in range(12):
        tried.append(paying.choose([SURE]))
        meter.record(1, tried[-1], COSTS["dear"](1, tried[-1]))
    # Twice each, since the first forward of its kind does not count.
    assert tried[:10] == [16, 16, 8, 8, 4, 4, 2, 2, 1, 1]
    assert tried[10] == tried[11] == 1


def test_every_probe_comes_again():
    paying = PayingWidth(measured(COSTS["dear"], 1))
    chosen = [paying.choose([[0.99**k for k in range(64)]]) for _ in range(PROBE_AFTER * len(PROBES))]
    again = chosen[PROBE_AFTER - 1 :: PROBE_AFTER]
    assert sorted(again) == sorted(PROBES)
    assert set(chosen) == set(PROBES)
    assert chosen.count(1) == len(chosen) - len(PROBES) + 1
