"""Ids without repeats: what is found of a batch, what a translator makes of it, and what may be looked for ahead of time."""

from __future__ import annotations

import threading
from itertools import chain, cycle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.ids import IdIndex, TableRules, Translator
from hotbed.ids.distinct import BatchIds, DistinctIds
from tests.ids.test_translator import LONG_STREAMS, QUARANTINE, RULES, arrays, clock, new, state_of

DISTINCT = DistinctIds("test-ids")


def entries_of(matrix: np.ndarray, tables: list[int], num_tables: int) -> tuple[np.ndarray, BatchIds]:
    """(the entry of every id, column after column; the entries) of a matrix [B, F] of ids."""
    size, width = matrix.shape
    spans = [[matrix.ctypes.data + 8 * f, width, size, table, f, width] for f, table in enumerate(tables)]
    numbers = np.full(matrix.size, -7, dtype=np.int32)
    pieces = DISTINCT.number(np.array(spans, dtype=np.int64).reshape(-1, 6), numbers)
    return numbers, DISTINCT.gather(pieces, numbers, num_tables)


@pytest.mark.parametrize(("size", "width", "most"), [(0, 3, 5), (1, 1, 1), (63, 2, 9), (500, 3, 400), (70_000, 2, 900)])
def test_every_lookup_finds_its_id(size, width, most):
    ids = np.random.default_rng(size).integers(-most, most, (size, width)) * 7046029254386353131 + 2**40
    tables = [3, 1, 3][:width]
    numbers, batch = entries_of(ids, tables, 5)
    for f, table in enumerate(tables):
        column = numbers[f * size : (f + 1) * size]
        assert (batch.ids[column] == ids[:, f]).all()
        assert (batch.tables[column] == table).all()
    assert batch.counts.tolist() == np.bincount(numbers, minlength=batch.ids.shape[0]).tolist()
    assert batch.totals.tolist() == [size * tables.count(table) for table in range(5)]
    positions = np.arange(size * width).reshape(size, width).T.reshape(-1)
    firsts = np.full(batch.ids.shape[0], size * width)
    np.minimum.at(firsts, numbers, positions)
    assert batch.firsts.tolist() == firsts.tolist()
    if size <= 1 << 15:  # a piece for each column
        assert batch.ids.shape[0] == sum(np.unique(ids[:, f]).shape[0] for f in range(width))


@settings(max_examples=80)
@given(
    rules=RULES,
    stream=LONG_STREAMS,
    steps=st.lists(st.sampled_from(["look", "back", "trained", "rewound", ""]), min_size=30),
)
def test_entries_are_translated_as_lookups_are(rules, stream, steps):
    """Also where rows were looked for some batches before, and ids came, expired or were taken back since."""
    num_tables = len(rules)
    plain, ours = new(rules), new(rules)
    spans = [arrays(lookups, num_tables) for lookups in stream]
    found = {}
    done, number = 0, 0
    for step in steps:
        if number == len(stream):
            break
        if step == "look":
            for later in range(number, min(number + 3, len(stream))):
                found[later] = entries(*spans[later], num_tables)
                rows = np.empty(found[later][1].ids.shape[0], dtype=np.int64)
                found[later] += (ours.look_ahead(DISTINCT, found[later][1], rows),)
        elif step == "back":
            assert plain.roll_back(done).tolist() == ours.roll_back(done).tolist()
            number = done
        elif step == "trained":
            done = number
            plain.trained(done)
            ours.trained(done)
        elif step == "rewound":
            with ours.rewound(done):
                pass
        if number - done == QUARANTINE:
            continue
        tables, ids = spans[number]
        numbers, batch, *known = found.pop(number, None) or entries(tables, ids, num_tables)
        now = clock(number + 1)
        keys, released = plain.translate(tables, ids, learns=True, now=now)
        entry_keys, ours_released = ours.translate_distinct(batch, True, now, *known)
        assert entry_keys[numbers].tolist() == keys.tolist()
        assert released.tolist() == ours_released.tolist()
        assert state_of(ours) == state_of(plain)
        ours.check_integrity()
        known = ours.look_ahead(DISTINCT, batch, np.empty(batch.ids.shape[0], dtype=np.int64))
        evaluated = ours.translate_distinct(batch, False, known=known).keys[numbers]
        assert evaluated.tolist() == plain.translate(tables, ids, learns=False).keys.tolist()
        number += 1


