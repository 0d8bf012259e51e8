"""Gradient sum per row and row update as Triton kernels: sorted lookups in, updated records out.

The lookups are sorted by row (stable, so equal rows keep the order of the batch) and cut into chunks of 32. A program walks
one chunk: a row that lies within it is summed and updated at once; the parts of a row that crosses a boundary are kept, added
up over groups of chunks by a second kernel, and by a third, which updates the row. A row that fills hundreds of chunks is
therefore summed by hundreds of programs. Where boundaries fall depends on the keys of the batch alone: the result is the same
bits whatever slot a row is in.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.init_rows.triton import row_bits
from hotbed.ops.inputs import bucket
from hotbed.ops.launch import Launch, cdiv, power_of_2
from hotbed.ops.lookups import Lookups
from hotbed.ops.precision import FP32, KINDS
from hotbed.ops.precision.triton import random_bits, round_stochastic, widen
from hotbed.ops.records import Layout
from hotbed.ops.update.settings import UpdateSettings
from hotbed.optim.rules import Rule

_FP32 = tl.constexpr(FP32)
_CHUNK = 32
_GROUP = 32  # chunks
_HEADS = 16  # sums added at once


@triton.jit
def _exp2(x):
    return tl.exp2(x)


@triton.jit
def _sqrt(x):
    return tl.sqrt(x)


@triton.jit
def _where(condition, yes, no):
    return tl.where(condition, yes, no)


@triton.jit
def _absolute(x):
    return tl.abs(x)


_MATH = {"sqrt": _sqrt, "exp2": _exp2, "where": _where, "absolute": _absolute, "tl": tl}


@triton.jit
def _apply(
    records, slot, key, g, count, d, inside, lr, l2, weight_decay, clip_norm, constants, salt, width,
    DIM: tl.constexpr, PRECISION: tl.constexpr, STATE: tl.constexpr, STATES: tl.constexpr, ROW_STATE: tl.constexpr,
    CLIP: tl.constexpr, BY_COUNT: tl.constexpr, ROW: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """One record: count scaling, clipping, decay, rule; the constants are float64, the state starts at column STATE."""
    kind = records.dtype.element_ty
    slot = slot.to(tl.int64)
    place = records + slot * width + STATE + d
    if PRECISION == _FP32:
        w = tl.load(records + slot * width + d, mask=inside, other=0.0)
    else:
        halves = records.to(tl.pointer_type(tl.uint16), bitcast=True) + slot * width * 2 + d
        w = widen(tl.load(halves, mask=inside, other=0), PRECISION)
    lr = tl.full([], 0.0, dtype=tl.float64) + lr
    if BY_COUNT:
        g = g / count.to(kind)
    if CLIP:
        norm = tl.sqrt(tl.sum(g.to(tl.float64) * g.to(tl.float64), axis=0))
        g = tl.where(norm > clip_norm, g * (clip_norm / norm).to(kind), g)
    g = g + l2 * w
    w = w * (1.0 - lr * weight_decay).to(kind)
    g = tl.where(inside, g, 0.0)
    mean_square = tl.sum(g.to(tl.float64) * g.to(tl.float64), axis=0) / DIM
    r = mean_square * 0.0
    if ROW_STATE:
        r = tl.load(records + slot * width + STATE + DIM * STATES).to(tl.float64)
    r, c0, c1 = ROW(r, mean_square, lr, constants)
    c0, c1 = (c0 + 0.0 * lr).to(kind), (c1 + 0.0 * lr).to(kind)
    h0, h1, h2, h3, h4, _, _ = constants
    h = (h0.to(kind), h1.to(kind), h2.to(kind), h3.to(kind), h4.to(kind))
    a = w * 0.0
    b = w * 0.0
    if STATES >= 1:
        a = tl.load(place, mask=inside, other=0.0)
    if STATES >= 2:
        b = tl.load(place + DIM, mask=inside, other=0.0)
    w, a, b = ELEMENT(w, g, a, b, c0, c1, h)
    if PRECISION == _FP32:
        tl.store(records + slot * width + d, w, mask=inside)
    else:
        tl.store(halves, round_stochastic(w, random_bits(row_bits(key, salt), d), PRECISION), mask=inside)
    if STATES >= 1:
        tl.store(place, a, mask=inside)
    if STATES >= 2:
        tl.store(place + DIM, b, mask=inside)
    if ROW_STATE:
        tl.store(records + slot * width + STATE + DIM * STATES, r.to(kind))


@triton.jit
def _constants_of(h):
    """The seven constants of a rule, loaded once for all rows of a chunk."""
    return tl.load(h), tl.load(h + 1), tl.load(h + 2), tl.load(h + 3), tl.load(h + 4), tl.load(h + 5), tl.load(h + 6)


@triton.jit
def _gradient(position, grad, out_rows, scale, d, inside, DIM: tl.constexpr, BAGS: tl.constexpr, SCALED: tl.constexpr):
    """The gradient [D] of one lookup."""
    row = position
    if BAGS:
        row = tl.load(out_rows + position)
    value = tl.load(grad + row.to(tl.int64) * DIM + d, mask=inside, other=0.0)  # rows x DIM may exceed 31 bits
    if SCALED:
        value *= tl.load(scale + position)
    return value


@triton.jit
def _add(
    i, stop, value, slot, following, key, total, count, continues, chunk, records, partial, partial_count, d, inside,
    lr, l2, weight_decay, clip_norm, constants, salt, width,
    DIM: tl.constexpr, PRECISION: tl.constexpr, STATE: tl.constexpr, STATES: tl.constexpr, ROW_STATE: tl.constexpr,
    CLIP: tl.constexpr, BY_COUNT: tl.constexpr, ROW: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Add lookup i to the sum of its row; at the row's last one in the chunk, update the row or keep the sum."""
    if i < stop:
        total += value
        count += 1
        ends = following != key
        if ends | (i + 1 == stop):
            if continues | (ends == 0):
                side = chunk * 2 + tl.where(continues, 0, 1)
                tl.store(partial + side * DIM + d, total, mask=inside)
                tl.store(partial_count + side, count)
            elif key >= 0:
                _apply(records, slot, key, total, count, d, inside, lr, l2, weight_decay, clip_norm, constants, salt, width,
                       DIM, PRECISION, STATE, STATES, ROW_STATE, CLIP, BY_COUNT, ROW, ELEMENT)  # fmt: skip
            total = tl.zeros_like(total)
            count = count * 0
            continues = i < 0
        key = following
    return key, total, count, continues


