"""The Triton kernels against their references: on a CUDA device where there is one, else under Triton's interpreter."""

import dataclasses

import numpy as np
import pytest
import torch

import hotbed
from hotbed.ops.keys import Addresses
from hotbed.ops.keys import reference as keys_reference
from hotbed.ops.lookup import reference as lookup_reference
from hotbed.ops.lookups import Bags, Lookups, SortedKeys, Span
from hotbed.ops.records import layout_of
from hotbed.ops.update import TableRows, settings_of
from hotbed.ops.update import reference as update_reference
from tests.ops.cases import random_bags, random_matrix
from tests.ops.test_update import OPTIMIZERS, ROWS, VARIANTS, start

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(lookups):
    def move(value):
        return value.to(DEVICE) if isinstance(value, torch.Tensor) else value

    return Lookups(*map(move, lookups))._replace(bags=None if lookups.bags is None else Bags(*map(move, lookups.bags)))


@pytest.mark.parametrize("make", [random_matrix, random_bags])
@pytest.mark.parametrize("dim", [1, 5, 63, 300])
def test_lookup(make, dim):
    from hotbed.ops.lookup.triton import lookup

    for batch in (0, 1, 7):
        generator = torch.Generator().manual_seed(dim + batch)
        lookups, _ = make(ROWS, batch, generator)
        records = torch.randn(sum(ROWS), dim + 3, generator=generator)
        actual = lookup(records.to(DEVICE), on_device(lookups), dim)
        torch.testing.assert_close(actual.cpu(), lookup_reference.lookup(records, lookups, dim), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lengths", [[5, 27, 32, 1, 64, 31, 33, 96], [7, 3300, 1, 40], [1024, 1056, 31, 1025], [4096]])
def test_rows_that_cross_boundaries(lengths):
    from hotbed.ops.update.triton import update

    optimizer, dim = hotbed.optim.SGD(lr=1.0), 3
    keys = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    generator = torch.Generator().manual_seed(len(keys))
    keys = keys[torch.randperm(len(keys), generator=generator)]
    grad = torch.randint(-9, 10, (len(keys), dim), generator=generator).float()  # whole numbers: sums are exact
    records = torch.zeros(len(lengths), layout_of(dim, optimizer).width, device=DEVICE)
    lookups = on_device(Lookups(keys, (), len(keys)))
    update(records, layout_of(dim, optimizer), grad.to(DEVICE), lookups, settings_of(optimizer, 1.0, ()))
    expected = -torch.zeros(len(lengths), dim).index_add_(0, keys, grad)
    assert torch.equal(records[:, :dim].cpu(), expected)


@pytest.mark.parametrize("make", [random_matrix, random_bags])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.rule.name)
def test_update(optimizer, make):
    from hotbed.ops.update.triton import update

    for variant, dim, batch in [(VARIANTS[0], 1, 2), (VARIANTS[1], 5, 9), (VARIANTS[2], 16, 30), (VARIANTS[3], 33, 9)]:
        optimizer = dataclasses.replace(optimizer, **variant)
        generator = torch.Generator().manual_seed(dim + batch)
        lookups, tables = make(ROWS, batch, generator)
        layout, records = start(optimizer, dim, generator)
        grad = torch.randn(lookups.num_out, dim, generator=generator)
        settings = settings_of(optimizer, 0.1, tables)
        actual = records.to(DEVICE)
        update(actual, layout, grad.to(DEVICE), on_device(lookups), settings)
        update_reference.update(records, layout, grad, lookups, settings)
        torch.testing.assert_close(actual.cpu(), records, rtol=3e-5, atol=3e-5)


