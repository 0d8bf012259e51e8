"""Tables with rows=None: any id, who gets a row, what evaluation sees, and what is told when something does not fit."""

import copy
from unittest import mock

import pytest
import torch

import hotbed
from hotbed import Admit, Constant, Expire, Jagged, Normal, Table, Uniform, checkpoint, optim
from hotbed.cache import BYTES_PER_SLOT, Cache, make_policy
from hotbed.errors import BudgetError, ConfigError, HotbedError
from hotbed.ids import Translator
from hotbed.ops.init_rows import stream_of
from hotbed.ops.lookups import Span
from hotbed.ops.move import InitialTable, initial_records, initial_rows
from hotbed.ops.records import layout_of
from hotbed.store import MemoryStore
from hotbed.tables.group.temporary import TEMPORARY
from hotbed.tables.sizing.budget import BYTES_PER_ID, Budgets, rooms_of

LOW, HIGH = -(2**63), 2**63 - 1


def make(tables=None, optimizer=None, hbm="64KiB", **options):
    tables = {"user": Table(None, 4)} if tables is None else tables
    return hotbed.EmbeddingTables(tables, optimizer or optim.Adam(lr=0.1), hbm=hbm, **options)


def column(*ids):
    return torch.tensor(ids).unsqueeze(1)


def train(tables, *ids):
    vectors = tables(column(*ids))
    vectors.pow(2).sum().backward()
    return vectors.detach()


def look(tables, *ids):
    with torch.no_grad():
        return tables(column(*ids)).squeeze(1)


def test_any_64_bit_id_has_a_row_of_its_own():
    ids = [LOW, LOW + 1, -2, -1, 0, 1, 2**31, 2**32, 2**32 + 1, TEMPORARY, HIGH - 1, HIGH]
    tables = make()
    first = train(tables, *ids).squeeze(1)
    assert torch.unique(first, dim=0).shape[0] == len(ids)
    assert bool((first.abs().sum(dim=1) > 0).all())
    found, columns = tables.rows("user")
    assert found.tolist() == ids
    assert not torch.equal(columns["weight"], first)
    assert torch.equal(columns["step"], torch.ones(len(ids), 1))


def test_two_tables_never_share_rows():
    tables = make({"user": Table(None, 4, init=Constant(1.0)), "ad": Table(None, 4, init=Constant(1.0))})
    vectors = tables(torch.tensor([[7, 7], [LOW, 8]]))
    assert vectors.shape == (2, 2, 4)
    vectors[:, 0].sum().backward()
    assert tables.rows("user")[0].tolist() == [LOW, 7]
    assert tables.rows("ad")[0].tolist() == [7, 8]
    assert bool((tables.rows("user")[1]["weight"] != 1).all())
    assert bool((tables.rows("ad")[1]["weight"] == 1).all())


@pytest.mark.parametrize("optimizer", [optim.SGD(), optim.Adam(), optim.FTRL(l1=0.1)], ids=lambda one: one.rule.name)
def test_initial_values_are_those_of_a_preset_table(optimizer):
    """A pure function of (seed, table, id)."""
    preset = hotbed.EmbeddingTables({"user": Table(50, 4)}, optimizer, seed=9)
    ids = torch.randperm(50, generator=torch.Generator().manual_seed(0)).unsqueeze(1)
    dynamic = make(optimizer=optimizer, seed=9)
    dynamic(ids)
    assert torch.equal(dynamic.rows("user")[1]["weight"], preset.weight("user"))
    for name, state in preset.states("user").items():
        assert torch.equal(dynamic.rows("user")[1][name], state)


