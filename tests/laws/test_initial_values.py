"""Law 1, its root: a row's initial value is a pure function of (seed, table, id)."""

import pytest
import torch

import hotbed
from hotbed import Table, optim

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("init", [hotbed.Normal(0.01), hotbed.Uniform(0.1), hotbed.Constant(0.5)], ids=str)
@pytest.mark.parametrize("optimizer", [optim.SGD(), optim.Adam(), optim.FTRL(l1=0.1)], ids=lambda o: o.rule.name)
def test_rows_start_the_same_on_every_device(device, init, optimizer):
    tables = {"user": Table(1000, 7, init=init), "ad": Table(33, 7, init=init)}
    here = hotbed.EmbeddingTables(tables, optimizer, seed=5)
    there = hotbed.EmbeddingTables(dict(reversed(tables.items())), optimizer, seed=5, device=device)
    for name in tables:
        assert torch.equal(here.weight(name), there.weight(name).cpu())
        for state, value in here.states(name).items():
            torch.testing.assert_close(there.states(name)[state].cpu(), value, rtol=1e-6, atol=1e-6)


def test_an_untouched_row_keeps_its_first_value():
    tables = hotbed.EmbeddingTables({"ad": Table(100, 4)}, optim.Adam(l2=0.1, weight_decay=0.1))
    first = tables.weight("ad").clone()
    for _ in range(5):
        tables(torch.randint(0, 50, (20, 1))).sum().backward()
    assert torch.equal(tables.weight("ad")[50:], first[50:])
    assert torch.equal(tables.states("ad")["step"][50:], torch.zeros(50, 1))
