"""16-bit weights in Triton against the references: on a CUDA device where there is one, else under Triton's interpreter."""

import dataclasses

import pytest
import torch

from hotbed.ops.lookup import reference as lookup_reference
from hotbed.ops.precision import KINDS, reference, salt_of
from hotbed.ops.records import layout_of
from hotbed.ops.update import TableRows, settings_of
from hotbed.ops.update import reference as update_reference
from hotbed.optim import SGD
from tests.ops.cases import random_bags, random_matrix
from tests.ops.test_precision import (
    PRECISIONS,
    TYPES,
    assert_same_but_for_ties,
    odd_numbers,
    random_words,
    same_bits,
    start,
)
from tests.ops.test_triton import on_device
from tests.ops.test_update import OPTIMIZERS, ROWS, VARIANTS

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = triton.language
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from hotbed.ops.precision.triton import round_nearest, round_stochastic, widen  # noqa: E402  after the skip


@triton.jit
def rounded(x, random, nearest, stochastic, wide, num, KIND: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < num, other=0.0)
    bits = tl.load(random + i, mask=i < num, other=0).to(tl.uint32)
    near, coin = round_nearest(value, KIND), round_stochastic(value, bits, KIND)
    tl.store(nearest + i, near.to(tl.int16, bitcast=True), mask=i < num)
    tl.store(stochastic + i, coin.to(tl.int16, bitcast=True), mask=i < num)
    tl.store(wide + i, widen(coin, KIND), mask=i < num)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rounding(precision):
    x, dtype = odd_numbers(), TYPES[precision]
    random, num = random_words(x.shape[0]), x.shape[0]
    nearest, stochastic = (torch.zeros(num, dtype=torch.int16, device=DEVICE) for _ in range(2))
    wide = torch.zeros(num, device=DEVICE)
    grid = (triton.cdiv(num, 4096),)
    rounded[grid](x.to(DEVICE), random.to(DEVICE), nearest, stochastic, wide, num, KIND=KINDS[precision], BLOCK=4096)
    expected = reference.round_stochastic(x, random, dtype)
    same_bits(stochastic.cpu().view(dtype), expected)
    assert torch.equal(wide.cpu().nan_to_num(7.0), expected.float().nan_to_num(7.0))
    finite = x.isfinite()
    same_bits(nearest.cpu().view(dtype)[finite], reference.round_nearest(x, dtype)[finite])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("make", [random_matrix, random_bags])
@pytest.mark.parametrize("dim", [1, 5, 300])
def test_lookup(precision, make, dim):
    from hotbed.ops.lookup.triton import lookup

    generator = torch.Generator().manual_seed(dim)
    lookups, _ = make(ROWS, 7, generator)
    layout = layout_of(dim, SGD(), precision)
    numbers = layout.numbers(torch.zeros(sum(ROWS), layout.width))
    numbers.copy_(torch.randn(numbers.shape, generator=generator))
    actual = lookup(numbers.to(DEVICE), on_device(lookups), dim)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.cpu(), lookup_reference.lookup(numbers, lookups, dim), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.rule.name)
def test_update(optimizer, precision):
    from hotbed.ops.update.triton import update

    for make, variant, dim, batch in [
        (random_matrix, VARIANTS[0], 1, 2),
        (random_bags, VARIANTS[1], 5, 9),
        (random_matrix, VARIANTS[2], 16, 30),
        (random_bags, VARIANTS[3], 33, 9),
    ]:
        optimizer = dataclasses.replace(optimizer, **variant)
        generator = torch.Generator().manual_seed(dim + batch)
        lookups, tables = make(ROWS, batch, generator)
        layout, records = start(optimizer, dim, precision, generator)
        grad = torch.randn(lookups.num_out, dim, generator=generator)
        settings = settings_of(optimizer, 0.1, tables, salt=salt_of(5, batch))
        actual = records.to(DEVICE)
        update(actual, layout, grad.to(DEVICE), on_device(lookups), settings)
        update_reference.update(records, layout, grad, lookups, settings)
        assert_same_but_for_ties(layout, actual.cpu(), records)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rounding_follows_the_key_and_not_the_slot(precision):
    """Sums of whole numbers are exact, so the bits are those of the reference, also of rows that cross chunks."""
    from hotbed.ops.update.triton import update

    generator = torch.Generator().manual_seed(0)
    lookups, tables = random_matrix(ROWS, 80, generator)
    layout, records = start(SGD(), 9, precision, generator)
    grad = torch.randint(-8, 9, (lookups.num_out, 9), generator=generator).float()
    place = torch.randperm(sum(ROWS), generator=generator)
    slots = torch.where(lookups.slots < 0, -1, place[lookups.slots.clamp(min=0)])
    for salt in (5, salt_of(1, 2), salt_of(1, 3)):
        expected, moved = records.clone(), torch.empty_like(records)
        moved[place] = records
        moved = moved.to(DEVICE)
        settings = settings_of(SGD(), 2.0**-13, tables, salt=salt)
        update_reference.update(expected, layout, grad, lookups, settings)
        elsewhere = on_device(lookups._replace(slots=slots, keys=lookups.slots))
        everywhere = settings._replace(tables=(TableRows(0, sum(ROWS), 0, len(ROWS)),))
        update(moved, layout, grad.to(DEVICE), elsewhere, everywhere)
        assert torch.equal(moved.cpu()[place].view(torch.int32), expected.view(torch.int32))
