"""Gradient sum per row and row update on the CPU, compiled, in one pass.

The work is cut into parts: the lookups of one table, or of one residue class of a large table's rows. A part belongs to
one thread from start to end. It numbers its rows as they come, in a small hash table, goes through the gradients in the order
of the batch, adding each to the sum of its row, and then through the rows, applying the rule. A row that is used once needs no
sum. No two threads ever meet in a row, and no sum depends on the number of threads or parts.

Where every row of a table moves, lookups are sorted by row instead (radix, stable, so equal rows keep the order of the batch).
"""

from __future__ import annotations

import math
import types
from functools import cache
from typing import Any

import numpy as np

from hotbed.host.intrinsics import prefetch
from hotbed.host.jit import digest_of, njit
from hotbed.host.splitmix import GOLDEN
from hotbed.ops.init_rows.numba import row_bits
from hotbed.ops.precision import FP32
from hotbed.ops.precision.numba import random_bits, round_stochastic, widen
from hotbed.optim.rules import Rule

_DIGIT_BITS = 11
_DIGITS = 1 << _DIGIT_BITS
_AHEAD = 16  # lookups between asking for a record or gradient and reading it
_ROWS_AHEAD = 6  # rows, likewise, when their sums are there: more lines than that a core does not fetch at once
_LOW = np.uint64(0xFFFFFFFF)
_S32 = np.uint64(32)
_NOTHING = np.uint64(0xFFFFFFFFFFFFFFFF)
_IDLE = np.uint64(64)  # rows without a gradient that one call takes: a call for each costs more than the rule
_MEMO = 256  # results of a row rule that depends on the row's state alone (Adam's powers), kept by state


@njit(nogil=True, error_model="numpy")
def _where(condition: Any, yes: Any, no: Any) -> Any:
    return yes if condition else no


_MATH = {"sqrt": math.sqrt, "exp2": np.exp2, "where": _where, "absolute": abs}


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _square(values: Any, i: Any, D: Any) -> Any:
    """The sum of squares of values[i, :D] in float64; four running sums, because one waits for itself."""
    s0, s1, s2, s3 = 0.0, 0.0, 0.0, 0.0
    quarter = D // np.uint64(4)
    for d in range(quarter):
        at = d * np.uint64(4)
        v0, v1 = np.float64(values[i, at]), np.float64(values[i, at + np.uint64(1)])
        v2, v3 = np.float64(values[i, at + np.uint64(2)]), np.float64(values[i, at + np.uint64(3)])
        s0 += v0 * v0
        s1 += v1 * v1
        s2 += v2 * v2
        s3 += v3 * v3
    for d in range(quarter * np.uint64(4), D):
        v0 = np.float64(values[i, d])
        s0 += v0 * v0
    return (s0 + s1) + (s2 + s3)


@njit(nogil=True, cache=True, error_model="numpy")
def _prepare(weights: Any, at: Any, g: Any, count: Any, numbers: Any) -> None:
    """Count scaling, clipping and decay, on the sum g [1, D]; numbers = lr, l2, weight_decay, clip_norm, by_count."""
    D = np.uint64(g.shape[1])
    lr, l2, weight_decay, clip_norm = numbers[0], numbers[1], numbers[2], numbers[3]
    if numbers[4] != 0 and count > 1:
        for d in range(D):
            g[0, d] /= weights.dtype.type(count)
    if clip_norm > 0:
        norm = math.sqrt(_square(g, 0, D))
        if norm > clip_norm:
            factor = weights.dtype.type(clip_norm / norm)
            for d in range(D):
                g[0, d] *= factor
    if l2 != 0:
        strength = weights.dtype.type(l2)
        for d in range(D):
            g[0, d] += strength * weights[at, d]
    if weight_decay != 0:
        keep = weights.dtype.type(1.0 - lr * weight_decay)
        for d in range(D):
            weights[at, d] *= keep


