"""The judge of the speed bars, on made-up results."""

import itertools

import pytest

from benchmarks.gpu_bars import ANCHOR, BARS, CACHED, FBGEMM, FBGEMM_CACHE, HBM, PARTS, judge, wanted
from hotbed.bench.results import Result
from hotbed.bench.run import ids_key
from hotbed.bench.timing import Timing

FAST = {FBGEMM: 1.0, FBGEMM_CACHE: 1.6, HBM: 0.5, CACHED: 0.9}


def results_of(ms_of_system, *slower):
    """Of all settings; `slower`: (what holds for a setting, system, factor)."""
    found = {}
    for setting, systems in wanted(BARS).items():
        for system in systems:
            if system in ms_of_system:
                factor = next((f for holds, name, f in slower if name == system and holds(setting)), 1.0)
                timing = Timing([ms_of_system[system] * factor], {}, None)
                found[setting, system] = Result(system, "sgd", setting, timing, 0, 1.0, 1.0)
    return found


def missed(results):
    return {verdict.bar.part for verdict in judge([results]) if not verdict.is_met}


def test_every_setting_is_wanted_with_what_it_is_compared_with():
    settings = wanted(BARS)
    assert ANCHOR in settings
    assert settings[ANCHOR] == [FBGEMM, HBM, CACHED]
    assert all(not setting.cold for setting in settings)
    for bar in BARS:
        assert bar.system in settings[bar.setting]
        assert bar.other[1] in settings[bar.other[0]]
    assert len({bar.about for bar in BARS}) == len(BARS)
    drawn = [ids_key(setting) for setting in settings]
    assert len(list(itertools.groupby(drawn))) == len(set(drawn))


def test_a_fast_run_meets_all():
    assert missed(results_of(FAST)) == set()


@pytest.mark.parametrize(
    ("system", "ms", "parts"),
    [
        (HBM, 0.61, {"single"}),
        (HBM, 0.81, {"single", "bags"}),
        (CACHED, 1.05, {"single", "large", "hard", "adam"}),
        (CACHED, 1.15, {"single", "large", "hard", "adam", "bags"}),
        (FBGEMM_CACHE, 1.0, {"hard", "adam", "bags"}),
    ],
)
def test_a_slower_run_misses_its_bars(system, ms, parts):
    assert missed(results_of(FAST | {system: ms})) == parts


@pytest.mark.parametrize(
    ("holds", "part"),
    [
        (lambda one: one.ids == "dynamic", "dynamic"),
        (lambda one: one.ssd is not None, "ssd"),
        (lambda one: one.ranks == 1, "ranks"),
        (lambda one: one.output == "dict", "outputs"),
    ],
)
def test_a_kind_that_is_slower_than_the_plain_one_misses_its_bar(holds, part):
    assert missed(results_of(FAST, (holds, CACHED, 1.3))) == {part}
    assert part in PARTS


def test_the_round_in_the_middle_counts():
    fast, slow = results_of(FAST), results_of(FAST | {HBM: 0.9, CACHED: 1.3})
    assert all(verdict.is_met for verdict in judge([slow, fast, fast]))
    assert not all(verdict.is_met for verdict in judge([slow, fast, slow]))


def test_what_was_not_measured_is_missed():
    verdicts = judge([results_of({HBM: 0.5, CACHED: 0.9})])
    missing = [verdict for verdict in verdicts if verdict.bar.other[1] in (FBGEMM, FBGEMM_CACHE)]
    assert missing
    assert not any(verdict.is_met for verdict in missing)
    assert all("not measured" in str(verdict) for verdict in missing)
