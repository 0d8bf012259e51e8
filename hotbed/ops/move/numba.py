"""Moving whole records on the CPU, compiled. Threads take disjoint runs of rows and ask for memory some rows ahead."""

from __future__ import annotations

import types
from functools import cache
from typing import Any

import numpy as np

from hotbed.host.intrinsics import prefetch
from hotbed.host.jit import digest_of, njit
from hotbed.ops.init_rows.distributions import CONSTANT, NORMAL
from hotbed.ops.init_rows.numba import first_number, row_bits
from hotbed.ops.precision import FP32
from hotbed.ops.precision.numba import round_nearest, widen
from hotbed.optim.rules import Rule

_LINES_AHEAD = 36  # cache lines asked for before the first of them is read


@njit(nogil=True, cache=True, inline="always")
def _ask(records: Any, row: Any) -> None:
    for column in range(0, records.shape[1], 16):
        prefetch(records, row, column)


@njit(nogil=True, cache=True, inline="always")
def _rows_ahead(width: Any) -> Any:
    return 1 + _LINES_AHEAD // (1 + width // 16)


@njit(nogil=True, cache=True, inline="always")
def _table_of(bases: Any, key: Any) -> Any:
    """The last table whose base is not above the key."""
    low, high = 0, bases.shape[0]
    while high - low > 1:  # ends: the span is halved every time
        middle = (low + high) // 2
        if bases[middle] <= key:
            low = middle
        else:
            high = middle
    return low


@njit(nogil=True, error_model="numpy")
def _where(condition: Any, yes: Any, no: Any) -> Any:
    return yes if condition else no


first_state: Any = None  # the rule's `first`, given by unpack_kernel


def _unpack(
    thread: int,
    num_threads: int,
    records: Any,
    halves: Any,
    kind: int,
    slots: Any,
    source: Any,
    staging: Any,
    keys: Any,
    tables: Any,
    scales: Any,
    f: Any,
    dim: int,
    num_states: int,
    has_row_state: bool,
) -> None:
    """Copy or create; tables [T, 4] are base, stream, init, padding id, scales [T] and f [3] are float32.

    halves is records as uint16, where the weights are of a `kind` of 16 bits.
    """
    width = np.uint64(records.shape[1])
    D = np.uint64(dim)
    state = D if kind == FP32 else (D + np.uint64(1)) // np.uint64(2)
    used = state + D * np.uint64(num_states)
    ahead = _rows_ahead(records.shape[1])
    stop = slots.shape[0] * (thread + 1) // num_threads
    for i in range(slots.shape[0] * thread // num_threads, stop):
        if i + ahead < stop and slots[i + ahead] >= 0:
            _ask(records, slots[i + ahead])
            if source[i + ahead] >= 0:
                _ask(staging, source[i + ahead])
        if slots[i] < 0:
            continue
        slot = np.uint64(slots[i])
        if source[i] >= 0:
            row = np.uint64(source[i])
            for c in range(width):
                records[slot, c] = staging[row, c]
            continue
        t = _table_of(tables[:, 0], keys[i])
        number, init, scale = keys[i] - tables[t, 0], tables[t, 2], scales[t]
        bits = row_bits(number, np.uint64(tables[t, 1]))
        if kind != FP32:
            records[slot, state - np.uint64(1)] = 0  # an odd weight stands beside zeros
        for d in range(D):
            w = scale
            if number == tables[t, 3]:
                w = np.float32(0)
            elif init != CONSTANT:
                w = np.float32(first_number(bits, d, init == NORMAL)) * scale
            if kind == FP32:
                records[slot, d] = w
            else:
                halves[slot, d] = round_nearest(w, kind)
                w = widen(halves[slot, d], kind)  # state starts from the weights as they are stored
            a, b = first_state(w, f)
            if num_states > 0:
                records[slot, state + d] = a
            if num_states > 1:
                records[slot, state + D + d] = b
        for c in range(used, width):
            records[slot, c] = f[2] if has_row_state and c == used else np.float32(0)


@cache
def unpack_kernel(rule: Rule) -> Any:
    """_unpack for one rule, compiled at its first call and then kept on disk under the rule's name and code."""
    tag = f"{rule.name}_{digest_of(tuple(rule))}"
    first = njit(rule.bind_first({"where": _where}), name=f"first_{tag}", nogil=True, error_model="numpy")
    function = types.FunctionType(_unpack.__code__, {**globals(), "first_state": first})
    function.__module__ = __name__
    return njit(function, name=f"unpack_{tag}", nogil=True, cache=True, error_model="numpy")
