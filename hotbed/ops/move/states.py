"""What a store knows of each row, one byte, compiled. Bytes far apart are asked for ahead, or every one costs a wait.

ABSENT: never written. WRITTEN: written since the last checkpoint. SAVED: written before it. EXPECTED: on its way here. A row
that can be read is odd.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from hotbed.host.intrinsics import prefetch
from hotbed.host.jit import njit

ABSENT, SAVED, EXPECTED, WRITTEN = 0, 1, 2, 3
HELD, KEPT = 1, 2  # a byte of its own for each row that a snapshot holds: see store/held.py
_AHEAD = 24


@njit(nogil=True, cache=True)
def mark(state: Any, keys: Any, value: int) -> None:
    """Set the state of distinct keys [U]."""
    lines = state.reshape(-1, 1)
    for i in range(keys.size):
        if i + _AHEAD < keys.size:
            prefetch(lines, keys[i + _AHEAD], 0)
        state[keys[i]] = value


@njit(nogil=True, cache=True)
def sort_out(state: Any, keys: Any, source: Any, found: Any, late: Any) -> Any:
    """(rows that are there, rows that are expected): `found` gets keys, `late` positions, `source` the place of each key."""
    lines = state.reshape(-1, 1)
    num_found, num_late = 0, 0
    for i in range(keys.size):
        if i + _AHEAD < keys.size:
            prefetch(lines, keys[i + _AHEAD], 0)
        source[i] = -1
        if state[keys[i]] & 1:
            source[i] = np.int32(num_found)
            found[num_found] = keys[i]
            num_found += 1
        elif state[keys[i]] == EXPECTED:
            late[num_late] = i
            num_late += 1
    return num_found, num_late


@njit(nogil=True, cache=True)
def _after_zeros(marks: Any, words: Any, start: int) -> int:
    """The first place from `start` on that may not be zero; `words` are the bytes of `marks`, eight at a time."""
    while start < marks.size and start % 8 != 0 and marks[start] == 0:
        start += 1
    if start % 8 == 0:
        word = start // 8
        while word < words.size and words[word] == 0:
            word += 1
        start = min(word * 8, marks.size)
    return start


@njit(nogil=True, cache=True)
def next_marked(marks: Any, words: Any, start: int, out: Any) -> Any:
    """(number of keys from `start` on whose byte is not zero, where to continue): `out` gets as many as it has room for."""
    count = 0
    while count < out.size:  # ends: start grows in every pass
        start = _after_zeros(marks, words, start)
        if start >= marks.size:
            break
        if marks[start] != 0:
            out[count] = start
            count += 1
        start += 1
    return count, start


@njit(nogil=True, cache=True)
def hold(state: Any, words: Any, touched: bool, unsaved: Any, held: Any) -> int:
    """Hold all rows that can be read, or those written since the last time and those `unsaved`; they count as saved.

    Their number, or -1, with nothing changed, where a row is on its way.
    """
    start = 0
    while start < state.size:
        start = _after_zeros(state, words, start)
        if start < state.size and state[start] == EXPECTED:
            return -1
        start += 1
    count = 0
    start = 0
    while start < state.size:
        start = _after_zeros(state, words, start)
        if start >= state.size:
            break
        if state[start] == WRITTEN or (
            state[start] == SAVED and (not touched or (start < unsaved.size and unsaved[start] != 0))
        ):
            held[start] = HELD
            state[start] = SAVED
            count += 1
        start += 1
    return count


@njit(nogil=True, cache=True)
def join(marks: Any, words: Any, more: Any) -> None:
    """Whatever is marked in `marks` is marked in `more`."""
    start = 0
    while start < marks.size:
        start = _after_zeros(marks, words, start)
        if start < marks.size and marks[start] != 0:
            more[start] = HELD
        start += 1


def words_of(marks: Any) -> Any:
    """The whole words among these bytes, for loops that skip zeros."""
    return marks[: marks.size // 8 * 8].view(np.uint64)


def marked(marks: Any, chunk: int) -> Iterator[Any]:
    """The keys whose byte is not zero, ascending, int64 arrays of at most `chunk`; bytes may change meanwhile."""
    words, start = words_of(marks), 0
    while start < marks.size:
        keys = np.empty(min(chunk, marks.size - start), dtype=np.int64)
        count, start = next_marked(marks, words, start, keys)
        if count:
            yield keys[:count]
