"""Distinct keys by owner: the compiled way against plain torch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotbed.ops.partition import OwnerPartition, partition_by_owner, reference


@given(st.lists(st.tuples(st.integers(-20, 20), st.integers(0, 2)), max_size=200), st.integers(1, 5))
def test_pairs(pairs, world):
    keys = torch.tensor([key for key, _ in pairs], dtype=torch.int64) * 7**15
    check(keys, world, torch.tensor([kind for _, kind in pairs], dtype=torch.int32))


@pytest.mark.parametrize("length", [0, 1, 5000])
def test_many(length):
    check(torch.randint(-500, 500, [length]), 3, torch.zeros(length, dtype=torch.int32))


@pytest.mark.parametrize("length", [0, 7, 5000])
def test_of_one_kind_without_padding(length):
    keys = torch.randint(-500, 500, [length])
    check(keys, 4, None, padded=False)


def check(keys, world, kinds, padded=True):
    slots = torch.where(keys % 11 == 3, -1, 0) if padded else None

    def owner_of(keys, kinds):
        return (keys % (7 * world) + (0 if kinds is None else kinds)) % world

    real = torch.ones_like(keys, dtype=torch.bool) if slots is None else slots >= 0
    owners = owner_of(keys, kinds)
    ways = (
        partition_by_owner(keys, slots, owner_of, world, kinds),
        OwnerPartition(*reference.partition_by_owner(keys, slots, owner_of, world, kinds)),
    )
    for partitioned in ways:
        assert torch.equal(partitioned.places < 0, ~real)
        places = partitioned.places[real]
        assert torch.equal(partitioned.keys[places], keys[real])
        if kinds is not None:
            assert torch.equal(partitioned.kinds[places], kinds[real])
        assert torch.equal(
            torch.arange(world).repeat_interleave(torch.tensor(partitioned.counts))[places], owners[real]
        )
        assert torch.equal(partitioned.times.long(), torch.bincount(places, minlength=partitioned.keys.shape[0]))
    assert ways[0].keys.shape == ways[1].keys.shape
    assert ways[0].counts == ways[1].counts
