import math

import pytest

from hotbed.report import formats


def plain(text):
    return text.replace(formats.SPACE, " ")


@pytest.mark.parametrize(
    ("value", "written"),
    [
        *((0, "0"), (7, "7"), (0.25, "0.25"), (812, "812"), (999.7, "1,000"), (9_999, "9,999"), (10_000, "10.0 k")),
        *((45_840, "45.8 k"), (99_960, "100 k"), (999_600, "1.00 M"), (1_234_567, "1.23 M"), (33_760_000, "33.8 M")),
        *((2.5e9, "2.50 G"), (3e12, "3.00 T"), (-45_840, "-45.8 k"), (1e20, "1e+20")),
        *((math.nan, "–"), (math.inf, "∞"), (-math.inf, "−∞")),
    ],
)
def test_compact(value, written):
    assert plain(formats.compact(value)) == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        *((0.0123, "0.012 s"), (8.4, "8.4 s"), (9.999, "10 s"), (59.4, "59 s"), (59.6, "1 min"), (200, "3 min 20 s")),
        *((3_599.7, "1 h"), (7_500, "2 h 5 min"), (360_000, "100 h"), (math.nan, "–"), (-1, "–"), (math.inf, "–")),
    ],
)
def test_duration(seconds, written):
    assert plain(formats.duration(seconds)) == written


def test_the_others():
    assert formats.count(1_234_567.4) == "1,234,567"
    assert formats.decimal(0.77409) == "0.7741"
    assert formats.decimal(1e12) == "1e+12"
    assert plain(formats.percent(0.7625)) == "76.2 %"
    assert formats.significant(2.5e-5) == "2.5e-05"
    for write in (formats.count, formats.decimal, formats.percent, formats.significant):
        assert write(math.nan) == "–"
        assert write(math.inf) == "∞"


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0.000812, "0.812 ms"), (0.0134, "13.4 ms"), (0.0996, "99.6 ms"), (1.1501, "1,150 ms"), (math.nan, "–")],
)
def test_time_of_a_step(seconds, written):
    assert plain(formats.milliseconds(seconds)) == written
