"""Moving whole records on the CPU, compiled. Threads take disjoint runs of rows and ask for memory some rows ahead."""

from __future__ import annotations

import types
from functools import cache
from typing import Any

import numpy as np

from hotbed.host.intrinsics import prefetch
from hotbed.host.jit import digest_of, njit
from hotbed.host.splitmix import GOLDEN
from hotbed.ops.init_rows.distributions import CONSTANT, NORMAL
from hotbed.ops.init_rows.numba import first_number, row_bits
from hotbed.ops.move.states import WRITTEN
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


first_state: Any = None  # the rule's `first`, given by _bound
create: Any = None  # _create of that rule, likewise


def _create(records: Any, halves: Any, kind: int, slot: Any, key: Any, initial: Any, shape: Any) -> None:
    """The first record of a key, in its slot; initial = tables [T, 4], scales, f as in _unpack, shape as there.

    A loop for each way to draw numbers, so that eight of them are made at once: 16 ns for 17 normal ones instead of 100.
    """
    (tables, scales, f), (dim, num_states, has_row_state, first) = initial, shape
    D, width = np.uint64(dim), np.uint64(records.shape[1])
    state = D if kind == FP32 else (D + np.uint64(1)) // np.uint64(2)
    used = state + D * np.uint64(num_states)
    t = _table_of(tables[:, 0], key)
    number, init, scale = key - tables[t, 0], tables[t, 2], scales[t]
    bits = row_bits(number, np.uint64(tables[t, 1])) + np.uint64(first) * GOLDEN  # of element d is that of first + d
    is_constant = number == tables[t, 3] or init == CONSTANT
    if is_constant and number == tables[t, 3]:
        scale = np.float32(0)
    if kind != FP32:
        records[slot, state - np.uint64(1)] = 0  # an odd weight stands next to zeros
        for d in range(D):
            w = scale if is_constant else np.float32(first_number(bits, d, init == NORMAL)) * scale
            halves[slot, d] = round_nearest(w, kind)
    elif is_constant:
        for d in range(D):
            records[slot, d] = scale
    elif init == NORMAL:
        for d in range(D):
            records[slot, d] = np.float32(first_number(bits, d, True)) * scale
    else:
        for d in range(D):
            records[slot, d] = np.float32(first_number(bits, d, False)) * scale
    if num_states > 0:
        for d in range(D):  # state starts from the weights as they are stored
            a, b = first_state(records[slot, d] if kind == FP32 else widen(halves[slot, d], kind), f)
            records[slot, state + d] = a
            if num_states > 1:
                records[slot, state + D + d] = b
    for c in range(used, width):
        records[slot, c] = f[2] if has_row_state and c == used else np.float32(0)


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
    initial: Any,
    shape: Any,
) -> None:
    """Copy or create; initial = tables [T, 4] (base, stream, init, padding id), scales [T] and f [3], which are float32.

    halves is records as uint16, where the weights are of a `kind` of 16 bits; shape = dim, element states, has a row
    state, first column.
    """
    width = np.uint64(records.shape[1])
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
        else:
            create(records, halves, kind, slot, keys[i], initial, shape)


def _exchange(
    thread: int,
    num_threads: int,
    records: Any,
    halves: Any,
    kind: int,
    slots: Any,
    keys: Any,
    first_keys: Any,
    victim_slots: Any,
    victim_keys: Any,
    below: Any,
    state: Any,
    initial: Any,
    shape: Any,
    counts: Any,
) -> None:
    """A thread's share of the misses, each after the victim that was in its slot; counts [T, 2]: rows that were there, victims.

    Victims [V] are listed in the order of the misses that take their slots [M].
    """
    width = np.uint64(records.shape[1])
    ahead = _rows_ahead(2 * records.shape[1])
    stop = slots.shape[0] * (thread + 1) // num_threads
    start, v, found = slots.shape[0] * thread // num_threads, 0, 0
    for i in range(start):
        v += v < victim_slots.shape[0] and victim_slots[v] == slots[i]
    first_victim, soon, states = v, v, state.reshape(-1, 1)
    for i in range(start, min(start + ahead, stop)):
        soon += soon < victim_slots.shape[0] and victim_slots[soon] == slots[i]
    for i in range(start, stop):
        if i + 2 * ahead < stop:
            prefetch(states, keys[i + 2 * ahead], 0)
        if i + ahead < stop:
            _ask(records, slots[i + ahead])
            if state[keys[i + ahead]] & 1:
                _ask(below, keys[i + ahead])
            if soon < victim_slots.shape[0] and victim_slots[soon] == slots[i + ahead]:
                _ask(below, victim_keys[soon])
                prefetch(states, victim_keys[soon], 0)
                soon += 1
        slot = np.uint64(slots[i])
        if v < victim_slots.shape[0] and victim_slots[v] == slots[i]:
            row = np.uint64(victim_keys[v])
            for c in range(width):
                below[row, c] = records[slot, c]
            state[row] = WRITTEN
            v += 1
        if state[keys[i]] & 1:
            row = np.uint64(keys[i])
            for c in range(width):
                records[slot, c] = below[row, c]
            found += 1
        else:
            create(records, halves, kind, slot, first_keys[i], initial, shape)
    counts[thread, 0], counts[thread, 1] = found, v - first_victim


@cache
def _bound(rule: Rule) -> dict[str, Any]:
    """The names that kernels of one rule take from it."""
    tag = f"{rule.name}_{digest_of(tuple(rule))}"
    first = njit(rule.bind_first({"where": _where}), name=f"first_{tag}", nogil=True, error_model="numpy")
    function = types.FunctionType(_create.__code__, {**globals(), "first_state": first})
    created = njit(function, name=f"create_{tag}", nogil=True, error_model="numpy")
    return {**globals(), "create": created, "tag": tag}


@cache
def unpack_kernel(rule: Rule) -> Any:
    """_unpack for one rule, compiled at its first call and then kept on disk under the rule's name and code."""
    return _kernel(_unpack, _bound(rule))


@cache
def exchange_kernel(rule: Rule) -> Any:
    """_exchange for one rule, likewise."""
    return _kernel(_exchange, _bound(rule))


def _kernel(function: Any, names: dict[str, Any]) -> Any:
    function = types.FunctionType(function.__code__, names)
    function.__module__ = __name__
    name = f"{function.__name__[1:]}_{names['tag']}"
    return njit(function, name=name, nogil=True, cache=True, error_model="numpy")
