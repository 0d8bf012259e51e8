"""First values of rows on the CPU, compiled; the same bits as the reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from hotbed.host.jit import njit
from hotbed.host.splitmix import GOLDEN, mix

_S16, _S32, _S40, _S48 = (np.uint64(s) for s in (16, 32, 40, 48))
_MASK16 = np.uint64(0xFFFF)


@njit(nogil=True, cache=True, inline="always")
def _sum_of_pieces(bits: Any) -> Any:
    return np.int64((bits & _MASK16) + ((bits >> _S16) & _MASK16) + ((bits >> _S32) & _MASK16) + (bits >> _S48))


@njit(nogil=True, cache=True, inline="always")
def row_bits(row: Any, stream: Any) -> Any:
    """The 64 bits that (stream, id) stand for; all elements of the row follow from them."""
    return mix((np.uint64(row) + stream) * GOLDEN)


@njit(nogil=True, cache=True, inline="always")
def first_number(bits: Any, d: Any, normal: bool) -> Any:
    """Element d of a row as an integer, to be multiplied by the scale."""
    bits = mix(bits + np.uint64(d + 1) * GOLDEN)
    if normal:
        return 2 * (_sum_of_pieces(bits) + _sum_of_pieces(mix(bits ^ GOLDEN))) - 8 * 0xFFFF
    return 2 * np.int64(bits >> _S40) + 1 - (1 << 24)


@njit(nogil=True, cache=True)
def fill(thread: int, num_threads: int, out: Any, ids: Any, stream: Any, normal: bool, scale: Any) -> None:
    """Thread's share of out [U, D]; ids [U] int64, stream uint64, scale of out's type."""
    num_rows, dim = out.shape
    for i in range(num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads):
        bits = row_bits(ids[i], stream)
        for d in range(dim):
            out[i, d] = out.dtype.type(first_number(bits, d, normal)) * scale
