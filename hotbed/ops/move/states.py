"""What a store knows of each row, one byte, compiled. Bytes far apart are asked for ahead, or every one costs a wait.

ABSENT: never written. WRITTEN: written since the last checkpoint. SAVED: written before it. EXPECTED: on its way here. A row
that can be read is odd.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from hotbed.ops.prefetch import prefetch

ABSENT, SAVED, EXPECTED, WRITTEN = 0, 1, 2, 3
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
