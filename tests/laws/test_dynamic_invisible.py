"""Law 1 for dynamic ids: any cache, tier, policy, look-ahead, and whatever a loop does in between, gives the same bits."""

import functools
import itertools
import tempfile
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hotbed
from hotbed import Admit, Expire, Jagged, Table
from hotbed.cache import POLICIES
from hotbed.tables import module as tables_module
from hotbed.tables.sizing.budget import rooms_of
from tests.laws.test_cache_invisible import OPTIMIZERS

RULES = {
    "none": {},
    "count": {"admit": Admit(after=2), "expire": Expire(unused_steps=4, every=3)},
    "sketch": {"admit": Admit(after=3, sketch=1024), "expire": Expire(score_below=0.6, half_life=3, every=2)},
    "chance": {"admit": Admit(probability=0.4), "expire": Expire(unused_steps=2, every=2)},
}
TIERS = ["memory", "tiered", "ssd"]
WINDOWS = [None, {"window": 1, "look_ahead": 1}, {"window": 2, "look_ahead": 5}, {"window": 3, "look_ahead": 8}]
SLOTS = 40
EVERY_ROW = 4000


@pytest.fixture(autouse=True)
def rows_rest_for_a_short_while():
    """So that rows of expired ids are used again within a test; longer than these feeds look ahead."""
    with mock.patch("hotbed.tables.group.dynamic.QUARANTINE", 30):
        yield


