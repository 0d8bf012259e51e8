"""Rows of int8 below the device: packed as defined, without bias, and packed again as they were."""

import numpy as np
import pytest
import torch

from hotbed.ops.int8 import numba, pack, packed_width, reference, unpack
from hotbed.ops.records import Layout

LAYOUTS = [
    Layout(dim, element, row) for dim in (1, 3, 16, 33) for element, row in (((), ("sum",)), (("m", "v"), ()), ((), ()))
]


def records_of(layout, num_rows, seed=0):
    draw = torch.Generator().manual_seed(seed)
    records = torch.randn(num_rows, layout.width, generator=draw) * torch.rand(num_rows, 1, generator=draw)
    records[:, layout.used :] = 0
    return records, torch.randperm(num_rows, generator=draw) * 7


def unpacked(packed, layout):
    out = torch.full((packed.shape[0], layout.width), torch.nan)
    unpack(packed, layout, out)
    return out


def same_bits(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_compiled_and_plain_give_the_same_bits(layout):
    records, keys = records_of(layout, 500)
    records[3, : layout.dim] = 0
    records[4, : layout.dim] *= 1e-36  # some of them subnormal
    records[5, : layout.dim] = -0.0
    packed = numba.pack(records, keys, layout)
    assert packed.shape == (500, packed_width(layout))
    assert same_bits(packed, reference.pack(records, keys, layout))
    out = torch.full_like(records, torch.nan)
    reference.unpack(packed, layout, out)
    assert same_bits(unpacked(packed, layout), out)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_weight_is_off_by_less_than_its_scale_and_state_not_at_all(layout):
    records, keys = records_of(layout, 500)
    found = unpacked(pack(records, keys, layout), layout)
    largest = records[:, : layout.dim].abs().amax(1, keepdim=True)
    assert ((found - records)[:, : layout.dim].abs() <= largest / 127 * 1.0001).all()
    assert same_bits(found[:, layout.dim :].contiguous(), records[:, layout.dim :].contiguous())


@pytest.mark.parametrize("seed", range(5))
def test_what_was_unpacked_packs_to_itself(seed):
    layout = Layout(16, (), ("sum",))
    records, keys = records_of(layout, 20_000, seed)
    records[:, :16] *= 10.0 ** torch.randint(-20, 20, (20_000, 1))
    once = pack(records, keys, layout)
    assert same_bits(once, pack(unpacked(once, layout), keys, layout))


def test_rounding_has_no_bias_and_differs_by_key():
    layout = Layout(4, (), ())
    records = torch.tensor([[1.0, 0.3, -0.0012, 0.5551]]).repeat(200_000, 1)
    found = unpacked(pack(records, torch.arange(200_000), layout), layout)
    step = 1 / 127
    assert torch.equal(found[:, 0], torch.full((200_000,), float(found[0, 0])))
    bias = found.double().mean(0) - records[0].double()
    assert (bias.abs() < 5 * step / 2 / 200_000**0.5 + 2e-5).all()
    assert len(found[:, 2].unique()) == 2


@pytest.mark.parametrize("has_state", [True, False])
def test_small_steps_are_not_swallowed(has_state):
    layout, keys = Layout(2, (), ("sum",) if has_state else ()), torch.arange(2_000)
    records = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).repeat(2_000, 1)
    for n in range(100):  # each about a tenth of the scale
        if has_state:
            records[:, 1] += 0.1 / 127
            records[:, 2] += 1
        else:
            records[:, 1] += (0.1 + 0.0001 * (n - 50)) / 127
        records = unpacked(pack(records, keys, layout), layout)
    assert abs(float(records[:, 1].mean()) - 10 / 127) < 0.5 / 127


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**127, float(np.finfo(np.float32).max)])
def test_a_number_that_is_not_finite_is_not_hidden(bad):
    layout = Layout(3, (), ())
    records = torch.tensor([[1.0, bad, 2.0, 0.0]])
    found = unpacked(pack(records, torch.tensor([5]), layout), layout)
    assert found[0, :3].isnan().all()
    assert reference.pack(records, torch.tensor([5]), layout)[0, 1].isnan()


def test_the_largest_numbers_stay_finite():
    layout, largest = Layout(3, (), ()), np.nextafter(np.float32(2.0**127), np.float32(0))
    records = torch.tensor([[1.0, float(largest), -float(largest), 0.0]])
    packed = pack(records, torch.tensor([5]), layout)
    assert torch.equal(packed, reference.pack(records, torch.tensor([5]), layout))
    assert torch.allclose(unpacked(packed, layout)[0, 1:3], records[0, 1:3], rtol=1e-4)


def test_the_bits_are_those_of_key_and_row_alone():
    layout = Layout(16, (), ("sum",))
    records, keys = records_of(layout, 300)
    order = torch.randperm(300)
    assert same_bits(pack(records, keys, layout)[order], pack(records[order], keys[order], layout))
    assert not same_bits(pack(records, keys, layout), pack(records, keys + 1, layout))
