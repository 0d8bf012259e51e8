"""Law 1 on the device where the reader thread works on dynamic ids ahead of time; the training stream lags behind the host."""

import pytest
import torch

import hotbed
from hotbed import Admit, Expire, Jagged, Table, optim
from hotbed.pipeline.encodings import NARROW, KeyEncoding, MapEncoding
from hotbed.tables.group.cached import CachedRows

pytestmark = pytest.mark.gpu
LAG = 2_000_000  # clocks of the device: about a millisecond
SIZES = [256, 256, 200, 256, 1, 256, 0, 256, 300, 256, 256, 256]


@pytest.fixture
def ways(monkeypatch):
    """The keys of every batch, and how often rows were created that compiled code did not find."""
    found = {"keys": [], "created": 0}
    prepare, create = MapEncoding.prepare, CachedRows._create

    def counted(self, *given):
        found["created"] += 1
        return create(self, *given)

    monkeypatch.setattr(
        MapEncoding, "prepare", lambda self, *given: found["keys"].append(self.kinds[0]) or prepare(self, *given)
    )
    monkeypatch.setattr(KeyEncoding, "prepare", lambda *_: pytest.fail("keys were made when a batch arrived"))
    monkeypatch.setattr(CachedRows, "_create", counted)
    return found


def matrices():
    draw = torch.Generator().manual_seed(1)
    return [(torch.rand(n, 3, generator=draw) ** 4 * 4000).long() * 7919 - 10**12 + 5 * k for k, n in enumerate(SIZES)]


def bags():
    draw, found = torch.Generator().manual_seed(2), []
    for size in SIZES:
        batch = {}
        for name in "xyz":
            offsets = torch.nn.functional.pad(torch.randint(0, 6, (size,), generator=draw).cumsum(0), (1, 0))
            values = (torch.rand(int(offsets[-1]), generator=draw) ** 4 * 3000).long() * 7919
            batch[name] = Jagged(values, offsets, torch.rand(values.shape[0], generator=draw) if name == "z" else None)
        found.append(batch)
    return found


def moved(batch):
    if isinstance(batch, torch.Tensor):
        return batch.cuda()
    return {name: Jagged(*(None if part is None else part.cuda() for part in bag)) for name, bag in batch.items()}


def make(hbm, rules):
    tables = {"a": Table(None, 16, features=("x", "y"), **rules), "z": Table(None, 16, **rules)}
    return hotbed.EmbeddingTables(tables, optim.Adam(lr=0.1), device="cuda", output="concat", hbm=hbm, memory="64MiB")


def train(tables, loader, held, lag):
    losses = []
    for number, batch in enumerate(loader):
        torch.cuda._sleep(lag)
        loss = tables(batch).pow(2).sum()
        for _ in range(number % 3 if number > 6 else 0):
            with torch.no_grad():
                losses.append(tables(held).sum())
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@pytest.mark.parametrize("rules", [{}, {"admit": Admit(after=2)}, {"expire": Expire(unused_steps=5, every=3)}])
@pytest.mark.parametrize("make_batches", [matrices, bags])
@pytest.mark.parametrize("on_host", [True, False])
def test_the_same_bits(ways, make_batches, on_host, rules):
    batches = make_batches()
    on_device = [moved(batch) for batch in batches]
    large, small = make("32MiB", rules), make("1MiB", rules)
    for _ in range(2):
        loader = hotbed.prefetch(batches if on_host else on_device, small, look_ahead=4)
        assert train(small, loader, on_device[0], LAG) == train(large, on_device, on_device[0], 0)
    assert ways["keys"].count(NARROW) >= 2 * len(batches)
    assert ways["created"]
    assert small.id_counts() == large.id_counts()
    for name in ("a", "z"):
        (ids, columns), (other_ids, others) = small.rows(name), large.rows(name)
        assert torch.equal(ids, other_ids)
        for column, value in others.items():
            assert torch.equal(columns[column], value), (name, column)
    with torch.no_grad():
        seen = [tables(on_device[3]).sum().item() for tables in (small, large)]
        ahead = [vectors.sum().item() for vectors in map(small, hotbed.prefetch(on_device[3:4], small))]
    assert seen[0] == seen[1] == ahead[0]