def make(tables, optimizer, tier="memory", slots=EVERY_ROW, folder=None, **options):
    """Tables with so many slots; the memory over an ssd holds a third as many rows."""
    budgets = {"hbm": "1MiB", "memory": "64MiB"}
    if tier != "memory":
        budgets["ssd"] = f"{folder}:64MiB"
    if tier == "ssd":
        del budgets["hbm"]

    def small(*arguments):
        rooms = [room._replace(num_slots=slots) for room in rooms_of(*arguments)]
        few = {"memory_slots": slots // 3} if tier == "tiered" else {}
        return [room._replace(place=room.place._replace(**few)) for room in rooms]

    with mock.patch.object(tables_module, "rooms_of", small):
        return hotbed.EmbeddingTables(tables, optimizer, seed=3, **budgets, **options)


def close(tables):
    for group in tables.groups:
        group.residency.store.close()


def scattered(numbers):
    """Ids all over 64 bits; few of them small, and the extremes among them."""
    ids = numbers * -7046029254386353131
    ids[numbers == 0], ids[numbers == 1], ids[numbers == 2] = -(2**63), 2**63 - 1, -1
    return ids


def random_batches(count, size=9, seed=0):
    """Bags of `a`, and ids of `b` and `c`; some ids come all the time, most for a while."""
    generator = torch.Generator().manual_seed(seed)

    def ids(number, batch):
        rare = (torch.rand(number, generator=generator) ** 3 * 40).long() + 2 * batch
        often = torch.randint(0, 6, (number,), generator=generator)
        return scattered(torch.where(torch.rand(number, generator=generator) < 0.3, often, rare))

    batches = []
    for batch in range(count):
        lengths = torch.randint(0, 4, (size,), generator=generator)
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        bags = Jagged(ids(int(lengths.sum()), batch), ends)
        batches.append({"a": bags, "b": ids(size, batch), "c": ids(size, batch)})
    return batches


def declared(rules, rows=None, **options):
    return {
        "a": Table(rows, 5, pooling="mean", **rules, **options),
        "b": Table(rows, 5, features=("b", "c"), **rules, **options),
    }


def step(tables, inputs):
    vectors = tables(inputs)
    loss = (vectors.prod(dim=1).tanh() + vectors.sum(dim=1)).pow(2).mean()
    loss.backward()
    return loss.item()


def everything(tables):
    """All that training made, as trained so far."""
    found = {}
    for name in ("a", "b"):
        ids, columns = tables.rows(name)
        found[name] = {"ids": ids, **columns}
        shared = tables.shared_row(name)
        if shared is not None:
            found[f"{name} shared"] = shared
    return found, tables.id_counts()


def assert_same(one, other):
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    for name, columns in one[0].items():
        for column, value in columns.items():
            assert torch.equal(value, other[0][name][column]), (name, column)


def check(tables):
    for group in tables.groups:
        group.residency.cache.check_integrity()
        group.keyspace.translator.check_integrity()
        assert group.keyspace.num_ahead == 0


@functools.cache
def train_plain(optimizer, rule, precision):
    """Every row in the cache, nothing ahead."""
    tables = make(declared(RULES[rule]), OPTIMIZERS[optimizer], precision=precision)
    losses = [step(tables, inputs) for inputs in random_batches(60)]
    assert tables.counters().evictions == 0
    return losses, everything(tables)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_cache_gives_the_same_bits(optimizer, rule, tmp_path):
    losses, expected = train_plain(optimizer, rule, "fp32")
    turn = list(OPTIMIZERS).index(optimizer) + list(RULES).index(rule)
    ways = itertools.product(TIERS, WINDOWS)
    for number, (tier, ahead) in enumerate(ways):
        if (number + turn) % 5:  # every way with some optimizer and some rule
            continue
        policy = sorted(POLICIES)[(number + turn) % len(POLICIES)]
        tables = make(declared(RULES[rule]), OPTIMIZERS[optimizer], tier, SLOTS, tmp_path / str(number), policy=policy)
        batches = random_batches(60)
        loader = batches if ahead is None else hotbed.prefetch(batches, tables, **ahead)
        assert [step(tables, inputs) for inputs in loader] == losses, (tier, ahead)
        assert_same(everything(tables), expected)
        check(tables)
        counts = tables.counters()
        assert counts.evictions > 60
        if rule != "chance":
            assert counts.misses > counts.created  # rows left and came back
        close(tables)
    if rule != "none":
        assert all(each.expired > 40 and each.rejected > 40 for each in expected[1].values())


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_any_cache_gives_the_same_bits_in_16_bits(precision):
    losses, expected = train_plain("adam", "count", precision)
    for ahead in WINDOWS[1:]:
        tables = make(declared(RULES["count"]), OPTIMIZERS["adam"], slots=SLOTS, precision=precision)
        assert [step(tables, inputs) for inputs in hotbed.prefetch(random_batches(60), tables, **ahead)] == losses
        assert_same(everything(tables), expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_are_those_of_a_preset_table(optimizer):
    """Without rules, and from equal first values, ids are only names: renumbered they give the same bits."""
    first = {"init": hotbed.Constant(0.1)}
    batches = random_batches(30)
    dynamic = make(declared({}, **first), OPTIMIZERS[optimizer], slots=SLOTS)
    losses = [step(dynamic, inputs) for inputs in hotbed.prefetch(batches, dynamic, window=2, look_ahead=5)]
    numbers = {"a": {}, "b": {}}

    def renumbered(table, ids):
        return torch.tensor(
            [numbers[table].setdefault(id_, len(numbers[table])) for id_ in ids.tolist()], dtype=torch.int64
        )

    preset = hotbed.EmbeddingTables(declared({}, rows=2000, **first), OPTIMIZERS[optimizer])
    for inputs, loss in zip(batches, losses):
        bag = inputs["a"]
        named = {"a": Jagged(renumbered("a", bag.values), bag.offsets)}
        named |= {name: renumbered("b", inputs[name]) for name in ("b", "c")}
        assert step(preset, named) == loss
    for name in ("a", "b"):
        ids, columns = dynamic.rows(name)
        assert ids.tolist() == sorted(numbers[name])
        rows = torch.tensor([numbers[name][id_] for id_ in ids.tolist()])
        assert torch.equal(columns["weight"], preset.weight(name)[rows])
        for state, value in preset.states(name).items():
            assert torch.equal(columns[state], value[rows])


def asked(tables, inputs):
    with torch.no_grad():
        return tables(inputs).sum(dim=(0, 1)).tolist()


class Play:
    """A loop in which a batch meets scenes; `seen` is all that came of it."""

    def __init__(self, tables, feed, others):
        self.tables, self.feed, self.spare = tables, feed, itertools.cycle(others)
        self.seen, self.pending, self.at = [], [], 0

    def run(self, batches, script):
        while self.at < len(batches):
            for inputs in self.feed(batches[self.at :], self.tables):
                scenes = script[self.at] if self.at < len(script) else ["train"]
                self.at += 1
                if self.pending and self.pending[0][0] < self.at - 1:
                    self.backward(None)
                for scene in scenes:
                    if scene != "leave":
                        getattr(self, scene)(inputs)
                if "leave" in scenes:
                    break
        self.backward(None)
        return self.seen

    def train(self, inputs):
        self.seen.append(step(self.tables, inputs))

    def copy(self, inputs):
        self.seen.append(step(self.tables, dict(inputs)))

    def other(self, inputs):
        self.seen.append(step(self.tables, next(self.spare)))

    def ask(self, inputs):
        self.seen.append(asked(self.tables, inputs))

    def ask_other(self, inputs):
        self.seen.append(asked(self.tables, next(self.spare)))

    def late(self, inputs):
        self.pending.append((self.at, self.tables(inputs).pow(2).mean()))

    def backward(self, inputs):
        for _, loss in self.pending:
            loss.backward()
            self.seen.append(loss.item())
        self.pending.clear()

    def evaluate(self, inputs):
        self.tables.eval()
        with torch.no_grad():
            for n, each in enumerate(self.feed([next(self.spare) for _ in range(6)], self.tables)):
                self.seen.append(self.tables(each).sum().item())
                if n == 3:
                    break
        self.tables.train()

    def inner(self, inputs):
        self.backward(None)
        for each in self.feed([next(self.spare) for _ in range(4)], self.tables):
            self.seen.append(step(self.tables, each))

    def look(self, inputs):
        self.seen.append((self.tables.id_counts(), [self.tables.rows(name)[0].tolist() for name in ("a", "b")]))


SCENES = ["train", "copy", "other", "ask", "ask_other", "late", "backward", "evaluate", "inner", "look", "leave"]


def assert_plays_alike(script, rule, windows, tier="memory", folder=None, policy="oracle"):
    batches, others = random_batches(40, size=4), random_batches(17, size=3, seed=1)
    plain = make(declared(RULES[rule]), OPTIMIZERS["adam"])
    expected = Play(plain, lambda loader, tables: iter(loader), others).run(batches, script)
    rows = everything(plain)
    for ahead in windows:
        tables = make(declared(RULES[rule]), OPTIMIZERS["adam"], tier, 20, folder, policy=policy)
        play = Play(tables, lambda loader, tables, ahead=ahead: hotbed.prefetch(loader, tables, **ahead), others)
        assert play.run(batches, script) == expected, ahead
        assert_same(everything(tables), rows)
        check(tables)
        close(tables)


@pytest.mark.parametrize("scene", SCENES)
def test_whatever_a_loop_does_gives_the_same_bits(scene):
    """Before the batch is trained, instead of it, and after it now and then."""
    now_and_then = [["train", scene] if n % 5 == 2 else ["train"] for n in range(40)]
    for number, script in enumerate(([[scene, "train"]] * 20, [[scene]] * 20, now_and_then)):
        assert_plays_alike(script, "count", WINDOWS[2 + number % 2 :][:1])  # both windows see every scene


@settings(max_examples=15)
@given(data=st.data())
def test_any_loop_gives_the_same_bits(data):
    script = data.draw(st.lists(st.lists(st.sampled_from(SCENES), max_size=4), max_size=24))
    rule, ahead = data.draw(st.sampled_from(sorted(RULES))), data.draw(st.sampled_from(WINDOWS[1:]))
    tier, policy = data.draw(st.sampled_from(TIERS)), data.draw(st.sampled_from(sorted(POLICIES)))
    with tempfile.TemporaryDirectory() as folder:
        assert_plays_alike(script, rule, [ahead], tier, folder, policy)


@settings(max_examples=15)
@given(data=st.data())
def test_any_stream_of_ids_gives_the_same_bits(data):
    ids = st.one_of(st.integers(-3, 9), st.sampled_from([-(2**63), 2**63 - 1, 1 << 33]))
    size = data.draw(st.integers(1, 5))
    rows = data.draw(st.lists(st.lists(st.tuples(ids, ids), min_size=size, max_size=size), min_size=1, max_size=40))
    rule, ahead = data.draw(st.sampled_from(sorted(RULES))), data.draw(st.sampled_from(WINDOWS))
    batches = [torch.tensor(each) for each in rows]
    results = []
    for slots in (EVERY_ROW, 12):
        tables = make({name: Table(None, 3, **RULES[rule]) for name in "ab"}, OPTIMIZERS["ftrl"], slots=slots)
        loader = batches if slots == EVERY_ROW or ahead is None else hotbed.prefetch(batches, tables, **ahead)
        results.append(([step(tables, each) for each in loader], everything(tables)))
        check(tables)
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1])
