"""Checkpoints of tables of every kind: of one moment while training goes on, full and incremental, into tables of any other."""

import pytest
import torch

import hotbed
from hotbed import Table, optim
from hotbed.errors import BudgetError, HotbedError, StoreError
from hotbed.tables.snapshot.rows import digests_of

ROWS = {"a": 300, "b": 50, "c": 90}


def new_tables(kind, folder, precision="fp32"):
    budgets = {
        "plain": {},
        "cached": {"cache": 0.3},
        "tiered": {"cache": 0.3, "memory": "16KiB", "ssd": f"{folder}/rows:16MiB"},
        "ssd": {"memory": "30KiB", "ssd": f"{folder}/rows:16MiB"},
    }[kind]
    tables = {"a": Table(ROWS["a"], 8), "b": Table(ROWS["b"], 8), "c": Table(ROWS["c"], 5)}
    return hotbed.EmbeddingTables(tables, optim.Adam(lr=0.05), output="concat", seed=3, precision=precision, **budgets)


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = [(torch.rand(count, 20, generator=generator) ** 2 * rows).long() for rows in ROWS.values()]
    return list(torch.stack(draw, dim=2))


def train(tables, loader):
    for ids in loader:
        tables(ids).pow(2).sum().backward()


def equal(one, other):
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("into", ["plain", "cached", "tiered", "ssd"])
@pytest.mark.parametrize("kind", ["plain", "cached", "tiered", "ssd"])
def test_saved_by_one_kind_and_loaded_by_another(tmp_path, kind, into, precision):
    tables = new_tables(kind, tmp_path / "one", precision)
    for step in range(3):  # a full one, then two that add to it
        train(tables, batches(4, seed=step))
        hotbed.checkpoint.save(tmp_path / "saved", tables, step=step)
    other = new_tables(into, tmp_path / "other", precision)
    train(other, batches(3, seed=9))
    loaded = hotbed.checkpoint.load(tmp_path / "saved", other)
    assert loaded.step == 2
    assert other.num_updates == tables.num_updates == 12
    assert equal(tables, other)
    for each in (tables, other):
        train(each, hotbed.prefetch(batches(6, seed=5), each))
    assert equal(tables, other)


@pytest.mark.parametrize("kind", ["plain", "cached", "tiered", "ssd"])
@pytest.mark.parametrize("touched", [False, True])
def test_rows_of_one_moment_while_training_continues(tmp_path, kind, touched):
    tables = new_tables(kind, tmp_path)
    train(tables, batches(5))
    if touched:
        with tables.snapshot() as first:
            list(first.parts())
            first.commit()
        train(tables, batches(2, seed=7))
    expected = {name: value.clone() for name, value in tables.state_dict().items()}
    with tables.snapshot(touched) as snapshot:
        parts = snapshot.parts()
        found = [next(parts, None)]
        train(tables, batches(8, seed=1))
        found += list(parts)
        seen = set()
        for table, ids, columns, _ in filter(None, found):
            assert not seen & {(table, id_) for id_ in ids.tolist()}
            seen |= {(table, id_) for id_ in ids.tolist()}
            for name, column in columns.items():
                assert torch.equal(column, expected[f"{table}.{name}"][ids]), (table, name)
        if snapshot.frozen:
            (tmp_path / "linked").mkdir()
            snapshot.frozen[0].link_into(tmp_path / "linked")
            assert any((tmp_path / "linked").iterdir())
        else:
            assert seen


def test_what_was_not_committed_is_touched_again(tmp_path):
    for kind in ("plain", "cached"):
        tables = new_tables(kind, tmp_path)
        train(tables, batches(3))
        with tables.snapshot() as snapshot:
            list(snapshot.parts())
            snapshot.commit()
        train(tables, batches(1, seed=4))
        sizes = []
        for commits in (False, True, True):
            with tables.snapshot(touched=True) as snapshot:
                sizes.append(sum(part.ids.shape[0] for part in snapshot.parts()))
                if commits:
                    snapshot.commit()
        assert sizes[0] == sizes[1] > 0
        assert sizes[2] == 0


@pytest.mark.parametrize("kind", ["plain", "cached"])
def test_a_full_one_that_fails_loses_no_marks(tmp_path, kind):
    tables = new_tables(kind, tmp_path)
    train(tables, batches(3))
    with tables.snapshot() as snapshot:
        snapshot.commit()
    train(tables, [torch.tensor([[1, 2, 3]])])
    with tables.snapshot():
        pass  # never committed
    train(tables, [torch.tensor([[4, 2, 3]])])
    with tables.snapshot(touched=True) as snapshot:
        found = {(part.table, id_) for part in snapshot.parts() for id_ in part.ids.tolist()}
    assert found >= {("a", 1), ("a", 4), ("b", 2), ("c", 3)}


