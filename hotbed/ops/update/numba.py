"""Gradient sum per row and row update on the CPU, compiled, in one pass.

The work is cut into parts: the look-ups of one table, or of one residue class of a large table's rows. A part belongs to
one thread from start to end: it lists its look-ups, sorts them by row (radix, stable, so equal rows keep the order of the
batch), and for every row sums the gradients and applies the rule while the sum is in the first-level cache. No two
threads ever meet in a row, and no sum depends on the number of threads or parts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from hotbed.ops.prefetch import prefetch
from hotbed.optim.rules import ADAGRAD_RULE, ADAM_RULE, FTRL_RULE, ROWWISE_ADAGRAD_RULE, SGD_RULE, Rule

_DIGIT_BITS = 11
_DIGITS = 1 << _DIGIT_BITS
_AHEAD = 8  # rows between asking for a record and updating it
_LOW = np.uint64(0xFFFFFFFF)
_S32 = np.uint64(32)

KINDS = (SGD_RULE, ADAGRAD_RULE, ROWWISE_ADAGRAD_RULE, ADAM_RULE, FTRL_RULE)  # kind = position


@njit(nogil=True, error_model="numpy")
def _where(condition: Any, yes: Any, no: Any) -> Any:
    return yes if condition else no


_MATH = {"sqrt": math.sqrt, "power": math.pow, "where": _where, "absolute": abs}


def _compile(rule: Rule) -> Any:
    """apply(records, slot, g, dim, lr, constants, h): one rule on one record, as a compiled loop."""
    row, element = (njit(nogil=True, error_model="numpy")(f) for f in rule.bind(_MATH))
    num_states, has_row_state, uses_mean_square = len(rule.element_states), bool(rule.row_states), rule.uses_mean_square

    @njit(nogil=True, error_model="numpy")
    def apply(records: Any, slot: Any, g: Any, dim: Any, lr: Any, constants: Any, h: Any) -> None:
        D = np.uint64(dim)
        mean_square = 0.0
        if uses_mean_square:
            for d in range(D):
                mean_square += np.float64(g[d]) * np.float64(g[d])
            mean_square /= np.float64(dim)
        state = D * np.uint64(1 + num_states)
        r = 0.0
        if has_row_state:
            r = np.float64(records[slot, state])
        r, rate, factor = row(r, mean_square, lr, constants)
        c0, c1 = records.dtype.type(rate), records.dtype.type(factor)
        if has_row_state:
            records[slot, state] = r
        zero = records.dtype.type(0)
        if num_states == 0:
            for d in range(D):
                records[slot, d] = element(records[slot, d], g[d], zero, zero, c0, c1, h)[0]
        elif num_states == 1:
            for d in range(D):
                w, a, _ = element(records[slot, d], g[d], records[slot, D + d], zero, c0, c1, h)
                records[slot, d] = w
                records[slot, D + d] = a
        else:
            for d in range(D):
                w, a, b = element(records[slot, d], g[d], records[slot, D + d], records[slot, D + D + d], c0, c1, h)
                records[slot, d] = w
                records[slot, D + d] = a
                records[slot, D + D + d] = b

    return apply


_sgd, _adagrad, _rowwise_adagrad, _adam, _ftrl = (_compile(rule) for rule in KINDS)


@njit(nogil=True, cache=True)
def _collect(slots: Any, spans: Any, part: Any, items: Any) -> Any:
    """List the part's look-ups as (row in table << 32 | position), in batch order; (count, largest row)."""
    base, first, stop, mask, residue = part[0], part[2], part[3], part[4], part[5]
    count, largest = 0, 0
    for p in range(first, stop):
        position, stride = spans[p, 0], spans[p, 2]
        for _ in range(spans[p, 1]):
            row = slots[position] - base
            if row >= 0 and (row & mask) == residue:
                items[count] = (np.uint64(row) << _S32) | np.uint64(position)
                count += 1
                largest = max(largest, row)
            position += stride
    return count, largest


@njit(nogil=True, cache=True)
def _sort(items: Any, spare: Any, count: Any, largest: Any, histogram: Any) -> Any:
    """Stable radix sort by row; returns the array that holds the result."""
    shift = np.uint64(32)
    while largest > 0:
        histogram[:] = 0
        for i in range(count):
            histogram[(items[i] >> shift) & np.uint64(_DIGITS - 1)] += 1
        total = 0
        for digit in range(_DIGITS):
            here = histogram[digit]
            histogram[digit] = total
            total += here
        for i in range(count):
            digit = (items[i] >> shift) & np.uint64(_DIGITS - 1)
            spare[histogram[digit]] = items[i]
            histogram[digit] += 1
        items, spare = spare, items
        shift += np.uint64(_DIGIT_BITS)
        largest >>= _DIGIT_BITS
    return items


