"""Row groups in, rows of batches out.

In: a block of row groups, and the position of each of its rows. Out: those rows in slabs, the memory of future batches
(slab.py). The columns of an Arrow file are used where they were read (data/arrow_file.py); those of Parquet are decoded by
pyarrow in the calling thread. `scatter.py` copies their rows.

Everything is checked: files that changed since they were opened, wrong checksums, nulls, labels other than 0 and 1,
numbers that are not finite, and row numbers outside their table give a DataError that names file and row group.

`Buffers`: reusable memory for batches: sizes in, tensors out; the memory is reused once no tensor or view refers to it.

Fresh memory costs as much as decoding into it, because the kernel zeroes every page at first touch. So the memory of a batch
goes to a free list, from which the next batch of its size takes it. Python's reference counting decides when: a tensor keeps
its memory alive, and so does every view, slice, numpy array or autograd graph. A caller that keeps a batch keeps it unchanged.

Pinned memory comes from torch's allocator, which follows the same rule and waits for pending copies to the device.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.data.arrow_file import read_batch
from hotbed.data.dataset import AGAIN, ArrowBatch, RowGroup, stamp_of
from hotbed.data.loader.scatter import Kinds, RowPlaces, describe, scatter
from hotbed.data.schema import IdFeature, Schema
from hotbed.errors import DataError, RemoteError
from hotbed.files import RemotePath, readable
from hotbed.host.devices import pinned_empty
from hotbed.host.jit import njit
from hotbed.types import Jagged

_CHANGED = (
    "The file has changed since the dataset was opened. Do not change a dataset while it is being read; start again."
)
_MOST_OPEN = 16  # Parquet files of a thread
_SMALL = 1 << 17  # bytes; the C library reuses smaller pieces itself
_STEPS = 8  # size classes between two powers of two: at most an eighth is wasted
_address_in = ctypes.pythonapi.PyCapsule_GetPointer
_address_in.restype, _address_in.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class ColumnSet:
    """The columns to read: all of them, or only ids."""

    def __init__(self, schema: Schema, *, only_ids: bool = False) -> None:
        self.only_ids = only_ids
        self.label = [] if only_ids else [schema.label]
        self.dense = [] if only_ids else [*(column.name for column in schema.dense), *schema.targets]
        self.num_dense = 0 if only_ids else len(schema.dense)  # those that follow are targets
        self.has_weight = bool(schema.weight) and not only_ids
        self.single = [feature.name for feature in schema.features if not feature.multi]
        self.multi = {feature.name: feature for feature in schema.features if feature.multi}
        self.flat = [*self.label, *self.dense, *self.single]
        limits = {feature.name: _limit(feature) for feature in schema.features}
        self.last = np.asarray([limits.get(name, 0) - 1 for name in self.flat], dtype=np.int64).view(np.uint64)

    def kinds(self, letters: NDArray[np.int64]) -> Kinds:
        """The kinds of the flat columns; `letters` are their types in the file."""
        return Kinds(letters, self.last, len(self.label), len(self.dense))


class _GroupBags(NamedTuple):
    """The bags of one feature in one row group."""

    values: NDArray[Any]  # int32 or int64 [L]
    offsets: NDArray[Any]  # int32 or int64 [r + 1]


def decode(
    columns: ColumnSet, groups: Sequence[RowGroup], place: NDArray[np.int64], spots: RowPlaces, buffers: Buffers
) -> dict[str, Jagged]:
    """Read `groups`; their i-th row becomes row place[i] of the block, whose requested rows go to `spots`.

    Returns the bags of the block.
    """
    bags: dict[str, list[_GroupBags]] = {name: [] for name in columns.multi}
    start = 0
    for group in groups:
        some = place[start : start + group.rows]
        rows = _read(group, columns)
        _place(rows.select(columns.flat), columns, some, spots, group)
        _refuse_nulls(rows, [*columns.multi], group)
        for name, feature in columns.multi.items():
            bags[name].append(_read_bags(rows.column(name), feature, group))
        start += group.rows
    return {name: _join_bags(parts, place, buffers) for name, parts in bags.items()}


def _limit(feature: IdFeature) -> int:
    """The limit of its row numbers; 0 for 64-bit ids."""
    return feature.rows if feature.mode in ("vocabulary", "direct") else 0


def fetch_ahead(group: RowGroup) -> None:
    """Have the bytes of a row group of a store fetched; of a local file nothing, which the kernel reads ahead itself."""
    if isinstance(group.file, RemotePath) and group.batch is not None:
        place = group.batch.place
        with suppress(OSError):  # whoever reads the row group reports it
            group.file.content().fetch_ahead(place.begin, place.begin + place.length)


def _read(group: RowGroup, columns: ColumnSet) -> pa.RecordBatch:
    """The columns of a row group, in memory that is not written again as long as they live."""
    try:
        rows = _read_parquet(group, columns) if group.batch is None else _read_arrow(group, group.batch)
    except RemoteError:
        raise
    except (pa.ArrowException, OSError, IndexError, ValueError) as error:
        _open_files.drop()
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        way_out = _CHANGED if _has_changed(group) else AGAIN
        raise DataError(f"{_where(group)} cannot be decoded ({reason}). {way_out}") from error
    if rows.num_rows != group.rows:
        raise DataError(f"{_where(group)} holds {rows.num_rows:,} rows; its footer said {group.rows:,}. {AGAIN}")
    if _has_changed(group):
        raise DataError(f"{_where(group)} was read from a file that is not the one that was opened. {_CHANGED}")
    return rows


def _has_changed(group: RowGroup) -> bool:
    try:
        return group.stamp is not None and stamp_of(group.file) != group.stamp
    except OSError:
        return False  # it is gone


def _read_arrow(group: RowGroup, batch: ArrowBatch) -> pa.RecordBatch:
    memory = _file_memory.empty((batch.place.length,), torch.uint8)
    return read_batch(group.file, batch.place, batch.schema, memory.numpy())


def _read_parquet(group: RowGroup, columns: ColumnSet) -> pa.RecordBatch:
    names = [*columns.flat, *columns.multi]
    table = _open_files.get(group).read_row_group(group.number, columns=names, use_threads=False)
    batches = table.to_batches()
    return batches[0] if len(batches) == 1 else table.combine_chunks().to_batches()[0]


class _OpenFiles(threading.local):
    """Parquet files that this thread has open: opening one takes a millisecond of Python, which training waits for."""

    def __init__(self) -> None:
        self._files: dict[Any, pq.ParquetFile] = {}  # the one used longest ago first

    def get(self, group: RowGroup) -> pq.ParquetFile:
        key = group.file, group.stamp
        found = self._files.pop(key, None)
        if found is None:
            while len(self._files) >= _MOST_OPEN:
                self._files.pop(next(iter(self._files))).close()
            # Not mapped into memory: reading a truncated mapped file kills the process.
            found = pq.ParquetFile(readable(group.file), pre_buffer=False, page_checksum_verification=True)
        self._files[key] = found
        return found

    def drop(self) -> None:
        """All of them."""
        while self._files:
            self._files.popitem()[1].close()


_open_files = _OpenFiles()


def _place(
    rows: pa.RecordBatch, columns: ColumnSet, place: NDArray[np.int64], spots: RowPlaces, group: RowGroup
) -> None:
    """Copy labels, numbers and single ids."""
    schema, array = rows.__arrow_c_array__()
    found = describe(_address_in(schema, b"arrow_schema"), _address_in(array, b"arrow_array"))
    if found[:, 1].any():
        _refuse_nulls(rows, columns.flat, group)
    kinds = columns.kinds(np.ascontiguousarray(found[:, 0]))
    wrong = scatter(np.ascontiguousarray(found[:, 2]), kinds, place, spots)
    if wrong >= 0:
        _refuse(rows, columns.flat[wrong], columns, group)


def _refuse_nulls(rows: pa.RecordBatch, names: list[str], group: RowGroup) -> None:
    for name in names:
        nulls = rows.column(name).null_count
        if nulls:
            raise DataError(f"{_where(group)}: column {name!r} has {nulls:,} nulls; a dataset has none. {AGAIN}")


def _refuse(rows: pa.RecordBatch, name: str, columns: ColumnSet, group: RowGroup) -> None:
    """Raise a DataError for the first wrong value of the column."""
    values = rows.column(name).to_numpy()
    if name in columns.label:
        row = int(np.argmax((values != 0) & (values != 1)))
        raise DataError(f"{_where(group)}, row {row}: label is {values[row]}; it must be 0 or 1. {AGAIN}")
    if name in columns.dense:
        row = int(np.argmin(np.isfinite(values)))
        raise DataError(f"{_where(group)}, row {row}: column {name!r} is {values[row]}; it must be finite. {AGAIN}")
    limit = int(columns.last[columns.flat.index(name)]) + 1
    row = int(np.argmax((values < 0) | (values >= limit)))
    _refuse_id(group, name, f"row {row}", int(values[row]), limit)


def _refuse_id(group: RowGroup, feature: str, row: str, value: int, limit: int) -> None:
    raise DataError(
        f"{_where(group)}, {row}: id {value} of feature {feature!r} lies outside its table of {limit:,} rows. {AGAIN}"
    )


def _read_bags(lists: pa.Array, feature: IdFeature, group: RowGroup) -> _GroupBags:
    """The feature's bags."""
    name, limit = feature.name, _limit(feature)
    offsets = lists.offsets.to_numpy()
    longest = int(np.diff(offsets).max(initial=0))
    if feature.length and longest > feature.length:
        raise DataError(
            f"{_where(group)}: a sequence of {name!r} has {longest} ids; the schema allows {feature.length}. {AGAIN}"
        )
    values = lists.values
    if values.null_count:
        raise DataError(
            f"{_where(group)}: bags of {name!r} hold {values.null_count:,} nulls; they may have none. {AGAIN}"
        )
    numbers = values.to_numpy()[offsets[0] : offsets[-1]]
    if limit and len(numbers) and (numbers.min() < 0 or numbers.max() >= limit):
        wrong = numbers[(numbers < 0) | (numbers >= limit)][0]
        _refuse_id(group, name, "in a bag", int(wrong), limit)
    return _GroupBags(numbers, offsets - offsets[0])


