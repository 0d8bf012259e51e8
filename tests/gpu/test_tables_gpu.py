"""The tables on a CUDA device give the CPU's results to rounding, and their own results to the bit."""

import pytest
import torch

import hotbed
from hotbed import Jagged, Table, optim
from hotbed.errors import IdError, ShapeError

pytestmark = pytest.mark.gpu
OPTIMIZERS = [optim.SGD(), optim.Adagrad(), optim.RowwiseAdagrad(), optim.Adam(lr=0.01), optim.FTRL(l1=0.001)]


def train(device, optimizer, steps=5):
    tables = hotbed.EmbeddingTables(
        {"user": Table(500, 12), "tags": Table(70, 12, pooling="mean"), "seen": Table(90, 6, pooling="none")},
        optimizer,
        device=device,
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        lengths = torch.randint(0, 4, (257,), generator=generator)
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        values = torch.randint(0, 70, (int(ends[-1]),), generator=generator)
        inputs = {
            "user": torch.randint(0, 500, (257,), generator=generator).to(device),
            "tags": Jagged(values.to(device), ends.to(device)),
            "seen": torch.randint(0, 90, (257, 3), generator=generator).to(device),
        }
        out = tables(inputs)
        (out["user"] * out["tags"] + out["user"]).sum().add(out["seen"].pow(2).sum()).backward()
    return {name: value.cpu() for name, value in tables.state_dict().items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.rule.name)
def test_cuda_equals_cpu_and_itself(optimizer):
    cpu, cuda, again = train("cpu", optimizer), train("cuda", optimizer), train("cuda", optimizer)
    for name, value in cpu.items():
        torch.testing.assert_close(cuda[name], value, rtol=1e-4, atol=1e-5)
        assert torch.equal(cuda[name], again[name]), name


def test_errors_on_cuda():
    tables = hotbed.EmbeddingTables({"user": Table(10, 4)}).to("cuda")
    assert tables(torch.zeros(3, 1, dtype=torch.int64, device="cuda")).device.type == "cuda"
    before = tables.weight("user").clone()
    tables(torch.tensor([[1], [2], [10]], device="cuda")).sum().backward()  # known to be bad when it reaches the device
    with pytest.raises(IdError, match="id 10 of feature 'user' in sample 2"):
        tables(torch.tensor([[1]], device="cuda"))
    assert torch.equal(tables.weight("user"), before)
    with pytest.raises(ShapeError, match="is on cpu"):
        tables(torch.tensor([[1]]))


def test_a_hot_row_and_a_big_batch():
    tables = hotbed.EmbeddingTables({"user": Table(3, 16)}, optim.SGD(lr=1e-3), device="cuda")
    before = tables.weight("user").clone()
    tables(torch.zeros(65_536, 1, dtype=torch.int64, device="cuda")).sum().backward()
    torch.testing.assert_close(tables.weight("user")[0], before[0] - 65.536, rtol=1e-5, atol=1e-4)
