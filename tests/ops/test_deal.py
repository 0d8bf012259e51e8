"""Distinct keys by owner: the compiled way against plain torch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotbed.ops.deal import deal, reference


@given(st.lists(st.integers(-1, 40), max_size=200), st.integers(1, 5))
def test_numba(keys, world):
    keys = torch.tensor(keys, dtype=torch.int64)
    check(keys * 7**15, world)


@pytest.mark.parametrize("length", [0, 1, 5000])
def test_many(length):
    check(torch.randint(-1, 1000, [length]), 3)


def check(keys, world):
    keys = keys.where(keys >= 0, -1)
    owners = keys % world
    dealt = deal(keys, owners, world)
    found, counts, places = reference.deal(keys, owners, world)
    assert dealt.counts == counts
    assert torch.equal(dealt.places < 0, places < 0)
    for mine, theirs in zip(dealt.keys.split(counts), found.split(counts)):
        assert torch.equal(mine.sort().values, theirs)
    real = keys >= 0
    assert torch.equal(dealt.keys[dealt.places[real]], keys[real])
    assert torch.equal(found[places[real]], keys[real])
