"""Heavy hitters against a Counter: every bound that is promised, for any stream, and after merging."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed.data.prepare.sketches import HeavyHitters
from hotbed.errors import ConfigError

COUNTS = st.one_of(st.integers(0, 5), st.integers(0, 20_000))
STREAM = st.lists(st.tuples(st.integers(-40, 40), COUNTS), max_size=300)
SMALL = 16 * 32  # bytes: 12 ids


def sketch(stream, num_bytes: int = SMALL) -> HeavyHitters:
    made = HeavyHitters(num_bytes)
    ids, counts = zip(*stream) if stream else ((), ())
    made.add(np.array(ids, dtype=np.int64), np.array(counts, dtype=np.int64))
    return made


def truth(stream) -> Counter[int]:
    true: Counter[int] = Counter()
    for id_, count in stream:
        true[id_] += count
    return true


def assert_bounds(made: HeavyHitters, true: Counter[int]) -> None:
    found = dict(zip(*(column.tolist() for column in made.items())))
    assert made.total == true.total()
    assert len(found) == len(made) <= made.capacity
    assert made.error <= 2 * true.total() / made.capacity
    for id_, count in true.items():
        assert found.get(id_, 0) <= count <= found.get(id_, 0) + made.error
    assert set(found) <= set(true)


def reference(stream, capacity: int) -> tuple[dict[int, int], int]:
    """The same rule over a dict: (counters, error)."""
    counters: dict[int, int] = {}
    error = 0
    for id_, count in stream:
        if count == 0:
            continue
        if id_ not in counters and len(counters) == capacity:
            median = sorted(counters.values())[capacity // 2]
            error += median
            counters = {one: value - median for one, value in counters.items() if value > median}
        counters[id_] = counters.get(id_, 0) + count
    return counters, error


@given(STREAM)
def test_equals_the_reference_and_keeps_its_bounds(stream):
    made = sketch(stream)
    counters, error = reference(stream, made.capacity)
    assert dict(zip(*(column.tolist() for column in made.items()))) == counters
    assert made.error == error
    assert_bounds(made, truth(stream))


@given(STREAM, STREAM, st.sampled_from([SMALL, 2 * SMALL]))
def test_merged_bounds_hold_for_both(first, second, num_bytes):
    made = sketch(first, num_bytes)
    made.merge(sketch(second))
    true = truth([*first, *second])
    found = dict(zip(*(column.tolist() for column in made.items())))
    assert made.total == true.total()
    for id_, count in true.items():
        assert found.get(id_, 0) <= count <= found.get(id_, 0) + made.error
    assert made.error <= 2 * true.total() / HeavyHitters(SMALL).capacity


def test_few_ids_are_exact():
    made = sketch([(id_, 1) for id_ in range(12)] * 3)
    assert made.error == 0
    assert sorted(made.items().counts.tolist()) == [3] * 12


def test_one_frequent_id_among_very_many_rare_ones():
    """Four million distinct ids through 64 KiB: what is seen often enough is found, the rest is bounded."""
    made = HeavyHitters(1 << 16)
    rare = np.arange(4_000_000, dtype=np.int64)
    rare[::100] = -7
    made.add(rare)
    found = dict(zip(*(column.tolist() for column in made.items())))
    assert made.error <= 2 * len(rare) / made.capacity
    assert found[-7] <= 40_000 <= found[-7] + made.error


def test_a_sketch_too_small_is_refused():
    with pytest.raises(ConfigError, match="100 bytes"):
        HeavyHitters(100)
