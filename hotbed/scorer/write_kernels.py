"""Compiled: changed rows in, rows at their place in scratch files out, with marks; and rows read back from there.

Lookups continue meanwhile (kernels.py): a row that is written here is visible as a change until it is marked.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hotbed.host.intrinsics import read_fully, write_fully
from hotbed.host.jit import njit
from hotbed.scorer.kernels import WAYS, is_marked, set_of, table_of


@njit(nogil=True, cache=True)
def _mark(row: Any, table: Any, files: Any) -> None:
    """Mark a row as changed."""
    if row < files.sure[table]:
        bit = files.mark_starts[table] + row
        files.marks[bit >> 3] |= np.uint8(1) << np.uint8(bit & 7)


@njit(nogil=True, cache=True)
def _refresh(key: Any, rows: Any, m: Any, cache: Any, epoch: Any) -> None:
    """Replace the row in the cache, if it is there."""
    s = set_of(key, cache.keys.shape[0])
    for way in range(WAYS):
        if cache.keys[s, way] == key:
            cache.epochs[s, way] = epoch
            for d in range(rows.shape[1]):
                cache.rows[WAYS * s + way, d] = rows[m, d]


@njit(nogil=True, cache=True)
def write_rows(keys: Any, rows: Any, files: Any) -> Any:
    """Write rows to the scratch files of their tables, adjacent rows together; returns 0 or an errno."""
    size, n = 4 * rows.shape[1], 0
    while n < keys.shape[0]:  # ends: n passes one key at least
        table = table_of(keys[n], files.starts)
        row, stop = keys[n] - files.starts[table], n + 1
        while stop < keys.shape[0] and keys[stop] == keys[stop - 1] + 1 and keys[stop] < files.starts[table + 1]:
            stop += 1
        error = write_fully(files.scratch[table], rows.ctypes.data + n * size, (stop - n) * size, row * size)
        if error != 0:
            return error
        n = stop
    return 0


@njit(nogil=True, cache=True)
def mark_written(keys: Any, rows: Any, cache: Any, files: Any, epoch: Any) -> None:
    """Mark written rows as changed, and refresh them in the cache."""
    for n in range(keys.shape[0]):
        table = table_of(keys[n], files.starts)
        _mark(keys[n] - files.starts[table], table, files)
        _refresh(keys[n], rows, n, cache, epoch)


@njit(nogil=True, cache=True)
def read_places(handle: Any, places: Any, rows: Any) -> Any:
    """rows[n] = the row at places[n] of a file of rows; returns 0 or a fault."""
    size = 4 * rows.shape[1]
    for n in range(places.shape[0]):
        fault = read_fully(handle, rows.ctypes.data + n * size, size, places[n] * size)
        if fault != 0:
            return fault
    return 0


@njit(nogil=True, cache=True)
def compare(keys: Any, rows: Any, files: Any, held: Any, differs: Any) -> Any:
    """differs[n]: whether rows[n] differs from the row in the scratch file, or none is there. Returns 0 or a fault.

    Rows are compared as 32-bit words. Rows of consecutive keys are read together, into `held`.
    """
    size, n = 4 * rows.shape[1], 0
    while n < keys.shape[0]:  # ends: n passes one key at least
        table = table_of(keys[n], files.starts)
        first = keys[n] - files.starts[table]
        if not is_marked(files, table, first):
            differs[n] = True
            n += 1
            continue
        stop = n + 1
        while stop < min(keys.shape[0], n + held.shape[0]) and keys[stop] == keys[stop - 1] + 1:
            if keys[stop] >= files.starts[table + 1] or not is_marked(files, table, keys[stop] - files.starts[table]):
                break
            stop += 1
        fault = read_fully(files.scratch[table], held.ctypes.data, (stop - n) * size, first * size)
        if fault != 0:
            return fault
        for m in range(n, stop):
            other = False
            for d in range(rows.shape[1]):
                other |= rows[m, d] != held[m - n, d]
            differs[m] = other
        n = stop
    return 0
