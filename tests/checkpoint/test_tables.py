"""EmbeddingTables through save, load and warm_start."""

import pytest
import torch
from torch import nn

import hotbed
from hotbed import checkpoint
from hotbed.checkpoint import Policy
from hotbed.checkpoint.chain import find
from hotbed.errors import RunError

TABLES = {"user": hotbed.Table(rows=500, dim=6), "ad": hotbed.Table(rows=40, dim=3)}
OPTIMIZERS = [hotbed.optim.SGD, hotbed.optim.Adagrad, hotbed.optim.RowwiseAdagrad, hotbed.optim.Adam, hotbed.optim.FTRL]


def make(optimizer=hotbed.optim.Adam, tables=TABLES, **settings):
    return hotbed.EmbeddingTables(tables, optimizer(lr=0.1), output="dict", **settings)


def train(tables, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = {name: torch.randint(0, table.rows, (8,), generator=generator) for name, table in tables.tables.items()}
        sum((vector * vector.detach().cos()).sum() for vector in tables(ids).values()).backward()


def same(one, other):
    mine, yours = one.state_dict(), other.state_dict()
    return mine.keys() == yours.keys() and all(torch.equal(mine[name], yours[name]) for name in mine)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("settings", [{}, {"cache": 0.2}, {"precision": "bf16"}, {"precision": "fp16"}], ids=str)
def test_rows_come_back_to_the_bit(tmp_path, optimizer, settings):
    tables = make(optimizer, **settings)
    for steps in (5, 1, 2):
        train(tables, steps, seed=steps)
        checkpoint.save(tmp_path, tables)
    assert find(tmp_path).manifest.kind == "incremental"
    other = make(optimizer, **settings)
    train(other, 3, seed=9)
    checkpoint.load(tmp_path, other)
    assert same(tables, other)
    train(tables, 3, seed=4)
    train(other, 3, seed=4)
    assert same(tables, other)


def test_only_rows_ever_trained_are_saved(tmp_path):
    tables = make()
    train(tables, 2)
    checkpoint.save(tmp_path, tables)
    assert 0 < find(tmp_path).manifest.rows["user"] <= 16


def test_a_cache_of_another_size_will_do(tmp_path):
    tables = make(cache=0.2)
    train(tables, 5)
    checkpoint.save(tmp_path, tables)
    other = make()
    checkpoint.load(tmp_path, other)
    assert same(tables, other)


def test_model_optimizer_and_extra(tmp_path):
    tables, model = make(), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    saved = checkpoint.save(tmp_path, tables, step=7, model=model, optimizer=optimizer, extra={"epoch": 3})
    assert saved.name == "000000000007"
    twin = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    twin_optimizer = torch.optim.Adam(twin.parameters())
    found = checkpoint.load(tmp_path, make(), model=twin, optimizer=twin_optimizer)
    assert (found.step, found.extra) == (7, {"epoch": 3})
    assert all(torch.equal(one, other) for one, other in zip(model.state_dict().values(), twin.state_dict().values()))
    mine, yours = (one.state_dict()["state"] for one in (optimizer, twin_optimizer))
    assert len(mine) == 6
    assert all(torch.equal(mine[number][name], yours[number][name]) for number in mine for name in mine[number])


def test_another_model_is_reported_before_rows_are_loaded(tmp_path):
    tables = make()
    train(tables, 2)
    checkpoint.save(tmp_path, tables, model=nn.Linear(3, 1))
    other = make()
    fresh = {name: one.clone() for name, one in other.state_dict().items()}
    with pytest.raises(RunError, match=r"2 dense tensors differ|1 dense tensors differ"):
        checkpoint.load(tmp_path, other, model=nn.Linear(4, 1))
    assert all(torch.equal(one, fresh[name]) for name, one in other.state_dict().items())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"seed": 1}, "seed 0, not 1"),
        ({"optimizer": hotbed.optim.SGD}, "optimizer Adam, not SGD"),
        ({"precision": "bf16"}, "precision fp32, not bf16"),
        ({"tables": {**TABLES, "ad": hotbed.Table(rows=41, dim=3)}}, "rows 40, not 41"),
    ],
    ids=lambda one: str(one)[:20],
)
def test_tables_that_would_read_wrong_rows_are_refused(tmp_path, change, what):
    checkpoint.save(tmp_path, make())
    with pytest.raises(RunError, match=what):
        checkpoint.load(tmp_path, make(**change))


@pytest.fixture
def source(tmp_path):
    tables, model = make(), nn.Linear(3, 2)
    train(tables, 20)
    checkpoint.save(tmp_path / "c", tables, model=model, policy=Policy(keep=5))
    train(tables, 3, seed=5)
    checkpoint.save(tmp_path / "c", tables, model=model, policy=Policy(keep=5))
    return tmp_path / "c", tables, model


def test_warm_start_into_the_same_tables(source):
    place, tables, model = source
    other, twin = make(cache=0.3), nn.Linear(3, 2)
    carried = checkpoint.warm_start(place, other, model=twin)
    for name in TABLES:
        assert torch.equal(other.weight(name), tables.weight(name))
        assert all(torch.equal(one, tables.states(name)[state]) for state, one in other.states(name).items())
    assert torch.equal(twin.weight, model.weight)
    assert (carried.dense, other.num_updates, len(carried.notes)) == (2, 0, 1)


