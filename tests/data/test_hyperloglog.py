"""HyperLogLog against a reference in plain Python, sets, and its own error bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed.data.prepare.sketches import BITS, REGISTERS, STANDARD_ERROR, HyperLogLog

IDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=200)
MASK = 2**64 - 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def reference(ids: list[int]) -> np.ndarray:
    """The registers, by their definition."""
    registers = np.zeros(REGISTERS, dtype=np.uint8)
    for id_ in ids:
        text = f"{mix((id_ & MASK) ^ 0xD1B54A32D192ED03):064b}"
        rest = text[BITS:]
        value = len(rest) - len(rest.lstrip("0")) + 1
        place = int(text[:BITS], 2)
        registers[place] = max(registers[place], value)
    return registers


def sketch(ids) -> HyperLogLog:
    made = HyperLogLog()
    made.add(np.asarray(ids, dtype=np.int64))
    return made


@given(IDS)
def test_registers_equal_the_reference(ids):
    np.testing.assert_array_equal(sketch(ids).registers, reference(ids))


@given(IDS, IDS, st.randoms())
def test_merging_and_order_and_repetition_change_nothing(first, second, random):
    union = [*first, *second, *first]
    random.shuffle(union)
    merged = sketch(first)
    merged.merge(sketch(second))
    np.testing.assert_array_equal(merged.registers, sketch(union).registers)


@pytest.mark.parametrize("distinct", [0, 1, 10, 1000, 30_000, 65_536, 200_000, 3_000_000])
@pytest.mark.parametrize("kind", ["sequence", "random"])
def test_estimate_is_within_four_standard_errors(distinct, kind):
    ids = np.arange(distinct, dtype=np.int64)
    if kind == "random":
        ids = np.random.default_rng(distinct).integers(-(2**63), 2**63 - 1, distinct)
    assert sketch(ids).estimate() == pytest.approx(distinct, rel=4 * STANDARD_ERROR, abs=0.01)


def test_registers_of_very_many_ids_are_estimated():
    """2**40 ids: every register drawn from the distribution of the largest value among 2**24 ids."""
    random = np.random.default_rng(1)
    largest = np.ceil(-np.log2(1 - random.random(REGISTERS) ** (1 / 2**24)))
    made = HyperLogLog()
    made.registers[:] = np.clip(largest, 1, 49)
    assert made.estimate() == pytest.approx(2**40, rel=4 * STANDARD_ERROR)
