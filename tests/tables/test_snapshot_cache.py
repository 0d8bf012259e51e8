"""Caches go on where a checkpoint found them: the steps after a resume hit as those of a run that never stopped."""

import pytest
import torch

import hotbed
from hotbed import Table, optim
from hotbed.cache.contents import contents_of
from hotbed.checkpoint import Policy, Saver, State
from hotbed.tables.snapshot.cache import state_of

POLICIES = ["lru", "lfu", "static", "oracle"]
ROWS = 4000
HOT = torch.arange(0, 300)


def new_tables(kind, folder, policy="lru", **changed):
    budgets = {
        "cached": {"cache": 0.15},
        "tiered": {"cache": 0.15, "memory": "120KiB", "ssd": f"{folder}:16MiB"},
        "ssd": {"memory": "120KiB", "ssd": f"{folder}:16MiB"},
        "dynamic": {"hbm": "80KiB", "memory": "4MiB"},
        "dynamic tiered": {"hbm": "80KiB", "memory": "400KiB", "ssd": f"{folder}:16MiB"},
    }[kind]
    rows = None if kind.startswith("dynamic") else ROWS
    adagrad = optim.Adagrad(lr=0.05)
    return hotbed.EmbeddingTables({"a": Table(rows, 8)}, adagrad, seed=3, policy=policy, **{**budgets, **changed})


def batches(count, seed=0):
    """Some ids are frequent, and which ones drifts slowly."""
    generator = torch.Generator().manual_seed(seed)
    drift = torch.arange(count).view(count, 1, 1)
    draw = (torch.rand(count, 200, 1, generator=generator) ** 7 * ROWS).long()
    return list((draw + drift) % ROWS)


def train(tables, loader):
    """(distinct keys, misses, rows found in memory) of every step."""
    found = []
    store = tables.caches[0].store
    for ids in loader:
        before, hits = tables.counters(), _from_memory(store)
        tables(ids).pow(2).sum().backward()
        done = tables.counters().minus(before)
        found.append((done.keys, done.misses, _from_memory(store) - hits))
    return found


def _from_memory(store):
    return store.counts.from_memory if isinstance(store, hotbed.store.TieredStore) else 0


def misses(found):
    return sum(misses for _, misses, _ in found)


