"""The stable hash: against a plain Python reference, and pinned values that must never change."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed.data.formats.parquet import text_of_strings
from hotbed.data.hash import MISSING_ID, expected_collisions, expected_sharing, hash_string, hash_text
from tests.data.raw_files import text_of

WORD = 2**64 - 1


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def reference(value: bytes) -> int:
    """The docstring of hotbed/data/hash.py, one value at a time."""
    if not value:
        return -(2**63)
    state = 0x9E3779B97F4A7C15
    for at in range(0, len(value), 8):
        state = mix(state ^ int.from_bytes(value[at : at + 8], "little"))
    bits = mix(state ^ len(value))
    return bits - 2**64 if bits >= 2**63 else bits


@given(st.lists(st.binary(max_size=40)))
def test_equals_the_reference(values):
    np.testing.assert_array_equal(
        hash_text(text_of(values)), np.array([reference(value) for value in values], dtype=np.int64)
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("68fd1e64", -7790776267924253791),
        ("aaaaaaaaaaaaaaaaaaaa", -8936270923813822201),
        ("", MISSING_ID),
        ("żółw", -4580361063391795893),
    ],
)
def test_ids_never_change(value, expected):
    assert hash_string(value) == expected
    assert hash_string(value.encode()) == expected


def test_padding_does_not_matter_but_length_does():
    ids = hash_text(text_of([b"a", b"a\0", b"a\0\0", b"aaaaaaaa", b"aaaaaaaa\0"]))
    assert len(set(ids.tolist())) == 5


def test_hex_strings_of_8_digits_never_collide():
    ids = hash_text(text_of([f"{i:08x}" for i in range(0, 2**32, 30011)]))
    assert len(np.unique(ids)) == len(ids)


def test_arrow_strings_with_nulls_and_offsets():
    array = pa.array(["zero", "one", None, "", "żółw"]).slice(1)
    assert hash_text(text_of_strings(array)).tolist() == [
        hash_string("one"),
        MISSING_ID,
        MISSING_ID,
        hash_string("żółw"),
    ]


def test_bits_are_spread():
    """Taken modulo a small table, the ids of consecutive strings fall evenly (the hashing trick needs it)."""
    ids = hash_text(text_of([f"user{i}" for i in range(64_000)]))
    counts = np.bincount(ids % 64, minlength=64)
    assert counts.min() > 880
    assert counts.max() < 1120


@pytest.mark.parametrize(("num_ids", "num_rows"), [(1, 7), (2, 1), (5, 1), (50, 64), (3000, 1000)])
def test_ids_that_share_a_row_are_foretold(num_ids, num_rows):
    generator, shares = np.random.default_rng(3), []
    for _ in range(200):
        times = np.bincount(generator.integers(0, num_rows, num_ids), minlength=num_rows)
        shares.append(times[times > 1].sum())
    assert expected_sharing(num_ids, num_rows) == pytest.approx(np.mean(shares), rel=0.05, abs=0.01)


def test_texts_that_share_an_id_are_foretold():
    assert expected_collisions(1) == 0
    assert expected_collisions(40_000_000) == pytest.approx(1 / 23_000, rel=0.01)
    assert expected_collisions(2**33) == pytest.approx(2.0, rel=0.01)