def test_tables_that_start_alike_and_others_are_made_together():
    """Also the one id of each table that kernels would take for padding."""
    inits = {"a": Normal(0.1), "b": Uniform(0.2), "c": Normal(0.1), "d": Constant(0.3)}
    tables = make({name: Table(None, 4, init=init) for name, init in inits.items()})
    keyspace, seed = tables.groups[0].keyspace, tables.groups[0].seed
    for name, init in inits.items():
        stream = stream_of(seed, name)
        ids = torch.tensor([LOW, -2, -1, 0, 5, 2**40, HIGH, (-1 - stream + 2**63) % 2**64 - 2**63])
        expected = [
            initial_records(ids, initial_rows(4, tables.optimizer, [InitialTable(0, stream, init, no_id)]))
            for no_id in (-1, -2)
        ]
        is_minus_one = (ids == -1).unsqueeze(1)
        assert torch.equal(keyspace.first_of_ids(name, ids), torch.where(is_minus_one, expected[1], expected[0])), name
    ids = torch.stack([torch.arange(6) for _ in inits], dim=1)
    with torch.no_grad():
        vectors = tables(ids)
    for column, name in enumerate(inits):
        assert torch.equal(vectors[:, column], keyspace.first_of_ids(name, ids[:, column])[:, :4])


