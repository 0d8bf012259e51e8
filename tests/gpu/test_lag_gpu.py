"""Law 1 when the device is far behind the host: what is free for the host may still be in use on the device."""

import pytest
import torch

import hotbed
from hotbed import Table, optim

pytestmark = pytest.mark.gpu
ROWS = {"a": 4000, "b": 900, "c": 30, "d": 12000}
LAG = 4_000_000  # clock cycles, some 2 ms


def batches(count, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    columns = [(torch.rand(count, size, generator=generator) ** 4 * limit).long() for limit in ROWS.values()]
    return [ids.contiguous().cuda() for ids in torch.stack(columns, dim=2)]


def make(dynamic=False, **tiers):
    tables = {name: Table(None if dynamic else rows, 16) for name, rows in ROWS.items()}
    return hotbed.EmbeddingTables(tables, optim.Adam(lr=0.1), device="cuda", output="concat", **tiers)


def train(tables, loader, lag):
    losses = []
    for ids in loader:
        torch.cuda._sleep(lag)
        vectors = tables(ids)
        for _ in range(3):  # memory that is given back while the device has yet to use it
            wide = vectors.repeat(1, 16).tanh()
            vectors = vectors + wide[:, : vectors.shape[1]] * 0.25
        loss = vectors.pow(2).mean()
        torch.cuda._sleep(lag)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@pytest.mark.parametrize("window", [1, 3, None])
@pytest.mark.parametrize("way", ["recorded", "odd sizes", "ssd"])
def test_the_same_bits(way, window, tmp_path):
    loader = batches(24, 256)
    if way == "odd sizes":
        loader = [ids[: 256 - i].contiguous() for i, ids in enumerate(loader)]
    plain, tiers = make(), {"memory": "512KiB", "ssd": f"{tmp_path}:64MiB"} if way == "ssd" else {}
    expected = train(plain, loader, 0)
    cached = make(cache=0.06, **tiers)
    assert train(cached, hotbed.prefetch(loader, cached, window=window), LAG) == expected
    for name, value in plain.state_dict().items():
        assert torch.equal(value.cpu(), cached.state_dict()[name].cpu()), name


def test_dynamic_ids():
    loader = batches(24, 256)
    large, small = (make(dynamic=True, hbm=hbm, memory="64MiB") for hbm in ("32MiB", "640KiB"))
    assert train(small, hotbed.prefetch(loader, small), LAG) == train(large, loader, 0)
    assert small.counters().written_back > 1000
