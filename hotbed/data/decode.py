"""Parquet row groups in, rows as tensors out.

In: a few row groups and the place every row of theirs is to take. Out: one Batch that holds all of them, assembled by Numba
without the GIL. Column by column, a tile of rows at a time: the values of a tile (64 rows of 26 ids are 13 KB) stay in the
first-level cache while 26 columns write into them, so transposing and shuffling are one pass.

Values are checked as they pass: nulls, labels other than 0 and 1, numbers that are not finite and row numbers outside their
table are a DataError that names file and row group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from hotbed.data.dataset import AGAIN, RowGroup
from hotbed.data.schema import IdFeature, Schema
from hotbed.errors import DataError
from hotbed.types import Batch, Jagged

TILE = 64


class _Bags(NamedTuple):
    """The bags of one feature in one row group."""

    values: NDArray[Any]  # int32 or int64 [L]
    offsets: NDArray[Any]  # int32 or int64 [r + 1]


def decode(schema: Schema, groups: Sequence[RowGroup], place: NDArray[np.int64], pin_memory: bool) -> Batch:
    """Read `groups`; their i-th row becomes row place[i] of the result."""
    num_rows = len(place)
    single = [feature for feature in schema.features if not feature.multi]
    limits = np.asarray([_limit(feature) for feature in single], dtype=np.int64)
    labels = torch.empty(num_rows, dtype=torch.float32, pin_memory=pin_memory)
    dense = torch.empty((num_rows, len(schema.dense)), dtype=torch.float32, pin_memory=pin_memory)
    ids = torch.empty((num_rows, len(single)), dtype=torch.int64, pin_memory=pin_memory)
    bags: dict[str, list[_Bags]] = {feature.name: [] for feature in schema.features if feature.multi}
    start = 0
    for group in groups:
        spot = place[start : start + group.rows]
        table = _read(group, schema)
        labels.numpy()[spot] = _labels(table, schema.label, group)
        _place_dense(table, [column.name for column in schema.dense], spot, dense.numpy(), group)
        _place_ids(table, [feature.name for feature in single], limits, spot, ids.numpy(), group)
        for feature in schema.features:
            if feature.multi:
                bags[feature.name].append(_read_bags(table, feature.name, _limit(feature), group))
        start += group.rows
    return Batch(labels, dense, ids, {name: _join_bags(parts, place, pin_memory) for name, parts in bags.items()})


def _limit(feature: IdFeature) -> int:
    """The rows that its numbers must lie in; 0 for 64-bit ids."""
    return feature.rows if feature.mode in ("vocabulary", "direct") else 0


def _read(group: RowGroup, schema: Schema) -> pa.Table:
    names = [schema.label, *(column.name for column in schema.dense), *(feature.name for feature in schema.features)]
    try:
        with pq.ParquetFile(group.file) as parquet:
            table = parquet.read_row_group(group.number, columns=names, use_threads=False)
    except (pa.ArrowException, OSError, IndexError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{_where(group)} cannot be decoded ({reason}). {AGAIN}") from error
    if table.num_rows != group.rows:
        raise DataError(f"{_where(group)} holds {table.num_rows:,} rows; its footer said {group.rows:,}. {AGAIN}")
    for name in names:
        if table[name].null_count:
            raise DataError(
                f"{_where(group)}: column {name!r} has {table[name].null_count:,} nulls; a dataset has none. {AGAIN}"
            )
    return table


def _array(table: pa.Table, name: str) -> pa.Array:
    chunks = table[name].chunks
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)


def _labels(table: pa.Table, name: str, group: RowGroup) -> NDArray[np.float32]:
    labels: NDArray[np.float32] = _array(table, name).to_numpy()
    wrong = (labels != 0) & (labels != 1)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DataError(f"{_where(group)}, row {row}: label is {labels[row]}; it must be 0 or 1. {AGAIN}")
    return labels


def _place_dense(
    table: pa.Table, names: Sequence[str], spot: NDArray[np.int64], out: NDArray[np.float32], group: RowGroup
) -> None:
    if not names:
        return
    bad = _scatter_dense(np.stack([_array(table, name).to_numpy() for name in names]), spot, out)
    if bad >= 0:
        name, row = names[bad // len(spot)], bad % len(spot)
        value = _array(table, name)[row].as_py()
        raise DataError(f"{_where(group)}, row {row}: column {name!r} is {value}; it must be finite. {AGAIN}")


def _place_ids(
    table: pa.Table,
    names: Sequence[str],
    limits: NDArray[np.int64],
    spot: NDArray[np.int64],
    out: NDArray[np.int64],
    group: RowGroup,
) -> None:
    if not names:
        return
    bad = _scatter_ids(np.stack([_array(table, name).to_numpy() for name in names]), limits, spot, out)
    if bad >= 0:
        feature, row = divmod(bad, len(spot))
        _raise_id(group, names[feature], f"row {row}", _array(table, names[feature])[row].as_py(), int(limits[feature]))


def _read_bags(table: pa.Table, name: str, limit: int, group: RowGroup) -> _Bags:
    """The feature's bags; `limit` rows in its table, 0 for none."""
    lists = _array(table, name)
    offsets = lists.offsets.to_numpy()
    values = lists.values
    if values.null_count:
        raise DataError(
            f"{_where(group)}: bags of {name!r} hold {values.null_count:,} nulls; they may have none. {AGAIN}"
        )
    numbers = values.to_numpy()[offsets[0] : offsets[-1]]
    if limit and len(numbers) and (numbers.min() < 0 or numbers.max() >= limit):
        wrong = numbers[(numbers < 0) | (numbers >= limit)][0]
        _raise_id(group, name, "in a bag", int(wrong), limit)
    return _Bags(numbers, offsets - offsets[0])


