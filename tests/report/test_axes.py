import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.report.charts import linear, logarithmic

FINITE = st.floats(-1e29, 1e29)


@settings(deadline=None, max_examples=300)
@given(st.lists(FINITE, min_size=1, max_size=20), st.booleans(), st.booleans())
def test_every_value_falls_between_the_ends(values, zero, snug):
    axis = linear(values, (10, 110), zero=zero, snug=snug)
    assert axis.low < axis.high
    assert all(10 - 1e-6 <= axis.place(value) <= 110 + 1e-6 for value in values)
    assert all(10 - 1e-3 <= axis.place(tick) <= 110 + 1e-3 for tick in axis.ticks)
    assert len(axis.ticks) == len(axis.labels) <= 9


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.4, 0.69], ["0.4", "0.5", "0.6", "0.7"]),
        ([0.41, 0.65], ["0.40", "0.45", "0.50", "0.55", "0.60", "0.65"]),
        ([0, 2_400_000], ["0", "0.5 M", "1.0 M", "1.5 M", "2.0 M", "2.5 M"]),
        ([0, 24_000], ["0", "5 k", "10 k", "15 k", "20 k", "25 k"]),
        ([0, 4_800], ["0", "1,000", "2,000", "3,000", "4,000", "5,000"]),
        ([0, 0.00005], ["0", "1e-5", "2e-5", "3e-5", "4e-5", "5e-5"]),
        ([0, 12], ["0", "2.5", "5.0", "7.5", "10.0", "12.5"]),
    ],
)
def test_ticks_are_round_and_their_labels_short(values, labels):
    found = [label.replace("\u202f", " ") for label in linear(values, (0, 100)).labels]
    assert found == labels


def test_shares_are_written_as_percentages():
    labels = linear([0, 0.8], (0, 100), unit="share").labels
    assert [label.replace("\u202f", " ") for label in labels] == ["0 %", "20 %", "40 %", "60 %", "80 %"]


def test_shares_end_at_the_whole():
    assert linear([0.1, 0.97], (0, 100), unit="share", zero=True).high == 1.0
    assert linear([0.9, 0.99], (0, 100), unit="share").high == 1.0
    assert linear([0.0, 1.2], (0, 100), unit="share").high == pytest.approx(1.25)


@pytest.mark.parametrize("value", [0.0, 0.001, -5.0, 1e-320, 1e20])
def test_one_value_gets_room_around_it(value):
    axis = linear([value], (0, 100))
    assert axis.low < value < axis.high


def test_a_log_axis_spans_powers_of_ten():
    axis = logarithmic([2e-6, 0.3, 1.0], (0, 60), unit="share")
    assert axis.low == pytest.approx(1e-6)
    assert axis.place(1.0) == pytest.approx(60)
    assert axis.place(0.001) == pytest.approx(30)
    assert axis.place(0.0) == 0.0
    assert [label.replace("\u202f", " ") for label in axis.labels] == ["0.0001 %", "0.01 %", "1 %", "100 %"]
    assert all(math.isfinite(axis.place(tick)) for tick in axis.ticks)
