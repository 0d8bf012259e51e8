"""Law 4 on a CPU: every array that rows and their caches have fits the budgets that were given, at every step.

Arrays are found by walking from the groups of tables, so that one nobody thought of is counted too. Left out is what follows
a window and not the tables: batches that are known, rows and lists on their way, the ring of numbers, buffers of files.
`staging=` bounds the rows on their way.
"""

import gc
import weakref
from itertools import chain
from types import BuiltinFunctionType, FunctionType, ModuleType

import numpy as np
import pytest
import torch

import hotbed
from hotbed import Table, optim
from hotbed.errors import BudgetError, ConfigError
from hotbed.host.memory import parse_bytes, typed
from hotbed.store import SsdStore
from hotbed.tables.group.fetch import StagedFetch
from hotbed.tables.sizing.budget import staged_row_bytes

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
    without = [group.residency.staging for group in groups]
    for cache in (group.residency.cache for group in groups):
        without += [cache.counters, cache._host_lists, cache._ahead, cache.index._uncounted]
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


def new_tables(tmp_path, kind="three tiers", **given):
    ssd = {"memory": "8MiB", "ssd": f"{tmp_path}:64MiB"} if kind == "three tiers" else {}
    rows = None if kind == "dynamic" else ROWS // FEATURES
    tables = {f"f{n}": Table(rows, DIM, hashing=rows is not None) for n in range(FEATURES)}
    return hotbed.EmbeddingTables(tables, optim.Adagrad(), hbm="1MiB", **ssd, **given)


class Moving:
    """Counts the bytes of rows on their way: those of windows in flight, and of the buffers that they pass."""

    def __init__(self, monkeypatch, tables):
        self.most, self._tables, self._fetches = 0, tables, weakref.WeakSet()
        monkeypatch.setattr("hotbed.tables.group.cached.StagedFetch", self._new)

    def _new(self, *arguments):
        fetch = StagedFetch(*arguments)
        self._fetches.add(fetch)
        return fetch

    def count(self):
        rows = [(one.staged, one.source, one.leaving) for one in list(self._fetches)]
        self.most = max(self.most, num_bytes([rows, *(group.residency.staging for group in self._tables.groups)]))


@pytest.mark.parametrize("kind", ["three tiers", "dynamic"])
def test_rows_on_their_way_stay_within_staging_and_change_no_bit(tmp_path, monkeypatch, kind):
    found, most, windows = [], [], []
    staging = 700 * staged_row_bytes(64, "cpu")  # of which a batch needs about 590
    for number, given in enumerate([{}, {"staging": staging}]):
        tables = new_tables(tmp_path / str(number), kind, **given)
        moving, losses = Moving(monkeypatch, tables), []
        for ids in chain(hotbed.prefetch(batches("uniform"), tables), batches("skewed", 3)):
            loss = tables(ids).square().sum()
            loss.backward()
            losses.append(loss.item())
            moving.count()
        found.append(losses)
        most.append(moving.most)
        windows.append(tables.counters().windows)
    assert found[0] == found[1]
    assert most[1] <= staging < most[0]
    assert windows == [18, 63]  # one batch a window, instead of four


def test_a_batch_that_staging_does_not_hold_is_refused_with_what_would(tmp_path):
    tables = new_tables(tmp_path, staging=300 * staged_row_bytes(64, "cpu"))
    loader = batches("uniform", 4)
    with pytest.raises(
        BudgetError, match=r"a batch needs 5\d\d rows of tables of dim 8 at once, and staging= has room for 300"
    ):
        tables(loader[0])
    with pytest.raises(BudgetError, match="or smaller batches") as refused:
        next(iter(hotbed.prefetch(loader, tables)))
    enough = str(refused.value).split("staging='")[1].split("'")[0]
    assert len(list(hotbed.prefetch(loader, new_tables(tmp_path / "more", staging=enough)))) == 4
    tables(loader[0][:50])  # nothing has changed: a smaller one is taken
    assert typed(parse_bytes(enough, "staging")) == enough


def test_rows_that_move_from_memory_to_memory_need_no_staging():
    tables = hotbed.EmbeddingTables({"a": Table(ROWS, DIM)}, cache=0.1, staging="1KiB")
    assert [len(ids) for ids in hotbed.prefetch([torch.arange(500).unsqueeze(1)], tables)] == [500]


def test_staging_warms_a_cache_piece_by_piece(tmp_path):
    tables = new_tables(tmp_path, staging=100 * staged_row_bytes(64, "cpu"))
    keys = torch.arange(0, 1000, 2)
    tables.groups[0].warm(keys, torch.ones(500, dtype=torch.int64))
    assert tables.counters().misses == 500
    tables(torch.tensor([[0, 0, 0, 0], [2, 2, 2, 2]]))
    assert tables.counters().hits == 2  # of the first table


def test_staging_belongs_to_a_cache():
    with pytest.raises(ConfigError, match="give cache= or hbm= too"):
        hotbed.EmbeddingTables({"a": Table(ROWS, DIM)}, staging="1MiB")
