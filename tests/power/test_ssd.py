"""Power is lost while rows on an ssd are written, compacted, saved and taken over: checkpoints share their segments.

The store's own files need not outlive the process. What a checkpoint holds must, whatever the store does next.
"""

import errno
import os

import pytest
import torch

from hotbed.checkpoint import Policy, Saver
from hotbed.checkpoint.chain import find, folders_in
from hotbed.checkpoint.read import load_rows, problems_of
from hotbed.store.ssd import SsdStore
from hotbed.store.ssd.format import HEADER_BYTES, record_bytes
from tests.checkpoint.fakes import state
from tests.checkpoint.test_frozen import ROWS, WIDTH, SsdTables
from tests.power.record import Recorder
from tests.power.replay import replay

SEGMENT = HEADER_BYTES + 8 * record_bytes(WIDTH)
POLICY = Policy(full_every=1, keep=2)


class SmallTables(SsdTables):
    """Segments of eight rows, so that every few writes seal, compact and delete."""

    def __init__(self, folder):
        super().__init__(folder)
        self.store.close()
        zeros = lambda keys: torch.zeros(len(keys), WIDTH)  # noqa: E731
        self.store = SsdStore(folder, ROWS, WIDTH, zeros, max_bytes=200 * SEGMENT, segment_bytes=SEGMENT)

    def train(self, number):
        """Rewrite most rows a few times; some stay as they were."""
        for step in range(3):
            keys = torch.arange(5 * step, 5 * step + 15)
            self.store.write(keys, torch.full((15, WIDTH), 10.0 * number + step))
            self.store._compaction.wait()


@pytest.fixture(params=["links", "copies"])
def ways(request, monkeypatch):
    """Whether the ssd and the checkpoints are on one file system."""

    def refuse(*_):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    if request.param == "copies":
        monkeypatch.setattr(os, "link", refuse)
    return request.param


def test_rows_are_written_compacted_saved_and_adopted(disk, room, tmp_path, ways):
    root, held, known, opened = disk / "checkpoints", {}, {}, set()
    tables = SmallTables(disk / "ssd")

    def save(tables, step):
        tables.train(step)
        Saver(root, tables, POLICY).save(state(step), wait=True)
        held[step] = tables.rows()

    def loaded(root):
        fresh = SmallTables(tmp_path / "fresh")
        load_rows(find(root), fresh.restore())
        rows = fresh.rows()
        fresh.store.close()
        return rows

    save(tables, 1)
    with Recorder(disk) as recorder:
        save(tables, 2)
        recorder.mark("2")
        tables.train(7)  # compaction takes away what the checkpoint has linked
        adopting = SmallTables(disk / "other")
        load_rows(find(root), adopting.restore())
        save(adopting, 3)
        recorder.mark("3")
        tables.store.close()
    assert tables.store.counts.compactions > 0
    assert len(folders_in(root)) == 2

    def found(left):
        for one in folders_in(left / "checkpoints"):
            content = tuple(path.read_bytes() for path in sorted(one.rglob("*")) if path.is_file())
            if content not in known:
                assert problems_of(one) == []
                assert torch.equal(loaded(one), held[find(one).manifest.step])
                known[content] = True
        if (names := frozenset(path.name for path in (left / "ssd").iterdir())) not in opened:
            opened.add(names)
            again = SmallTables(left / "ssd")
            assert list(again.store.items()) == []
            again.store.close()
            assert [path.name for path in (left / "ssd").iterdir()] == ["lock"]
        return str(find(left / "checkpoints").manifest.step)

    replay(
        f"ssd store: write, compact, save, adopt ({ways})",
        recorder,
        room,
        found,
        lambda said: {"3"} if "3" in said else {"2", "3"} if said else {"1", "2"},
    )
    adopting.store.close()