@pytest.mark.parametrize("kind", ["plain", "cached"])
def test_when_the_first_of_all_fails_the_next_has_every_row_that_was_trained(tmp_path, kind):
    tables = new_tables(kind, tmp_path)
    train(tables, [torch.tensor([[1, 2, 3]])])
    with tables.snapshot():
        pass  # never committed
    train(tables, [torch.tensor([[4, 2, 3]])])
    with tables.snapshot(touched=True) as snapshot:
        assert saved_ids(snapshot) >= {("a", 1), ("a", 4), ("b", 2), ("c", 3)}


@pytest.mark.parametrize("kind", ["plain", "cached"])
def test_an_incremental_one_is_as_large_as_what_was_touched(tmp_path, kind):
    tables = new_tables(kind, tmp_path)
    train(tables, batches(20))
    with tables.snapshot() as snapshot:
        snapshot.commit()
    ids = torch.tensor([[1, 2, 3], [1, 4, 3]])
    train(tables, [ids])
    with tables.snapshot(touched=True) as snapshot:
        found = {(part.table, id_) for part in snapshot.parts() for id_ in part.ids.tolist()}
    assert found == {("a", 1), ("b", 2), ("b", 4), ("c", 3)}


@pytest.mark.parametrize("kind", ["plain", "cached"])
def test_rows_that_were_loaded_count_as_saved(tmp_path, kind):
    tables, other = new_tables(kind, tmp_path), new_tables(kind, tmp_path)
    train(tables, batches(5))
    hotbed.checkpoint.save(tmp_path / "saved", tables, step=1)
    hotbed.checkpoint.load(tmp_path / "saved", other)
    train(other, [torch.tensor([[1, 2, 3]])])
    with other.snapshot(touched=True) as snapshot:
        assert saved_ids(snapshot) == {("a", 1), ("b", 2), ("c", 3)}


@pytest.mark.parametrize("kind", ["plain", "cached"])
def test_a_second_one_is_refused_while_the_first_is_open(tmp_path, kind):
    """Rows of the first would be in neither, if the first is not saved."""
    tables = new_tables(kind, tmp_path)
    train(tables, batches(3))
    with tables.snapshot() as snapshot:
        with pytest.raises(StoreError, match=r"a snapshot of these rows is open.* Leave it first"):
            tables.snapshot()
        train(tables, batches(2, seed=1))
        snapshot.commit()
    with tables.snapshot(touched=True) as snapshot:
        assert list(snapshot.parts())


@pytest.mark.parametrize("kind", ["plain", "cached", "tiered"])
def test_one_that_was_never_entered_is_given_back(tmp_path, kind):
    """An interrupt came between the two."""
    tables = new_tables(kind, tmp_path)
    train(tables, batches(3))
    with tables.snapshot() as snapshot:
        snapshot.commit()
    train(tables, [torch.tensor([[1, 2, 3]])])
    tables.snapshot(touched=True)
    with tables.snapshot(touched=True) as snapshot:
        if kind == "tiered":
            assert all(segment.num_holds == 1 for segment, _ in snapshot.frozen[0].files._held)
        else:
            assert saved_ids(snapshot) == {("a", 1), ("b", 2), ("c", 3)}


def saved_ids(snapshot):
    return {(part.table, id_) for part in snapshot.parts() for id_ in part.ids.tolist()}


def assert_loads_as(tables, folder, kind="plain"):
    other = new_tables(kind, folder)
    hotbed.checkpoint.load(folder / "saved", other)
    assert equal(tables, other)


def lend_weight(tables):
    return tables.weight("a")


def lend_state(tables):
    return next(iter(tables.states("a").values()))


def lend_rows(tables):
    return tables.rows("a")[1]["weight"]


def lend_state_dict(tables):
    return tables.state_dict()["a.weight"]


@pytest.mark.parametrize("lend", [lend_weight, lend_state, lend_rows, lend_state_dict])
def test_rows_written_through_a_view_are_saved(tmp_path, lend):
    """However long ago the view was handed out, and whoever writes: torch, or numpy, which torch does not notice."""
    tables = new_tables("plain", tmp_path)
    train(tables, batches(3))
    hotbed.checkpoint.save(tmp_path / "saved", tables, step=0)
    view = lend(tables)
    for step in range(1, 4):
        view[3 * step] = 40.0 + step
        view.numpy()[200 + step] = -step
        train(tables, batches(1, seed=step))
        hotbed.checkpoint.save(tmp_path / "saved", tables, step=step)
        assert_loads_as(tables, tmp_path)


