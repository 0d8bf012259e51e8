"""The index against a dict: random histories, ids made to collide, and damage that must be noticed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotbed.errors import BudgetError, HotbedError, StoreError
from hotbed.host.pages import Pages
from hotbed.ids import IdIndex
from hotbed.ids.cells import CELLS, NUM_SHARDS, SHARED

LOW, HIGH = -(2**63), 2**63 - 1
INVERSE_FIRST, INVERSE_SECOND, STEP = 0x96DE1B173F119089, 0x319642B2D24D8EC3, 0x9E3779B97F4A7C15
M = 2**64 - 1


def id_with_hash(hash_: int, table: int) -> int:
    """The one id of a table that has this hash: every step of the hash turned round."""
    x = hash_ ^ (hash_ >> 31) ^ (hash_ >> 62)
    x = (x * INVERSE_SECOND) & M
    x = x ^ (x >> 27) ^ (x >> 54)
    x = (x * INVERSE_FIRST) & M
    x = x ^ (x >> 30) ^ (x >> 60)
    x ^= ((table + 1) * STEP) & M
    return x - 2**64 if x >= 2**63 else x


def tables_ids(pairs) -> tuple[np.ndarray, np.ndarray]:
    pairs = list(pairs)
    return np.array([p[0] for p in pairs], dtype=np.uint16), np.array([p[1] for p in pairs], dtype=np.int64)


def filled(pairs) -> IdIndex:
    index = IdIndex(1 << 22)
    tables, ids = tables_ids(pairs)
    index.insert(tables, ids, np.arange(len(ids)))
    return index


ADVERSARIAL = {
    "sequential": [(0, i) for i in range(30_000)],
    "equal low bits": [(3, i << 32) for i in range(30_000)],
    "equal low 48 bits": [(3, (i - 15_000) << 48) for i in range(30_000)],
    "multiples of the shards": [(1, i * NUM_SHARDS) for i in range(30_000)],
    "every table": [(table, 7) for table in range(65_536)],
    "extremes": [(table, value) for table in (0, 65_535) for value in (LOW, LOW + 1, -1, 0, 1, HIGH - 1, HIGH)],
    "one shard": [(2, id_with_hash((5 << 58) | (i * 0x9E3779B97F4A7C15 & (2**58 - 1)), 2)) for i in range(30_000)],
    "one bucket": [(2, id_with_hash((9 << 58) | (i << 8) | 17, 2)) for i in range(700)],
    "one bucket and tag": [(2, id_with_hash((9 << 58) | (i << 8), 2)) for i in range(1_200)],
    "one hash in every table": [(table, id_with_hash(0x1234567890ABCDEF, table)) for table in range(1_000)],
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_ids_made_to_collide(name):
    pairs = ADVERSARIAL[name]
    index = filled(pairs)
    index.check_integrity()
    tables, ids = tables_ids(pairs)
    assert len(index) == len(pairs)
    np.testing.assert_array_equal(index.find(tables, ids), np.arange(len(pairs)))
    np.testing.assert_array_equal(index.owners_of(np.arange(len(pairs)))[0], tables)
    np.testing.assert_array_equal(index.owners_of(np.arange(len(pairs)))[1], ids)
    others = (tables ^ np.uint16(4096), ids)
    known = set(pairs)
    expected = [(int(t), int(i)) in known for t, i in zip(*others)]
    np.testing.assert_array_equal(index.find(*others) >= 0, expected)
    index.remove(tables[::2], ids[::2])
    index.check_integrity()
    rows = index.find(tables, ids)
    assert (rows[::2] == -1).all()
    np.testing.assert_array_equal(index.owners_of(np.arange(len(pairs)))[1], ids, err_msg="who is gone is still known")
    np.testing.assert_array_equal(index.owners_of(np.arange(len(pairs)))[0], tables)
    np.testing.assert_array_equal(index.is_live(np.arange(len(pairs))), np.arange(len(pairs)) % 2 == 1)
    np.testing.assert_array_equal(rows[1::2], np.arange(1, len(pairs), 2))


def test_hash_collisions_are_made_by_the_test():
    """What the tests above call one hash is one hash."""
    from hotbed.ids.cells import hash_of

    for table, id_ in ADVERSARIAL["one hash in every table"][:5]:
        assert int(hash_of(np.uint16(table), np.int64(id_))) == 0x1234567890ABCDEF


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_ids_in_batches(threads):
    rng = np.random.default_rng(7)
    ids = rng.integers(LOW, HIGH, 300_000)
    tables = rng.integers(0, 40, 300_000).astype(np.uint16)
    index = IdIndex(1 << 20)
    for start in range(0, len(ids), 50_001):
        part = slice(start, start + 50_001)
        index.insert(tables[part], ids[part], np.arange(len(ids))[part])
    index.check_integrity()
    np.testing.assert_array_equal(index.find(tables, ids, threads), np.arange(len(ids)))
    assert (index.find(tables + np.uint16(40), ids, threads) == -1).all()
    entries = list(index.items(chunk=70_000))
    np.testing.assert_array_equal(np.concatenate([entry.rows for entry in entries]), np.arange(len(ids)))
    np.testing.assert_array_equal(np.concatenate([entry.ids for entry in entries]), ids)
    np.testing.assert_array_equal(np.concatenate([entry.tables for entry in entries]), tables)
    assert index.num_bytes < 26 * len(ids) + NUM_SHARDS * 4096


def test_removed_ids_leave_nothing_behind():
    """Ids that come and go for ever cost no memory and no length of search."""
    index = IdIndex(1 << 20)
    tables = np.zeros(20_000, dtype=np.uint16)
    sizes = []
    for turn in range(30):
        ids = np.arange(20_000) + 20_000 * turn
        index.insert(tables, ids, np.arange(20_000))
        sizes.append(index.num_bytes)
        index.remove(tables, ids)
    assert len(index) == 0
    assert sizes[-1] < 1.1 * sizes[0], "a shard or two may have had more ids in another turn"
    for first, count in index._shards:
        assert not np.any(index._words[first : first + count, :2]), "cells and counts of passers-by are empty again"
    index.check_integrity()


def test_the_version_is_even_after_every_change_and_another_one():
    """Lookups of other threads take an odd version for a change that is under way, and an equal one for none."""
    index = IdIndex(1 << 10)
    version, seen = index.shared_arrays[3], []
    for change in (
        lambda: index.insert(*tables_ids([(0, 5), (0, 6)]), np.arange(2)),
        lambda: index.remove(*tables_ids([(0, 5)])),
    ):
        change()
        seen.append(int(version[0]))
    assert [number % 2 for number in seen] == [0, 0]
    assert 0 < seen[0] < seen[1]


def test_an_empty_batch():
    index = filled([(0, 1)])
    nothing = tables_ids([])
    assert index.find(*nothing).shape == (0,)
    index.insert(*nothing, np.empty(0, dtype=np.int64))
    assert index.remove(*nothing).shape == (0,)


def test_more_rows_than_there_may_be():
    index = IdIndex(100)
    tables, ids = tables_ids((0, i) for i in range(101))
    with pytest.raises(StoreError, match="at most 100"):
        index.insert(tables, ids, np.arange(101))
    assert len(index) == 0


def test_a_shard_without_room_takes_nothing():
    """Ids made to fall into one shard fill its address space: an error, and the index as it was before the batch."""
    index = IdIndex(1 << 16)
    index._region = 1024
    tables, ids = tables_ids(ADVERSARIAL["one shard"])
    index.insert(tables[:1_000], ids[:1_000], np.arange(1_000))
    with pytest.raises(StoreError, match="larger one"):
        index.insert(tables[1_000:], ids[1_000:], np.arange(1_000, len(ids)))
    assert len(index) == 1_000
    index.check_integrity()
    np.testing.assert_array_equal(index.find(tables[:1_000], ids[:1_000]), np.arange(1_000))


def test_address_space_that_is_refused():
    with pytest.raises(BudgetError, match="Use fewer rows"):
        Pages((2**60,), np.uint64)


def test_no_id_twice_and_no_row_twice():
    index = filled([(0, 5), (0, 6)])
    with pytest.raises(AssertionError, match="id 5 of table 0"):
        index.insert(*tables_ids([(0, 5)]), np.array([9]))
    with pytest.raises(AssertionError, match="row 1"):
        index.insert(*tables_ids([(0, 7)]), np.array([1]))
    with pytest.raises(AssertionError, match="id 8 of table 0 has no row"):
        index.remove(*tables_ids([(0, 8)]))


def test_shared_rows_belong_to_no_id():
    index = filled([(0, 5)])
    index.share(1, 3)
    assert index.find(*tables_ids([(3, 0)])).tolist() == [-1]
    assert index.is_live(np.array([0, 1, 2])).tolist() == [True, True, False]
    assert index.is_shared(np.array([0, 1])).tolist() == [False, True]
    assert [rows.tolist() for rows in index.rows()] == [[0]]
    assert [rows.tolist() for rows in index.rows(shared=True)] == [[0, 1]]
    assert index.owners_of(np.array([1]))[0].tolist() == [3]
    index.check_integrity()


def break_tag(index, bucket, cell):
    index._words[bucket, cell >> 3] ^= np.uint64(0x40 << (8 * (cell & 7)))


def break_row(index, bucket, cell):
    index._numbers[bucket, 4 + cell] = 4


def break_owner(index, bucket, cell):
    index._owners[index._numbers[bucket, 4 + cell], 2] = 0


def break_share(index, bucket, cell):
    index._owners[index._numbers[bucket, 4 + cell], 2] = SHARED | 1


def break_passers(index, bucket, cell):
    index._words[bucket, 1] += np.uint64(1 << 32)


def break_count(index, bucket, cell):
    index._counts[0] += 1


@pytest.mark.parametrize("damage", [break_tag, break_row, break_owner, break_share, break_passers, break_count])
def test_damage_is_noticed(damage):
    index = filled((0, i) for i in range(4_000))
    index.check_integrity()
    bucket = int(index._shards[11, 0]) + 3
    tags = index._words[bucket, :2].tobytes()[:CELLS]
    damage(index, bucket, next(cell for cell in range(CELLS) if tags[cell]))
    with pytest.raises(AssertionError):
        index.check_integrity()


IDS = st.one_of(
    st.integers(LOW, HIGH),
    st.integers(-3, 40),
    st.sampled_from([id_for for _, id_for in ADVERSARIAL["one bucket and tag"][:60]]),
)
PAIRS = st.lists(st.tuples(st.sampled_from([0, 2, 65_535]), IDS), max_size=60, unique=True)


class Histories(RuleBasedStateMachine):
    """Inserts and removes in any order; a dict says what must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.rows, self.next = IdIndex(1 << 16), {}, 0

    @rule(pairs=PAIRS)
    def insert(self, pairs):
        pairs = [pair for pair in pairs if pair not in self.rows]
        rows = np.arange(self.next, self.next + len(pairs))[::-1].copy()
        self.index.insert(*tables_ids(pairs), rows)
        self.rows.update(zip(pairs, rows.tolist()))
        self.next += len(pairs)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def remove(self, data):
        pairs = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True, max_size=40))
        assert self.index.remove(*tables_ids(pairs)).tolist() == [self.rows.pop(pair) for pair in pairs]

    @rule(pairs=PAIRS)
    def find(self, pairs):
        pairs = pairs + list(self.rows)
        assert self.index.find(*tables_ids(pairs)).tolist() == [self.rows.get(pair, -1) for pair in pairs]

    @invariant()
    def holds(self):
        self.index.check_integrity()
        entries = [entry for part in self.index.items(chunk=7) for entry in zip(*(a.tolist() for a in part))]
        assert entries == sorted(((t, i, row) for (t, i), row in self.rows.items()), key=lambda entry: entry[2])


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


