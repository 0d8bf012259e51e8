import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.report.points import sample, smooth, thin, usable

VALUES = st.lists(st.floats(-100, 100) | st.just(math.nan), max_size=200)


@settings(deadline=None, max_examples=100)
@given(VALUES, st.integers(4, 50))
def test_thinning_keeps_ends_extremes_and_order(values, limit):
    curve = list(enumerate(values))
    kept = thin(curve, limit)
    assert len(kept) <= limit
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    assert {x for x, _ in kept} <= {x for x, _ in curve}
    if curve:
        assert (kept[0][0], kept[-1][0]) == (0, len(curve) - 1)
    known = [y for y in values if usable(y)]
    if known:
        drawn = [y for _, y in kept if usable(y)]
        assert (min(drawn), max(drawn)) == (min(known), max(known))


def test_thinning_a_very_long_run_keeps_one_spike():
    curve = [(x, 0.5) for x in range(100_000)]
    curve[77_777] = (77_777, 9.0)
    kept = thin(curve)
    assert len(kept) <= 1000
    assert (77_777, 9.0) in kept


def test_a_gap_stays_a_gap():
    curve = [(x, math.nan if 40 <= x < 80 else 1.0) for x in range(120)]
    assert any(math.isnan(y) for _, y in thin(curve, 20))


@settings(deadline=None, max_examples=100)
@given(VALUES)
def test_smoothing_stays_within_the_values(values):
    smoothed = smooth(list(enumerate(values)))
    assert [x for x, _ in smoothed] == list(range(len(values)))
    known = [y for y in values if usable(y)]
    for (_, y), value in zip(smoothed, values):
        assert math.isnan(y) == math.isnan(value)
        assert math.isnan(y) or min(known) - 1e-9 <= y <= max(known) + 1e-9


def test_smoothing_is_the_same_from_both_sides_and_calms():
    values = [0.5 + 0.1 * (-1) ** k for k in range(400)]
    forward = [y for _, y in smooth(list(enumerate(values)))]
    backward = [y for _, y in smooth(list(enumerate(values[::-1])))]
    assert forward == pytest.approx(backward[::-1])
    assert max(abs(y - 0.5) for y in forward[20:-20]) < 0.02
    assert [y for _, y in smooth([(k, 3.0) for k in range(7)])] == pytest.approx([3.0] * 7)


def test_sampling_is_even_and_keeps_both_ends():
    assert [x for x, _ in sample([(x, 0.0) for x in range(101)], 5)] == [0, 25, 50, 75, 100]
    assert sample([(1, 2.0)]) == [(1, 2.0)]