def test_a_view_costs_one_whole_table_and_then_what_changed(tmp_path):
    tables = new_tables("plain", tmp_path)
    train(tables, batches(3))
    with tables.snapshot() as snapshot:
        snapshot.commit()
    view = tables.weight("b")
    found = []
    for row in (7, 8, 8):
        view[row] = 1.0
        train(tables, [torch.tensor([[1, 2, 3]])])
        with tables.snapshot(touched=True) as snapshot:
            found.append(saved_ids(snapshot))
            snapshot.commit()
    trained = {("a", 1), ("b", 2), ("c", 3)}
    assert found == [trained | {("b", row) for row in range(ROWS["b"])}, trained | {("b", 8)}, trained]


def test_what_changed_through_a_view_and_was_not_committed_is_saved_later(tmp_path):
    tables = new_tables("plain", tmp_path)
    view = tables.weight("b")
    with tables.snapshot() as snapshot:
        snapshot.commit()
    view[7] = 1.0
    for commits in (False, True):
        with tables.snapshot(touched=True) as snapshot:
            assert saved_ids(snapshot) == {("b", 7)}
            if commits:
                snapshot.commit()
    with tables.snapshot(touched=True) as snapshot:
        assert saved_ids(snapshot) == set()


def test_loaded_tables_do_not_compare_with_rows_of_before(tmp_path):
    tables = new_tables("plain", tmp_path)
    view = tables.weight("a")
    train(tables, batches(3))
    hotbed.checkpoint.save(tmp_path / "saved", tables, step=0)
    first = view[5].clone()
    view[5] = 9.0
    hotbed.checkpoint.save(tmp_path / "saved", tables, step=1)
    hotbed.checkpoint.load(tmp_path / "saved" / "000000000000", tables)
    assert torch.equal(tables.weight("a")[5], first)
    tables.weight("a")[5] = 9.0  # as it was compared with last, and not as it was loaded
    hotbed.checkpoint.save(tmp_path / "saved", tables, step=2)
    assert_loads_as(tables, tmp_path)


def test_reading_weights_piece_by_piece_hands_out_no_view(tmp_path, monkeypatch):
    monkeypatch.setattr("hotbed.tables.group.keyspace.CHUNK", 7)
    tables = new_tables("plain", tmp_path)
    pieces = list(tables.weight_pieces("b"))
    assert torch.equal(torch.cat(pieces), tables.weight("b"))
    pieces[0][:] = 9.0
    assert not bool((tables.weight("b") == 9.0).any())
    other = new_tables("plain", tmp_path)
    list(other.weight_pieces("b"))
    assert [group.residency.compared for group in other.groups] == [[], []]


def test_rows_back_at_their_initial_values_do_not_come_back_as_the_parents(tmp_path):
    """decay_scope="table" changes rows that no batch names."""

    def new():
        return hotbed.EmbeddingTables({"a": Table(50, 4)}, optim.Adagrad(lr=0.1, l2=0.01, decay_scope="table"))

    tables, untouched = new(), new()
    train(tables, [torch.arange(40).unsqueeze(1)])
    hotbed.checkpoint.save(tmp_path / "saved", tables, step=0)
    tables.load_state_dict(untouched.state_dict())
    hotbed.checkpoint.save(tmp_path / "saved", tables, step=1)
    train(tables, [torch.tensor([[3]])])  # and all others decay
    hotbed.checkpoint.save(tmp_path / "saved", tables, step=2)
    other = new()
    hotbed.checkpoint.load(tmp_path / "saved", other)
    assert equal(tables, other)


def test_digests_tell_records_apart():
    rows = torch.randn(500, 6)
    digests = digests_of(rows)
    assert torch.equal(digests, digests_of(rows.clone()))
    for changed in (rows.neg(), rows.flip(1), rows.roll(1, 1), torch.nextafter(rows, rows + 1)):
        assert bool((digests_of(changed) != digests).all())
    one = rows.clone()
    one[7, 2] = -one[7, 2]
    assert (digests_of(one) != digests).nonzero().tolist() == [[7]]
    assert torch.equal(
        digests_of(one.double())[8:] != digests_of(rows.double())[8:], torch.zeros(492, dtype=torch.bool)
    )


