"""What a step costs, what it yields, and the window that follows from both, at costs and rates that are made up."""

from __future__ import annotations

import itertools
import random
import sys
import threading

import pytest

from mars_hf.pacing import (
    AcceptanceMeter,
    CostMeter,
    WindowPacer,
    best_window,
    expected_step,
    interpolate,
    monotone,
)

# Seconds of a forward of (rows, tokens per row): nothing but a token's price, nearly free tokens, and one in between.
COSTS = {
    "dear": lambda rows, width: 1e-3 * rows * width,
    "cheap": lambda rows, width: 1e-2 + 1e-5 * rows * width,
    "mixed": lambda rows, width: 1e-2 + 5e-4 * rows * width,
}


class WarmMeter(CostMeter):
    """A meter for which no forward is the first of its kind."""

    def record(self, rows, width, seconds):
        self._begun.add((rows, width))
        super().record(rows, width, seconds)


def meter_of(cost, rows=(1, 4, 16), widths=range(1, 16)) -> CostMeter:
    meter = WarmMeter()
    for count, width in itertools.product(rows, widths):
        meter.record(count, width, cost(count, width))
    return meter


def test_the_first_forward_of_its_kind_does_not_count():
    meter = CostMeter()
    meter.record(1, 4, 50.0)
    assert not meter.is_measured(1, 4)
    assert meter.seconds(1, 4) == 1.0
    meter.record(1, 4, 2.0)
    assert meter.is_measured(1, 4)
    assert meter.seconds(1, 4) == 2.0
    # Nor does the first of another width pull its neighbours up.
    meter.record(1, 3, 50.0)
    assert meter.seconds(1, 4) == 2.0


def test_nothing_measured_costs_the_same_everywhere():
    assert CostMeter().seconds(4, 1) == CostMeter().seconds(4, 7) == 1.0


def test_an_outlier_does_not_count():
    meter = WarmMeter()
    for seconds in (1.0, 1.1, 50.0, 0.9, 1.0):
        meter.record(1, 4, seconds)
    assert meter.seconds(1, 4) == 1.0
    for _ in range(9):
        meter.record(1, 4, 3.0)
    assert meter.seconds(1, 4) == 3.0


def test_costs_between_measured_widths_lie_between_and_never_fall():
    meter = WarmMeter()
    for width, seconds in ((1, 1.0), (4, 2.0), (5, 1.8), (9, 4.0)):
        meter.record(2, width, seconds)
    assert meter.seconds(2, 2.5) == pytest.approx(1.45)
    # The two in the wrong order count as one level.
    assert meter.seconds(2, 4) == meter.seconds(2, 5) == pytest.approx(1.9)
    values = [meter.seconds(2, width / 4) for width in range(1, 60)]
    assert values == sorted(values)


def test_beyond_what_was_measured_the_shape_of_other_rows_counts():
    meter = meter_of(COSTS["mixed"], rows=(16,))
    meter.record(15, 7, 2 * COSTS["mixed"](16, 7))
    assert meter.seconds(15, 1) == pytest.approx(2 * COSTS["mixed"](16, 1))
    assert meter.seconds(15, 15) == pytest.approx(2 * COSTS["mixed"](16, 15))
    alone = WarmMeter()
    alone.record(15, 7, 1.0)
    assert alone.seconds(15, 1) == alone.seconds(3, 20) == 1.0


def test_threads_share_a_meter():
    meter, errors = CostMeter(), []

    def work(first: int) -> None:
        try:
            for rows, width in itertools.product(range(first, 40, 2), range(1, 30)):
                for _ in range(2):
                    meter.record(rows, width, 1.0)
                meter.is_measured(500, 1)
                meter.seconds(3, width)
        except RuntimeError as error:
            errors.append(error)

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(first,)) for first in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(usual)
    assert errors == []
    assert meter.is_measured(39, 29)


def test_monotone_is_the_closest_non_decreasing_sequence():
    grid = [k / 2 for k in range(9)]
    rng = random.Random(0)
    for _ in range(20):
        values = [rng.choice(grid) for _ in range(3)]
        found = monotone(values)
        assert found == sorted(found)
        error = sum((a - b) ** 2 for a, b in zip(found, values, strict=True))
        for other in itertools.combinations_with_replacement(grid, 3):
            assert error <= sum((a - b) ** 2 for a, b in zip(other, values, strict=True)) + 1e-9


def test_interpolate():
    assert [interpolate(x, [1, 3], [10.0, 20.0]) for x in (0, 1, 2, 3, 9)] == [10, 10, 15, 20, 20]


def simulated_step(rng: random.Random, rates: list[float], window: int) -> int:
    return next((k for k in range(1, window) if rng.random() >= rates[k - 1]), window)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("window", [1, 3, 6])