@given(table=st.integers(0, 65_535), id_=st.integers(LOW, HIGH))
def test_ids_come_back_whole(table, id_):
    index = filled([(table, id_)])
    tables, ids = index.owners_of(np.array([0]))
    assert (int(tables[0]), int(ids[0])) == (table, id_)
    assert index.find(*tables_ids([(table, id_)])).tolist() == [0]


def test_a_shard_without_an_empty_cell_is_reported():
    """It grows before, so this is what a wrong limit would do: not a search without an end."""
    index = IdIndex(1 << 22)
    index._limits[:] = 1 << 40
    count = NUM_SHARDS * 4 * int(index._shards[:, 1].max()) * CELLS
    tables, ids = np.zeros(count, dtype=np.uint16), np.arange(count)
    with pytest.raises(HotbedError, match="the index of dynamic ids is full, and did not grow"):
        index.insert(tables, ids, np.arange(count))


def test_the_last_row_of_an_index_is_its_last():
    index = IdIndex(64)
    most = index.capacity
    assert index.longest_pause == 0.0
    index.insert(*tables_ids([(0, 5)]), np.array([most - 1]))
    assert index.find(*tables_ids([(0, 5)])).tolist() == [most - 1]
    with pytest.raises(StoreError, match="row number"):
        index.insert(*tables_ids([(0, 6)]), np.array([most]))
    index.check_integrity()


def test_the_longest_pause_is_that_of_the_slowest_growth():
    index, before = filled([(0, i) for i in range(20_000)]), 0.0
    assert index.longest_pause > before
    before = index.longest_pause
    index.insert(*tables_ids((1, i) for i in range(40_000)), np.arange(20_000, 60_000))
    assert index.longest_pause >= before
