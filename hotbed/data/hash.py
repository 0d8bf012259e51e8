"""Strings in, 64-bit ids out: the same id for the same bytes on every machine and Python version.

    state = SEED
    for each 8 bytes (little endian, the last word padded with zeros):  state = mix(state ^ word)
    id = mix(state ^ number of bytes), read as a signed 64-bit integer

`mix` is the finaliser of splitmix64 (two multiply-and-shift rounds); it is a bijection, so two values of the same length
up to 8 bytes (Criteo's hex strings) never share an id, and longer ones collide as rarely as random 64-bit numbers do:
one chance in 23,000 that any two of 40 million values meet. It is not meant to withstand an attacker.

A missing value is a value: it has the reserved id `MISSING_ID`, which no string can get.
"""

from __future__ import annotations

import math

import numpy as np

from hotbed.data.formats.chunk import Text
from hotbed.data.hash_kernels import MISSING_ID, hash_spans, mix

__all__ = ["MISSING_ID", "expected_collisions", "expected_sharing", "hash_string", "hash_text", "mix"]


def hash_text(text: Text) -> np.ndarray:
    """The id of every value, int64 [n]; an empty value is missing."""
    ids: np.ndarray = hash_spans(text.data, text.starts, text.ends)
    return ids


def expected_collisions(num_ids: int) -> float:
    """Pairs of long texts that share an id, of so many different ones."""
    return num_ids * (num_ids - 1) / 2 / 2.0**64


def expected_sharing(num_ids: int, num_rows: int) -> float:
    """Of so many ids that are hashed into rows, those that find another one in their row."""
    return (
        num_ids * -math.expm1((num_ids - 1) * math.log1p(-1 / num_rows))
        if num_rows > 1
        else float(num_ids > 1) * num_ids
    )


def hash_string(value: str | bytes) -> int:
    """The id of one string."""
    data = np.frombuffer(value.encode() if isinstance(value, str) else value, dtype=np.uint8).copy()
    return int(hash_text(Text(data, np.array([0], dtype=np.int64), np.array([len(data)], dtype=np.int64)))[0])
