"""Law 1 on the recorded way: id matrices of one size, CUDA graphs, compiled transfers, caches that always evict."""

import pytest
import torch

import hotbed
from hotbed import Table, optim
from hotbed.cache import POLICIES
from hotbed.errors import BudgetError, IdError

pytestmark = pytest.mark.gpu
OPTIMIZERS = {
    "sgd": optim.SGD(lr=0.1),
    "adagrad": optim.Adagrad(lr=0.1),
    "rowwise_adagrad": optim.RowwiseAdagrad(lr=0.1),
    "adam": optim.Adam(lr=0.1),
    "ftrl": optim.FTRL(lr=0.1, l1=0.01),
}
ROWS = {"a": 4000, "b": 900, "c": 30, "d": 12000}


def batches(count, size, seed=0, device="cuda"):
    generator = torch.Generator().manual_seed(seed)
    columns = [(torch.rand(count, size, generator=generator) ** 4 * limit).long() for limit in ROWS.values()]
    return [ids.contiguous().to(device) for ids in torch.stack(columns, dim=2)]


def make(optimizer="adam", dims=(7, 7, 7, 7), **cache):
    tables = {name: Table(rows, dim) for (name, rows), dim in zip(ROWS.items(), dims)}
    return hotbed.EmbeddingTables(tables, OPTIMIZERS[optimizer], device="cuda", output="concat", **cache)


def train(tables, loader):
    losses = []
    for ids in loader:
        vectors = tables(ids)
        loss = (vectors.tanh() + vectors).pow(2).mean()
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def assert_same(plain, cached):
    for name, value in plain.state_dict().items():
        assert torch.equal(value.cpu(), cached.state_dict()[name].cpu()), name


@pytest.mark.parametrize("window", [1, 2, 4, 8])
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_bits(optimizer, policy, window):
    loader = [*batches(40, 256), batches(1, 77, seed=5)[0]]
    plain = make(optimizer)
    expected = train(plain, loader)
    for share in (1.0, 0.045):
        cached = make(optimizer, cache=share, policy=policy)
        assert train(cached, hotbed.prefetch(loader, cached, window=window)) == expected
        assert_same(plain, cached)
        cached.caches[0].cache.check_integrity()
    counts = cached.counters()
    assert counts.batches == 41
    assert counts.misses > counts.created
    assert counts.written_back > 1000


def test_groups_of_several_dims_and_a_loader_on_the_host():
    loader = batches(25, 300, device="cpu")
    plain, cached = make(dims=(3, 8, 3, 16)), make(dims=(3, 8, 3, 16), cache=0.3)
    expected = train(plain, [ids.cuda() for ids in loader])
    assert train(cached, hotbed.prefetch(loader, cached)) == expected
    assert_same(plain, cached)


def test_evaluation_in_between_and_many_passes():
    plain, cached = make(), make(cache=0.06)
    losses = []
    for tables in (plain, cached):
        found = []
        for number in range(3):
            loader, others = batches(20, 200, seed=number), batches(5, 333, seed=9)
            for n, ids in enumerate(loader if tables is plain else hotbed.prefetch(loader, tables)):
                loss = tables(ids).pow(2).sum()
                loss.backward()
                found.append(loss.item())
                if n == 11:
                    with torch.no_grad():
                        for other in others if tables is plain else hotbed.prefetch(others, tables):
                            found.append(tables(other).sum().item())
                if number == 1 and n == 15:
                    break
        losses.append(found)
    assert losses[0] == losses[1]
    assert_same(plain, cached)


@pytest.mark.parametrize("way", ["recorded", "eager"])
def test_rows_on_their_way_within_a_budget(way):
    """Windows are cut to fit; buffers go when a pass ends, also after rows were loaded, and come again with the next."""
    loader = batches(20, 256)
    plain, cached = make(), make(cache=0.15, staging="1500KiB")
    if way == "eager":
        cached.stop_recording(feeds=True)
    saved = plain.state_dict()
    for loads in (False, True, False):
        expected = train(plain, loader)
        feed = hotbed.prefetch(loader, cached)
        assert train(cached, feed) == expected
        for planner in cached.ownership.planners:
            assert not sum(ring.nbytes for transfer in planner._transfers for ring in transfer._rings)
        if loads:
            for tables in (plain, cached):
                tables.load_state_dict(saved)
    assert bool(cached.ownership.planners) is (way == "recorded")
    assert_same(plain, cached)
    counts = cached.counters()
    assert counts.misses > counts.created
    assert 20 < counts.windows < counts.batches == 60


def test_a_bad_id_is_found_before_its_batch_is_trained():
    loader = batches(20, 128)
    loader[7][5, 1] = 900
    tables = make(cache=0.1)
    seen = []

    def go_on():
        for ids in hotbed.prefetch(loader, tables):
            tables(ids).sum().backward()
            seen.append(ids)

    with pytest.raises(IdError, match="id 900 of feature 'b' in sample 5 is outside table 'b', which has 900 rows"):
        go_on()
    assert len(seen) <= 7
    tables.state_dict()


def test_a_batch_that_cannot_fit():
    tables = make(cache=0.01)
    with pytest.raises(BudgetError, match=r"one batch needs [0-9,]+ rows at once"):
        next(iter(hotbed.prefetch(batches(5, 512), tables)))


def test_a_bad_id_without_prefetch_teaches_nothing():
    tables = make()
    before = tables.weight("a").clone()
    ids = batches(1, 64)[0]
    ids[3, 2] = -1
    tables(ids).sum().backward()
    with pytest.raises(IdError, match="id -1 of feature 'c' in sample 3"):
        tables(batches(1, 64)[0])
    assert torch.equal(tables.weight("a"), before)