@pytest.mark.parametrize("kind", ["plain", "cached"])
def test_weights_that_were_put_in_are_touched(tmp_path, kind):
    tables = new_tables(kind, tmp_path)
    train(tables, batches(3))
    hotbed.checkpoint.save(tmp_path / "saved", tables, step=0)
    tables.load_weight("b", torch.full((ROWS["b"], 8), 7.0))
    hotbed.checkpoint.save(tmp_path / "saved", tables, step=1)
    other = new_tables("plain", tmp_path)
    hotbed.checkpoint.load(tmp_path / "saved", other)
    assert equal(tables, other)


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_every_changed_row_of_every_chunk_is_written_back(tmp_path, monkeypatch, chunk):
    """Those that a flush writes back at once are 2^18 otherwise, more than any test has."""
    monkeypatch.setattr("hotbed.tables.group.cached.CHUNK", chunk)
    tables, plain = new_tables("cached", tmp_path), new_tables("plain", tmp_path)
    for each in (tables, plain):
        train(each, batches(3))
    tables.flush()
    for group, whole in zip(tables.groups, plain.groups):
        keys, _ = group.residency.cache.resident()
        assert keys.shape[0] > 2 * chunk
        rows = torch.empty(keys.shape[0], group.layout.width)
        group.residency.store.read(keys, rows)
        assert torch.equal(rows[:, : group.layout.used], whole.records[keys][:, : group.layout.used])
        assert group.residency.cache.dirty()[0].shape[0] == 0


def test_marks_follow_the_rows_to_another_device(tmp_path):
    tables = new_tables("plain", tmp_path)
    with tables.snapshot() as snapshot:
        snapshot.commit()
    tables.to("meta")
    assert all(group.residency.touched.device == group.records.device for group in tables.groups)


def test_tables_that_lost_rows_in_a_plain_look_up_say_so(tmp_path, monkeypatch):
    def refuse(*_):
        raise StoreError("the disk is full")

    tables = new_tables("tiered", tmp_path)
    train(tables, batches(5))
    with monkeypatch.context() as patch:
        for group in tables.groups:
            patch.setattr(group.residency.store, "write", refuse)
        with pytest.raises(StoreError, match="full"):
            train(tables, batches(5, seed=1))
    with pytest.raises(HotbedError, match="lost rows"):
        tables(batches(1, seed=2)[0])
    with pytest.raises(HotbedError, match="lost rows"):
        tables.snapshot()


def dynamic_tables(folder, **budgets):
    if "ssd" in budgets:
        budgets["ssd"] = f"{folder}:16MiB"
    return hotbed.EmbeddingTables({"a": Table(None, 8)}, optim.Adam(lr=0.05), seed=3, hbm="12KiB", **budgets)


@pytest.mark.parametrize("into", [{"memory": "1MiB", "ssd": True}, {"memory": "4MiB"}])
def test_rows_of_ids_that_were_only_looked_ahead_are_nobodys(tmp_path, into):
    """Another id that gets such a row later begins with its own first value."""
    ids = [torch.arange(20 * n, 20 * n + 20).unsqueeze(1) for n in range(30)]
    tables = dynamic_tables(tmp_path / "rows", memory="1MiB", ssd=True)
    feed = hotbed.prefetch(ids, tables, look_ahead=6)
    for number, batch in enumerate(feed):
        train(tables, [batch])
        if number == 9:
            hotbed.checkpoint.save(tmp_path / "saved", tables)
            break
    feed.close()
    other, expected = (dynamic_tables(tmp_path / name, **into) for name in ("other", "expected"))
    hotbed.checkpoint.load(tmp_path / "saved", other)
    train(expected, ids[:10])
    for each in (other, expected):
        train(each, ids[20:])
    (_, found), (_, wanted) = other.rows("a"), expected.rows("a")
    assert all(torch.equal(found[name], column) for name, column in wanted.items())


def test_files_of_more_rows_than_memory_has_room_for_are_refused(tmp_path):
    tables = dynamic_tables(tmp_path / "rows", memory="4MiB", ssd=True)
    train(tables, [torch.arange(50 * n, 50 * n + 50).unsqueeze(1) for n in range(40)])
    hotbed.checkpoint.save(tmp_path / "saved", tables)
    other = dynamic_tables(tmp_path / "other", memory="20KiB")
    with pytest.raises(BudgetError, match="room for"):
        hotbed.checkpoint.load(tmp_path / "saved", other)
