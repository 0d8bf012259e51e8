"""Sums of gradients by row: the compiled way against the update that makes sums, bit for bit."""

import pytest
import torch

from hotbed.ops import sums
from hotbed.ops.lookups import Bags, Lookups, Span
from hotbed.ops.sums import sum_by_row


def plain(num_lookups, num_rows):
    slots = torch.randint(-1, num_rows, [num_lookups])
    return Lookups(slots, (Span("a", 0, num_lookups, 1),), num_lookups)


def bags(num_lookups, num_rows, dtype):
    num_bags = 1 + num_lookups // 3
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(0, num_lookups + 1, [num_bags - 1]).sort()[0]])
    starts = torch.cat([starts, torch.tensor([num_lookups])])
    return plain(num_lookups, num_rows)._replace(
        num_out=num_bags, bags=Bags(starts, torch.randperm(num_bags), torch.rand(num_lookups, dtype=dtype))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("num_lookups", "num_rows", "dim"), [(0, 1, 4), (1, 1, 3), (63, 5, 16), (1000, 400, 33)])
@pytest.mark.parametrize("has_bags", [False, True])
def test_sums(dtype, threads, num_lookups, num_rows, dim, has_bags, monkeypatch):
    lookups = bags(num_lookups, num_rows, dtype) if has_bags else plain(num_lookups, num_rows)
    grad = torch.randn(lookups.num_out, dim, dtype=dtype)
    monkeypatch.setattr("hotbed.host.pool.num_threads", lambda: threads)
    found = sum_by_row(grad, lookups, num_rows, ("a",))
    monkeypatch.setattr(sums, "backend_of", lambda tensor: "update")
    expected = sum_by_row(grad, lookups, num_rows, ("a",))
    assert torch.equal(found, expected)
