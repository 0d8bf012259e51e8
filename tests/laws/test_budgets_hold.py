"""Law 4 on a CPU: every array that rows and their caches have fits the budgets that were given, at every step.

Arrays are found by walking from the groups of tables, so that one nobody thought of is counted too. Left out is what follows
a window and not the tables: batches that are known, rows and lists on their way, the ring of numbers, buffers of files.
"""

import gc
import weakref
from types import BuiltinFunctionType, FunctionType, ModuleType

import numpy as np
import pytest
import torch

import hotbed
from hotbed import Table, optim
from hotbed.host.memory import parse_bytes
from hotbed.store import SsdStore

ROWS, DIM, BATCH, FEATURES = 60_000, 8, 150, 4
_NO_WAY_IN = (ModuleType, FunctionType, BuiltinFunctionType, type, torch.dtype, torch.device)


def batches(kind, count=60):
    draw = torch.Generator().manual_seed(5)
    share = torch.rand(count, BATCH, FEATURES, generator=draw) ** (5 if kind == "skewed" else 1)
    return list((share * ROWS).long())


def num_bytes(root, without=()):
    """Of all distinct arrays that are reachable."""
    seen, found, todo = {id(one) for one in without}, {}, [root]
    while todo:
        one = todo.pop()
        if id(one) in seen or type(one) in weakref.ProxyTypes or isinstance(one, _NO_WAY_IN):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            found[storage.data_ptr()] = max(found.get(storage.data_ptr(), 0), storage.nbytes())
        elif isinstance(one, np.ndarray):
            while isinstance(one.base, np.ndarray):
                one = one.base
            found[one.ctypes.data] = max(found.get(one.ctypes.data, 0), one.nbytes)
        else:
            todo += gc.get_referents(one)
    return sum(found.values())


def taken(tables):
    groups = list(tables.groups)
    without = [group.residency._staging for group in groups]
    for cache in (group.residency.cache for group in groups):
        without += [cache.counters, cache._host_lists, cache._ahead, cache._uncounted]
    tiered = [group.residency.store.tiered for group in groups]
    without += [one._foreseen for one in tiered if one is not None]  # of batches ahead, as `_ahead`
    stores = [getattr(group.residency.store, "ssd", group.residency.store) for group in groups]
    without += [one._buffer for s in stores if isinstance(s, SsdStore) for one in (s._writer, s._compaction.appender)]
    return num_bytes(groups, without)


def train(tables, kind, look_ahead=None):
    """The most bytes at any step."""
    most = 0
    loader = hotbed.prefetch(batches(kind), tables, look_ahead=look_ahead)
    for step, ids in enumerate(loader):
        tables(ids).sum().backward()
        if step % 7 == 0:
            most = max(most, taken(tables))
    return most


def test_the_walk_finds_arrays():
    tables = hotbed.EmbeddingTables({"a": Table(1000, DIM)}, optim.Adagrad(), hbm="64KiB", memory="1MiB")
    (group,) = tables.groups
    least = group.records.nbytes + group.residency.cache.num_bytes + group.residency.store.num_bytes
    assert least <= taken(tables) <= least + 4096
    group.hidden = [{"map": np.zeros(ROWS, np.int32)}]
    assert taken(tables) > least + 4 * ROWS - 4096


@pytest.mark.parametrize("kind", ["skewed", "uniform"])
@pytest.mark.parametrize("look_ahead", [None, 200], ids=["automatic", "far"])
@pytest.mark.parametrize(
    ("budgets", "limit"),
    [
        ({"hbm": "128KiB", "memory": ROWS * 65}, ("hbm", "memory")),
        ({"hbm": "1MiB", "memory": ROWS * 65}, ("hbm", "memory")),
        ({"memory": "1MiB", "ssd": "64MiB"}, ("memory",)),
        ({"hbm": "128KiB", "memory": "1MiB", "ssd": "64MiB"}, ("hbm", "memory")),
    ],
    ids=["small", "large", "memory is the cache", "three tiers"],
)
def test_arrays_fit_the_budgets(tmp_path, budgets, limit, look_ahead, kind):
    given = {**budgets, **({"ssd": f"{tmp_path}:{budgets['ssd']}"} if "ssd" in budgets else {})}
    tables = hotbed.EmbeddingTables(
        {f"f{n}": Table(ROWS // FEATURES, DIM, hashing=True) for n in range(FEATURES)}, optim.Adagrad(), **given
    )
    most = train(tables, kind, look_ahead)
    allowed = sum(parse_bytes(budgets[name], name) for name in limit)
    assert most <= allowed
    assert tables.counters().evictions > 0
    assert most > 0.9 * allowed or "ssd" in budgets


def test_the_index_of_a_cache_stays_within_hbm_while_batches_grow():
    """The first batch tells how far to look; later ones have seven times its rows."""
    tables = hotbed.EmbeddingTables({"a": Table(ROWS, DIM)}, optim.Adagrad(), hbm="96KiB")
    (group,) = tables.groups
    draw = torch.Generator().manual_seed(1)
    loader = [torch.randint(ROWS, (n, 1), generator=draw) for n in [60] * 10 + [420] * 60 + [60] * 30]
    assert 420 < group.num_slots < 700
    seen = []
    for ids in hotbed.prefetch(loader, tables):
        tables(ids).sum().backward()
        group.residency.cache.check_integrity()
        seen.append(group.records.nbytes + group.residency.cache.num_bytes)
    assert len(seen) == len(loader)
    assert max(seen) <= 96 << 10


def test_a_share_of_the_rows_bounds_no_index():
    """`cache=` promises no bytes: batches are looked at as far ahead as the policy can use."""
    tables = hotbed.EmbeddingTables({"a": Table(ROWS, DIM)}, optim.Adagrad(), cache=0.01)
    (group,) = tables.groups
    before = group.residency.cache.num_bytes
    for ids in hotbed.prefetch([torch.randint(ROWS, (300, 1)) for _ in range(40)], tables):
        tables(ids).sum().backward()
    assert group.residency.cache.num_bytes > 2 * before
