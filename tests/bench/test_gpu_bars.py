"""The judge of the speed bars, on made-up results."""

import pytest

from benchmarks.gpu_bars import ANCHOR, BARS, LARGE_BATCH, SMALL_BATCH, SYSTEMS, judge
from hotbed.bench.results import Result
from hotbed.bench.timing import Timing

SETTINGS = [*SMALL_BATCH, *LARGE_BATCH]


def results_of(ms_of_system, stall=0.01):
    return [
        Result(system, "sgd", setting, Timing([ms_of_system[system]], {}, stall), 0, 1.0, 1.0)
        for setting in SETTINGS
        for system in ms_of_system
    ]


def test_every_bar_holds_somewhere():
    assert {verdict.bar.about for verdict in judge([], SETTINGS)} == {bar.about for bar in BARS}
    assert ANCHOR in SETTINGS


def test_a_fast_run_meets_all():
    fast = dict(zip(SYSTEMS, (1.0, 2.0, 0.5, 0.9)))
    assert all(verdict.is_met for verdict in judge([results_of(fast)], SETTINGS))


@pytest.mark.parametrize(
    ("system", "ms", "missed"),
    [
        ("hotbed-hbm", 0.61, {4}),
        ("hotbed-cached", 1.05, {0}),
        ("hotbed-cached", 1.15, {0, 2}),
        ("fbgemm-hbm", 0.7, {0, 1, 2, 4}),
    ],
)
def test_a_slower_run_misses_its_bars(system, ms, missed):
    times = dict(zip(SYSTEMS, (1.0, 2.0, 0.5, 0.9))) | {system: ms}
    verdicts = judge([results_of(times)], SETTINGS)
    assert {BARS.index(verdict.bar) for verdict in verdicts if not verdict.is_met} == missed


def test_the_round_in_the_middle_counts():
    fast, slow = dict(zip(SYSTEMS, (1.0, 2.0, 0.5, 0.9))), dict(zip(SYSTEMS, (1.0, 2.0, 0.9, 1.3)))
    assert all(verdict.is_met for verdict in judge([results_of(each) for each in (slow, fast, fast)], SETTINGS))
    assert not all(verdict.is_met for verdict in judge([results_of(each) for each in (slow, fast, slow)], SETTINGS))


def test_what_was_not_measured_is_missed():
    verdicts = judge([results_of({"hotbed-hbm": 0.5, "hotbed-cached": 0.9}, stall=float("nan"))], SETTINGS)
    assert not any(verdict.is_met for verdict in verdicts)
    assert any("not measured" in str(verdict) for verdict in verdicts)
