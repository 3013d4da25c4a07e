"""What a row learns of its drafts, and what it would feed next."""

from __future__ import annotations

import pytest

from mars_hf.draft_options import DraftOptions
from mars_hf.row_drafts import RowDrafts


def test_a_wrong_lookup_says_nothing_of_what_stands_behind_it():
    # Behind the first 5, 6 came 7, 8, 9; behind the second, 7 and then something else.
    row = RowDrafts(DraftOptions(3, lookup=3), [5, 6, 7, 8, 9, 1, 5, 6])
    list(row.grow(deepest=10))
    assert (row.followed, row.ngram) == ([7, 8, 9], 2)
    rate = row.lookup_rates[1]
    right, count = rate.right, rate.count
    row.learn([7, 2, 9])
    assert (rate.right, rate.count) == (right + 1, count + 2)


def test_drafts_of_masks_count_up_to_the_one_behind_the_first_wrong():
    row = RowDrafts(DraftOptions(3), [5, 6])
    row.choices = [[(7, 0.9)], [(8, 0.9)], [(9, 0.9)]]
    before = [(rate.right, rate.count) for rate in row.group_rates]
    # The first draft was confirmed, and the step ended with the token that corrects the second.
    row.learn([7, 2])
    after = [(rate.right, rate.count) for rate in row.group_rates]
    changes = [(r - r0, c - c0) for (r, c), (r0, c0) in zip(after, before, strict=True)]
    assert changes == [(1, 1), (0, 1), (0, 1)]


@pytest.mark.parametrize("rates", [(0.1, 0.9, 0.5), (0.9, 0.2, 0.8), (0.0, 1.0, 1.0)])
def test_what_a_row_feeds_comes_by_falling_gain(rates):
    row = RowDrafts(DraftOptions(3, lookup=3), [5, 6, 7, 8, 9, 1, 5, 6])
    row.choices = [[(7, 0.9)], [(4, 0.5)], [(3, 0.7)]]
    for rate, value in zip(row.group_rates, rates, strict=True):
        rate.right, rate.count = value, 1
    gains = [leaf.gain for leaf in row.grow(deepest=20)]
    assert len(gains) > 10
    assert gains == sorted(gains, reverse=True)
