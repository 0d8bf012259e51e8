"""Dynamic ids for whoever goes by ids: warm starts, diffs, rows that come without a number."""

import pytest
import torch

import hotbed
from hotbed import Admit, Expire, Table, checkpoint, optim
from hotbed.checkpoint.chain import chain_of, find
from hotbed.checkpoint.diff import diff
from hotbed.checkpoint.owners import Owners
from hotbed.checkpoint.read import rows_of
from hotbed.errors import BudgetError
from hotbed.types import RowPart

RULES = {"admit": Admit(after=2), "expire": Expire(unused_steps=20, every=10)}
STEPS = (60, 300, 470)  # rows of ids that expired before step 60 have other owners by 470


def make(tables=None, budgets=None, optimizer=None):
    tables = tables or {"user": Table(None, 4, **RULES), "item": Table(None, 4), "page": Table(40, 4)}
    return hotbed.EmbeddingTables(
        tables, optimizer or optim.Adagrad(lr=0.1), seed=3, **(budgets or {"hbm": "64KiB", "memory": "64MiB"})
    )


def train(tables, step):
    generator = torch.Generator().manual_seed(step)
    user = (torch.rand(8, generator=generator) ** 2 * 12).long() + step // 5 * 3 - 7
    item = (torch.rand(8, generator=generator) * 20).long() * 2**50
    if step <= STEPS[0]:  # many rows in the first checkpoint, so that the others add to it
        item = torch.arange(8) + 8 * step
    tables(torch.stack([user, item, user.abs() % 40], 1)).pow(2).sum().backward()


@pytest.fixture(scope="module", params=["memory", "ssd"])
def source(request, tmp_path_factory):
    """Checkpoints that add to each other, and tables as the last of them has them."""
    folder = tmp_path_factory.mktemp(request.param)
    ssd = {"hbm": "16KiB", "memory": "1MiB", "ssd": f"{folder / 'rows'}:32MiB"}
    tables = make(budgets=ssd if request.param == "ssd" else None)
    for step in range(1, STEPS[-1] + 1):
        train(tables, step)
        if step in STEPS:
            checkpoint.save(folder / "saved", tables, step=step, policy=checkpoint.Policy(keep=3))
    assert tables.id_counts()["user"].expired > 100
    return folder / "saved", tables


def assert_same_rows(one, other, table, columns=("weight", "sum_of_squares")):
    (ids, mine), (their_ids, theirs) = one.rows(table), other.rows(table)
    assert torch.equal(ids, their_ids)
    for name in columns:
        assert torch.equal(mine[name], theirs[name]), name


def test_rows_have_had_several_owners(source):
    """Else the tests here would say nothing."""
    place, _ = source
    chain = chain_of(find(place))
    if chain[-1].manifest.linked:
        return  # files of an ssd hold all rows each time, so that a chain is short
    owners, pairs, num_lost = Owners(chain), set(), 0
    for part in (part for entry in chain for part in rows_of(entry) if part.table == "user"):
        pairs |= set(zip(part.columns["row"].tolist(), part.ids.tolist()))
        num_lost += int((~owners.owned(part)).sum())
    assert len({row for row, _ in pairs}) < len(pairs)
    assert num_lost > 0


def test_warm_start_into_the_same_tables(source):
    place, tables = source
    other = make()
    carried = checkpoint.warm_start(place, other)
    for table in tables.tables:
        assert_same_rows(tables, other, table)
        assert carried.rows[table] == (len(tables.rows(table)[0]) if table != "page" else carried.rows["page"])
    assert torch.equal(tables.shared_row("user")["weight"], other.shared_row("user")["weight"])
    assert other.shared_row("item") is None
    other.groups[0].keyspace.translator.check_integrity()
    before = len(other.ids("user"))
    for step in range(1000, 1030):  # last uses begin now: old ids go after 20 steps, and no row is given twice
        train(other, step)
    other.groups[0].keyspace.translator.check_integrity()
    assert other.id_counts()["user"].expired >= before


def test_warm_start_into_another_optimizer_and_a_wider_dim(source):
    place, tables = source
    other = make({"user": Table(None, 6), "new": Table(None, 6)}, optimizer=optim.Adam(lr=0.1))
    carried = checkpoint.warm_start(place, other)
    assert any("re-initialised for Adam" in note for note in carried.notes)
    ids, columns = tables.rows("user")
    their_ids, theirs = other.rows("user")
    assert torch.equal(ids, their_ids)
    assert torch.equal(columns["weight"], theirs["weight"][:, :4])
    assert len(other.ids("new")) == 0


def test_warm_start_into_a_number_of_rows_and_back(source, tmp_path):
    """Ids become row numbers where they fit; the shared row is no id's."""
    place, tables = source
    ids, columns = tables.rows("user")
    preset = make({"user": Table(int(ids.max()), 4)}, {})
    carried = checkpoint.warm_start(place, preset)
    first = make({"user": Table(int(ids.max()), 4)}, {}).weight("user")
    inside = (ids >= 0) & (ids < int(ids.max()))
    assert carried.rows["user"] == int(inside.sum())
    assert carried.rows["user"] < len(ids)
    expected = first.clone()
    expected[ids[inside]] = columns["weight"][inside]
    assert torch.equal(preset.weight("user"), expected)

    checkpoint.save(tmp_path / "preset", preset)
    dynamic = make({"user": Table(None, 4)})
    checkpoint.warm_start(tmp_path / "preset", dynamic)
    their_ids, theirs = dynamic.rows("user")
    assert set(ids[inside].tolist()) <= set(their_ids.tolist())
    assert torch.equal(theirs["weight"], preset.weight("user")[their_ids])


