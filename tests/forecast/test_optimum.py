"""The clairvoyant optimum against every possible choice of victims."""

import re
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.errors import BudgetError
from hotbed.forecast.optimum import optimum, optimum_by_batch
from hotbed.forecast.trace import trace_of

batches_of_keys = st.lists(st.sets(st.integers(0, 6), max_size=4), max_size=7)


def best_of_all(batches, num_slots):
    """Try everything: the fewest misses over all sets of rows that could be kept."""
    states = {frozenset(): 0}
    for batch in batches:
        after = {}
        for resident, misses in states.items():
            others = resident - batch
            total = misses + len(batch - resident)
            for size in range(min(len(others), num_slots - len(batch)) + 1):
                for kept in combinations(sorted(others), size):
                    state = frozenset(batch).union(kept)
                    after[state] = min(after.get(state, total), total)
        states = after
    return min(states.values())


def as_trace(batches):
    return trace_of([np.array(sorted(batch), dtype=np.int64) for batch in batches], num_rows=100)


@given(batches_of_keys, st.integers(4, 6))
@settings(max_examples=300)
def test_nothing_is_better(batches, num_slots):
    assert optimum(as_trace(batches), num_slots) == best_of_all(batches, num_slots)


def test_the_farthest_row_leaves():
    # 0 1 stay for their next uses, 2 is needed last: with room for three rows 2 must go
    batches = [{0, 1, 2}, {3}, {0}, {1}, {2}]
    assert optimum_by_batch(as_trace(batches), 3).tolist() == [3, 1, 0, 0, 1]


def test_rows_of_the_same_batch_never_leave():
    batches = [{0, 1}, {2, 3}, {0, 1}, {2, 3}]
    assert optimum_by_batch(as_trace(batches), 2).tolist() == [2, 2, 2, 2]
    assert optimum_by_batch(as_trace(batches), 4).tolist() == [2, 2, 0, 0]


def test_every_key_misses_once_where_all_fit():
    generator = np.random.default_rng(0)
    trace = trace_of((generator.integers(0, 500, 60) for _ in range(50)), num_rows=500)
    assert optimum(trace, 500) == trace.distinct().shape[0]


def test_one_slot_less_is_never_better():
    generator = np.random.default_rng(1)
    trace = trace_of((generator.zipf(1.3, 40) % 300 for _ in range(80)), num_rows=300)
    misses = [optimum(trace, slots) for slots in range(trace.most_keys, 301, 10)]
    assert misses == sorted(misses, reverse=True)
    assert misses[0] > misses[-1]


@pytest.mark.parametrize("batches", [[], [set()], [set(), {1}, set()]])
def test_empty_batches(batches):
    assert optimum(as_trace(batches), 1) == sum(map(len, batches))


def test_a_batch_that_does_not_fit():
    with pytest.raises(
        BudgetError,
        match=r"needs 3 rows at once, but the cache has 2 slots\. Take --cache 0\.07 of the 100 rows .*\(0\.03 holds",
    ) as told:
        optimum(as_trace([{1}, {1, 2, 3}]), 2)
    assert told.value.num_slots == 3


@given(st.integers(1, 10**6), st.integers(1, 10**9))
def test_the_share_that_is_named_is_enough(needed, more):
    trace = trace_of([np.arange(needed % 50 + 1)], num_rows=needed % 50 + more)
    with pytest.raises(BudgetError) as told:
        optimum(trace, needed % 50)
    shares = re.findall(r"--cache (\S+) of|\((\S+) holds", str(told.value))
    assert 1 <= len(shares) <= 2
    for share in (float(one or other) for one, other in shares):
        assert round(share * trace.num_rows) >= trace.most_keys
        assert share <= 1
