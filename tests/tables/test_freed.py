"""`del tables` frees rows, index and stores at once: none of them waits for the garbage collector."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

import hotbed

KEPT = {"plain": {}, "cached": {"cache": 0.5}, "ssd": {"memory": "400KiB"}, "dynamic": {"hbm": "1MiB"}}
ROWS = 2000


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(ROWS, (100, 2), generator=generator) for _ in range(12)]


def train(tables, ahead=False, stop=None):
    for n, ids in enumerate(hotbed.prefetch(batches(), tables) if ahead else batches()):
        if n == stop:
            break
        tables(ids).square().sum().backward()


def evaluate(tables):
    tables.eval()
    with torch.no_grad():
        tables(batches()[0])
        return tables.rows("a")[0].shape


USES = {
    "made": lambda tables, folder: None,
    "trained": lambda tables, folder: train(tables),
    "read ahead": lambda tables, folder: train(tables, ahead=True),
    "left early": lambda tables, folder: train(tables, ahead=True, stop=5),
    "evaluated": lambda tables, folder: (train(tables), evaluate(tables)),
    "saved": lambda tables, folder: (train(tables, ahead=True), hotbed.checkpoint.save(folder, tables)),
}


def parts_of(tables):
    groups = tables.groups
    halves = [half for group in groups for half in (group.keyspace, group.residency)]
    stores = [cache.store for cache in tables.caches]
    return [weakref.ref(part) for part in (tables, *groups, *halves, *stores, *(group.records for group in groups))]


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kept", KEPT)
def test_deleted_tables_are_freed_at_once(kept, use, tmp_path, no_collector):
    where = KEPT[kept] | ({"ssd": f"{tmp_path}/rows:64MiB"} if kept == "ssd" else {})
    declared = {name: hotbed.Table(None if kept == "dynamic" else ROWS, 16) for name in ("a", "b")}
    tables = hotbed.EmbeddingTables(declared, **where)
    USES[use](tables, tmp_path / "saved")
    parts = parts_of(tables)
    del tables
    assert [part() for part in parts if part() is not None] == []


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_deleted_tables_of_ranks_are_freed_at_once(mode, tmp_path, no_collector):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        tables = hotbed.ShardedTables({name: hotbed.Table(ROWS, 16) for name in ("a", "b")}, cache=0.5, mode=mode)
        train(tables, ahead=True)
        parts = parts_of(tables)
        del tables
        assert [part() for part in parts if part() is not None] == []
    finally:
        dist.destroy_process_group()