def test_output_rows_that_are_known_ahead_change_nothing():
    """As a recording hands them over: views of longer buffers, int32, padding behind them that nobody may look at."""
    from hotbed.ops.lookup.triton import lookup
    from hotbed.ops.update.triton import update

    optimizer, dim = hotbed.optim.Adagrad(lr=0.1), 5
    generator = torch.Generator().manual_seed(1)
    lookups, tables = random_bags(ROWS, 30, generator)
    layout, records = start(optimizer, dim, generator)
    grad = torch.randn(lookups.num_out, dim, generator=generator).to(DEVICE)
    ours = on_device(lookups)
    num, num_starts = ours.slots.shape[0], ours.bags.starts.shape[0]
    sorted_keys, order = torch.sort(ours.slots, stable=True)

    def padded(tensor, dtype, fill):
        longer = torch.full((tensor.shape[0] + 77,), fill, dtype=dtype, device=DEVICE)
        longer[: tensor.shape[0]] = tensor
        return longer

    theirs = ours._replace(
        slots=padded(ours.slots, torch.int32, -7)[:num],
        bags=Bags(
            padded(ours.bags.starts, torch.int64, -7)[:num_starts],
            ours.bags.out_rows,
            padded(ours.scale, torch.float32, torch.nan)[:num],
            padded(ours.out_row_of_lookup(), torch.int32, -7)[:num],
        ),
        sorted=SortedKeys(
            padded(sorted_keys, torch.int32, 2**31 - 1)[:num],
            padded(order, torch.int32, -7)[:num],
        ),
    )
    found = []
    for each in (ours, theirs):
        changed = records.to(DEVICE, copy=True)
        vectors = lookup(changed, each, dim)
        update(changed, layout, grad, each, settings_of(optimizer, 0.1, tables))
        found.append((vectors, changed))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_hot_rows_cross_many_chunks():
    """Rows of 1, 63, 64, 65 and 1,300 lookups: inside a chunk, at its boundaries, across twenty of them."""
    from hotbed.ops.update.triton import update

    counts = [1, 63, 64, 65, 1300, 2]
    slots = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    slots = slots[torch.randperm(slots.shape[0], generator=torch.Generator().manual_seed(0))]
    lookups = Lookups(slots, (Span("a", 0, slots.shape[0], 1),), slots.shape[0])
    grad = torch.randn(slots.shape[0], 3, generator=torch.Generator().manual_seed(1))
    optimizer = dataclasses.replace(OPTIMIZERS[3], scale_by_count=True)
    layout, records = start(optimizer, 3, torch.Generator().manual_seed(2))
    settings = settings_of(optimizer, 0.1, (TableRows(0, 6, 0, 1),))
    actual = records.to(DEVICE)
    update(actual, layout, grad.to(DEVICE), on_device(lookups), settings)
    update_reference.update(records, layout, grad, lookups, settings)
    torch.testing.assert_close(actual.cpu(), records, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("bad", [None, 10, -1, -(2**63)])
def test_keys(bad):
    from hotbed.ops.keys.triton import make_keys

    addresses = Addresses(
        np.array([0, 10]), np.array([10, 7]), np.array([False, True]), np.array([True, False]), np.array([3, 0])
    )
    spans = (Span("a", 0, 1500, 2), Span("b", 1, 1500, 2))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 10, (3000,), generator=generator)
    ids[1::2] = torch.randint(-(2**62), 2**62, (1500,), generator=generator)
    if bad is not None:
        ids[2222] = bad
        ids[2600] = bad
    keys, position = make_keys(ids.to(DEVICE), spans, addresses)
    expected, expected_position = keys_reference.make_keys(ids, spans, addresses)
    assert position.get() == expected_position.get() == (None if bad is None else 2222)
    if bad is None:
        assert torch.equal(keys.cpu().to(torch.int64), expected)


def test_the_gradient_of_a_row_beyond_31_bits_is_found():
    """2,049 rows of 2^20 numbers: the place of the last exceeds an int32, which order and out_rows may be of."""
    import mmap

    import triton
    import triton.language as tl

    from hotbed.ops.update.triton import _gradient

    if DEVICE == "cuda":
        pytest.skip("the address is the same; this needs 16 GiB of addresses, not of memory")

    @triton.jit
    def gradient_of(positions, grad, out, DIM: tl.constexpr, GRADIENT: tl.constexpr):
        d = tl.arange(0, 4)
        tl.store(out + d, GRADIENT(tl.load(positions), grad, positions, grad, d, d < 4, DIM, False, False))

    dim, row = 1 << 20, 2048
    try:  # addresses without memory behind them: one that wrapped around would lie in the first half
        memory = mmap.mmap(-1, 4 * 2 * (row + 1) * dim, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    except (OSError, ValueError) as error:
        pytest.skip(f"no room for addresses: {error}")
    grad = torch.frombuffer(memory, dtype=torch.float32)[(row + 1) * dim :]
    grad[row * dim : row * dim + 4] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    out = torch.zeros(4)
    gradient_of[(1,)](torch.tensor([row], dtype=torch.int32), grad, out, dim, _gradient)
    assert out.tolist() == [1.0, 2.0, 3.0, 4.0]
