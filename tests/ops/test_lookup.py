import pytest
import torch

from hotbed.ops.lookup import lookup, reference
from hotbed.ops.lookups import Bags
from tests.ops.cases import random_bags, random_matrix
from tests.pairs import pairs


@pytest.mark.parametrize(
    ("dim", "batch", "make", "threads"), pairs([1, 3, 16, 63], [0, 1, 7, 500], [random_matrix, random_bags], [1, 2, 3])
)
def test_compiled_equals_reference(dim, batch, make, threads, monkeypatch):
    monkeypatch.setattr("hotbed.host.pool.ALONE", 0)
    generator = torch.Generator().manual_seed(dim * 1000 + batch)
    lookups, _ = make([1, 10, 300], batch, generator)
    records = torch.randn(311, dim + 3, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        actual = lookup(records, lookups, dim)
    finally:
        torch.set_num_threads(before)
    assert actual.shape == (lookups.num_out, dim)
    torch.testing.assert_close(actual, reference.lookup(records, lookups, dim), rtol=1e-6, atol=1e-6)


def test_bags_by_hand():
    records = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    generator = torch.Generator().manual_seed(0)
    lookups, _ = random_bags([1, 1, 1], 2, generator)
    lookups = lookups._replace(
        slots=torch.tensor([0, 1, 1, -1]),
        bags=Bags(torch.tensor([0, 3, 3, 4]), torch.tensor([2, 0, 1]), torch.tensor([1.0, 0.5, 0.5, 9.0])),
        num_out=3,
    )
    assert lookup(records, lookups, 2).tolist() == [[0.0, 0.0], [0.0, 0.0], [3.0, 30.0]]
