import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed import optim
from hotbed.ops.records import layout_of
from hotbed.store import MemoryStore, held, memory

LAYOUT = layout_of(2, optim.SGD())


def first(keys):
    return keys.unsqueeze(1).float() * torch.ones(1, LAYOUT.width) + 0.5


@settings(max_examples=50)
@given(data=st.data())
def test_against_a_dict(data):
    store, model = MemoryStore(20, LAYOUT, first), {}
    for step in range(data.draw(st.integers(1, 6))):
        keys = torch.tensor(sorted(data.draw(st.sets(st.integers(0, 19), min_size=1))))
        out = torch.full((keys.shape[0], LAYOUT.width), torch.nan)
        store.read(keys, out)
        expected = [model.get(key, first(torch.tensor([key]))[0].tolist()) for key in keys.tolist()]
        assert out.tolist() == expected
        if data.draw(st.booleans()):
            records = torch.rand(keys.shape[0], LAYOUT.width) + step
            store.write(keys, records)
            model |= dict(zip(keys.tolist(), records.tolist()))
    found = {key: record for keys, records in store.items(3) for key, record in zip(keys.tolist(), records.tolist())}
    assert found == model
    assert store.num_written == len(model)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_opening_a_large_store_takes_no_memory():
    before = resident_bytes()
    store = MemoryStore(50_000_000, LAYOUT, first)  # 800 MB once every row is used
    out = torch.empty(2, LAYOUT.width)
    store.read(torch.tensor([3, 49_999_999]), out)
    assert out[:, 0].tolist() == [3.5, 50_000_000.0]
    assert resident_bytes() - before < 100e6


def test_held_rows_are_of_one_moment():
    store = MemoryStore(50, LAYOUT, first)
    keys = torch.arange(0, 50, 2)
    store.write(keys, torch.full((25, LAYOUT.width), 1.0))
    held = store.hold(touched=False)
    seen = {}
    for number, (some, records) in enumerate(held.items(4)):
        assert not seen.keys() & set(some.tolist())
        seen |= dict(zip(some.tolist(), records[:, 0].tolist()))
        late = torch.tensor([2 * number, 48 - 2 * number, 49 - 2 * number])
        store.write(torch.unique(late), torch.full((torch.unique(late).shape[0], LAYOUT.width), 2.0))
        store.forget(torch.tensor([30]))
    assert seen == dict.fromkeys(keys.tolist(), 1.0)
    held.commit()
    touched = store.hold(touched=True)
    later = {key for some, records in touched.items() for key in some.tolist()}
    assert later == {key for some, records in store.items() for key in some[records[:, 0] == 2.0].tolist()}
    touched.give_back()
    again = store.hold(touched=True)
    assert len(again) == len(touched)
    again.commit()
    assert len(store.hold(touched=True)) == 0


def full_store():
    store = MemoryStore(10, LAYOUT, first)
    store.write(torch.arange(10), torch.ones(10, LAYOUT.width))
    return store


def test_a_row_that_is_read_while_it_is_kept_is_given_once(monkeypatch):
    store = full_store()
    rows, found = store.hold(touched=False), []
    items, gather = rows.items(), held.gather_rows

    def slow(records, keys, out):  # the reader comes between the writer's look at a row and its copy
        monkeypatch.setattr(held, "gather_rows", gather)
        found.extend(next(items)[0].tolist())
        gather(records, keys, out)

    monkeypatch.setattr(held, "gather_rows", slow)
    store.write(torch.tensor([3]), torch.zeros(1, LAYOUT.width))
    for keys, records in items:
        found += keys.tolist()
        assert bool((records == 1).all())
    assert sorted(found) == list(range(10))


def test_rows_that_find_no_memory_are_not_saved(monkeypatch):
    def refuse(*_):
        raise MemoryError

    store = full_store()
    with monkeypatch.context() as patch:
        patch.setattr(memory, "HeldRows", refuse)
        with pytest.raises(MemoryError):
            store.hold(touched=True, at_once=True)
    assert len(store.hold(touched=True)) == 10


def test_of_two_held_at_once_the_one_that_fails_is_not_forgotten():
    store = full_store()
    one = store.hold(touched=True, at_once=True)
    store.write(torch.tensor([1]), torch.zeros(1, LAYOUT.width))
    other = store.hold(touched=True, at_once=True)
    one.give_back()
    other.commit()
    assert np.array_equal(store.hold(touched=True).keys, np.arange(10))
