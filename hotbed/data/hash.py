"""Strings in, 64-bit ids out: the same id for the same bytes on every machine and Python version.

    state = SEED
    for each 8 bytes (little endian, the last word padded with zeros):  state = mix(state ^ word)
    id = mix(state ^ number of bytes), read as a signed 64-bit integer

`mix` is the finaliser of splitmix64 (two multiply-and-shift rounds); it is a bijection, so two values of the same length
up to 8 bytes (Criteo's hex strings) never share an id, and longer ones collide as rarely as random 64-bit numbers do: the
chance that any two of 40 million values collide is one in 23,000. It is not meant to withstand an attacker.

A missing value has the reserved id `MISSING_ID`, which no string gets.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from hotbed.host.jit import njit
from hotbed.host.splitmix import FIRST, GOLDEN, SECOND, mix

if TYPE_CHECKING:
    from hotbed.data.formats.chunk import Text

MISSING_ID = -(2**63)

_SEED = GOLDEN
_MISSING_BITS = np.uint64(2**63)
_MASK = 2**64 - 1


@njit(nogil=True, cache=True, inline="always")
def load_word(data: np.ndarray, at: int) -> np.uint64:
    """Eight bytes, little endian; LLVM turns it into one load."""
    word = np.uint64(data[at])
    word |= np.uint64(data[at + 1]) << np.uint64(8)
    word |= np.uint64(data[at + 2]) << np.uint64(16)
    word |= np.uint64(data[at + 3]) << np.uint64(24)
    word |= np.uint64(data[at + 4]) << np.uint64(32)
    word |= np.uint64(data[at + 5]) << np.uint64(40)
    word |= np.uint64(data[at + 6]) << np.uint64(48)
    word |= np.uint64(data[at + 7]) << np.uint64(56)
    return word


@njit(nogil=True, cache=True, inline="always")
def hash_word(word: np.uint64) -> np.int64:
    """The id of eight bytes."""
    return _signed(mix(mix(_SEED ^ word) ^ np.uint64(8)))


@njit(nogil=True, cache=True)
def hash_span(data: np.ndarray, start: int, end: int) -> np.int64:
    """The id of data[start:end]."""
    state = _SEED
    position = start
    while position + 8 <= end:
        state = mix(state ^ load_word(data, position))
        position += 8
    if position < end:
        word = np.uint64(0)
        for byte in range(end - position):
            word |= np.uint64(data[position + byte]) << np.uint64(8 * byte)
        state = mix(state ^ word)
    return _signed(mix(state ^ np.uint64(end - start)))


@njit(nogil=True, cache=True)
def hash_spans(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The ids of many spans, int64 [n]; MISSING_ID for empty ones."""
    out = np.empty(len(starts), dtype=np.int64)
    for i in range(len(starts)):
        out[i] = hash_span(data, starts[i], ends[i]) if ends[i] > starts[i] else MISSING_ID
    return out


@njit(nogil=True, cache=True, inline="always")
def _signed(bits: np.uint64) -> np.int64:
    return np.int64(_SEED if bits == _MISSING_BITS else bits)


def hash_text(text: Text) -> np.ndarray:
    """The id of every value, int64 [n]; an empty value is missing."""
    ids: np.ndarray = hash_spans(text.data, text.starts, text.ends)
    return ids


def expected_collisions(num_ids: int) -> float:
    """The expected number of pairs that share an id among `num_ids` long strings."""
    return num_ids * (num_ids - 1) / 2 / 2.0**64


def expected_sharing(num_ids: int, num_rows: int) -> float:
    """The expected number of ids that share their row with another when `num_ids` ids are hashed into rows."""
    return (
        num_ids * -math.expm1((num_ids - 1) * math.log1p(-1 / num_rows))
        if num_rows > 1
        else float(num_ids > 1) * num_ids
    )


def short_text(id_: int) -> str | None:
    """The string of 1 to 8 bytes that has this id; None for the id of a longer one, or of none."""
    for length in range(1, 9):
        word = _unmix(_unmix(id_ & _MASK) ^ length) ^ int(_SEED)
        data = word.to_bytes(8, "little")
        if not any(data[length:]) and all(data[:length]):
            try:
                text = data[:length].decode()
            except UnicodeDecodeError:
                continue
            if text.isprintable() and hash_string(text) == id_:
                return text
    return None


def _unmix(x: int) -> int:
    """The inverse of `mix`."""
    x ^= (x >> 31) ^ (x >> 62)
    x = x * pow(int(SECOND), -1, 1 << 64) & _MASK
    x ^= (x >> 27) ^ (x >> 54)
    x = x * pow(int(FIRST), -1, 1 << 64) & _MASK
    return x ^ (x >> 30) ^ (x >> 60)


def hash_string(value: str | bytes) -> int:
    """The id of one string."""
    data = np.frombuffer(value.encode() if isinstance(value, str) else value, dtype=np.uint8).copy()
    return int(hash_spans(data, np.array([0], dtype=np.int64), np.array([len(data)], dtype=np.int64))[0])