def _join_bags(parts: Sequence[_GroupBags], place: NDArray[np.int64], buffers: Buffers) -> Jagged:
    offsets = buffers.empty((len(place) + 1,), torch.int64)
    to = offsets.numpy()
    to[0] = 0
    start = 0
    for part in parts:
        end = start + len(part.offsets) - 1
        to[1 + place[start:end]] = np.diff(part.offsets)
        start = end
    np.cumsum(to, out=to)
    values = buffers.empty((int(to[-1]),), torch.int64)
    start = 0
    for part in parts:
        end = start + len(part.offsets) - 1
        _scatter_bags(part.values, part.offsets, place[start:end], to, values.numpy())
        start = end
    return Jagged(values, offsets)


def _where(group: RowGroup) -> str:
    return f"{group.file}, row group {group.number}"


@njit(nogil=True, cache=True)
def _scatter_bags(
    values: NDArray[Any],
    offsets: NDArray[Any],
    spot: NDArray[np.int64],
    out_offsets: NDArray[np.int64],
    out: NDArray[np.int64],
) -> None:
    for row in range(len(spot)):
        target = out_offsets[spot[row]]
        for source in range(offsets[row], offsets[row + 1]):
            out[target] = values[source]
            target += 1


class Buffers:
    """A free list of memory; any thread may take from it and release."""

    def __init__(self, *, pin_memory: bool = False, most_bytes: int = 1 << 30) -> None:
        """`most_bytes` limits the free list; memory beyond it is returned to the system."""
        self.pin_memory = pin_memory
        self._most_bytes = most_bytes
        self._free: dict[int, deque[Tensor]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor."""
        count = int(np.prod(shape, dtype=np.int64))
        num_bytes = count * dtype.itemsize
        if self.pin_memory:
            return pinned_empty(shape, dtype)
        if num_bytes < _SMALL:
            return torch.empty(shape, dtype=dtype, device="cpu")
        size = _size_class(num_bytes)
        try:
            memory = self._free[size].pop()
        except (KeyError, IndexError):
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        # numpy views have the first owner as their base, not each other: watch the array that torch refers to
        watched = memory[:num_bytes].view(dtype).reshape(shape).numpy()
        weakref.finalize(watched, self._take_back, memory).atexit = False
        return torch.from_numpy(watched)

    @property
    def free_bytes(self) -> int:
        """The size of the free list."""
        return sum(size * len(free) for size, free in list(self._free.items()))

    def _take_back(self, memory: Any) -> None:
        """Called when the last view is gone, perhaps inside another method of this class: atomic operations, no lock."""
        size = memory.numel()
        if self.free_bytes + size <= self._most_bytes:
            self._free.setdefault(size, deque()).append(memory)


def _size_class(num_bytes: int) -> int:
    """The size class of `num_bytes`."""
    step = max(1 << (num_bytes - 1).bit_length() >> 1, _STEPS) // _STEPS
    return -(-num_bytes // step) * step


_file_memory = Buffers(most_bytes=1 << 28)  # for the bytes of files
