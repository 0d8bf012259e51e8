"""Law 1 where the GPU moves a share of the rows itself: all rows written before, caches that evict in every window."""

import threading

import pytest
import torch

import hotbed
from hotbed import Table, optim
from hotbed.bench.systems import write_rows
from hotbed.ops.move import compiled_transfer, transfer_loop

pytestmark = pytest.mark.gpu
ROWS = {"a": 60_000, "b": 25_000}
LAG = 4_000_000  # clock cycles, some 2 ms


@pytest.fixture(autouse=True)
def helps(monkeypatch):
    """In every window."""
    monkeypatch.setattr(compiled_transfer, "TRIES", False)


def batches(count, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    columns = [(torch.rand(count, size, generator=generator) ** 2 * limit).long() for limit in ROWS.values()]
    return [ids.contiguous().cuda() for ids in torch.stack(columns, dim=2)]


def make(**options):
    tables = {name: Table(rows, 16) for name, rows in ROWS.items()}
    made = hotbed.EmbeddingTables(tables, optim.Adagrad(lr=0.1), device="cuda", **options)
    for cache in made.caches:
        write_rows(cache)
    return made


def train(tables, loader, lag=0):
    losses = []
    for ids in loader:
        torch.cuda._sleep(lag)
        loss = tables(ids).pow(2).mean()
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def transfers(tables):
    return [transfer for planner in tables.ownership.planners for transfer in planner._transfers]


@pytest.mark.parametrize("lag", [0, LAG])
@pytest.mark.parametrize("window", [1, 2, None])
def test_the_same_bits(window, lag):
    loader = batches(40, 4096)
    plain, cached = make(), make(cache=0.15)
    expected = [train(plain, loader) for _ in range(2)]
    assert [train(cached, hotbed.prefetch(loader, cached, window=window), lag) for _ in range(2)] == expected
    (transfer,) = transfers(cached)
    assert transfer._mapped.is_mapped.all()
    shares = transfer._words[[transfer_loop.SHARE_IN, transfer_loop.SHARE_OUT]]
    assert (shares != transfer_loop.FIRST_SHARE).any()
    for name, value in plain.state_dict().items():
        assert torch.equal(value.cpu(), cached.state_dict()[name].cpu()), name


@pytest.mark.parametrize("mapped", [False, True])
def test_rows_that_are_partly_out_of_reach(mapped, monkeypatch):
    """Chunks of 4,096 rows, of which every other one is not filled."""
    monkeypatch.setattr("hotbed.ops.move.mapped._CHUNK_BYTES", 4096 * 4 * 32)
    loader = batches(30, 4096)
    plain, cached = make(), make(cache=0.15)
    (group,) = cached.caches
    if not mapped:
        first = torch.arange(0, group.keyspace.num_rows)
        group.store.forget(first[(first >> 12) % 2 == 1])
    assert train(cached, hotbed.prefetch(loader, cached)) == train(plain, loader)
    (transfer,) = transfers(cached)
    assert bool(transfer._mapped.is_mapped.all()) == mapped
    assert transfer._mapped.is_mapped.any()
    for name, value in plain.state_dict().items():
        assert torch.equal(value.cpu(), cached.state_dict()[name].cpu()), name


def test_memory_is_free_when_the_tables_are_gone():
    """Registered memory that is given back and mapped anew can be registered again."""
    for _ in range(3):
        tables = make(cache=0.2)
        train(tables, hotbed.prefetch(batches(6, 4096), tables))
        assert transfers(tables)[0]._mapped.is_mapped.all()
        del tables


def test_backward_runs_in_the_thread_that_calls_it():
    tables, threads = make(), []
    vectors = tables(batches(1, 64)[0])
    vectors.register_hook(lambda grad: threads.append(threading.get_ident()))
    vectors.sum().backward()
    assert threads == [threading.get_ident()]