def test_warm_start_into_another_optimizer(source):
    place, tables, _ = source
    for optimizer in OPTIMIZERS[:3] + OPTIMIZERS[4:]:
        other = make(optimizer)
        carried = checkpoint.warm_start(place, other)
        assert torch.equal(other.weight("user"), tables.weight("user"))
        first = other.optimizer.first_state(other.weight("user"))
        for name, state in other.states("user").items():
            assert torch.equal(state, torch.as_tensor(first[name]).expand_as(state))
        assert f"tables user, ad: optimizer state of Adam is re-initialised for {optimizer.__name__}" in carried.notes


def test_warm_start_into_grown_shrunk_added_removed_and_wider_tables(source):
    place, tables, _ = source
    changed = {
        "user": hotbed.Table(rows=300, dim=6),
        "site": hotbed.Table(rows=9, dim=2),
        "ad": hotbed.Table(rows=60, dim=5),
    }
    other, fresh = make(tables=changed), make(tables=changed)
    carried = checkpoint.warm_start(place, other)
    assert torch.equal(other.weight("user"), tables.weight("user")[:300])
    assert torch.equal(other.weight("site"), fresh.weight("site"))
    trained = (tables.states("ad")["step"] > 0).view(-1)
    assert torch.equal(other.weight("ad")[:40][trained][:, :3], tables.weight("ad")[trained])
    assert torch.equal(other.weight("ad")[:40][:, 3:], fresh.weight("ad")[:40][:, 3:])
    assert torch.equal(other.weight("ad")[40:], fresh.weight("ad")[40:])
    notes = "\n".join(carried.notes)
    assert "table site: new" in notes
    assert "table ad: numbers 3 to 4 of every vector begin with initial values" in notes
    assert "rows whose ids the tables do not have: user" in notes
    removed = checkpoint.warm_start(place, make(tables={"user": TABLES["user"]}))
    assert "table ad: not in this model" in removed.notes


def test_warm_start_refuses_what_means_something_else(tmp_path):
    tables = make(tables={"site": hotbed.Table(rows=50, dim=4, hashing=True), "ad": hotbed.Table(rows=9, dim=4)})
    train(tables, 3)
    checkpoint.save(tmp_path, tables)
    changed = {"site": hotbed.Table(rows=60, dim=4, hashing=True), "ad": hotbed.Table(rows=9, dim=2)}
    other, fresh = make(tables=changed), make(tables=changed)
    carried = checkpoint.warm_start(tmp_path, other)
    assert same(other, fresh)
    assert carried.rows == {}
    assert any("hashed into a different number of rows" in note for note in carried.notes)
    assert any("vectors of 4 numbers do not fit in 2" in note for note in carried.notes)


def test_warm_start_follows_ids_that_were_numbered_again(source):
    place, tables, _ = source
    turned = torch.arange(499, -1, -1)
    turned[7] = -1
    other = make()
    carried = checkpoint.warm_start(place, other, translation={"user": turned})
    trained = (tables.states("user")["step"] > 0).view(-1)
    trained[7] = False
    assert torch.equal(other.weight("user").flip(0)[trained], tables.weight("user")[trained])
    assert carried.rows["user"] == int(trained.sum())


def test_warm_start_into_a_changed_model(source):
    place, _, model = source
    other = nn.ModuleDict({"new": nn.Linear(2, 2)})
    carried = checkpoint.warm_start(place, make(), model=other)
    assert carried.dense == 0
    assert {
        "dense new.weight is new: it begins as in a new model",
        "dense weight: the model has none of this name",
    } <= set(carried.notes)
    wider = nn.Linear(4, 2)
    carried = checkpoint.warm_start(place, make(), model=wider)
    assert torch.equal(wider.bias, model.bias)
    assert "dense weight: its shape was [2, 3], now [2, 4]; it begins as in a new model" in carried.notes


def test_after_a_warm_start_the_next_checkpoint_is_full(source):
    place, _, _ = source
    other = make()
    checkpoint.load(place, other)
    checkpoint.warm_start(place, other)
    checkpoint.save(place, other, step=99)
    assert find(place).manifest.kind == "full"


def test_who_went_back_saves_elsewhere_or_gives_up_what_came_later(tmp_path):
    tables = make()
    for _ in range(5):
        train(tables, 10)
        checkpoint.save(tmp_path, tables, policy=Policy(keep=5))
    checkpoint.load(tmp_path / "000000000020", tables)
    train(tables, 5)
    with pytest.raises(RunError, match=r"holds step 50, later than the 25 to be saved.*discard_after"):
        checkpoint.save(tmp_path, tables)
    assert len(list(tmp_path.glob("0*"))) == 5
    assert [one.name[-2:] for one in checkpoint.discard_after(tmp_path, 25)] == ["30", "40", "50"]
    assert checkpoint.save(tmp_path, tables).name == "000000000025"
    other = make()
    assert checkpoint.load(tmp_path, other).step == 25
    assert same(tables, other)


def test_the_saver_of_a_run_keeps_what_it_has_just_written(tmp_path):
    tables = make()
    for step in (30, 40, 50):
        train(tables, 1)
        checkpoint.save(tmp_path, tables, step=step, policy=Policy(keep=3))
    checkpoint.Saver(tmp_path, tables, Policy(keep=2)).save(checkpoint.State(20, {}, {}), wait=True)
    assert min(one.name[-2:] for one in tmp_path.glob("0*")) == "20"
