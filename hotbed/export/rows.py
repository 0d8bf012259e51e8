"""The rows of a model folder in, one file per table out, in any order and precision, a few MiB at a time.

The model's tables stay on disk and are mapped, so neither a table nor its export is ever completely in memory; an order or
dynamic ids take 8 bytes a row.

`to_precision`: float32 rows in, rows in the precision of the export out, row by row.

fp32    as they are
fp16    rounded to nearest: off by |w| / 2048 at most, or by 3e-8 where |w| < 6.2e-5; above 65,504 an error
int8    scale = max |w| / 127 of the row, weight = round(w / scale): off by scale / 2 = max |w| / 254 of the row at most,
        give or take a rounding of float32; rows without a number above 1.5e-36 become 0

`RowOrder`: the order of a table's rows in an export, most frequent first. The rows of a vocabulary are in that order already:
row 0, which all unknown ids share, then the most frequent id. Rows of other tables are ordered by the counts of the dataset if
it is available, else by id. An order takes 8 bytes of memory a row, and about 30 while it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.checkpoint.files import PiecewiseTensor, write_tensors
from hotbed.data.dataset import FeatureCounts
from hotbed.data.schema import IdFeature
from hotbed.errors import RunError
from hotbed.host.atomic import writing
from hotbed.run.export_format import NUMBERS, Order, Precision, RowFormat, Tensors

Floats = NDArray[np.float32]
_MOST = 127
_LEAST = np.float32(np.finfo(np.float32).tiny * _MOST)  # below, a scale loses precision
Ints = NDArray[np.int64]
Report = Callable[[int], None]  # rows written since the last call
_PIECE = 16 << 20  # bytes of float32
_TORCH = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}
_ARROW = {"fp32": pa.float32(), "fp16": pa.float16(), "int8": pa.int8()}


class RowBlock(NamedTuple):
    """Some rows of an export."""

    ids: Ints
    rows: StoredRows


class ModelRows:
    """The rows of one table of a model folder."""

    def __init__(self, tensors: Tensors, table: str, row_order: RowOrder) -> None:
        self.table = table
        self._kind, (self.num_rows, self.dim), _ = tensors.places[f"{table}.weight"]
        self._weight = tensors.map(f"{table}.weight")
        self._ids = tensors.map(f"{table}.id") if f"{table}.id" in tensors.places else None
        self._positions = row_order.positions

    @property
    def id_is_position(self) -> bool:
        """Whether the n-th row of the export is that of id n."""
        return self._ids is None and self._positions is None

    def stretches(self) -> Iterator[slice]:
        """All rows of the export, in stretches of a few MiB."""
        step = max(1, _PIECE // (4 * self.dim))
        return (slice(start, min(start + step, self.num_rows)) for start in range(0, self.num_rows, step))

    def ids(self, stretch: slice) -> Ints:
        """The ids of these rows of the export."""
        at = self._at(stretch)
        if self._ids is not None:
            return np.asarray(self._ids[at])
        return np.arange(stretch.start, stretch.stop) if isinstance(at, slice) else at

    def rows(self, stretch: slice) -> Floats:
        """These rows of the export in float32."""
        return as_float32(self._weight[self._at(stretch)], self._kind)

    def piece(self, stretch: slice, precision: Precision) -> RowBlock:
        """These rows, in the export's precision."""
        ids = self.ids(stretch)
        return RowBlock(ids, to_precision(self.rows(stretch), precision, self.table, ids))

    def _at(self, stretch: slice) -> slice | Ints:
        return stretch if self._positions is None else self._positions[stretch]


def as_float32(numbers: NDArray[Any], kind: str) -> Floats:
    """A float32 copy; bfloat16 is given as its bits."""
    if kind == "BF16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)


def write_rows(
    stem: Path, rows: ModelRows, precision: Precision, row_format: RowFormat, report: Report = lambda _: None
) -> Path:
    """Write the file of one table; returns its path."""
    path = stem.with_name(f"{stem.name}.{row_format}")
    if row_format == "parquet":
        with writing(path):
            _write_parquet(path, rows, precision, report)
    else:
        _write_safetensors(path, rows, precision, report)
    return path


def _write_safetensors(path: Path, rows: ModelRows, precision: Precision, report: Report) -> None:
    def weights() -> Iterator[Tensor]:
        for stretch in rows.stretches():
            yield torch.from_numpy(rows.piece(stretch, precision).rows.weight)
            report(stretch.stop - stretch.start)

    def scale() -> Iterator[Tensor]:
        for stretch in rows.stretches():
            found = rows.piece(stretch, precision).rows.scale
            assert found is not None, "only int8 has scales"
            yield torch.from_numpy(found)

    tensors: dict[str, Tensor | PiecewiseTensor] = {
        "id": PiecewiseTensor((rows.num_rows,), torch.int64, partial(_id_pieces, rows)),
        "weight": PiecewiseTensor((rows.num_rows, rows.dim), _TORCH[precision], weights),
    }
    if precision == "int8":
        tensors["scale"] = PiecewiseTensor((rows.num_rows,), torch.float32, scale)
    write_tensors(path, tensors)


