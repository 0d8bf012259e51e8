import numpy as np
import pytest
import torch

from hotbed.ops.keys import Addresses, make_keys, reference
from hotbed.ops.lookups import Span


def addresses(rows, hashing, padding):
    base = np.cumsum([0, *rows[:-1]]).astype(np.int64)
    return Addresses(
        base,
        np.array(rows, dtype=np.int64),
        np.array(hashing),
        np.array([p is not None for p in padding]),
        np.array([p or 0 for p in padding], dtype=np.int64),
    )


@pytest.mark.parametrize("batch", [0, 1, 5, 333])
def test_compiled_equals_reference(batch):
    generator = torch.Generator().manual_seed(batch)
    table = addresses([10, 7, 20], [False, True, False], [None, None, 3])
    spans = tuple(Span(f"f{i}", i, batch, 3) for i in range(3))
    ids = torch.randint(0, 10, (batch, 3), generator=generator)
    ids[:, 1] = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator)
    flat = ids.reshape(-1)
    keys, bad = make_keys(flat, spans, table)
    expected, expected_bad = reference.make_keys(flat, spans, table)
    assert (bad.get(), expected_bad.get()) == (None, None)
    assert torch.equal(keys, expected)
    assert torch.equal(keys.view(-1, 3)[:, 2] == -1, ids[:, 2] == 3)


@pytest.mark.parametrize("value", [10, -1, 2**63 - 1, -(2**63)])
def test_the_first_bad_position_is_found(value):
    ids = torch.arange(40) % 10
    ids[23], ids[31] = value, value
    table = addresses([10, 10], [False, False], [None, None])
    spans = (Span("a", 0, 20, 2), Span("b", 1, 20, 2))
    assert make_keys(ids, spans, table)[1].get() == 23
    assert reference.make_keys(ids, spans, table)[1].get() == 23


@pytest.mark.parametrize("make", [make_keys, reference.make_keys])
def test_padding_is_padding_where_ids_are_hashed(make):
    """Not the row that its hash would name: that row belongs to other ids."""
    table = addresses([10, 7], [False, True], [None, 100])
    spans = (Span("a", 0, 4, 2), Span("b", 1, 4, 2))
    ids = torch.tensor([1, 100, 2, 2, 3, 9, 4, 100])
    keys, bad = make(ids, spans, table)
    assert keys.tolist() == [1, -1, 2, 10 + 2, 3, 10 + 2, 4, -1]  # 100 % 7 is 2, too
    assert bad.get() is None


def test_hashed_padding_is_padding_on_the_device():
    triton = pytest.importorskip("hotbed.ops.keys.triton", reason="Triton is not installed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = addresses([10, 7], [False, True], [None, 100])
    spans = (Span("a", 0, 2, 2), Span("b", 1, 2, 2))
    keys, _ = triton.make_keys(torch.tensor([1, 100, 2, 9], device=device), spans, table)
    assert keys.tolist() == [1, -1, 2, 10 + 2]