def _compile(rule: Rule, tag: str) -> tuple[Any, Any]:
    """(apply, apply_idle): one rule on one record, and on many that have no gradient, as compiled loops.

    The weights of a record are weights[at, :D], its gradient is g[i]; its state is records[slot, state:].
    """
    row, element = (njit(f, name=f"{f.__name__}_{tag}", nogil=True, error_model="numpy") for f in rule.bind(_MATH))
    num_states, has_row_state, uses_mean_square = len(rule.element_states), bool(rule.row_states), rule.uses_mean_square

    @njit(name=f"rates_{tag}", nogil=True, error_model="numpy", inline="always")
    def rates(records: Any, slot: Any, row_state: Any, mean_square: Any, lr: Any, constants: Any, memo: Any) -> Any:
        """The row's part of the rule: its state moved on, and the two numbers that every weight needs."""
        r = 0.0
        if has_row_state:
            r = np.float64(records[slot, row_state])
        if has_row_state and not uses_mean_square:
            place = np.uint64(r) % np.uint64(_MEMO)
            if memo[place, 0] != r:
                memo[place, 0] = r
                memo[place, 1], memo[place, 2], memo[place, 3] = row(r, mean_square, lr, constants)
            r, rate, factor = memo[place, 1], memo[place, 2], memo[place, 3]
        else:
            r, rate, factor = row(r, mean_square, lr, constants)
        if has_row_state:
            records[slot, row_state] = r
        return records.dtype.type(rate), records.dtype.type(factor)

    @njit(name=f"apply_{tag}", nogil=True, error_model="numpy")
    def apply(
        weights: Any,
        at: Any,
        records: Any,
        slot: Any,
        state: Any,
        g: Any,
        i: Any,
        lr: Any,
        constants: Any,
        h: Any,
        memo: Any,
    ) -> None:
        D = np.uint64(g.shape[1])
        mean_square = 0.0
        if uses_mean_square:
            mean_square = _square(g, i, D) / np.float64(g.shape[1])
        c0, c1 = rates(records, slot, state + D * np.uint64(num_states), mean_square, lr, constants, memo)
        zero = records.dtype.type(0)
        if num_states == 0:
            for d in range(D):
                weights[at, d] = element(weights[at, d], g[i, d], zero, zero, c0, c1, h)[0]
        elif num_states == 1:
            for d in range(D):
                w, a, _ = element(weights[at, d], g[i, d], records[slot, state + d], zero, c0, c1, h)
                weights[at, d] = w
                records[slot, state + d] = a
        else:
            for d in range(D):
                a, b = records[slot, state + d], records[slot, state + D + d]
                w, a, b = element(weights[at, d], g[i, d], a, b, c0, c1, h)
                weights[at, d] = w
                records[slot, state + d] = a
                records[slot, state + D + d] = b

    @njit(name=f"apply_idle_{tag}", nogil=True, error_model="numpy")
    def apply_idle(records: Any, slots: Any, count: Any, D: Any, lr: Any, constants: Any, h: Any, memo: Any) -> None:
        zero = records.dtype.type(0)
        for k in range(count):
            slot = slots[k]
            c0, c1 = rates(records, slot, D * np.uint64(num_states + 1), 0.0, lr, constants, memo)
            for d in range(D):
                a = records[slot, D + d] if num_states > 0 else zero
                b = records[slot, D + D + d] if num_states > 1 else zero
                w, a, b = element(records[slot, d], zero, a, b, c0, c1, h)
                records[slot, d] = w
                if num_states > 0:
                    records[slot, D + d] = a
                if num_states > 1:
                    records[slot, D + D + d] = b

    return apply, apply_idle


@njit(nogil=True, cache=True)
def _collect(slots: Any, spans: Any, part: Any, items: Any) -> Any:
    """List the part's lookups as (row in table << 32 | position), in batch order; (count, largest row)."""
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


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _sum_eight(grad: Any, items: Any, first: Any, stop: Any, start: Any, g: Any) -> None:
    """Eight columns of a sum, kept in registers: the compiler cannot know that g is not part of grad."""
    zero = grad.dtype.type(0)
    a0, a1, a2, a3, a4, a5, a6, a7 = zero, zero, zero, zero, zero, zero, zero, zero
    for i in range(first, stop):
        o = items[i] & _LOW
        a0 += grad[o, start + np.uint64(0)]
        a1 += grad[o, start + np.uint64(1)]
        a2 += grad[o, start + np.uint64(2)]
        a3 += grad[o, start + np.uint64(3)]
        a4 += grad[o, start + np.uint64(4)]
        a5 += grad[o, start + np.uint64(5)]
        a6 += grad[o, start + np.uint64(6)]
        a7 += grad[o, start + np.uint64(7)]
    g[0, start + np.uint64(0)] = a0
    g[0, start + np.uint64(1)] = a1
    g[0, start + np.uint64(2)] = a2
    g[0, start + np.uint64(3)] = a3
    g[0, start + np.uint64(4)] = a4
    g[0, start + np.uint64(5)] = a5
    g[0, start + np.uint64(6)] = a6
    g[0, start + np.uint64(7)] = a7


