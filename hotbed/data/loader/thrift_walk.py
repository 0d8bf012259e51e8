"""Structs in Thrift's compact encoding in, one value after the other out: what Parquet's footer and page headers are made of.

A walk holds where it is: the fields and list items that lead to the value it came to last. Maps are not understood, and Parquet
has none.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

FAILED = -1
OVER, NUMBER, OTHER = 0, 1, 2  # what a step came to: the end, a number, a text or anything else
_STOP, _TRUE, _FALSE, _BYTE, _SHORT, _INT, _LONG, _DOUBLE, _TEXT, _LIST, _SET, _STRUCT = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    10,
    12,
)
_DEEPEST = 10
# Rows of a walk: of every open struct or list its last field or item, what its items are (0: a struct), how many are left
FIELD, _ITEMS, _LEFT, _STATE = 0, 1, 2, 3
_DEPTH, _VALUE, _AT = 0, 1, 2  # of the last row


@njit(nogil=True, cache=True)
def start_walk(at: int) -> NDArray[np.int64]:
    """A walk through the struct at byte `at`."""
    walk = np.zeros((4, _DEEPEST), dtype=np.int64)
    walk[_STATE, _AT] = at
    return walk


@njit(nogil=True, cache=True)
def depth_of(walk: NDArray[np.int64]) -> int:
    """Of the value: walk[FIELD, : depth + 1] is its path; 0 in the outermost struct."""
    return int(walk[_STATE, _DEPTH])


@njit(nogil=True, cache=True)
def value_of(walk: NDArray[np.int64]) -> int:
    """The number the walk came to."""
    return int(walk[_STATE, _VALUE])


@njit(nogil=True, cache=True)
def end_of(walk: NDArray[np.int64]) -> int:
    """The byte after the struct, once the walk is over."""
    return int(walk[_STATE, _AT])


@njit(nogil=True, cache=True)
def _read_number(raw: NDArray[np.uint8], at: int, end: int) -> tuple[int, int]:
    """An unsigned number of seven bits a byte, and where it ends, or -1."""
    number, shift = np.uint64(0), np.uint64(0)
    while at < end and shift < 64:
        number |= np.uint64(raw[at] & 0x7F) << shift
        at += 1
        if raw[at - 1] < 0x80:
            return np.int64(number), at
        shift += np.uint64(7)
    return 0, FAILED


@njit(nogil=True, cache=True)
def _signed(number: int) -> int:
    return ((number >> 1) & 0x7FFFFFFFFFFFFFFF) ^ -(number & 1)


@njit(nogil=True, cache=True)
def _open(walk: NDArray[np.int64], items: int, count: int) -> bool:
    """Go down into a struct (no items) or a list."""
    depth = walk[_STATE, _DEPTH] + 1
    if depth == _DEEPEST:
        return False
    walk[FIELD, depth] = 0 if items == 0 else -1
    walk[_ITEMS, depth], walk[_LEFT, depth] = items, count
    walk[_STATE, _DEPTH] = depth
    return True


@njit(nogil=True, cache=True)
def step(raw: NDArray[np.uint8], end: int, walk: NDArray[np.int64]) -> int:
    """Go to the next value; OVER, NUMBER, OTHER or FAILED."""
    while True:  # ends: a turn passes a byte, counts an item of a list, or closes what was opened
        at, depth = walk[_STATE, _AT], walk[_STATE, _DEPTH]
        if walk[_ITEMS, depth]:
            if walk[_LEFT, depth] == 0:
                walk[_STATE, _DEPTH] -= 1
                continue
            walk[_LEFT, depth] -= 1
            walk[FIELD, depth] += 1
            kind = walk[_ITEMS, depth]
        else:
            if at >= end:
                return FAILED
            kind, ahead = np.int64(raw[at] & 0x0F), np.int64(raw[at] >> 4)
            at += 1
            if kind == _STOP:
                walk[_STATE, _AT] = at
                if depth == 0:
                    return OVER
                walk[_STATE, _DEPTH] -= 1
                continue
            if ahead:
                walk[FIELD, depth] += ahead
            else:
                number, at = _read_number(raw, at, end)
                if at < 0:
                    return FAILED
                walk[FIELD, depth] = _signed(number)
        found, at = _take(raw, at, end, kind, walk)
        if at < 0 or at > end:
            return FAILED
        walk[_STATE, _AT] = at
        if found != OVER:
            return found


@njit(nogil=True, cache=True)
def _take(raw: NDArray[np.uint8], at: int, end: int, kind: int, walk: NDArray[np.int64]) -> tuple[int, int]:
    """Read a value, or open it (OVER); where it ends, or -1."""
    if kind == _STRUCT:
        return OVER, at if _open(walk, 0, 0) else FAILED
    if kind in (_LIST, _SET):
        if at >= end:
            return OVER, FAILED
        items, count = np.int64(raw[at] & 0x0F), np.int64(raw[at] >> 4)
        at += 1
        if count == 15:
            count, at = _read_number(raw, at, end)
        if at < 0 or items == 0 or count < 0 or count > end:
            return OVER, FAILED
        return OVER, at if _open(walk, items, count) else FAILED
    if kind in (_TRUE, _FALSE):
        return OTHER, at + (walk[_ITEMS, walk[_STATE, _DEPTH]] != 0)  # a byte each in a list, in their kind elsewhere
    if kind == _BYTE:
        return OTHER, at + 1
    if kind == _DOUBLE:
        return OTHER, at + 8
    if kind not in (_SHORT, _INT, _LONG, _TEXT):
        return OTHER, FAILED
    number, at = _read_number(raw, at, end)
    if at < 0 or kind != _TEXT:
        walk[_STATE, _VALUE] = _signed(number)
        return NUMBER, at
    return OTHER, at + number if 0 <= number <= end - at else FAILED
