import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed import optim
from hotbed.errors import StoreError
from hotbed.ops.move.states import WRITTEN, marked
from hotbed.ops.records import layout_of
from hotbed.store import MemoryStore, held, memory

LAYOUT = layout_of(2, optim.SGD())


def first(keys):
    return keys.unsqueeze(1).float() * torch.ones(1, LAYOUT.width) + 0.5


@settings(max_examples=50)
@given(data=st.data())
def test_against_a_dict(data):
    store, model = MemoryStore(20, LAYOUT.width, first), {}
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


def test_memory_can_be_had_at_once():
    store = MemoryStore(4_000_000, LAYOUT.width, first)  # 64 MB
    before = resident_bytes()
    store.make_pages()
    assert resident_bytes() - before > 0.9 * store.parts()[0].nbytes
    out = torch.empty(1, LAYOUT.width)
    store.read(torch.tensor([3]), out)
    assert torch.equal(out, first(torch.tensor([3])))
    assert store.num_written == 0


def test_opening_a_large_store_takes_no_memory():
    before = resident_bytes()
    store = MemoryStore(50_000_000, LAYOUT.width, first)  # 800 MB once every row is used
    out = torch.empty(2, LAYOUT.width)
    store.read(torch.tensor([3, 49_999_999]), out)
    assert out[:, 0].tolist() == [3.5, 50_000_000.0]
    assert resident_bytes() - before < 100e6


def test_a_store_that_grows_sees_rows_that_others_wrote_once_it_reaches_them():
    store = MemoryStore(1 << 20, LAYOUT.width, first, grows=True)
    records, state = store.parts()
    records[5], state[5] = 1.0, WRITTEN
    assert store.num_written == 0
    store.reach(6)
    store.reach(3)
    assert store.num_written == 1
    assert [keys.tolist() for keys, _ in store.items()] == [[5]]


def test_held_rows_are_of_one_moment():
    store = MemoryStore(50, LAYOUT.width, first)
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
    store = MemoryStore(10, LAYOUT.width, first)
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


def test_a_row_that_is_forgotten_while_it_is_held_is_given_as_it_was():
    """Forgotten, and then given to somebody else, who writes it."""
    store = full_store()
    rows = store.hold(touched=False)
    store.forget(torch.tensor([3, 4]))
    store.write(torch.tensor([3]), torch.zeros(1, LAYOUT.width))
    out = torch.empty(2, LAYOUT.width)
    store.read(torch.tensor([3, 4]), out)
    assert out[:, 0].tolist() == [0.0, 4.5]
    given = {
        key: record for keys, records in rows.items() for key, record in zip(keys.tolist(), records[:, 0].tolist())
    }
    assert given == dict.fromkeys(range(10), 1.0)


@pytest.mark.parametrize("taken", [False, True])
def test_a_hold_that_stops_on_the_way_loses_no_row(monkeypatch, taken):
    """Whether it had marked its rows or not; and rows of an earlier one that was given back are not forgotten either."""

    def stop(*arguments):
        if taken:
            hold(*arguments)
        raise KeyboardInterrupt

    store, hold = full_store(), memory.hold
    store.hold(touched=True).commit()
    store.write(torch.tensor([1]), torch.zeros(1, LAYOUT.width))
    store.hold(touched=True).give_back()
    store.write(torch.tensor([7]), torch.zeros(1, LAYOUT.width))
    with monkeypatch.context() as patch:
        patch.setattr(memory, "hold", stop)
        with pytest.raises(KeyboardInterrupt):
            store.hold(touched=True)
    assert store.hold(touched=True).keys.tolist() == [1, 7]


def test_one_is_open_at_a_time_and_the_second_leaves_the_first_alone():
    store = full_store()
    one = store.hold(touched=True)
    with pytest.raises(StoreError, match="one at a time"):
        store.hold(touched=True)
    store.write(torch.tensor([1]), torch.zeros(1, LAYOUT.width))
    assert all(bool((records == 1).all()) for _, records in one.items())
    one.give_back()
    one.give_back()
    assert np.array_equal(store.hold(touched=True).keys, np.arange(10))


def peak_bytes(act):
    """Most memory that a call takes beside what there was, as the system counts it; and what the call gives."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not begin to count anew")
    before = resident_bytes()
    result = act()
    peak = int(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line).split()[1])
    return peak * 1024 - before, result


def test_a_snapshot_of_few_rows_of_many_takes_little_memory():
    store = MemoryStore(400_000_000, LAYOUT.width, first)
    keys = torch.arange(0, 400_000_000, 50_000_000)
    store.write(keys, torch.ones(8, LAYOUT.width))
    store.hold(touched=False).give_back()  # compiles
    taken, held = peak_bytes(lambda: store.hold(touched=True))
    assert taken < 20e6
    taken, found = peak_bytes(lambda: [key for some, _ in held.items() for key in some.tolist()])
    assert found == keys.tolist()
    assert taken < 20e6


def test_a_snapshot_looks_no_further_than_the_keys_in_use(monkeypatch):
    """Dynamic ids set aside addresses for hundreds of millions of rows; to look through them all takes seconds."""
    seen = []
    monkeypatch.setattr(held, "marked", lambda marks, chunk: (seen.append(marks.size), marked(marks, chunk))[1])
    store = MemoryStore(400_000_000, LAYOUT.width, first, grows=True)
    store.write(torch.tensor([3, 70_000]), torch.ones(2, LAYOUT.width))
    rows = store.hold(touched=False)
    store.write(torch.tensor([90_000, 3]), torch.zeros(2, LAYOUT.width))
    assert rows.keys.tolist() == [3, 70_000]
    assert sorted((key, row[0]) for keys, one in rows.items() for key, row in zip(keys.tolist(), one.tolist())) == [
        (3, 1.0),
        (70_000, 1.0),
    ]
    assert set(seen) == {70_001}


def test_a_snapshot_of_all_rows_copies_a_chunk_at_a_time():
    layout = layout_of(64, optim.SGD())
    store = MemoryStore(400_000, layout.width, lambda keys: torch.ones(keys.shape[0], layout.width))
    for keys in torch.arange(400_000).split(1 << 16):  # 102 MB
        store.write(keys, torch.ones(keys.shape[0], layout.width))
    store.hold(touched=False).give_back()
    taken, held = peak_bytes(lambda: store.hold(touched=False))
    assert taken < 10e6
    taken, count = peak_bytes(lambda: sum(keys.shape[0] for keys, _ in held.items(1 << 14)))
    assert count == 400_000
    assert taken < 25e6


@settings(max_examples=60)
@given(data=st.data())
def test_marked_keys_against_numpy(data):
    marks = np.zeros(data.draw(st.integers(0, 90)), dtype=np.uint8)
    for key in data.draw(st.lists(st.integers(0, 89))):
        marks[key : key + 1] = data.draw(st.integers(1, 3))
    chunk = data.draw(st.integers(1, 20))
    assert [key for keys in marked(marks, chunk) for key in keys.tolist()] == np.flatnonzero(marks).tolist()