@njit(nogil=True, cache=True, error_model="numpy")
def _sum(grad: Any, items: Any, first: Any, stop: Any, out_rows: Any, scale: Any, g: Any) -> None:
    """The gradients of lookups items[first:stop], added in that order, into g [1, D]."""
    D = np.uint64(g.shape[1])
    start = np.uint64(0)
    if out_rows.shape[0] == 0 and scale.shape[0] == 0:
        while start + np.uint64(8) <= D:
            _sum_eight(grad, items, first, stop, start, g)
            start += np.uint64(8)
    for d in range(start, D):
        g[0, d] = 0
    for i in range(first, stop):
        position = items[i] & _LOW
        o = np.uint64(out_rows[position]) if out_rows.shape[0] > 0 else position
        factor = scale[position] if scale.shape[0] > 0 else grad.dtype.type(1)
        for d in range(start, D):
            g[0, d] += grad[o, d] * factor


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _ask(records: Any, grad: Any, items: Any, first: Any, stop: Any, base: Any, out_rows: Any) -> None:
    """Ask for the gradients and records of lookups items[first:stop]."""
    for i in range(first, stop):
        position = items[i] & _LOW
        o = np.uint64(out_rows[position]) if out_rows.shape[0] > 0 else position
        for column in range(0, grad.shape[1], 16):
            prefetch(grad, o, column)
        row = items[i] >> _S32
        if i == 0 or items[i - 1] >> _S32 != row:
            for column in range(0, records.shape[1], 16):
                prefetch(records, np.int64(row) + base, column)


apply_rule: Any = None  # what _compile returns, given by update_kernel
apply_idle: Any = None
KIND = FP32  # the type of the weights, likewise


@njit(nogil=True, cache=True)
def _number(slots: Any, spans: Any, part: Any, words: Any, items: Any, rows: Any, uses: Any) -> Any:
    """Number the part's rows in the order in which they come: (how many there are, lookups of them).

    items become (number << 32 | position) of every lookup, rows (row << 32 | first position) and uses of every row. words [a
    power of two, twice the lookups or more] is a hash table of (row << 32 | number); a table with fewer rows than that has
    a word for each.
    """
    base, first, stop, mask, residue = part[0], part[2], part[3], part[4], part[5]
    last, factor, shift = np.uint64(words.size - 1), np.uint64(1), np.uint64(0)
    if part[1] > words.size:
        factor = GOLDEN
        while words.size >> np.int64(np.uint64(64) - shift) == 0:  # ends: shift grows
            shift += np.uint64(1)
    words[:] = _NOTHING
    count, num_rows = 0, np.uint64(0)
    for p in range(first, stop):
        position, stride = spans[p, 0], spans[p, 2]
        for _ in range(spans[p, 1]):
            row = slots[position] - base
            if row >= 0 and (row & mask) == residue:
                r = np.uint64(row)
                place = ((r * factor) >> shift) & last
                word = words[place]
                while word != _NOTHING and word >> _S32 != r:  # ends: half of the words are free
                    place = (place + np.uint64(1)) & last
                    word = words[place]
                if word == _NOTHING:
                    word = (r << _S32) | num_rows
                    words[place] = word
                    rows[num_rows] = (r << _S32) | np.uint64(position)
                    uses[num_rows] = 0
                    num_rows += np.uint64(1)
                uses[word & _LOW] += 1
                items[count] = (word << _S32) | np.uint64(position)
                count += 1
            position += stride
    return np.int64(num_rows), count


@njit(nogil=True, cache=True)
def _count(slots: Any, spans: Any, part: Any) -> Any:
    """Lookups of a part, at most."""
    base, first, stop, mask, residue = part[0], part[2], part[3], part[4], part[5]
    count = 0
    for p in range(first, stop):
        if mask == 0:
            count += spans[p, 1]
            continue
        position, stride = spans[p, 0], spans[p, 2]
        for _ in range(spans[p, 1]):
            count += ((slots[position] - base) & mask) == residue
            position += stride
    return count