@pytest.mark.parametrize(
    "rules", [{}, {"admit": Admit(after=2), "expire": Expire(unused_steps=2, every=1)}], ids=["none", "both"]
)
@pytest.mark.parametrize("ahead", [False, True])
def test_evaluation_changes_nothing_and_reads_first_values(ahead, rules):
    def run(evaluates):
        tables = make({"user": Table(None, 4, **rules)}, hbm=8 * (48 + BYTES_PER_SLOT))
        batches = [column(*(n % 5, n % 3, 100 + n // 2)) for n in range(40)]
        for n, ids in enumerate(hotbed.prefetch(batches, tables, window=2, look_ahead=6) if ahead else batches):
            tables(ids).pow(2).sum().backward()
            if evaluates and n % 3 == 0:
                tables.eval()
                before = tables.id_counts()
                one, other = look(tables, -1, 500 + n, LOW, -1), look(tables, LOW, -1)
                assert torch.equal(one[0], one[3])
                assert torch.equal(one[0], other[1])
                assert torch.equal(one[2], other[0])
                assert bool((one.abs().sum(dim=1) > 0).all())
                if rules:
                    assert torch.equal(one[0], tables.shared_row("user")["weight"][0])
                assert tables.id_counts() == before
                tables.train()
        return tables

    quiet, asked = run(False), run(True)
    assert quiet.id_counts() == asked.id_counts()
    assert torch.equal(quiet.rows("user")[0], asked.rows("user")[0])
    for name, value in quiet.rows("user")[1].items():
        assert torch.equal(value, asked.rows("user")[1][name])
    asked.caches[0].cache.check_integrity()
    assert asked.caches[0].store.num_written <= quiet.groups[0].keyspace.translator.end  # no temporary row was written


def test_an_unknown_id_reads_what_it_will_start_from():
    tables = make()
    seen = look(tables, 5, HIGH)
    assert tables.rows("user")[0].tolist() == []
    assert torch.equal(train(tables, 5, HIGH).squeeze(1), seen)
    assert not torch.equal(look(tables, 5, HIGH), seen)


def test_temporary_rows_stay_as_long_as_their_batch():
    """Weights of a bag get a gradient outside training: rows are brought in again for it."""
    tables = make({"user": Table(None, 4)}, hbm=6 * (48 + BYTES_PER_SLOT))
    tables.eval()
    weights = torch.ones(3, requires_grad=True)
    out = tables({"user": Jagged(torch.tensor([1, 2, 3]), torch.tensor([0, 3]), weights)})
    for n in range(30):
        look(tables, *range(10 * n, 10 * n + 4))
    out.sum().backward()
    rows = look(tables, 1, 2, 3)
    torch.testing.assert_close(weights.grad, rows.sum(dim=1))
    ids = tables.groups[0].keyspace
    del out
    look(tables, 9)
    assert len(ids.temporary) <= 3


def test_admission_and_expiry_are_counted():
    tables = make(
        {
            "user": Table(None, 4, admit=Admit(after=3), expire=Expire(unused_steps=2, every=1)),
            "ad": Table(None, 4, padding_id=0),
        }
    )
    for _ in range(3):
        tables(torch.tensor([[7, 1], [8, 0]])).sum().backward()
    for _ in range(6):
        tables(torch.tensor([[7, 1], [7, 2]])).sum().backward()
    counts = tables.id_counts()
    assert counts["user"] == (18, 2, 4, 1)
    assert counts["ad"] == (15, 2, 0, 0)
    assert tables.rows("user")[0].tolist() == [7]
    assert tables.rows("ad")[0].tolist() == [1, 2]
    assert tables.shared_row("user")["step"].tolist() == [[2.0]]
    assert tables.shared_row("ad") is None


def test_a_row_that_is_given_again_starts_anew():
    with mock.patch("hotbed.tables.group.dynamic.QUARANTINE", 3):
        tables = make({"user": Table(None, 4, expire=Expire(unused_steps=1, every=1))})
        first = {}
        for n in range(40):
            first[n] = train(tables, n).view(4)
        assert tables.groups[0].keyspace.translator.end < 12
        again = make({"user": Table(None, 4)})
        assert all(torch.equal(look(again, n)[0], value) for n, value in first.items())


def test_a_batch_that_is_too_old_for_backward_is_refused_and_breaks_nothing():
    with mock.patch("hotbed.tables.group.dynamic.QUARANTINE", 3):
        tables, other = make({"user": Table(None, 4)}), make({"user": Table(None, 4)})
        old = tables(column(1))
        other(column(1))
        for n in range(2, 7):
            assert torch.equal(train(tables, n), train(other, n))
        with pytest.raises(HotbedError, match="call backward within 3 batches"):
            old.sum().backward()
        assert torch.equal(train(tables, 1), train(other, 1))


def test_a_batch_from_before_a_load_moves_no_row_of_other_ids(tmp_path):
    saved = make({"user": Table(None, 4)})
    train(saved, 7)
    checkpoint.save(tmp_path, saved)
    tables = make({"user": Table(None, 4)})
    old = tables(column(1))
    checkpoint.load(tmp_path, tables)
    before = tables.rows("user")[1]["weight"].clone()
    with pytest.raises(HotbedError, match="looked up before rows were loaded"):
        old.sum().backward()
    assert torch.equal(tables.rows("user")[1]["weight"], before)
    assert torch.equal(train(tables, 8), train(saved, 8))


@pytest.mark.parametrize("ahead", [False, True])
def test_every_way_of_giving_ids(ahead):
    """Poolings, padding, weights, sequences and shared tables: as a preset table of the same rows, whatever they are called."""

    def declared(rows):
        first = {"init": Constant(0.2), "padding_id": 0}
        return {
            "bag": Table(rows, 4, pooling="mean", features=("bag", "single"), **first),
            "weighted": Table(rows, 4, **first),
            "sequence": Table(rows, 4, pooling="none", **first),
            "wide": Table(rows, 6, pooling="sum", **first),
        }

    generator = torch.Generator().manual_seed(0)

    def ids(*shape):
        return torch.randint(0, 30, shape, generator=generator)

    ends = torch.tensor([0, 2, 2, 5, 6])
    batches = [
        {
            "bag": Jagged(ids(6), ends),
            "single": ids(4),
            "weighted": Jagged(ids(6), ends, torch.rand(6, generator=generator)),
            "sequence": ids(4, 3),
            "wide": ids(4, 2),
        }
        for _ in range(12)
    ]
    preset, dynamic = (
        hotbed.EmbeddingTables(declared(30), optim.Adagrad()),
        make(declared(None), optim.Adagrad(), "8KiB"),
    )
    loader = hotbed.prefetch(batches, dynamic, window=2, look_ahead=4) if ahead else batches
    for inputs, given in zip(batches, loader):
        one, other = preset(inputs), dynamic(given)
        for name, vectors in one.items():
            assert torch.equal(vectors, other[name]), name
        for each in (one, other):
            sum(vectors.pow(2).sum() for vectors in each.values()).backward()
    assert dynamic.counters().evictions > 0
    assert 0 not in dynamic.rows("bag")[0]


def test_stacked_vectors_are_in_the_order_of_features():
    tables = {"a": Table(9, 4), "b": Table(None, 4), "c": Table(9, 4), "d": Table(None, 4)}
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    stacked, named = make(tables, seed=2), make(tables, seed=2, output="dict")
    assert len(stacked.groups) == 2
    vectors, expected = stacked(ids), named(ids)
    assert torch.equal(vectors, torch.stack([expected[name] for name in "abcd"], dim=1))
    assert torch.equal(make(tables, seed=2, output="concat")(ids), vectors.flatten(1))
    vectors.sum().backward()


def test_a_mistake_in_a_batch_teaches_nothing():
    tables = make({"user": Table(None, 4), "ad": Table(9, 4)}, hbm="4KiB")
    with pytest.raises(hotbed.errors.IdError, match="id 9 of feature 'ad'"):
        tables(torch.tensor([[5, 9]]))
    with pytest.raises(BudgetError, match=r"rows at once, but the cache has .* hbm=") as caught:
        tables(torch.stack([torch.arange(400), torch.zeros(400, dtype=torch.int64)], dim=1))
    assert "cache=" not in str(caught.value)
    assert [group.keyspace.translator.batch for group in tables.groups if group.keyspace.is_dynamic] == [0]
    assert tables.id_counts()["user"] == (0, 0, 0, 0)
    assert tables.rows("user")[0].tolist() == []
    tables(torch.tensor([[5, 8]])).sum().backward()
    assert tables.rows("user")[0].tolist() == [5]


def test_batches_kept_and_never_trained():
    """A feed goes on, however many of its batches nobody has called the tables with."""
    tables = make({"user": Table(None, 4, expire=Expire(unused_steps=1, every=1))})
    batches = [column(n, n + 1) for n in range(900)]
    kept = list(hotbed.prefetch(batches, tables))
    assert len(kept) == 900
    assert tables.id_counts()["user"].seen == 0
    train(tables, 5)
    assert tables.rows("user")[0].tolist() == [5]


def test_a_long_run_whose_rows_are_used_again():
    """Rows rest longer than any feed looks ahead: the same bits as a loop that looks nowhere."""
    rules = {"admit": Admit(after=2), "expire": Expire(unused_steps=8, every=16)}
    batches = [column(n, n // 2, n // 3 % 50, n // 7) for n in range(1000)]
    losses, results = [], []
    for look_ahead in (None, {}):
        tables = make({"user": Table(None, 2, **rules)}, optim.SGD(lr=0.1), hbm=600 * (16 + BYTES_PER_SLOT))
        loader = batches if look_ahead is None else hotbed.prefetch(batches, tables, **look_ahead)
        losses.append([])
        for ids in loader:
            assert not tables.groups[0].keyspace.has_released, "they are forgotten before others take them"
            loss = tables(ids).pow(2).sum()
            loss.backward()
            losses[-1].append(loss.item())
        results.append((tables.id_counts(), *tables.rows("user")))
        assert tables.groups[0].keyspace.translator.end < tables.id_counts()["user"].admitted - 100
    assert losses[0] == losses[1]
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][2]["weight"], results[1][2]["weight"])


def test_a_look_up_that_is_too_old_is_refused():
    tables = make({"user": Table(None, 2, expire=Expire(unused_steps=1, every=1))}, hbm=4 * (32 + BYTES_PER_SLOT))
    old = tables(column(1, 2)).sum()
    for n in range(400):
        train(tables, 10 + n % 3)
    with pytest.raises(HotbedError, match="looked up 400 training batches ago"):
        old.backward()


def test_whole_tables_cannot_be_had():
    tables = make()
    train(tables, 1)
    for ask in (lambda: tables.weight("user"), lambda: tables.states("user"), tables.state_dict):
        with pytest.raises(HotbedError, match=r"'user' has dynamic ids.*tables\.rows\('user'\).*hotbed\.checkpoint"):
            ask()
    preset = hotbed.EmbeddingTables({"ad": Table(3, 2)})
    ids, columns = preset.rows("ad")
    assert ids.tolist() == [0, 1, 2]
    assert torch.equal(columns["weight"], preset.weight("ad"))
    assert preset.shared_row("ad") is None
    assert preset.id_counts() == {}


def test_tables_move():
    tables = make()
    train(tables, 1, 2)
    before = tables.rows("user")[1]["weight"]
    tables.to("cpu")
    assert torch.equal(tables.rows("user")[1]["weight"], before)
    with pytest.raises(ConfigError, match="float32"):
        tables.double()
    with pytest.raises(HotbedError, match="cannot be copied"):  # as of all tables behind a cache
        copy.deepcopy(tables)


@pytest.mark.parametrize(
    ("tables", "options", "message"),
    [
        ({"a": Table(None, 4)}, {}, "give hbm=, its bytes on the device"),
        ({"a": Table(None, 4)}, {"cache": 0.1}, "have no number of rows; give hbm="),
        ({"a": Table(None, 4)}, {"hbm": 10}, "does not hold one row"),
        ({"a": Table(None, 4, hashing=True)}, {"hbm": "1MiB"}, "leave one of them out"),
        ({"a": Table(9, 4, admit=Admit(after=2))}, {}, "admit= is for dynamic ids"),
        ({"a": Table(9, 4, expire=Expire(unused_steps=2))}, {}, "expire= is for dynamic ids"),
        ({"a": Table(None, 4, admit=3)}, {"hbm": "1MiB"}, "admit must be a hotbed.Admit, not 3"),
        ({"a": Table(None, 4, padding_id=2**63)}, {"hbm": "1MiB"}, "must be a 64-bit id"),
        ({"a": Table(0, 4)}, {"hbm": "1MiB"}, "rows must be a whole number from 1"),
        ({"a": Table(None, 4)}, {"hbm": "1MiB", "ssd": "/tmp/x:1GiB"}, "give memory= too"),
    ],
)
def test_mistakes(tables, options, message):
    with pytest.raises(ConfigError, match=message):
        hotbed.EmbeddingTables(tables, **options)


@pytest.mark.parametrize("ahead", [False, True])
def test_memory_that_is_reached_is_reported_and_nothing_is_lost(ahead):
    record = layout_of(4, optim.SGD()).width * 4
    tables = make(optimizer=optim.SGD(lr=0.1), memory=100 * (record + 1 + BYTES_PER_ID))
    batches = [column(*range(10 * n, 10 * n + 10)) for n in range(20)]
    losses = []

    def loop():
        for ids in hotbed.prefetch(batches, tables, window=1, look_ahead=3) if ahead else batches:
            loss = tables(ids).sum()
            loss.backward()
            losses.append(loss.item())

    with pytest.raises(BudgetError, match=r"reached their part of memory=.*100 ids have rows.*Admit.*Expire"):
        loop()
    trained = len(losses)
    assert trained == 10 or (ahead and 5 <= trained < 10)
    assert tables.rows("user")[0].tolist() == list(range(10 * trained))
    train(tables, *range(10))


def test_counts_of_ids_that_wait_take_memory_too():
    tables = make({"user": Table(None, 4, admit=Admit(after=2))}, memory="1MiB")
    with pytest.raises(BudgetError, match=r"0 ids have rows, and 1\.0 MiB are for .*, and for the counts of as many"):
        tables(torch.arange(50_000).unsqueeze(1))
    with (
        mock.patch.object(Translator, "num_bytes", 20 << 20),
        pytest.raises(BudgetError, match=r"their index and rows take 20\.0 MiB of 1\.0 MiB"),
    ):
        tables(column(0))
    assert tables.id_counts()["user"].seen == 0
    tables(column(0))


def test_budgets_are_shared_with_preset_tables():
    record = layout_of(16, optim.Adagrad()).width * 4
    sizes = [(1000, record), (None, record), (None, 4 * record)]
    rooms = rooms_of(Budgets(hbm="1MiB", memory="16MiB"), sizes, "cuda")
    assert rooms[0].num_slots == 1000
    assert rooms[0].ids is None
    taken = sum(room.num_slots * (size + BYTES_PER_SLOT) for room, (_, size) in zip(rooms, sizes))
    assert 0.99 * 2**20 < taken <= 2**20
    held = [room.ids.rows * (size + 1 + BYTES_PER_ID) for room, (_, size) in zip(rooms[1:], sizes[1:])]
    assert 0.99 * (2**24 - 1000 * (record + 1)) < sum(held) <= 2**24 - 1000 * (record + 1)
    crowded = rooms_of(Budgets(hbm="1MiB"), [(10**6, record), (None, record)], "cuda")
    assert crowded[0].num_slots == crowded[1].num_slots
    assert crowded[1].ids.memory is None
    on_ssd = rooms_of(Budgets(hbm="1MiB", memory="16MiB", ssd="/x:1GiB"), [(None, record)], "cuda")[0]
    assert on_ssd.ids.memory <= 2**23
    assert 0.95 * 2**23 < on_ssd.place.memory_slots * (record + 25) <= 2**24 - on_ssd.ids.memory
    with pytest.raises(BudgetError, match="holds no row of dynamic ids"):
        rooms_of(Budgets(hbm="1MiB", memory=1000 * (record + 1)), sizes, "cuda")


def test_a_cache_forgets():
    cache = Cache(4, make_policy("lru"), torch.device("cpu"))
    for keys in ([1, 2, 3], [2, 3, 4]):
        cache.plan([cache.arrive_at_once(torch.tensor(keys), None)], train=True)
    ahead = cache.arrive(torch.tensor([3, 9]), None)
    cache.forget(torch.tensor([2, 3, 50]))
    cache.check_integrity()
    assert sorted(cache.resident()[0].tolist()) == [1, 4]
    assert sorted(cache.dirty()[0].tolist()) == [1, 4]
    plan = cache.plan([ahead], train=False)
    assert plan.miss_keys.tolist() == [3, 9]
    assert plan.num_evictions == 0
    cache.check_integrity()


def test_a_store_that_grows_walks_only_over_what_was_used():
    layout = layout_of(4, optim.SGD())
    store = MemoryStore(2**32 - 2, layout.width, lambda keys: torch.zeros(keys.shape[0], layout.width), grows=True)
    assert store.num_written == 0
    store.write(torch.tensor([5, 70_000]), torch.ones(2, layout.width))
    store.forget(torch.tensor([5]))
    assert store.num_written == 1
    assert [keys.tolist() for keys, _ in store.items()] == [[70_000]]
    store.clear()
    assert store.num_written == 0


@pytest.mark.parametrize("num_ahead", [1, 2])
def test_keys_of_a_batch_that_was_taken_back_are_used_no_more(num_ahead):
    """Whoever is translated next may have got the same rows."""
    ids = make().groups[0].keyspace

    def sense_of(*some):
        spans = (Span("user", 0, len(some), 1),)
        return ids.keys(torch.tensor(some), spans, ("user",), True)[2]

    senses = [sense_of(2 * n, 2 * n + 1) for n in range(num_ahead)]
    assert ids.fits(senses[0], True)
    ids.roll_back()
    assert not ids.fits(senses[0], True)
    again = sense_of(77)
    assert ids.fits(again, True)
    assert not ids.fits(senses[0], True)