def test_warm_start_under_other_ids(source):
    place, tables = source
    ids, columns = tables.rows("user")
    translation = torch.full((int(ids.max()) + 1,), -1)
    known = ids[ids >= 0][::2]
    translation[known] = known * 2**40
    other = make({"user": Table(None, 4)})
    carried = checkpoint.warm_start(place, other, translation={"user": translation})
    assert other.ids("user").tolist() == (known * 2**40).tolist()
    assert carried.rows["user"] == len(known)
    assert any("rows whose ids the tables do not have: user" in note for note in carried.notes)
    assert torch.equal(other.rows("user")[1]["weight"], columns["weight"][torch.isin(ids, known)])


def test_diff_goes_by_ids(tmp_path):
    tables = make({"user": Table(None, 4, expire=Expire(unused_steps=20, every=10))})

    def step(*ids):
        tables(torch.tensor(ids)[:, None]).pow(2).sum().backward()

    for _ in range(30):
        step(1, 2, 3)
    checkpoint.save(tmp_path, tables, step=1)
    for _ in range(60):
        step(1, 2)
    checkpoint.save(tmp_path, tables, step=2)
    for _ in range(420):  # 3 is gone, and what its row was is another's
        step(1, *range(90, 94))
    step(2, 3)
    checkpoint.save(tmp_path, tables, step=3)
    entries = [[find(tmp_path / f"{number:012}")] for number in (1, 2, 3)]
    found = diff(*entries[:2]).tables["user"]
    assert (found.same, found.changed, found.added, found.gone) == (0, 2, 0, 1)
    found = diff(*entries[1:]).tables["user"]
    assert (found.same, found.changed, found.added, found.gone) == (0, 2, 5, 0)
    same = diff(entries[2], entries[2]).tables["user"]
    assert (same.same, same.changed) == (7, 0)


def test_diff_of_a_shared_row_is_not_that_of_id_zero(tmp_path):
    tables = make({"user": Table(None, 4, admit=Admit(after=2))})
    for number, ids in ((1, [0, 0, 5, 5]), (2, [9, 11])):  # the last two read the shared row, and train it
        tables(torch.tensor(ids)[:, None]).pow(2).sum().backward()
        checkpoint.save(tmp_path, tables, step=number)
    found = diff(*([find(tmp_path / f"{number:012}")] for number in (1, 2))).tables
    assert (found["user"].same, found["user"].changed) == (2, 0)
    assert (found["user (shared row)"].same, found["user (shared row)"].changed) == (0, 1)


def test_diff_of_rows_on_an_ssd(source):
    place, _ = source
    found = diff([find(place / f"{STEPS[0]:012}")], [find(place)])
    assert found.tables["page"].changed > 0 or found.frozen


def test_rows_without_numbers_replace_all_others():
    tables = make()
    for step in range(30):
        train(tables, step)
    page = tables.weight("page").clone()
    weight = torch.randn(3, 4)
    shared = RowPart("user", torch.zeros(1, dtype=torch.int64), {"weight": weight[:1], "shared": torch.ones(1)})
    rows = RowPart("user", torch.tensor([5, -9, 2**62]), {"weight": weight})
    tables.load_rows([rows, shared])
    assert tables.ids("user").tolist() == [-9, 5, 2**62]
    assert tables.ids("item").tolist() == []
    assert torch.equal(torch.cat(list(tables.weight_pieces("user"))), weight[[1, 0, 2]])
    assert torch.equal(tables.shared_row("user")["weight"], weight[:1])
    assert torch.equal(tables.weight("page"), page)
    tables.eval()
    ids = torch.tensor([[5, 0, 0], [77, 0, 0]])
    assert torch.equal(tables(ids)[:, 0].detach(), weight[[0, 0]])  # 77 reads the shared one


def test_more_rows_than_there_is_room_for():
    tables = make({"user": Table(None, 4)}, {"hbm": "16KiB", "memory": "8KiB"})
    with pytest.raises(BudgetError, match=r"there are 1,000 rows of dynamic ids to load, and memory= has room for \d+"):
        tables.load_rows([RowPart("user", torch.arange(1000), {"weight": torch.zeros(1000, 4)})])


@pytest.mark.parametrize(
    "below", [{"hbm": "16KiB"}, {"ssd": "32MiB"}, {"hbm": "16KiB", "ssd": "32MiB"}], ids=["memory", "ssd", "tiered"]
)
def test_new_ids_begin_anew_whatever_was_ahead_when_a_checkpoint_was_saved(tmp_path, below):
    """Files of an ssd have records of ids of batches ahead, which no later checkpoint names."""
    users, saved = {"user": Table(None, 4)}, tmp_path / "saved"

    def on_ssd(name, budgets):
        place = {"ssd": f"{tmp_path / name}:{budgets['ssd']}"} if "ssd" in budgets else {}
        return make(users, {"memory": "2MiB", **budgets, **place})

    first = on_ssd("first", {"ssd": "32MiB"})
    batches = [torch.arange(8 * n, 8 * n + 8).view(8, 1) for n in range(4)]
    loop = hotbed.prefetch(batches, first, window=2, look_ahead=4)
    first(next(loop)).pow(2).sum().backward()
    checkpoint.save(saved, first, step=1)
    loop.close()
    second = on_ssd("second", below)
    checkpoint.load(saved, second)
    second(batches[0]).pow(2).sum().backward()
    checkpoint.save(saved, second, step=2)
    third = on_ssd("third", below)
    checkpoint.load(saved, third)
    new = torch.arange(100, 124).view(24, 1)
    assert torch.equal(third(new), make(users)(new))