@njit(nogil=True, cache=True, error_model="numpy")
def _add_up(grad: Any, items: Any, count: Any, out_rows: Any, scale: Any, sum_of: Any, sums: Any) -> None:
    """Add the gradient of every lookup to the sum of its row, in the order of the batch; rows with sum_of < 0 have none."""
    D = np.uint64(grad.shape[1])
    for k in range(count):
        if k + _AHEAD < count and sum_of[items[k + _AHEAD] >> _S32] >= 0:
            soon = items[k + _AHEAD] & _LOW
            o = np.uint64(out_rows[soon]) if out_rows.shape[0] > 0 else soon
            for column in range(0, grad.shape[1], 16):
                prefetch(grad, o, column)
        at = sum_of[items[k] >> _S32]
        if at < 0:
            continue
        m, position = np.uint64(at), items[k] & _LOW
        o = np.uint64(out_rows[position]) if out_rows.shape[0] > 0 else position
        if scale.shape[0] > 0:
            factor = scale[position]
            for d in range(D):
                sums[m, d] += grad[o, d] * factor
        else:
            for d in range(D):
                sums[m, d] += grad[o, d]


def _update(
    thread: int,
    num_threads: int,
    records: Any,
    halves: Any,
    slots: Any,
    keys: Any,
    spans: Any,
    parts: Any,
    grad: Any,
    out_rows: Any,
    scale: Any,
    numbers: Any,
    constants: Any,
    h: Any,
    salt: Any,
    scratch: Any,
) -> None:
    """Every num_threads-th part, with the rule that `update_kernel` puts in the place of apply_rule.

    halves is records as uint16; keys [L], or empty where a slot is its key; parts [P, 6]: base, rows, first span, stop span,
    mask, residue; numbers as in _prepare; scratch [T, 2, L] uint64.
    """
    D = np.uint64(grad.shape[1])
    state = D if KIND == FP32 else (D + np.uint64(1)) // np.uint64(2)
    w = np.empty((1, grad.shape[1]), dtype=records.dtype)
    memo = np.full((_MEMO, 4), np.nan)
    lr = numbers[0]
    plain = numbers[1] == 0 and numbers[2] == 0 and numbers[3] == 0 and numbers[4] == 0
    direct = plain and KIND == FP32 and scale.shape[0] == 0  # the gradient of a row used once is its sum
    items, rows = scratch[thread, 0], scratch[thread, 1]
    uses, sum_of = np.empty(items.size, dtype=np.int32), np.empty(items.size, dtype=np.int32)
    words, sums = np.empty(2, dtype=np.uint64), np.empty((0, grad.shape[1]), dtype=grad.dtype)
    for p in range(thread, parts.shape[0], num_threads):
        base, size = parts[p, 0], 2
        while size < 2 * _count(slots, spans, parts[p]):  # ends: it doubles
            size *= 2
        if words.size < size:
            words = np.empty(size, dtype=np.uint64)
        num_rows, count = _number(slots, spans, parts[p], words[:size], items, rows, uses)
        num_sums = 0
        for n in range(num_rows):
            sum_of[n] = -1 if direct and uses[n] == 1 else num_sums
            num_sums += sum_of[n] >= 0
        if sums.shape[0] < num_sums:
            sums = np.empty((num_sums + num_sums // 4, grad.shape[1]), dtype=grad.dtype)
        sums[:num_sums] = 0
        _add_up(grad, items, count, out_rows, scale, sum_of, sums)
        for n in range(num_rows):
            if n + _ROWS_AHEAD < num_rows:
                soon = rows[n + _ROWS_AHEAD]
                for column in range(0, records.shape[1], 16):
                    prefetch(records, np.int64(soon >> _S32) + base, column)
                if sum_of[n + _ROWS_AHEAD] < 0:
                    soon &= _LOW
                    o = np.uint64(out_rows[soon]) if out_rows.shape[0] > 0 else soon
                    for column in range(0, grad.shape[1], 16):
                        prefetch(grad, o, column)
            slot, position, m = np.uint64(base) + (rows[n] >> _S32), rows[n] & _LOW, np.uint64(max(sum_of[n], 0))
            if KIND != FP32:
                key = keys[position] if keys.shape[0] > 0 else np.int64(slot)
                bits = row_bits(key, salt)
                for d in range(D):
                    w[0, d] = widen(halves[slot, d], KIND)
                _prepare(w, 0, sums[m : m + np.uint64(1)], uses[n], numbers)
                apply_rule(w, 0, records, slot, state, sums, m, lr, constants, h, memo)
                for d in range(D):
                    halves[slot, d] = round_stochastic(w[0, d], random_bits(bits, d), KIND)
            elif sum_of[n] < 0:
                o = np.uint64(out_rows[position]) if out_rows.shape[0] > 0 else position
                apply_rule(records, slot, records, slot, state, grad, o, lr, constants, h, memo)
            else:
                if not plain:
                    _prepare(records, slot, sums[m : m + np.uint64(1)], uses[n], numbers)
                apply_rule(records, slot, records, slot, state, sums, m, lr, constants, h, memo)


def _update_whole(
    thread: int,
    num_threads: int,
    records: Any,
    halves: Any,
    slots: Any,
    keys: Any,
    spans: Any,
    parts: Any,
    grad: Any,
    out_rows: Any,
    scale: Any,
    numbers: Any,
    constants: Any,
    h: Any,
    salt: Any,
    scratch: Any,
) -> None:
    """As _update, and all rows of its parts, also those without a gradient."""
    D = np.uint64(grad.shape[1])
    state = D if KIND == FP32 else (D + np.uint64(1)) // np.uint64(2)
    w = np.empty((1, grad.shape[1]), dtype=records.dtype)
    g = np.empty((1, grad.shape[1]), dtype=grad.dtype)
    idle = np.empty(_IDLE, dtype=np.uint64)  # slots of rows that have no gradient, gathered up
    memo = np.full((_MEMO, 4), np.nan)
    histogram = np.empty(_DIGITS, dtype=np.int64)
    lr = numbers[0]
    plain = numbers[1] == 0 and numbers[2] == 0 and numbers[3] == 0 and numbers[4] == 0
    for p in range(thread, parts.shape[0], num_threads):
        base, rows, mask, residue = parts[p, 0], parts[p, 1], parts[p, 4], parts[p, 5]
        count, largest = _collect(slots, spans, parts[p], scratch[thread, 0])
        items = _sort(scratch[thread, 0], scratch[thread, 1], count, largest, histogram)
        i, asked = 0, 0
        next_row, num_idle = residue, np.uint64(0)
        while next_row < rows:  # ends: the row grows
            row = next_row
            next_row += mask + 1
            first = i
            while i < count and np.int64(items[i] >> _S32) == row:
                i += 1
            slot = np.uint64(base + row)
            if plain and KIND == FP32 and i == first:  # a row of a whole table that the batch does not hold
                idle[num_idle] = slot
                num_idle += np.uint64(1)
                if num_idle == _IDLE:
                    apply_idle(records, idle, num_idle, D, lr, constants, h, memo)
                    num_idle = np.uint64(0)
                continue
            ahead = min(count, i + _AHEAD)
            _ask(records, grad, items, asked, ahead, base, out_rows)
            asked = ahead
            if KIND != FP32:
                key = keys[items[first] & _LOW] if keys.shape[0] > 0 and i > first else base + row
                bits = row_bits(key, salt)
                for d in range(D):
                    w[0, d] = widen(halves[slot, d], KIND)
                _sum(grad, items, first, i, out_rows, scale, g)
                _prepare(w, 0, g, i - first, numbers)
                apply_rule(w, 0, records, slot, state, g, np.uint64(0), lr, constants, h, memo)
                for d in range(D):
                    halves[slot, d] = round_stochastic(w[0, d], random_bits(bits, d), KIND)
                continue
            if plain and i - first == 1 and scale.shape[0] == 0:  # a row used once: its gradient is the sum
                position = items[first] & _LOW
                o = np.uint64(out_rows[position]) if out_rows.shape[0] > 0 else position
                apply_rule(records, slot, records, slot, state, grad, o, lr, constants, h, memo)
                continue
            _sum(grad, items, first, i, out_rows, scale, g)
            _prepare(records, slot, g, i - first, numbers)
            apply_rule(records, slot, records, slot, state, g, np.uint64(0), lr, constants, h, memo)
        apply_idle(records, idle, num_idle, D, lr, constants, h, memo)


@cache
def update_kernel(rule: Rule, kind: int = FP32, *, whole_table: bool = False) -> Any:
    """_update, or _update_whole, for one rule and type, compiled at its first call and then kept on disk by name and code.

    The rule goes in through the globals: through a closure, Numba would compile anew in every process; through a switch on
    a number, the update takes a fifth longer.
    """
    tag = f"{rule.name}_{digest_of(tuple(rule))}"
    apply, idle = _compile(rule, tag)
    namespace = {**globals(), "apply_rule": apply, "apply_idle": idle, "KIND": kind}
    function = types.FunctionType((_update_whole if whole_table else _update).__code__, namespace)
    function.__module__ = __name__
    return njit(
        function,
        name=f"update_{'whole_' if whole_table else ''}{tag}_{kind}",
        nogil=True,
        cache=True,
        error_model="numpy",
    )
