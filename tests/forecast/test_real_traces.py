"""How near the default policy comes to the optimum on real logs."""

import functools

import pytest

from benchmarks.policies import bar
from benchmarks.traces import CASES, Case, prepared, real_trace, zipf_trace
from hotbed.forecast.optimum import optimum
from hotbed.forecast.replay import simulate


@pytest.fixture(scope="module")
def datasets(real_data, tmp_path_factory):
    """Real logs by name, prepared when first asked for."""
    work, made = tmp_path_factory.mktemp("logs"), {}

    def get(name):
        if name not in made:
            made[name] = prepared(name, real_data, work)
        return made[name]

    return get


@pytest.fixture(scope="module")
def traces(datasets):
    """Of a log, in batches of a size."""
    return functools.cache(lambda name, batch_size: real_trace(datasets(name), batch_size))


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in CASES.items() for case in cases], ids=str)
def test_the_default_policy_is_near_the_optimum(traces, name, case):
    trace = traces(name, case.batch_size)
    num_slots = round(case.share * trace.num_rows)
    misses, fewest = simulate(trace, num_slots).misses, optimum(trace, num_slots)
    assert fewest <= misses <= bar(case.share) * fewest, (
        f"{misses:,} misses, {fewest:,} would do: {misses / fewest:.3f}"
    )


@pytest.fixture(scope="module")
def skewed():
    return zipf_trace(100, 16384)


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(0.005, 16384), Case(0.015, 16384), Case(0.05, 16384)], ids=str)
def test_zipf(skewed, case):
    trace = skewed
    num_slots = round(case.share * trace.num_rows)
    assert simulate(trace, num_slots).misses <= bar(case.share) * optimum(trace, num_slots)