def _raise_id(group: RowGroup, feature: str, row: str, value: int, limit: int) -> None:
    raise DataError(
        f"{_where(group)}, {row}: id {value} of feature {feature!r} lies outside its table of {limit:,} rows. {AGAIN}"
    )


def _join_bags(parts: Sequence[_Bags], place: NDArray[np.int64], pin_memory: bool) -> Jagged:
    lengths = np.concatenate([np.diff(part.offsets) for part in parts]) if parts else np.zeros(0, dtype=np.int64)
    offsets = torch.zeros(len(place) + 1, dtype=torch.int64, pin_memory=pin_memory)
    by_place = np.empty(len(place), dtype=np.int64)
    by_place[place] = lengths
    np.cumsum(by_place, out=offsets.numpy()[1:])
    values = torch.empty(int(offsets[-1]), dtype=torch.int64, pin_memory=pin_memory)
    start = 0
    for part in parts:
        end = start + len(part.offsets) - 1
        _scatter_bags(part.values, part.offsets, place[start:end], offsets.numpy(), values.numpy())
        start = end
    return Jagged(values, offsets)


def slice_batch(batch: Batch, start: int, stop: int) -> Batch:
    """Rows start .. stop - 1, without copying them (offsets of bags apart)."""
    bags = {}
    for name, bag in batch.bags.items():
        offsets = bag.offsets[start : stop + 1]
        bags[name] = Jagged(bag.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])
    return Batch(batch.labels[start:stop], batch.dense[start:stop], batch.ids[start:stop], bags)


def join_batches(first: Batch, second: Batch) -> Batch:
    """The rows of `first`, then those of `second`."""
    bags = {}
    for name, bag in first.bags.items():
        other = second.bags[name]
        offsets = torch.cat([bag.offsets, other.offsets[1:] + bag.offsets[-1]])
        bags[name] = Jagged(torch.cat([bag.values, other.values]), offsets)
    return Batch(
        torch.cat([first.labels, second.labels]),
        torch.cat([first.dense, second.dense]),
        torch.cat([first.ids, second.ids]),
        bags,
    )


def pin(batch: Batch) -> Batch:
    """The batch in page-locked memory, as far as it is not there yet."""

    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_pinned() else tensor.pin_memory()

    bags = {name: Jagged(move(bag.values), move(bag.offsets)) for name, bag in batch.bags.items()}
    return Batch(move(batch.labels), move(batch.dense), move(batch.ids), bags)


def _where(group: RowGroup) -> str:
    return f"{group.file}, row group {group.number}"


@njit(nogil=True, cache=True)
def _scatter_ids(
    columns: NDArray[Any], limits: NDArray[np.int64], spot: NDArray[np.int64], out: NDArray[np.int64]
) -> int:
    """out[spot[r], f] = columns[f, r]; the first f * rows + r whose id is out of range, else -1."""
    num_rows = columns.shape[1]
    bad = -1
    for begin in range(0, num_rows, TILE):
        end = min(begin + TILE, num_rows)
        for feature in range(columns.shape[0]):
            limit = limits[feature]
            for row in range(begin, end):
                value = np.int64(columns[feature, row])
                if limit > 0 and (value < 0 or value >= limit) and bad < 0:
                    bad = feature * num_rows + row
                out[spot[row], feature] = value
    return bad


@njit(nogil=True, cache=True)
def _scatter_dense(columns: NDArray[np.float32], spot: NDArray[np.int64], out: NDArray[np.float32]) -> int:
    """out[spot[r], n] = columns[n, r]; the first n * rows + r whose value is not finite, else -1."""
    num_rows = columns.shape[1]
    bad = -1
    for begin in range(0, num_rows, TILE):
        end = min(begin + TILE, num_rows)
        for number in range(columns.shape[0]):
            for row in range(begin, end):
                value = columns[number, row]
                if not np.isfinite(value) and bad < 0:
                    bad = number * num_rows + row
                out[spot[row], number] = value
    return bad


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
