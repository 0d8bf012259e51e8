"""Tables take a KeyedJaggedTensor for what it is: the bags of every feature, with the same results to the bit."""

import pytest
import torch

import hotbed
from hotbed.errors import ShapeError
from hotbed.tables.keyed import bags_of, is_keyed
from hotbed.types import Jagged
from tests.interop.doubles import Keyed, keyed_tensor

FEATURES = ("user", "ad", "seen")
ROWS = {"user": 40, "ad": 30, "seen": 30}


def tables_of(**settings):
    tables = {
        "users": hotbed.Table(40, 4, features=("user",)),
        "ads": hotbed.Table(30, 4, "mean", features=("ad", "seen")),
    }
    return hotbed.EmbeddingTables(tables, hotbed.optim.Adagrad(lr=0.1), **settings)


def batches(count=6, size=5, seed=0, order=FEATURES):
    """(keyed, the same as a mapping) of random bags, empty ones too."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        lengths = {name: torch.randint(0, 4, (size,), generator=generator) for name in FEATURES}
        values = {
            name: torch.randint(0, ROWS[name], (int(lengths[name].sum()),), generator=generator) for name in FEATURES
        }
        keyed = keyed_tensor(
            list(order), torch.cat([values[name] for name in order]), torch.cat([lengths[name] for name in order])
        )
        bags = {
            name: Jagged(values[name], torch.nn.functional.pad(lengths[name].cumsum(0), (1, 0))) for name in FEATURES
        }
        yield keyed, bags


def train(tables, inputs):
    outs = []
    for one in inputs:
        out = tables(one)
        outs.append(out.detach().clone())
        (out * out).sum().backward()
    return outs, {name: tables.weight(name).clone() for name in tables.tables}


def assert_same(ours, theirs):
    assert all(torch.equal(one, other) for one, other in zip(ours[0], theirs[0], strict=True))
    assert all(torch.equal(ours[1][name], theirs[1][name]) for name in theirs[1])


@pytest.mark.parametrize("order", [FEATURES, FEATURES[::-1]])
def test_the_same_as_a_mapping_of_bags(order):
    ours = train(tables_of(), [keyed for keyed, _ in batches(order=order)])
    theirs = train(tables_of(), [bags for _, bags in batches()])
    assert_same(ours, theirs)
    assert not torch.equal(ours[1]["ads"], tables_of().weight("ads"))


@pytest.mark.parametrize("form", ["alone", "tuple", "mapping"])
def test_rows_are_prefetched(form):
    """Behind a cache that evicts; found again by the object the tables are called with."""
    wrap = {
        "alone": lambda keyed: keyed,
        "tuple": lambda keyed: (keyed, 1),
        "mapping": lambda keyed: {"ids": keyed, "label": 0},
    }[form]
    unwrap = {"alone": lambda one: one, "tuple": lambda one: one[0], "mapping": lambda one: one["ids"]}[form]
    tables = tables_of(cache=0.5)
    feed = hotbed.prefetch([wrap(keyed) for keyed, _ in batches(12, 4)], tables, window=2)
    ours = train(tables, (unwrap(one) for one in feed))
    theirs = train(tables_of(), [bags for _, bags in batches(12, 4)])
    assert_same(ours, theirs)
    counts = tables.counters()
    assert counts.evictions > 0


@pytest.mark.gpu
def test_on_a_device_the_host_need_not_move_it():
    tables = tables_of(cache=0.5, device="cuda")
    feed = hotbed.prefetch([keyed for keyed, _ in batches(12, 4)], tables, window=2)
    ours = train(tables, feed)
    moved = [
        {name: Jagged(*(one.cuda() for one in bag[:2])) for name, bag in bags.items()} for _, bags in batches(12, 4)
    ]
    theirs = train(tables_of(device="cuda"), moved)
    ours = (ours[0], {name: weight.cpu() for name, weight in ours[1].items()})
    assert_same(ours, (theirs[0], {name: weight.cpu() for name, weight in theirs[1].items()}))


def test_weights_of_ids_count():
    tables = hotbed.EmbeddingTables({"user": hotbed.Table(9, 4)}, output="concat").eval()
    values, lengths, weights = torch.tensor([3, 5, 3]), torch.tensor([2, 1]), torch.tensor([2.0, 1.0, -1.0])
    out = tables(keyed_tensor(["user"], values, lengths, weights))
    rows = tables.weight("user")
    torch.testing.assert_close(out, torch.stack([2 * rows[3] + rows[5], -rows[3]]))


def test_no_samples_and_no_ids():
    tables = tables_of().eval()
    empty = torch.empty(0, dtype=torch.int64)
    assert tables(Keyed(list(FEATURES), empty, empty)).shape == (0, 3, 4)
    assert not tables(Keyed(list(FEATURES), empty, torch.zeros(6, dtype=torch.int64))).any()


@pytest.mark.parametrize(
    ("keys", "lengths", "message"),
    [
        (["user", "ad"], [1, 1], "missing: 'seen'"),
        (["user", "ad", "seen", "more"], [1, 1, 0, 0], "unknown: 'more'"),
        (["user", "ad", "ad"], [1, 1, 0], "names each feature once"),
        (["user", "ad", "seen"], [1, 1], "2 bags of 3 keys"),
    ],
)
def test_what_does_not_fit_is_named(keys, lengths, message):
    with pytest.raises(ShapeError, match=message):
        tables_of()(Keyed(keys, torch.zeros(2, dtype=torch.int64), torch.tensor(lengths)))


def test_keys_of_different_sizes_are_refused():
    keyed = Keyed(list(FEATURES), torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64))
    keyed.variable_stride_per_key = lambda: True
    with pytest.raises(ShapeError, match="as many samples of every key"):
        bags_of(keyed)


def test_beside_it_nothing_else_is_given():
    (keyed, bags), *_ = batches(1)
    with pytest.raises(ShapeError, match="not both"):
        tables_of()(keyed, {"user": bags["user"]})


@pytest.mark.parametrize("value", [torch.zeros(2), {"a": 1}, Jagged(torch.zeros(1), torch.zeros(2)), None, object()])
def test_other_things_are_none(value):
    assert not is_keyed(value)
