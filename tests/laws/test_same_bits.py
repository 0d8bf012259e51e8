"""Law 1, its ground: for a fixed seed and device, training gives the same bits, however the work is cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hotbed
from hotbed import Table, optim

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OPTIMIZERS = {
    "sgd": optim.SGD(lr=0.1, clip_norm=0.5),
    "adagrad": optim.Adagrad(lr=0.1),
    "rowwise_adagrad": optim.RowwiseAdagrad(lr=0.1, l2=0.01),
    "adam": optim.Adam(lr=0.1, weight_decay=0.1),
    "ftrl": optim.FTRL(lr=0.1, l1=0.01),
}


def train(optimizer, batches, device="cpu", poolings=("sum", "mean")):
    """Records after training; the model is a fixed non-linear function, so every row's gradient depends on others."""
    tables = hotbed.EmbeddingTables(
        {"a": Table(20, 5, pooling=poolings[0]), "b": Table(9, 5, pooling=poolings[1], features=("b", "c"))},
        optimizer,
        device=device,
    )
    losses = []
    for ids in batches:
        vectors = tables({name: ids[:, i].to(device) for i, name in enumerate("abc")})
        loss = (vectors.prod(dim=1).tanh() + vectors.sum(dim=1)).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
    return losses, [group.records.cpu() for group in tables.groups]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_runs_and_any_thread_count_give_the_same_bits(device, name, monkeypatch):
    monkeypatch.setattr("hotbed.host.pool.ALONE", 0)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 9, (300, 3, 2), generator=generator) for _ in range(4)]
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            results.append(train(OPTIMIZERS[name], batches, device))
    finally:
        torch.set_num_threads(before)
    assert results[1][0] == results[2][0]
    for one, two in zip(results[1][1], results[2][1]):
        assert torch.equal(one, two)
    if device == "cpu":  # torch's own sums over the batch may differ between thread counts, but not on one this small
        assert results[0][0] == results[1][0]
        assert torch.equal(results[0][1][0], results[1][1][0])


@settings(max_examples=25)
@given(data=st.data())
def test_a_float64_reference_bounds_the_result(data):
    """The same training in float64, by plain torch autograd and the textbook update, stays within rounding."""
    size = data.draw(st.integers(1, 20))
    ids = torch.tensor(data.draw(st.lists(st.integers(0, 7), min_size=size, max_size=size))).unsqueeze(1)
    tables = hotbed.EmbeddingTables({"a": Table(8, 3)}, optim.Adagrad(lr=0.1, eps=1e-8))
    weight = tables.weight("a").double().clone().requires_grad_()
    total = torch.zeros_like(weight)
    for _ in range(3):
        tables(ids).pow(2).sum().backward()
        (grad,) = torch.autograd.grad(weight[ids].pow(2).sum(), weight)
        with torch.no_grad():
            total += grad**2
            weight -= 0.1 * grad / (total.sqrt() + 1e-8)
    touched = torch.unique(ids)
    torch.testing.assert_close(tables.weight("a")[touched].double(), weight.detach()[touched], rtol=1e-4, atol=1e-5)
