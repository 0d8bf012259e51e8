"""Weights of 16 bits: rounded without bias, by bits that belong to the key, the same on every backend."""

import dataclasses

import numpy as np
import pytest
import torch
from numba import njit

from hotbed.ops.lookup import lookup
from hotbed.ops.lookup import reference as lookup_reference
from hotbed.ops.precision import KINDS, numba, reference, salt_of
from hotbed.ops.records import layout_of
from hotbed.ops.update import reference as update_reference
from hotbed.ops.update import settings_of, update
from hotbed.optim import SGD
from tests.ops.cases import random_bags, random_matrix
from tests.ops.test_update import OPTIMIZERS, ROWS, VARIANTS

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
PRECISIONS = tuple(TYPES)


def odd_numbers():
    """Every kind of float32: any bits, numbers near the ends of each type, zeros, halves exactly."""
    generator = torch.Generator().manual_seed(0)
    every_bit = torch.randint(-(2**31), 2**31, (50_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    special = [0.0, -0.0, 65504, 65519.99, 65520, -1e9, 3.4e38, -3.4e38, 2**-14, 2**-24, 2**-25, 1e-45, -1e-45]
    not_finite = [float("inf"), -float("inf"), float("nan")]
    near_ends = [torch.randn(5000, generator=generator) * scale for scale in (1e-7, 1e-5, 1.0, 1e5, 1e38)]
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).float()
    return torch.cat([every_bit.view(torch.float32), torch.tensor(special + not_finite), *near_ends, halves])


def random_words(count):
    return torch.randint(0, 2**32, (count,), generator=torch.Generator().manual_seed(1))


def same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.view(torch.int16), expected.view(torch.int16))


@njit
def compiled_nearest(x, kind, out):
    for i in range(x.shape[0]):
        out[i] = numba.round_nearest(x[i], kind)


@njit
def compiled_stochastic(x, random, kind, out):
    for i in range(x.shape[0]):
        out[i] = numba.round_stochastic(x[i], random[i], kind)


@njit
def compiled_widen(half, kind, out):
    for i in range(half.shape[0]):
        out[i] = numba.widen(half[i], kind)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_compiled_equals_reference(precision):
    x, kind, dtype = odd_numbers(), KINDS[precision], TYPES[precision]
    random, out = random_words(x.shape[0]), np.empty(x.shape[0], dtype=np.uint16)
    compiled_stochastic(x.numpy(), random.numpy().astype(np.uint32), kind, out)
    same_bits(torch.from_numpy(out.view(np.int16)).view(dtype), reference.round_stochastic(x, random, dtype))
    x = x[x.isfinite()]
    out = np.empty(x.shape[0], dtype=np.uint16)
    compiled_nearest(x.numpy(), kind, out)
    same_bits(torch.from_numpy(out.view(np.int16)).view(dtype), reference.round_nearest(x, dtype))
    halves = np.arange(2**16, dtype=np.uint16)
    wide = np.empty(2**16, dtype=np.float32)
    compiled_widen(halves, kind, wide)
    expected = torch.from_numpy(halves.view(np.int16)).view(dtype).float()
    assert torch.equal(torch.from_numpy(wide).nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_number_becomes_one_of_its_two_neighbours(precision):
    x, dtype = odd_numbers(), TYPES[precision]
    x = x[x.isfinite() & (x.abs() <= torch.finfo(dtype).max)]
    nearest = reference.round_nearest(x, dtype)
    step = torch.sign(x.abs() - nearest.float().abs()).to(torch.int16)  # towards x, in magnitude; 0 where x is a half
    other = (nearest.view(torch.int16) + step).view(dtype)
    rounded = reference.round_stochastic(x, random_words(x.shape[0]), dtype)
    assert bool(((rounded == nearest) | (rounded == other)).all())
    between = (nearest != other) & (nearest != 0)
    assert 0.1 < float((rounded == other)[between].float().mean()) < 0.4


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", [1.0001, -0.0123456, 3e-5, -2.1e-7, 1e-8, 60001.7])
def test_rounding_has_no_bias(precision, value):
    """The mean of 400,000 roundings, over keys and elements, is the number itself within 4.5 deviations."""
    dtype = TYPES[precision]
    random = reference.random_bits(torch.arange(4000), salt_of(3, 17), 100).reshape(-1)
    x = torch.full([400_000], value)
    rounded = reference.round_stochastic(x, random, dtype).double()
    low, high = rounded.min(), rounded.max()
    assert low <= x[0] <= high
    assert low < high
    share = float((x[0].double() - low) / (high - low))
    mean, deviation = float((rounded - low).mean() / (high - low)), (share * (1 - share) / 400_000) ** 0.5
    assert abs(mean - share) < 4.5 * deviation + 1e-6


def test_the_bits_of_rows_elements_and_updates_are_independent():
    """Correlations between neighbours stay within what 400,000 coin tosses show, for the top bits that decide."""
    bits = reference.random_bits(torch.arange(4000), salt_of(3, 17), 100)
    again = reference.random_bits(torch.arange(4000), salt_of(3, 18), 100)
    assert bits.min() >= 0
    assert bits.max() < 2**32
    centred = (bits >> 16).double() / 2**16 - 0.5
    pairs = [(centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])]
    pairs.append((centred, (again >> 16).double() / 2**16 - 0.5))
    for a, b in pairs:
        assert abs(float((a * b).mean()) * 12) < 4.5 / a.numel() ** 0.5
    assert salt_of(3, 17) != salt_of(4, 17)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_finite_numbers_stay_finite_and_others_are_seen(precision):
    dtype, random = TYPES[precision], random_words(4)
    x = torch.tensor([3.4e38, -3.4e38, float("inf"), float("nan")])
    rounded = reference.round_stochastic(x, random, dtype)
    assert rounded[0] == torch.finfo(dtype).max
    assert rounded[1] == torch.finfo(dtype).min
    assert rounded[2].isinf()
    assert rounded[3].isnan()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("make", [random_matrix, random_bags])
