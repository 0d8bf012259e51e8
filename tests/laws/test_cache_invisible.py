"""Law 1: the cache is invisible. Any size, any policy: the same losses and rows, bit for bit, as tables without a cache."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hotbed
from hotbed import Jagged, Table, optim
from hotbed.cache import POLICIES
from hotbed.errors import BudgetError, ConfigError
from hotbed.pipeline.batches import to_device
from tests.pairs import pairs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OPTIMIZERS = {
    "sgd": optim.SGD(lr=0.1, clip_norm=0.5),
    "adagrad": optim.Adagrad(lr=0.1),
    "rowwise_adagrad": optim.RowwiseAdagrad(lr=0.1, l2=0.01),
    "adam": optim.Adam(lr=0.1, weight_decay=0.1),
    "ftrl": optim.FTRL(lr=0.1, l1=0.01),
}
ROWS = {"a": 60, "b": 45}


def inputs_of(batch):
    ends = torch.tensor([0, *(len(bag) for bag in batch["a"])]).cumsum(0)
    values = torch.tensor([value for bag in batch["a"] for value in bag], dtype=torch.int64)
    return {"a": Jagged(values, ends), "b": torch.tensor(batch["b"]), "c": torch.tensor(batch["c"])}


def train(optimizer, batches, *, device="cpu", pooling="sum", ahead=None, **cache):
    """(losses, state) after training on bags; the loss couples all rows of a sample. `ahead`: arguments of prefetch."""
    tables = hotbed.EmbeddingTables(
        {"a": Table(ROWS["a"], 5, pooling=pooling), "b": Table(ROWS["b"], 5, pooling=pooling, features=("b", "c"))},
        optimizer,
        device=device,
        **cache,
    )
    losses = []
    loader = [inputs_of(batch) for batch in batches]
    if ahead is None:
        loader = [to_device(inputs, torch.device(device)) for inputs in loader]
    else:
        loader = hotbed.prefetch(loader, tables, **ahead)
    for inputs in loader:
        vectors = tables(inputs)
        loss = (vectors.prod(dim=1).tanh() + vectors.sum(dim=1)).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
        if ahead is None and "cache" in cache:
            tables.caches[0].cache.check_integrity()
    if "cache" in cache:
        tables.caches[0].cache.check_integrity()
    return losses, {name: value.cpu().clone() for name, value in tables.state_dict().items()}, tables


def random_batches(count, size, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def ids(limit, number):  # skewed, so that some rows come back soon and some after they were evicted
        return (torch.rand(number, generator=generator) ** 3 * limit).long().tolist()

    return [
        {
            "a": [ids(ROWS["a"], int(torch.randint(0, 4, (1,), generator=generator))) for _ in range(size)],
            "b": ids(ROWS["b"], size),
            "c": ids(ROWS["b"], size),
        }
        for _ in range(count)
    ]


@functools.cache
def train_plain(name, count, device, pooling):
    return train(OPTIMIZERS[name], random_batches(count, 9), device=device, pooling=pooling)


def assert_same(plain, cached):
    assert plain[0] == cached[0]
    for name, value in plain[1].items():
        assert torch.equal(value, cached[1][name]), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "policy", "pooling"), pairs(OPTIMIZERS, sorted(POLICIES), ["sum", "mean"]))
def test_any_cache_gives_the_same_bits(name, policy, pooling, device):
    batches = random_batches(12, 9)
    plain = train_plain(name, 12, device, pooling)
    for share in (1.0, 0.34):
        cached = train(OPTIMIZERS[name], batches, device=device, pooling=pooling, cache=share, policy=policy)
        assert_same(plain, cached)
    counts = cached[2].counters()
    assert counts.windows == 12
    assert counts.evictions > 60  # the smallest cache evicts at every batch, rows with state among them


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "policy", "window"), pairs(OPTIMIZERS, sorted(POLICIES), [1, 2, 4, 8]))
def test_any_window_gives_the_same_bits(name, policy, window, device):
    batches = random_batches(20, 9)
    plain = train_plain(name, 20, device, "mean")
    for share in (0.6, 0.34):
        ahead = {"window": window, "look_ahead": window + 4}
        cached = train(
            OPTIMIZERS[name], batches, device=device, pooling="mean", cache=share, policy=policy, ahead=ahead
        )
        assert_same(plain, cached)
    counts = cached[2].counters()
    assert counts.batches == 20
    assert counts.evictions > 100
    assert counts.misses > counts.created  # dirty rows left and came back


@settings(max_examples=25)
@given(data=st.data())
def test_any_stream_of_ids_gives_the_same_bits(data):
    size = data.draw(st.integers(1, 6))

    def column(limit):
        return st.lists(st.integers(0, limit - 1), min_size=size, max_size=size)

    bags = st.lists(st.lists(st.integers(0, ROWS["a"] - 1), max_size=3), min_size=size, max_size=size)
    batch = st.fixed_dictionaries({"a": bags, "b": column(ROWS["b"]), "c": column(ROWS["b"])})
    batches = data.draw(st.lists(batch, min_size=1, max_size=8))
    optimizer = OPTIMIZERS[data.draw(st.sampled_from(sorted(OPTIMIZERS)))]
    policy = data.draw(st.sampled_from(sorted(POLICIES)))
    share = data.draw(st.sampled_from([0.3, 0.5, 0.9]))
    window, look_ahead = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    ahead = data.draw(st.sampled_from([None, {}, {"window": window, "look_ahead": look_ahead}]))
    plain = train(optimizer, batches)
    assert_same(plain, train(optimizer, batches, cache=share, policy=policy, ahead=ahead))


def test_a_batch_that_cannot_fit_is_an_error_and_nothing_changes():
    tables = hotbed.EmbeddingTables({"a": Table(100, 2)}, cache=0.05)
    before = tables.state_dict()["a.weight"]
    with pytest.raises(BudgetError, match="needs 9 rows at once, but the cache has 5 slots"):
        tables(torch.arange(9).unsqueeze(1))
    assert torch.equal(tables.state_dict()["a.weight"], before)


def test_rows_moved_between_forward_and_backward():
    """Two lookups in flight at once, in a cache that holds one of them: each gradient still finds its rows."""
    results = []
    for cache in ({}, {"cache": 0.3}):
        tables = hotbed.EmbeddingTables({"a": Table(20, 3)}, optim.Adam(lr=0.1), **cache)
        first = tables(torch.arange(6).unsqueeze(1)).pow(2).sum()
        second = tables(torch.arange(10, 16).unsqueeze(1)).pow(3).sum()
        first.backward()
        second.backward()
        results.append(tables.state_dict())
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_state_moves_between_plain_and_cached_tables():
    ids = torch.randint(0, 50, (8, 1), generator=torch.Generator().manual_seed(0))
    plain = hotbed.EmbeddingTables({"a": Table(50, 3)}, optim.Adam(lr=0.1), seed=3)
    plain(ids).sum().backward()
    cached = hotbed.EmbeddingTables({"a": Table(50, 3)}, optim.Adam(lr=0.1), seed=4, cache=0.2)
    cached(ids).sum().backward()
    cached.load_state_dict(plain.state_dict())
    for tables in (plain, cached):
        tables(ids).sum().backward()
    assert torch.equal(plain.weight("a"), cached.weight("a"))
    assert torch.equal(plain.states("a")["step"], cached.states("a")["step"])


@pytest.mark.parametrize("cache", [0, -1, 1.5, "2GiB", True])
def test_cache_mistakes(cache):
    with pytest.raises(ConfigError, match="cache"):
        hotbed.EmbeddingTables({"a": Table(10, 2)}, cache=cache)


def test_policy_and_scope_mistakes():
    with pytest.raises(ConfigError, match="float32"):
        hotbed.EmbeddingTables({"a": Table(10, 2)}, cache=0.5).double()
    with pytest.raises(ConfigError, match="there are lfu, lru, oracle, static"):
        hotbed.EmbeddingTables({"a": Table(10, 2)}, cache=0.5, policy="mru")
    with pytest.raises(ConfigError, match="decay_scope"):
        hotbed.EmbeddingTables({"a": Table(10, 2)}, optim.SGD(l2=0.1, decay_scope="table"), cache=0.5)