def test_expected_step_is_what_a_simulation_finds(rows, window):
    rates, rng = [0.8, 0.6, 0.7, 0.3, 0.9], random.Random(1)
    steps = [[simulated_step(rng, rates, window) for _ in range(rows)] for _ in range(20000)]
    tokens, width = expected_step(rates, rows, window)
    assert tokens == pytest.approx(sum(map(sum, steps)) / rows / len(steps), rel=0.02)
    assert width == pytest.approx(sum(map(max, steps)) / len(steps) + window - 1, rel=0.02)


def test_acceptance_counts_candidates_that_somebody_asked_about():
    meter = AcceptanceMeter(3)
    for _ in range(200):
        # Row 0 passes depth 1 and fails at depth 2; row 1 fails at depth 1; row 2 ended before anybody asked.
        meter.record(4, [2, 1, 1], [False, False, True])
    assert meter.rates[:2] == pytest.approx([0.5, 0.0], abs=1e-6)
    # Nobody reached depth 3: still what was taken for granted.
    assert meter.rates[2] == 0.5
    for _ in range(60):
        meter.record(2, [2, 2, 2], [False, False, True])
    assert meter.rates[0] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_best_window_is_what_the_brute_force_picks(cost, rows):
    meter = meter_of(COSTS[cost])
    for rates in ([0.9, 0.9, 0.9], [0.5, 0.2, 0.1], [0.05, 0.9, 0.9], [0.0, 0.0, 0.0], [0.7, 0.7, 0.7, 0.7, 0.7]):

        def speed(window, rates=rates):
            reach = [1.0]
            for rate in rates[: window - 1]:
                reach.append(reach[-1] * rate)
            longest = sum(1 - (1 - share) ** rows for share in reach)
            return sum(reach) / COSTS[cost](rows, longest + window - 1)

        chosen = best_window(meter, rates, rows)
        assert speed(chosen) == pytest.approx(max(speed(window) for window in range(1, len(rates) + 2)))


def simulate(cost, rates, rows, steps, fixed=None, meter=None, seed=0):
    """Tokens per second and the windows, of a pacer or of a fixed window, against a made-up model."""
    rng = random.Random(seed)
    pacer = WindowPacer(meter or CostMeter(), len(rates) + 1)
    tokens = seconds = 0.0
    carried, windows = None, []
    for step in range(steps):
        window = fixed or (pacer.window if step == 0 else pacer.choose(rows))
        accepted = [simulated_step(rng, rates, window) for _ in range(rows)]
        width = None if carried is None else carried + window - 1
        took = 0.0 if width is None else cost(rows, width) * rng.uniform(0.9, 1.1)
        if fixed is None:
            pacer.record(accepted, [False] * rows, width, took)
        tokens, seconds, carried = tokens + sum(accepted) / rows, seconds + took, max(accepted)
        windows.append(window)
    return tokens / seconds, windows


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("rates", [[0.9, 0.9, 0.9], [0.4, 0.3, 0.3], [0.02, 0.02, 0.02]])
def test_the_pacer_is_about_as_fast_as_the_best_fixed_window(cost, rows, rates):
    speed, windows = simulate(COSTS[cost], rates, rows, 600)
    best = max(simulate(COSTS[cost], rates, rows, 600, fixed=window)[0] for window in range(1, 5))
    assert speed > 0.9 * best
    assert windows[0] == 4


def test_it_starts_with_a_wide_window_and_two_single_tokens():
    _, windows = simulate(COSTS["cheap"], [0.9, 0.9, 0.9], 4, 20)
    assert windows[:3] == [4, 1, 1]
    assert windows[3:].count(4) > 12
    # What is known of the model's costs spares them to the next generation.
    _, windows = simulate(COSTS["cheap"], [0.9, 0.9, 0.9], 4, 20, meter=meter_of(COSTS["cheap"]))
    assert 1 not in windows


def test_a_window_that_does_not_pay_is_tried_again_and_found_when_it_does():
    rows = 4
    pacer = WindowPacer(meter_of(COSTS["mixed"]), 4)
    windows, carried = [], 1
    for step in range(900):
        window = pacer.choose(rows)
        windows.append(window)
        accepted, width = window if step >= 300 else 1, carried + window - 1
        pacer.record([accepted] * rows, [False] * rows, width, COSTS["mixed"](rows, width))
        carried = accepted
    early = windows[20:300]
    assert set(early) == {1, 2, 4}
    assert 6 <= len(early) - early.count(1) <= 10
    assert windows[-50:].count(4) >= 45


def test_the_cost_of_a_single_token_is_measured_again():
    pacer = WindowPacer(meter_of(COSTS["cheap"]), 4)
    pacer.acceptance.record(4, [4] * 50, [False] * 50)
    windows, carried = [], 1
    for _ in range(600):
        window = pacer.choose(4)
        width = carried + window - 1
        pacer.record([window] * 4, [False] * 4, width, COSTS["cheap"](4, width))
        windows.append(window)
        carried = window
    assert 8 <= windows.count(1) <= 10
