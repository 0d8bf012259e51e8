"""Tiny memory tiers over an ssd, with all that may come between two batches."""

import pytest

from tests.faults.tier_storm import tier_storm


@pytest.mark.parametrize("seed", range(4))
def test_the_same_bits_as_whole_tables(seed):
    tier_storm(seed)
