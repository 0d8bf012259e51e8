"""Generated rows as raw Criteo text, and the names ids carry in it.

In: ClickRows. Out: tab-separated bytes (label, 13 integers, 26 strings of 8 hex digits, empty where missing) rendered by
Numba. An id's name is a bijection of its number within the column, so two ids of a column never share a name.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hotbed.data.ahead import run_ahead
from hotbed.data.formats.chunk import Text
from hotbed.data.hash import MISSING_ID as MISSING_HASH
from hotbed.data.hash import hash_text
from hotbed.data.synthetic.generate import MISSING_ID, MISSING_INTEGER, ClickRows, CriteoLike
from hotbed.errors import DataError

CHUNK = 1 << 16
LONGEST = 2 + 13 * 12 + 26 * 9  # bytes of a row: label, integers of up to 11 characters, names of 8, separators


def write_tsv(path: str | Path, start: int, stop: int, seed: int = 0, threads: int = 2) -> int:
    """Write rows start .. stop - 1 of the seed's log as text; returns the number of bytes."""
    log = CriteoLike(seed)
    written = 0
    try:
        with Path(path).open("wb") as file:
            ranges = [(low, min(low + CHUNK, stop)) for low in range(start, stop, CHUNK)]
            for text in run_ahead(lambda pair: render(log.rows(*pair)), ranges, threads=threads, ahead=threads):
                written += file.write(text)
    except OSError as error:
        if Path(path).is_file():
            Path(path).unlink()  # half a log looks like a whole one
        raise DataError(f"{path} cannot be written: {error.strerror or error}.") from error
    return written


def render(rows: ClickRows) -> bytes:
    """The rows as text, one line each."""
    out = np.empty(len(rows.labels) * LONGEST, dtype=np.uint8)
    end = _render(rows.labels, rows.integers, rows.ids, out)
    return out[:end].tobytes()


def raw_ids(column: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The 64-bit ids that the reader of the text would give to these ids of a column; int64 [n]."""
    names = np.empty((len(ids), 8), dtype=np.uint8)
    _names(column, ids, names)
    starts = np.arange(0, 8 * len(ids), 8, dtype=np.int64)
    hashes = hash_text(Text(names.reshape(-1), starts, starts + 8))
    return np.asarray(np.where(ids == MISSING_ID, MISSING_HASH, hashes))


@njit(nogil=True, inline="always")
def _name(column: int, id_: np.int64 | int) -> np.uint32:
    """A bijection of 32-bit numbers for every column: odd multiplications and shifts."""
    mask = np.uint64(0xFFFFFFFF)
    word = (np.uint64(id_) + np.uint64(0x9E3779B9) * np.uint64(column + 1)) & mask
    word = ((word ^ (word >> np.uint64(16))) * np.uint64(0x7FEB352D)) & mask
    word = ((word ^ (word >> np.uint64(15))) * np.uint64(0x846CA68B)) & mask
    return np.uint32(word ^ (word >> np.uint64(16)))


@njit(nogil=True, inline="always")
def _put_name(column: int, id_: np.int64 | int, out: NDArray[np.uint8], at: int) -> None:
    name = _name(column, id_)
    for digit in range(8):
        nibble = (name >> np.uint32(28 - 4 * digit)) & np.uint32(15)
        out[at + digit] = nibble + (np.uint32(48) if nibble < 10 else np.uint32(87))


@njit(nogil=True, cache=True)
def _names(column: int, ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    for i in range(len(ids)):
        _put_name(column, ids[i], out[i], 0)


@njit(nogil=True, inline="always")
def _put_integer(value: np.int64 | int, out: NDArray[np.uint8], at: int) -> int:
    """Write the decimal digits; returns the place behind them."""
    if value < 0:
        out[at] = 45
        at += 1
        value = -value
    power = 1
    while power * 10 <= value:
        power *= 10
    while power > 0:
        out[at] = 48 + value // power % 10
        at += 1
        power //= 10
    return at


@njit(nogil=True, cache=True)
def _render(
    labels: NDArray[np.float32], integers: NDArray[np.int32], ids: NDArray[np.int32], out: NDArray[np.uint8]
) -> int:
    at = 0
    for row in range(len(labels)):
        out[at] = 49 if labels[row] > 0.5 else 48
        at += 1
        for column in range(integers.shape[0]):
            out[at] = 9
            at += 1
            if integers[column, row] != MISSING_INTEGER:
                at = _put_integer(np.int64(integers[column, row]), out, at)
        for column in range(ids.shape[0]):
            out[at] = 9
            at += 1
            if ids[column, row] != MISSING_ID:
                _put_name(column, np.int64(ids[column, row]), out, at)
                at += 8
        out[at] = 10
        at += 1
    return at