@njit(nogil=True, cache=True, error_model="numpy")
def _sum(grad: Any, items: Any, first: Any, stop: Any, count: Any, out_rows: Any, scale: Any, g: Any) -> None:
    """The gradients of look-ups items[first:stop], added in that order, into g; asks for those of the look-ups after."""
    D = np.uint64(g.shape[0])
    for d in range(D):
        g[d] = 0
    for i in range(first, stop):
        position = items[i] & _LOW
        ahead = items[min(i + _AHEAD, count - 1)] & _LOW
        o = position
        if out_rows.shape[0] > 0:
            o = np.uint64(out_rows[position])
            ahead = np.uint64(out_rows[ahead])
        for column in range(0, g.shape[0], 16):
            prefetch(grad, ahead, column)
        if scale.shape[0] > 0:
            factor = scale[position]
            for d in range(D):
                g[d] += grad[o, d] * factor
        else:
            for d in range(D):
                g[d] += grad[o, d]


@njit(nogil=True, cache=True, error_model="numpy")
def _finish(records: Any, slot: Any, g: Any, count: Any, kind: Any, numbers: Any, constants: Any, h: Any) -> None:
    """Count scaling, clipping, decay and the rule on one record; numbers = lr, l2, weight_decay, clip_norm, by_count."""
    dim = g.shape[0]
    D = np.uint64(dim)
    lr, l2, weight_decay, clip_norm = numbers[0], numbers[1], numbers[2], numbers[3]
    if numbers[4] != 0 and count > 1:
        for d in range(D):
            g[d] /= records.dtype.type(count)
    if clip_norm > 0:
        square = 0.0
        for d in range(D):
            square += np.float64(g[d]) * np.float64(g[d])
        norm = math.sqrt(square)
        if norm > clip_norm:
            factor = records.dtype.type(clip_norm / norm)
            for d in range(D):
                g[d] *= factor
    if l2 != 0:
        strength = records.dtype.type(l2)
        for d in range(D):
            g[d] += strength * records[slot, d]
    if weight_decay != 0:
        keep = records.dtype.type(1.0 - lr * weight_decay)
        for d in range(D):
            records[slot, d] *= keep
    if kind == 0:
        _sgd(records, slot, g, dim, lr, constants, h)
    elif kind == 1:
        _adagrad(records, slot, g, dim, lr, constants, h)
    elif kind == 2:
        _rowwise_adagrad(records, slot, g, dim, lr, constants, h)
    elif kind == 3:
        _adam(records, slot, g, dim, lr, constants, h)
    else:
        _ftrl(records, slot, g, dim, lr, constants, h)


@njit(nogil=True, cache=True, error_model="numpy")
def update(
    thread: int,
    num_threads: int,
    records: Any,
    slots: Any,
    spans: Any,
    parts: Any,
    grad: Any,
    out_rows: Any,
    scale: Any,
    kind: int,
    numbers: Any,
    constants: Any,
    h: Any,
    whole_table: bool,
    scratch: Any,
) -> None:
    """Every num_threads-th part. parts [P, 6]: base, rows, first span, stop span, mask, residue. scratch [T, 2, L] uint64."""
    g = np.empty(grad.shape[1], dtype=grad.dtype)
    histogram = np.empty(_DIGITS, dtype=np.int64)
    width = records.shape[1]
    for p in range(thread, parts.shape[0], num_threads):
        base, rows, mask, residue = parts[p, 0], parts[p, 1], parts[p, 4], parts[p, 5]
        count, largest = _collect(slots, spans, parts[p], scratch[thread, 0])
        items = _sort(scratch[thread, 0], scratch[thread, 1], count, largest, histogram)
        i = 0
        next_row = residue
        while i < count or (whole_table and next_row < rows):
            row = np.int64(items[i] >> _S32) if i < count else rows
            if whole_table:
                row = next_row
                next_row += mask + 1
            elif i + _AHEAD < count:
                ahead = np.int64(items[i + _AHEAD] >> _S32) + base
                for column in range(0, width, 16):
                    prefetch(records, ahead, column)
            first = i
            while i < count and np.int64(items[i] >> _S32) == row:
                i += 1
            _sum(grad, items, first, i, count, out_rows, scale, g)
            _finish(records, np.uint64(base + row), g, i - first, kind, numbers, constants, h)