@triton.jit(do_not_specialize=["salt", "num_lookups"])
def _chunks(
    records, keys, order, slots, grad, out_rows, scale, bad, partial, partial_count,
    lr, l2, weight_decay, clip_norm, constants, salt, num_lookups, width,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, BAGS: tl.constexpr, SCALED: tl.constexpr,
    CHECKED: tl.constexpr, PRECISION: tl.constexpr, STATE: tl.constexpr,
    STATES: tl.constexpr, ROW_STATE: tl.constexpr, CLIP: tl.constexpr, BY_COUNT: tl.constexpr,
    ROW: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Sum and update the rows within one chunk; keep the sums that cross its boundaries in partial [chunks, 2, D].

    Four gradients are asked for at once, and the places of the next four: waiting for each in turn takes twice as long.
    """
    chunk = tl.program_id(0).to(tl.int64)
    first = chunk * CHUNK
    stop = tl.minimum(first + CHUNK, num_lookups)
    last = num_lookups - 1
    d = tl.arange(0, BLOCK_D)
    inside = d < DIM
    key = tl.load(keys + first)
    continues = key == tl.load(keys + first - 1, mask=first > 0, other=-2)
    if CHECKED:  # a batch with a bad id must not teach anything
        stop = tl.where(tl.load(bad) == 4611686018427387904, stop, first)
    h = _constants_of(constants)
    total = tl.zeros([BLOCK_D], dtype=grad.dtype.element_ty)
    count = first * 0
    i = first
    p0 = tl.load(order + i)
    p1 = tl.load(order + tl.minimum(i + 1, last))
    p2 = tl.load(order + tl.minimum(i + 2, last))
    p3 = tl.load(order + tl.minimum(i + 3, last))
    while i < stop:  # ends: i grows
        v0 = _gradient(p0, grad, out_rows, scale, d, inside, DIM, BAGS, SCALED)
        v1 = _gradient(p1, grad, out_rows, scale, d, inside, DIM, BAGS, SCALED)
        v2 = _gradient(p2, grad, out_rows, scale, d, inside, DIM, BAGS, SCALED)
        v3 = _gradient(p3, grad, out_rows, scale, d, inside, DIM, BAGS, SCALED)
        s0, s1, s2, s3 = tl.load(slots + p0), tl.load(slots + p1), tl.load(slots + p2), tl.load(slots + p3)
        k1 = tl.load(keys + i + 1, mask=i + 1 < num_lookups, other=-2)
        k2 = tl.load(keys + i + 2, mask=i + 2 < num_lookups, other=-2)
        k3 = tl.load(keys + i + 3, mask=i + 3 < num_lookups, other=-2)
        k4 = tl.load(keys + i + 4, mask=i + 4 < num_lookups, other=-2)
        p0 = tl.load(order + tl.minimum(i + 4, last))
        p1 = tl.load(order + tl.minimum(i + 5, last))
        p2 = tl.load(order + tl.minimum(i + 6, last))
        p3 = tl.load(order + tl.minimum(i + 7, last))
        key, total, count, continues = _add(
            i, stop, v0, s0, k1, key, total, count, continues, chunk, records, partial, partial_count, d, inside,
            lr, l2, weight_decay, clip_norm, h, salt, width,
            DIM, PRECISION, STATE, STATES, ROW_STATE, CLIP, BY_COUNT, ROW, ELEMENT)  # fmt: skip
        key, total, count, continues = _add(
            i + 1, stop, v1, s1, k2, key, total, count, continues, chunk, records, partial, partial_count, d, inside,
            lr, l2, weight_decay, clip_norm, h, salt, width,
            DIM, PRECISION, STATE, STATES, ROW_STATE, CLIP, BY_COUNT, ROW, ELEMENT)  # fmt: skip
        key, total, count, continues = _add(
            i + 2, stop, v2, s2, k3, key, total, count, continues, chunk, records, partial, partial_count, d, inside,
            lr, l2, weight_decay, clip_norm, h, salt, width,
            DIM, PRECISION, STATE, STATES, ROW_STATE, CLIP, BY_COUNT, ROW, ELEMENT)  # fmt: skip
        key, total, count, continues = _add(
            i + 3, stop, v3, s3, k4, key, total, count, continues, chunk, records, partial, partial_count, d, inside,
            lr, l2, weight_decay, clip_norm, h, salt, width,
            DIM, PRECISION, STATE, STATES, ROW_STATE, CLIP, BY_COUNT, ROW, ELEMENT)  # fmt: skip
        i += 4


@triton.jit
def _add_parts(total, count, parts, part_counts, which, apart, there, d, inside, DIM: tl.constexpr):
    """Add the sums `which` [H] of `parts`, which stand `apart` sums apart."""
    place = parts + which[:, None] * apart * DIM + d[None, :]
    values = tl.load(place, mask=there[:, None] & inside[None, :], other=0.0)
    counts = tl.load(part_counts + which * apart, mask=there, other=0)
    return total + tl.sum(values, axis=0), count + tl.sum(counts, axis=0)


@triton.jit(do_not_specialize=["num_lookups"])
def _groups(
    keys, partial, partial_count, group_partial, group_count, num_lookups,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Add the parts of chunks whose lookups are all of one row, which began before them, a whole group of chunks at a time."""
    group = tl.program_id(0).to(tl.int64)
    first = group * GROUP * CHUNK
    stop = first + GROUP * CHUNK
    key = tl.load(keys + first)
    before = tl.load(keys + first - 1, mask=first > 0, other=-2)
    last = tl.load(keys + stop - 1, mask=stop <= num_lookups, other=-2)
    if (key == before) & (key == last) & (key >= 0):
        d = tl.arange(0, BLOCK_D)
        inside = d < DIM
        total = tl.zeros([BLOCK_D], dtype=partial.dtype.element_ty)
        count = group * 0
        chunk = group * GROUP + tl.arange(0, HEADS)
        for _ in range(GROUP // HEADS):
            total, count = _add_parts(total, count, partial, partial_count, chunk, 2, chunk >= 0, d, inside, DIM)
            chunk += HEADS
        tl.store(group_partial + group * DIM + d, total, mask=inside)
        tl.store(group_count + group, count)


@triton.jit(do_not_specialize=["salt", "num_lookups"])
def _boundaries(
    records, keys, order, slots, bad, partial, partial_count, group_partial, group_count,
    lr, l2, weight_decay, clip_norm, constants, salt, num_lookups, width,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    CHECKED: tl.constexpr, PRECISION: tl.constexpr, STATE: tl.constexpr,
    STATES: tl.constexpr, ROW_STATE: tl.constexpr, CLIP: tl.constexpr, BY_COUNT: tl.constexpr,
    ROW: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """The row that starts in this chunk and continues into the next, if there is one.

    Its parts: of chunks up to a boundary of groups, of whole groups, of the chunks that remain. A row that occurs a hundred
    thousand times is thus added in some ten steps.
    """
    chunk = tl.program_id(0).to(tl.int64)
    first = chunk * CHUNK
    stop = first + CHUNK
    key = tl.load(keys + stop - 1, mask=stop < num_lookups, other=-1)
    goes_on = key == tl.load(keys + stop, mask=stop < num_lookups, other=-2)
    before = tl.load(keys + first - 1, mask=first > 0, other=-2)
    starts_here = (key != tl.load(keys + first)) | (key != before)
    if CHECKED:
        goes_on = goes_on & (tl.load(bad) == 4611686018427387904)
    if goes_on & starts_here & (key >= 0):
        d = tl.arange(0, BLOCK_D)
        h = tl.arange(0, HEADS)
        inside = d < DIM
        total = tl.load(partial + (chunk * 2 + 1) * DIM + d, mask=inside, other=0.0)
        count = tl.load(partial_count + chunk * 2 + 1)
        c = chunk + 1
        more = c % GROUP != 0
        while more:  # ends: c reaches the boundary of a group
            heads = c + h
            there = (heads // GROUP == c // GROUP) & (heads * CHUNK < num_lookups)
            there = there & (tl.load(keys + heads * CHUNK, mask=there, other=-2) == key)
            total, count = _add_parts(total, count, partial, partial_count, heads, 2, there, d, inside, DIM)
            c = tl.minimum(c + HEADS, (c // GROUP + 1) * GROUP)
            more = (c % GROUP != 0) & (tl.sum(there.to(tl.int32), axis=0) == HEADS)
        group = c // GROUP
        more = c % GROUP == 0
        while more:  # ends: no group beyond the lookups is there
            groups = group + h
            ends = (groups + 1) * GROUP * CHUNK
            there = tl.load(keys + ends - 1, mask=ends <= num_lookups, other=-2) == key
            total, count = _add_parts(total, count, group_partial, group_count, groups, 1, there, d, inside, DIM)
            num_there = tl.sum(there.to(tl.int64), axis=0)
            group += num_there
            more = num_there == HEADS
        heads = group * GROUP + h
        more = c % GROUP == 0
        while more:  # ends: no chunk beyond the lookups is there
            there = heads * CHUNK < num_lookups
            there = there & (tl.load(keys + heads * CHUNK, mask=there, other=-2) == key)
            total, count = _add_parts(total, count, partial, partial_count, heads, 2, there, d, inside, DIM)
            heads += HEADS
            more = tl.sum(there.to(tl.int32), axis=0) == HEADS
        slot = tl.load(slots + tl.load(order + stop))
        _apply(records, slot, key, total, count, d, inside, lr, l2, weight_decay, clip_norm, _constants_of(constants), salt,
               width, DIM, PRECISION, STATE, STATES, ROW_STATE, CLIP, BY_COUNT, ROW, ELEMENT)  # fmt: skip


@cache
def _bound(rule: Rule) -> tuple[Any, Any]:
    """The rule's functions as Triton functions."""
    row, element = (triton.jit(function) for function in rule.bind(_MATH))
    return row, element


@cache
def _constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    padded = [*values, *[0.0] * (7 - len(values))]
    return torch.tensor(padded, dtype=torch.float64, device=device)


class _Partials(NamedTuple):
    """Sums of parts of rows, and of how many lookups."""

    chunk: Tensor  # [chunks, 2, D]: of the row that comes in over the chunk's boundary, and of the row that goes out
    chunk_count: Tensor  # int64 [chunks, 2]
    group: Tensor  # [groups, D]
    group_count: Tensor  # int64 [groups]


_kept_partials: dict[Any, _Partials] = {}


def _partials(num_chunks: int, dim: int, grad: Tensor) -> _Partials:
    """Room for the sums that cross boundaries, at least, kept for the next update on the same stream."""
    num_chunks = bucket(num_chunks)  # bags of varying length have other numbers in every batch
    stream = torch._C._cuda_getCurrentRawStream(grad.device.index) if grad.device.type == "cuda" else 0
    key = (grad.device, stream, num_chunks, dim, grad.dtype)
    found = _kept_partials.get(key)
    if found is None:
        if len(_kept_partials) >= 8:
            _kept_partials.clear()
        num_groups = cdiv(num_chunks, _GROUP)
        found = _kept_partials[key] = _Partials(
            torch.empty(num_chunks, 2, dim, dtype=grad.dtype, device=grad.device),
            torch.empty(num_chunks, 2, dtype=torch.int64, device=grad.device),
            torch.empty(num_groups, dim, dtype=grad.dtype, device=grad.device),
            torch.empty(num_groups, dtype=torch.int64, device=grad.device),
        )
    return found


_launch_chunks, _launch_groups, _launch_boundaries = Launch(_chunks), Launch(_groups), Launch(_boundaries)


def update(records: Tensor, layout: Layout, grad: Tensor, lookups: Lookups, settings: UpdateSettings) -> None:
    """Apply the row optimizer in place to every row with a gradient."""
    if lookups.sorted is None:
        keys, order = torch.sort(lookups.slots if lookups.keys is None else lookups.keys, stable=True)
    else:
        keys, order = lookups.sorted
    num_lookups, dim = keys.shape[0], layout.dim
    if num_lookups == 0:
        return
    num_chunks = cdiv(num_lookups, _CHUNK)
    partials = _partials(num_chunks, dim, grad)
    out_rows = lookups.out_row_of_lookup()
    bad = order if lookups.check is None else lookups.check.flag
    scale = lookups.scale
    row, element = _bound(settings.rule)
    salt = settings.salt - (1 << 64) if settings.salt >> 63 else settings.salt
    numbers = (
        float(settings.lr), float(settings.l2), float(settings.weight_decay), float(settings.clip_norm),
        _constants(settings.constants, grad.device), salt,
    )  # fmt: skip
    width, block_d = records.stride(0), power_of_2(dim)
    bags, scaled, checked = out_rows is not None, scale is not None, lookups.check is not None
    rule = (
        checked, KINDS[layout.precision], layout.weight_columns, len(layout.element_states), bool(layout.row_states),
        settings.clip_norm > 0, settings.scale_by_count, row, element,
    )  # fmt: skip
    types = (
        records.dtype,
        keys.dtype,
        order.dtype,
        lookups.slots.dtype,
        None if out_rows is None else out_rows.dtype,
        grad.dtype,
        grad.data_ptr() % 16,
        salt.bit_length() > 31,
    )
    key = (types, dim, width, bags, scaled, rule[:-2], settings.rule)
    warps = max(1, min(8, block_d // 128))
    _launch_chunks(
        (num_chunks,), key, records, keys, order, lookups.slots, grad, out_rows if bags else keys,
        grad if scale is None else scale, bad, *partials[:2], *numbers, num_lookups, width,
        dim, block_d, _CHUNK, bags, scaled, *rule, num_warps=warps,
    )  # fmt: skip
    if num_chunks > _GROUP:  # else no row fills a group
        _launch_groups(
            (num_chunks // _GROUP,), (keys.dtype, grad.dtype, dim), keys, *partials, num_lookups,
            dim, block_d, _CHUNK, _GROUP, _HEADS, num_warps=warps,
        )  # fmt: skip
    _launch_boundaries(
        (num_chunks,), key, records, keys, order, lookups.slots, bad, *partials, *numbers, num_lookups, width,
        dim, block_d, _CHUNK, _GROUP, _HEADS, *rule, num_warps=warps,
    )  # fmt: skip