KINDS = ["cached", "tiered", "ssd", "dynamic", "dynamic tiered"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_after_a_resume_misses_what_it_would_have_missed(tmp_path, kind, policy):
    tables = new_tables(kind, tmp_path / "one", policy)
    is_told = policy == "static" and not kind.startswith("dynamic")  # which row an id will have is not known before
    if is_told:
        tables.warm(HOT)
    train(tables, batches(40))
    hotbed.checkpoint.save(tmp_path / "saved", tables)
    whole = train(tables, batches(30, seed=1))
    other = new_tables(kind, tmp_path / "other", policy)
    train(other, batches(3, seed=7))
    loaded = hotbed.checkpoint.load(tmp_path / "saved", other)
    if is_told:
        other.warm(HOT)
    for group in other.groups:
        group.residency.cache.check_integrity()
    assert not loaded.notes
    assert train(other, batches(30, seed=1)) == whole
    other.caches[0].cache.check_integrity()
    cold = new_tables(kind, tmp_path / "cold", policy)
    assert misses(train(cold, batches(3, seed=1))) > 1.3 * misses(whole[:3])


def counts_after(tables, feed, step, act):
    """Train a feed to its end; the counters since a step, after which `act` is called."""
    before = None
    for number, ids in enumerate(feed, 1):
        tables(ids).pow(2).sum().backward()
        if number == step:
            act()
            before = tables.counters()
    return tables.counters().minus(before)


@pytest.mark.parametrize("kind", ["cached", "tiered"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_checkpoint_written_behind_a_feed(tmp_path, kind, policy):
    """Batches that were planned ahead when it was taken are planned again, one by one, in the run that goes on as in the one
    that is resumed; but that one knows fewer batches ahead than the other at first, which the oracle looks at."""
    tables = new_tables(kind, tmp_path / "one", policy)
    if policy == "static":
        tables.warm(HOT)
    saver = Saver(tmp_path / "saved", tables, Policy())
    ids = batches(120)
    feed = hotbed.prefetch(ids, tables, window=1)
    whole = counts_after(tables, feed, 60, lambda: saver.save(State(60, {}, {})))
    assert saver.settle()
    other = new_tables(kind, tmp_path / "other", policy)
    hotbed.checkpoint.load(tmp_path / "saved", other)
    if policy == "static":
        other.warm(HOT)
    began = other.counters()
    for one in hotbed.prefetch(ids[60:], other, window=1):
        other(one).pow(2).sum().backward()
    again = other.counters().minus(began)
    assert again.batches == whole.batches == 60
    assert again.keys == whole.keys
    if policy == "oracle":
        assert again.hits == pytest.approx(whole.hits, rel=0.01)
    else:
        assert (again.hits, again.evictions) == (whole.hits, whole.evictions)
    assert torch.equal(tables.weight("a"), other.weight("a"))


@pytest.mark.parametrize(
    ("kind", "changed", "said"),
    [
        ("cached", {"cache": 0.2}, "the cache of dim-8 had 600 slots of lru, now 800 of lru"),
        ("cached", {"policy": "lfu"}, "the cache of dim-8 had 600 slots of lru, now 600 of lfu"),
        ("tiered", {"memory": "140KiB"}, "memory over the ssd had another size for dim-8"),
        ("dynamic tiered", {"hbm": "90KiB", "memory": "500KiB"}, "slots of lru"),
    ],
)
def test_what_does_not_fit_is_left_out_and_said_once(tmp_path, kind, changed, said):
    tables = new_tables(kind, tmp_path / "one")
    train(tables, batches(20))
    hotbed.checkpoint.save(tmp_path / "saved", tables)
    other = new_tables(kind, tmp_path / "other", **{"policy": "lru", **changed})
    (note,) = hotbed.checkpoint.load(tmp_path / "saved", other).notes
    assert note.startswith("starting with an empty cache: ")
    assert said in note
    for each in (tables, other):
        train(each, batches(5, seed=1))
    (_, ours), (_, theirs) = tables.rows("a"), other.rows("a")
    assert all(torch.equal(column, theirs[name]) for name, column in ours.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_says_nothing_of_caches(tmp_path, kind, monkeypatch):
    tables = new_tables(kind, tmp_path / "one")
    train(tables, batches(10))
    with monkeypatch.context() as patch:
        patch.setattr("hotbed.tables.group.cached.state_of", lambda *_: {})
        hotbed.checkpoint.save(tmp_path / "saved", tables)
    other = new_tables(kind, tmp_path / "other")
    assert hotbed.checkpoint.load(tmp_path / "saved", other).notes == ()
    assert other.caches[0].cache.resident()[0].shape[0] == 0


def test_ids_that_were_only_looked_ahead_are_not_brought_in(tmp_path):
    tables = new_tables("dynamic tiered", tmp_path / "one")
    ids = [torch.arange(150 * n, 150 * n + 150).unsqueeze(1) for n in range(12)]
    feed = hotbed.prefetch(ids, tables, window=1, look_ahead=4)
    for number, batch in enumerate(feed):
        train(tables, [batch])
        if number == 3:
            hotbed.checkpoint.save(tmp_path / "saved", tables)
            break
    feed.close()
    other = new_tables("dynamic tiered", tmp_path / "other")
    hotbed.checkpoint.load(tmp_path / "saved", other)
    keys, _ = other.caches[0].cache.resident()
    assert keys.shape[0] > 0
    assert int(keys.max()) < 4 * 150
    other.caches[0].store.check_integrity()


def evaluated(folder):
    """Tables whose cache holds rows of ids that were never trained, and the ids to train on with."""
    tables = new_tables("dynamic", folder)
    train(tables, batches(20))
    with torch.no_grad():
        tables.eval()(torch.arange(10**12, 10**12 + 90).unsqueeze(1))
        tables.train()
    keys = tables.caches[0].cache.resident()[0]
    assert int((keys >= tables.groups[0].num_rows).sum()) == 90
    return tables, batches(20, seed=1)


def assert_goes_on_alike(tables, other, ids):
    other.caches[0].cache.check_integrity()
    for each in (tables, other):
        train(each, ids)
    (ours, columns), (theirs, their_columns) = tables.rows("a"), other.rows("a")
    assert torch.equal(ours, theirs)
    assert all(torch.equal(column, their_columns[name]) for name, column in columns.items())


def test_temporary_rows_of_an_evaluation_stay_out_of_checkpoints(tmp_path):
    tables, ids = evaluated(tmp_path / "one")
    hotbed.checkpoint.save(tmp_path / "saved", tables)
    other = new_tables("dynamic", tmp_path / "other")
    hotbed.checkpoint.load(tmp_path / "saved", other)
    assert other.caches[0].cache.resident()[0].shape[0] == tables.caches[0].cache.resident()[0].shape[0] - 90
    assert_goes_on_alike(tables, other, ids)


def test_a_file_that_names_a_row_twice_is_loaded_once(tmp_path, monkeypatch):
    """Guests were once saved as numbers of 32 bits, which are those of other rows."""

    def cut(rows, name):
        tensors, held = state_of(rows, name), contents_of(rows.cache)
        parts = {"keys": held.keys.to(torch.int32), "last": held.last, "uses": held.uses}
        return tensors | {f"cache.{name}.device.{part}": tensor for part, tensor in parts.items()}

    tables, ids = evaluated(tmp_path / "one")
    with monkeypatch.context() as patch:
        patch.setattr("hotbed.tables.group.cached.state_of", cut)
        hotbed.checkpoint.save(tmp_path / "saved", tables)
    other = new_tables("dynamic", tmp_path / "other")
    hotbed.checkpoint.load(tmp_path / "saved", other)
    assert_goes_on_alike(tables, other, ids)


def test_rows_that_cannot_be_read_leave_no_row_behind(tmp_path, monkeypatch):
    tables = new_tables("cached", tmp_path)
    train(tables, batches(10))
    hotbed.checkpoint.save(tmp_path / "saved", tables)
    other = new_tables("cached", tmp_path)

    def refuse(*_):
        raise hotbed.errors.StoreError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(other.caches[0].store, "read", refuse)
        with pytest.raises(hotbed.errors.StoreError, match="gone"):
            hotbed.checkpoint.load(tmp_path / "saved", other)
    assert other.caches[0].cache.resident()[0].shape[0] == 0
    assert torch.equal(other.weight("a"), new_tables("cached", tmp_path).weight("a"))


def test_a_failure_while_hot_rows_are_brought_in_is_remembered(tmp_path, monkeypatch):
    tables = new_tables("cached", tmp_path, "static")
    train(tables, batches(5))

    def refuse(*_):
        raise hotbed.errors.StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(tables.caches[0].store, "keep", refuse)
        with pytest.raises(hotbed.errors.StoreError, match="full"):
            tables.warm(torch.arange(1000, 1400))
    with pytest.raises(hotbed.errors.HotbedError, match="lost rows"):
        tables(batches(1)[0])
