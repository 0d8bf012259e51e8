"""Bringing rows into the cache as one Triton kernel: a program copies or creates the records of a few misses."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.init_rows.distributions import Normal, Uniform
from hotbed.ops.init_rows.triton import GOLDEN, first_values, row_bits
from hotbed.ops.launch import Launch, cdiv, power_of_2
from hotbed.ops.move.initial import InitialRows, arrays
from hotbed.ops.precision import FP32, KINDS
from hotbed.ops.precision.triton import round_nearest, widen

_FP32 = tl.constexpr(FP32)
_COLUMNS = 512  # of a record moved at once
_NUMBERS = 1024  # of all records of a program moved at once


@triton.jit
def _where(condition, yes, no):
    return tl.where(condition, yes, no)


@triton.jit
def _table_of(tables, key, NUM_TABLES: tl.constexpr, STEPS: tl.constexpr):
    """The last of tables [T, 4] whose base is not above the key."""
    low = (key * 0).to(tl.int32)
    high = low + NUM_TABLES
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2  # where the search has ended this is low, and nothing changes
        below = tl.load(tables + middle * 4) <= key
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit(do_not_specialize=["num_rows"])
def _unpack(
    records, halves, slots, source, staging, keys, tables, scales, f0, f1, f2, num_rows,
    NUM_TABLES: tl.constexpr, STEPS: tl.constexpr,
    WIDTH: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr,
    STATE: tl.constexpr, STATES: tl.constexpr, ROW_STATE: tl.constexpr,
    ANY_UNIFORM: tl.constexpr, ANY_NORMAL: tl.constexpr, FIRST: tl.constexpr, FIRST_COLUMN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Tables [T, 4] are base, stream, init, padding id; scales [T] are float32.

    Halves is records as int16, where the weights are of a KIND of 16 bits; state starts at column STATE.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.load(slots + i, mask=i < num_rows, other=-1).to(tl.int64)
    origin = tl.load(source + i, mask=i < num_rows, other=-1).to(tl.int64)
    place = (records + slot * WIDTH)[:, None]
    copied = (slot >= 0) & (origin >= 0)
    for start in range(0, WIDTH, BLOCK_C):
        c = (start + tl.arange(0, BLOCK_C))[None, :]
        mask = copied[:, None] & (c < WIDTH)
        values = tl.load(staging + origin[:, None] * WIDTH + c, mask=mask)
        tl.store(place + c, values, mask=mask)
    created = (slot >= 0) & (origin < 0)
    if tl.max(created.to(tl.int32), axis=0) > 0:
        key = tl.load(keys + i, mask=created, other=0)
        table = _table_of(tables, key, NUM_TABLES, STEPS)
        number = key - tl.load(tables + table * 4)
        bits = row_bits(number, tl.load(tables + table * 4 + 1))[:, None]
        if FIRST_COLUMN > 0:  # of element d are those of FIRST_COLUMN + d
            bits += tl.full((1, 1), FIRST_COLUMN, tl.uint64) * GOLDEN
        init = tl.load(tables + table * 4 + 2)[:, None]
        padding = (number == tl.load(tables + table * 4 + 3))[:, None]
        scale = tl.load(scales + table)[:, None]
        for start in range(0, DIM, BLOCK_D):
            d = (start + tl.arange(0, BLOCK_D))[None, :]
            mask = created[:, None] & (d < DIM)
            w = tl.where(padding, 0.0, first_values(bits, d, init, scale, ANY_UNIFORM, ANY_NORMAL))
            if KIND == _FP32:
                tl.store(place + d, w, mask=mask)
            else:
                half = round_nearest(w, KIND)
                half_place = halves + (slot * (2 * WIDTH))[:, None] + d
                tl.store(half_place, half.to(tl.int16, bitcast=True), mask=mask)
                if DIM % 2 == 1:  # an odd weight stands next to zeros
                    tl.store(half_place + 1, (d * 0).to(tl.int16), mask=mask & (d == DIM - 1))
                w = widen(half, KIND)  # state starts from the weights as they are stored
            a, b = FIRST(w, (f0, f1, f2))
            if STATES >= 1:
                tl.store(place + STATE + d, a, mask=mask)
            if STATES >= 2:
                tl.store(place + STATE + DIM + d, b, mask=mask)
        c = (STATE + DIM * STATES + tl.arange(0, 4))[None, :]
        rest = tl.where(ROW_STATE & (c == STATE + DIM * STATES), f2, 0.0)
        tl.store(place + c, rest, mask=created[:, None] & (c < WIDTH))


@lru_cache(maxsize=64)
def _shape(first: InitialRows, device: torch.device) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """(tables, scales, all that is fixed when the kernel is compiled)."""
    layout = first.layout
    block_c, block_d = (min(_COLUMNS, power_of_2(n)) for n in (layout.width, layout.dim))
    kinds = {type(table.init) for table in first.tables}
    shape = {
        "NUM_TABLES": len(first.tables),
        "STEPS": (len(first.tables) - 1).bit_length(),
        "WIDTH": layout.width,
        "DIM": layout.dim,
        "KIND": KINDS[layout.precision],
        "STATE": layout.weight_columns,
        "STATES": len(layout.element_states),
        "ROW_STATE": bool(layout.row_states),
        "ANY_UNIFORM": Uniform in kinds,
        "ANY_NORMAL": Normal in kinds,
        "FIRST": triton.jit(first.rule.bind_first({"where": _where, "tl": tl})),
        "FIRST_COLUMN": first.first_column,
        "BLOCK_M": max(1, _NUMBERS // block_c),
        "BLOCK_C": block_c,
        "BLOCK_D": block_d,
    }
    tables, scales, _ = (torch.from_numpy(array).to(device) for array in arrays(first))
    return tables, scales, shape


# a product and a sum stay two roundings, as everywhere else
_launch_unpack = Launch(_unpack, num_warps=4, enable_fp_fusion=False)


@triton.jit(do_not_specialize=["num_rows"])
def _pack(records, slots, out, num_rows, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = i < num_rows
    slot = tl.load(slots + i, mask=inside, other=0).to(tl.int64)
    for start in range(0, WIDTH, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (c < WIDTH)[None, :]
        rows = tl.load(records + slot[:, None] * WIDTH + c[None, :], mask=mask, other=0.0)
        tl.store(out + i[:, None] * WIDTH + c[None, :], rows, mask=mask)


_launch_pack = Launch(_pack, num_warps=4)


def pack(records: Tensor, slots: Tensor, out: Tensor, count: int) -> None:
    """out[i] = records[slots[i]] for the first `count`; contiguous float32 records."""
    if count == 0:
        return
    width = records.shape[1]
    block_c = min(_COLUMNS, power_of_2(width))
    block_m = max(1, 2048 // block_c)
    _launch_pack((cdiv(count, block_m),), (width, slots.dtype), records, slots, out, count, width, block_m, block_c)


def unpack(
    records: Tensor, slots: Tensor, source: Tensor, staging: Tensor, keys: Tensor, first: InitialRows, count: int = -1
) -> None:
    """records[slots[i]] = staging[source[i]], or the first record of keys[i] where source[i] < 0; slots < 0 are skipped.

    `count`: how many of the slots are meant; all if it is left out.
    """
    num_rows = slots.shape[0] if count < 0 else count
    if num_rows == 0:
        return
    tables, scales, shape = _shape(first, records.device)
    _launch_unpack(
        (cdiv(num_rows, shape["BLOCK_M"]),),
        (first, slots.dtype),
        records,
        records.view(torch.int16),
        slots,
        source,
        staging,
        keys,
        tables,
        scales,
        *first.constants,
        num_rows,
        *shape.values(),
    )
