"""Rows of one moment: frozen while the store goes on, linked, adopted, read without a store."""

import errno
import os
import threading

import torch

from hotbed.store.ssd import INDEX_NAME, SsdStore, frozen_items
from hotbed.store.ssd.format import HEADER_BYTES, record_bytes
from tests.store.test_ssd import NUM_ROWS, SEGMENT, WIDTH, contents, first, open_store

KEYS = torch.arange(NUM_ROWS)


def rows_of(folder):
    return {k: r for keys, records in frozen_items(folder) for k, r in zip(keys.tolist(), records.tolist())}


def test_a_frozen_moment_stays_while_the_store_continues(tmp_path):
    store = open_store(tmp_path / "rows", max_bytes=400 * SEGMENT)
    store.write(KEYS, first(KEYS))
    store.forget(KEYS[:3])
    model = contents(store)
    frozen = store.freeze()
    for step in range(40):
        store.write(KEYS, first(KEYS) + step)
    store._compaction.wait()
    assert frozen.facts["num_written"] == len(model) == 17
    frozen.link_into(tmp_path / "new" / "saved")  # folders on the way are made
    frozen.release()
    store._compaction.wait()
    for step in range(40):
        store.write(KEYS, first(KEYS) + step)
    store._compaction.wait()
    store.close()
    assert rows_of(tmp_path / "new" / "saved") == model


def test_linked_segments_are_shared_and_never_written_again(tmp_path):
    store = open_store(tmp_path / "rows")
    store.write(KEYS[:2], first(KEYS[:2]))
    with store.freeze() as frozen:
        (path,) = frozen.paths
        frozen.link_into(tmp_path / "saved")
    assert path.stat().st_nlink == 2
    before = path.read_bytes()
    store.write(KEYS[2:4], first(KEYS[2:4]))
    assert path.read_bytes() == before
    store.close()
    assert (tmp_path / "saved" / path.name).read_bytes() == before


def test_where_links_are_refused_segments_are_copied(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    store = open_store(tmp_path / "rows")
    store.write(KEYS, first(KEYS))
    with store.freeze() as frozen:
        frozen.link_into(tmp_path / "saved")
    store.adopt(tmp_path / "saved")
    assert list(contents(store).values()) == first(KEYS).tolist()
    store.close()
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "saved").iterdir())
    assert len(rows_of(tmp_path / "saved")) == NUM_ROWS


def test_an_adopted_checkpoint_outlives_the_store_and_can_be_saved_again(tmp_path):
    store = open_store(tmp_path / "rows")
    store.write(KEYS, first(KEYS))
    with store.freeze() as frozen:
        frozen.link_into(tmp_path / "one")
    store.close()
    other = open_store(tmp_path / "other")
    other.adopt(tmp_path / "one")
    assert contents(other) == rows_of(tmp_path / "one")
    for step in range(9):
        other.write(KEYS[:9], first(KEYS[:9]) + step)
    other._compaction.wait()
    other.check_integrity()
    with other.freeze() as frozen:
        frozen.link_into(tmp_path / "two")
    model = contents(other)
    other.close()
    assert rows_of(tmp_path / "two") == model
    assert rows_of(tmp_path / "one") == {int(key): first(key.view(1))[0].tolist() for key in KEYS}


def test_new_segments_are_numbered_after_adopted_ones(tmp_path):
    store = open_store(tmp_path / "rows")
    store.write(KEYS, first(KEYS))
    with store.freeze() as frozen:
        frozen.link_into(tmp_path / "saved")
    store.close()
    other = open_store(tmp_path / "other")
    other.adopt(tmp_path / "saved")
    adopted = [segment.header.number for segment in other._segments]
    assert len(adopted) > 2
    other.write(KEYS[:1], first(KEYS[:1]))
    numbers = {segment.header.number for segment in other._segments} - set(adopted)
    assert min(numbers) > max(adopted)
    other.close()


def test_adopting_into_other_segment_sizes(tmp_path):
    store = open_store(tmp_path / "rows", segment_bytes=HEADER_BYTES + 100 * record_bytes(WIDTH), max_bytes=1 << 20)
    store.write(KEYS, first(KEYS))
    with store.freeze() as frozen:
        frozen.link_into(tmp_path / "saved")
    store.close()
    small = open_store(tmp_path / "small")
    small.adopt(tmp_path / "saved")
    small.write(KEYS[:15], first(KEYS[:15]) + 1)
    small._compaction.wait()
    small.check_integrity()
    assert list(contents(small).values()) == [*(first(KEYS[:15]) + 1).tolist(), *first(KEYS[15:]).tolist()]
    small.close()


def test_freezing_an_empty_store(tmp_path):
    store = open_store(tmp_path / "rows")
    with store.freeze() as frozen:
        frozen.link_into(tmp_path / "saved")
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [INDEX_NAME]
    store.write(KEYS, first(KEYS))
    store.adopt(tmp_path / "saved")
    assert contents(store) == {}
    store.close()


def test_closing_keeps_what_is_frozen_until_it_is_released(tmp_path):
    store = open_store(tmp_path / "rows")
    store.write(KEYS, first(KEYS))
    frozen = store.freeze()
    store.close()
    frozen.link_into(tmp_path / "saved")
    frozen.release()
    assert list((tmp_path / "rows").glob("*.rows")) == []
    assert len(rows_of(tmp_path / "saved")) == NUM_ROWS


def test_freezing_while_rows_are_written_and_compacted(tmp_path):
    """Every frozen moment lies between two writes: all rows have one step's value."""
    store = SsdStore(
        tmp_path / "rows", 64, 2, lambda keys: torch.zeros(keys.numel(), 2), max_bytes=1 << 20, segment_bytes=256
    )
    keys = torch.arange(64)
    store.write(keys, torch.zeros(64, 2))
    stop, seen = threading.Event(), []

    def freeze():
        while not stop.is_set():
            with store.freeze() as frozen:
                folder = tmp_path / f"saved{len(seen)}"
                frozen.link_into(folder)
            rows = rows_of(folder)
            seen.append((len(rows), {value for row in rows.values() for value in row}))

    thread = threading.Thread(target=freeze)
    thread.start()
    step = 0
    try:
        while step < 100 or len(seen) < 10:
            step += 1
            store.write(keys, torch.full((64, 2), float(step)))
    finally:
        stop.set()
        thread.join()
    assert all(count == 64 and len(values) == 1 for count, values in seen)
    store._compaction.wait()
    store.check_integrity()
    store.close()