def entries(tables: np.ndarray, ids: np.ndarray, num_tables: int) -> tuple[np.ndarray, BatchIds]:
    """(the entry of every lookup, the entries) of lookups in any order: each run of one table is a span."""
    borders = np.flatnonzero(np.diff(tables.astype(np.int64), prepend=-1))
    ends = [*borders[1:], tables.shape[0]]
    spans = [[ids.ctypes.data + 8 * a, 1, b - a, tables[a], a, 1] for a, b in zip(borders, ends)]
    numbers = np.empty(ids.shape[0], dtype=np.int32)
    pieces = DISTINCT.number(np.array(spans, dtype=np.int64).reshape(-1, 6), numbers)
    return numbers, DISTINCT.gather(pieces, numbers, num_tables)


def test_rows_that_were_looked_for_while_the_index_changed():
    """A row that is found is that of its id, or the answer says that it may not hold; and some are found."""
    index = IdIndex(1 << 20)
    ids = np.random.default_rng(1).integers(-(2**62), 2**62, 60_000)
    tables = (ids % 3).astype(np.uint16)
    half = ids.shape[0] // 2
    index.insert(tables[:half], ids[:half], np.arange(half))
    batch, num_found, num_void = BatchIds(tables, ids), 0, 0
    over, turn = threading.Event(), threading.Lock()

    def change() -> None:
        """Ids come and go, and others take their rows, as long as somebody looks; shards grow on the way."""
        starts = range(half, ids.shape[0], 500)
        for number, start in enumerate(chain(starts, cycle(starts))):
            part = slice(start, start + 500)
            if number < len(starts):
                with turn:
                    index.insert(tables[part], ids[part], np.arange(start, start + 500))
            elif over.is_set():
                break
            if start % 3_000 == 0:
                swapped = slice(start - half, start - half + 500)
                with turn:
                    rows = index.remove(tables[swapped], ids[swapped])
                    index.insert(tables[swapped], ids[swapped], rows[::-1].copy())

    writer = threading.Thread(target=change)
    writer.start()
    for _ in range(20):
        known = DISTINCT.look_ahead(index, batch, np.empty(ids.shape[0], dtype=np.int64))
        found = known.rows >= 0
        with turn:  # as whoever changes the index asks
            if known.holds(index):
                owners = index.owners_of(known.rows[found])
                assert (owners[0] == tables[found]).all()
                assert (owners[1] == ids[found]).all()
                num_found += int(found.sum())
            else:
                num_void += 1
    over.set()
    writer.join()
    known = DISTINCT.look_ahead(index, batch, np.empty(ids.shape[0], dtype=np.int64))
    assert known.holds(index)
    assert (known.rows == index.find(tables, ids)).all()
    assert num_found + num_void > 0, "neither held nor was void"
    index.remove(tables[:1], ids[:1])
    assert not known.holds(index)


def test_rows_of_another_translator_do_not_hold():
    rules = [TableRules()]
    old, ours = Translator(rules, capacity=1 << 16), Translator(rules, capacity=1 << 16)
    batch = BatchIds(np.zeros(2, dtype=np.uint16), np.array([5, 6]))
    old.translate_distinct(batch, True)
    known = old.look_ahead(DISTINCT, batch, np.empty(2, dtype=np.int64))
    assert known.rows.tolist() == [0, 1]
    assert ours.translate_distinct(BatchIds(batch.tables, batch.ids[::-1].copy()), True).keys.tolist() == [0, 1]
    assert ours.translate_distinct(batch, True, known=known).keys.tolist() == [1, 0]