def _id_pieces(rows: ModelRows) -> Iterator[Tensor]:
    return (torch.from_numpy(np.array(rows.ids(stretch))) for stretch in rows.stretches())


def _write_parquet(path: Path, rows: ModelRows, precision: Precision, report: Report) -> None:
    """Row groups of a few MiB."""
    columns = [
        ("id", pa.int64()),
        ("weight", pa.list_(pa.field("element", _ARROW[precision], nullable=False), rows.dim)),
    ]
    if precision == "int8":
        columns.append(("scale", pa.float32()))
    schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])
    packed = ["weight.list.element"] if precision == "int8" else False  # 255 values: a byte each; plain takes four
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=packed) as writer:
        for stretch in rows.stretches():
            ids, (weight, scale) = rows.piece(stretch, precision)
            assert weight.dtype == NUMBERS[precision], f"rows of {precision} are {weight.dtype}"
            flat = pa.array(weight.reshape(-1), type=_ARROW[precision])
            arrays = [pa.array(ids), pa.FixedSizeListArray.from_arrays(flat, type=schema.field("weight").type)]
            arrays += [] if scale is None else [pa.array(scale)]
            writer.write_table(pa.table(arrays, schema=schema))
            report(len(ids))


class StoredRows(NamedTuple):
    """Rows in the precision of an export."""

    weight: NDArray[Any]  # [n, D]
    scale: Floats | None  # [n], of int8


def to_precision(rows: Floats, precision: Precision, table: str, ids: NDArray[np.int64]) -> StoredRows:
    """The rows [n, D] of these ids [n]; a RunError names the first that the precision cannot hold."""
    size = np.abs(rows).max(axis=1, initial=0.0)
    if not np.isfinite(size).all():
        at = int(np.flatnonzero(~np.isfinite(size))[0])
        raise RunError(
            f"table {table!r}: the row of id {ids[at]} holds {rows[at][~np.isfinite(rows[at])][0]}, which cannot be "
            "used for scoring; the model has diverged in training. Export an earlier checkpoint."
        )
    if precision == "fp32":
        return StoredRows(rows, None)
    if precision == "fp16":
        half = rows.astype(np.float16) if size.max(initial=0.0) < 65520 else None  # larger values round to infinity
        if half is None:
            at = int(np.argmax(size))
            raise RunError(
                f"table {table!r}: the row of id {ids[at]} holds a number of size {size[at]:g}, and fp16 ends at 65504. "
                "Export with --precision fp32, or int8, which has a scale for every row."
            )
        return StoredRows(half, None)
    scale = np.where(size < _LEAST, np.float32(0.0), size / np.float32(_MOST)).astype(np.float32)
    divisor = np.where(scale == 0, np.float32(np.inf), scale)
    return StoredRows(np.rint(rows / divisor[:, None]).clip(-_MOST, _MOST).astype(np.int8), scale)


class RowOrder(NamedTuple):
    """The order of one table's rows."""

    order: Order
    positions: Ints | None  # [R]: position in the model of each row of the export; None: the same order


def order_of_rows(feature: IdFeature, rows: int, hashing: bool, counts: FeatureCounts | None) -> RowOrder:
    """The order of a table with row numbers."""
    if feature.mode == "vocabulary":
        return RowOrder("frequency", None)
    if counts is None:
        return RowOrder("id", None)
    row_of = counts.ids % rows if hashing else counts.ids
    inside = (row_of >= 0) & (row_of < rows)
    seen = np.bincount(row_of[inside], weights=counts.counts[inside], minlength=rows)
    return RowOrder("frequency", np.argsort(np.negative(seen, out=seen), kind="stable"))


def order_of_ids(feature: IdFeature, ids: Ints, counts: FeatureCounts | None) -> RowOrder:
    """The order of a table of dynamic ids [R], given in ascending order."""
    if counts is None:
        return RowOrder("id", None)
    if feature.mode == "vocabulary":  # ids are row numbers of the dataset
        by_id = np.concatenate([[feature.unlisted_lookups], counts.counts])
        inside = (ids >= 0) & (ids < len(by_id))
        seen = np.where(inside, by_id[np.where(inside, ids, 0)], 0)
    else:
        order = np.argsort(counts.ids)
        known = counts.ids[order]
        at = np.minimum(np.searchsorted(known, ids), max(len(known) - 1, 0))
        seen = np.where(known[at] == ids, counts.counts[order][at], 0) if len(known) else np.zeros(len(ids))
    return RowOrder("frequency", np.argsort(-seen, kind="stable"))