@pytest.mark.parametrize("dim", [1, 7, 40])
def test_lookup(precision, make, dim):
    generator = torch.Generator().manual_seed(dim)
    lookups, _ = make(ROWS, 33, generator)
    layout = layout_of(dim, SGD(), precision)
    numbers = layout.numbers(torch.zeros(sum(ROWS), layout.width))
    numbers.copy_(torch.randn(numbers.shape, generator=generator))
    actual = lookup(numbers, lookups, dim)
    expected = lookup_reference.lookup(numbers.float(), lookups, dim)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lookup_reference.lookup(numbers, lookups, dim), expected, rtol=0, atol=0)


def start(optimizer, dim, precision, generator):
    layout = layout_of(dim, optimizer, precision)
    records = torch.rand(sum(ROWS), layout.width, generator=generator)
    weights = torch.randn(sum(ROWS), dim, generator=generator)
    layout.numbers(records)[:, : 2 * layout.weight_columns] = 0
    layout.weights(records).copy_(weights)
    for state in layout.row_states:
        records[:, layout.columns(state)] = torch.randint(0, 5, (sum(ROWS), 1), generator=generator).float()
    return layout, records


def assert_same_but_for_ties(layout, actual, expected):
    """State to float32 rounding; weights equal, but where sums differ in their last bit and fall on either side."""
    states = slice(layout.weight_columns, layout.used)
    torch.testing.assert_close(actual[:, states], expected[:, states], rtol=3e-5, atol=3e-5)
    ours, theirs = layout.weights(actual).float(), layout.weights(expected).float()
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)
    assert float((ours != theirs).float().mean()) < 0.01
    assert torch.equal(
        layout.numbers(actual)[:, layout.dim : 2 * layout.weight_columns].float().nan_to_num(),
        0 * ours[:, : layout.dim % 2],
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("make", [random_matrix, random_bags])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.rule.name)
def test_update(optimizer, make, precision):
    for variant, dim, batch in [
        (VARIANTS[0], 1, 2),
        (VARIANTS[1], 5, 9),
        (VARIANTS[2], 16, 300),
        (VARIANTS[3], 33, 90),
    ]:
        optimizer = dataclasses.replace(optimizer, **variant)
        generator = torch.Generator().manual_seed(dim + batch)
        lookups, tables = make(ROWS, batch, generator)
        layout, records = start(optimizer, dim, precision, generator)
        grad = torch.randn(lookups.num_out, dim, generator=generator)
        settings = settings_of(optimizer, 0.1, tables, salt=salt_of(5, batch))
        actual = records.clone()
        update(actual, layout, grad, lookups, settings)
        update_reference.update(records, layout, grad, lookups, settings)
        assert_same_but_for_ties(layout, actual, records)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rounding_follows_the_key_and_not_the_slot(precision):
    """Sums of whole numbers are exact, so every backend must find the same bits, wherever the rows are."""
    generator = torch.Generator().manual_seed(0)
    lookups, tables = random_matrix(ROWS, 40, generator)
    layout, records = start(SGD(), 9, precision, generator)
    grad = torch.randint(-8, 9, (lookups.num_out, 9), generator=generator).float()
    settings = settings_of(SGD(), 2.0**-13, tables, salt=77)
    place = torch.randperm(sum(ROWS), generator=generator)
    elsewhere = lookups._replace(
        slots=torch.where(lookups.slots < 0, -1, place[lookups.slots.clamp(min=0)]), keys=lookups.slots
    )
    one_table = settings_of(
        SGD(), 2.0**-13, (tables[0]._replace(base=0, rows=sum(ROWS), stop_span=len(ROWS)),), salt=77
    )
    results = []
    for move in (update, update_reference.update):
        still, moved = records.clone(), torch.empty_like(records)
        moved[place] = records
        move(still, layout, grad, lookups, settings)
        move(moved, layout, grad, elsewhere, one_table)
        results += [still, moved[place]]
    assert not torch.equal(layout.weights(results[0]), layout.weights(records))
    for result in results[1:]:
        assert torch.equal(result.view(torch.int32), results[0].view(torch.int32))
    other = records.clone()
    update(other, layout, grad, lookups, settings._replace(salt=78))
    assert not torch.equal(layout.weights(other), layout.weights(results[0]))
