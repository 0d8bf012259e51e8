"""Ids to numbers, in memory and in a file: the same as a dictionary, for any ids and any cache."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.scorer.id_map import FileIds, MemoryIds, bytes_in_memory

ids64 = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=60, deadline=None)
@given(
    known=st.lists(ids64, unique=True, max_size=700), asked=st.lists(ids64, max_size=50), memory=st.integers(0, 4000)
)
def test_as_a_dictionary(tmp_path_factory, known, asked, memory):
    folder = tmp_path_factory.getbasetemp()
    ids = np.array(known, dtype=np.int64)
    wanted = np.array([*asked, *known, *known[:20], *asked], dtype=np.int64)
    numbers = {one: number for number, one in enumerate(known)}
    expected = [numbers.get(int(one), -1) for one in wanted]
    for made in (MemoryIds(ids), FileIds(ids, memory, folder)):
        assert made.find(wanted).tolist() == expected
        assert made.find(wanted).tolist() == expected  # from the cache
        made.close()


@settings(max_examples=40, deadline=None)
@given(
    known=st.lists(ids64, unique=True, max_size=300),
    later=st.lists(st.lists(ids64, unique=True, max_size=60), max_size=6),
    memory=st.integers(0, 4000),
)
def test_ids_that_come_later_get_the_next_numbers(tmp_path_factory, known, later, memory):
    ids = np.array(known, dtype=np.int64)
    for made in (MemoryIds(ids), FileIds(ids, memory, tmp_path_factory.getbasetemp())):
        numbers = {one: number for number, one in enumerate(known)}
        for some in later:
            made.find(np.array(some, dtype=np.int64))  # a cache may remember that they are unknown
            for one in some:
                numbers.setdefault(one, len(numbers))
            assert made.add(np.array(some, dtype=np.int64)).tolist() == [numbers[one] for one in some]
            assert made.find(np.array([*numbers], dtype=np.int64)).tolist() == [*numbers.values()]
        assert made.num_ids == len(numbers)
        made.close()


@pytest.mark.parametrize("count", [1, 255, 256, 257, 70_000])
def test_many_blocks_with_little_memory(tmp_path, count):
    rng = np.random.default_rng(count)
    ids = np.unique(rng.integers(-(2**63), 2**63 - 1, count + 10))[:count]
    rng.shuffle(ids)
    made = FileIds(ids, 4000, tmp_path)
    assert made.num_bytes <= 4000 + 8 * 13
    np.testing.assert_array_equal(made.find(ids), np.arange(count))
    assert (made.find(ids + 1)[~np.isin(ids + 1, ids)] == -1).all()
    assert bytes_in_memory(count) >= 8 * count
    made.close()
