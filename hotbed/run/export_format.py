"""An export: a trained model for other systems, and for hotbed without the run it comes from.

    EXPORT/export.json                 the content: format, precision, every table (see `Export`)
    EXPORT/model.onnx                  the dense model: `vectors` [B, F, W] and `dense` [B, N] in (`dense` only where N > 0),
                                       `logit` [B] and `probability` [B] out, float32
    EXPORT/dense.safetensors           the same weights under torch's names
    EXPORT/rows/<table>.safetensors    `id` int64 [R], `weight` [R, D] as F32, F16 or I8; of int8 also `scale` float32 [R]
    EXPORT/rows/<table>.parquet        instead: columns id, weight (a list of D numbers) and, of int8, scale
    EXPORT/model.json  schema.json  counts/    as in RUN/model: how tables are read, what columns and ids mean
    EXPORT/score.py  README.md         how to score without hotbed
    EXPORT/manifest.json               size and crc32 of every file

A row of int8 is `scale * weight`. Rows are ordered hottest first if counts are known (`order`). If the row at position n has
the id n, `id_is_position` is true and no search for ids is needed. Every tensor of a row file is one aligned block, so a
reader may map it or read single rows at `offsets`; tables may be larger than memory.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import RunError
from hotbed.run.folder import check_folder, recover_folder

FORMAT_VERSION = 1
EXPORT = "export.json"
Precision = Literal["fp32", "fp16", "int8"]
RowFormat = Literal["safetensors", "parquet", "none"]
Order = Literal["frequency", "id"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
ROW_FORMATS: tuple[RowFormat, ...] = get_args(RowFormat)
NUMBERS: dict[Precision, Any] = {"fp32": np.float32, "fp16": np.float16, "int8": np.int8}
_DTYPES: dict[str, Any] = {
    "I64": np.int64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,  # numpy has no bfloat16; the bits
    "I8": np.int8,
}


@dataclass(frozen=True)
class Tensors:
    """Where the tensors of a safetensors file are; opening reads its header only."""

    path: Path
    places: dict[str, tuple[str, tuple[int, ...], int]]  # name -> type as in the file, shape, offset in bytes

    @classmethod
    def open(cls, path: Path) -> Tensors:
        """Read and check the header."""
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(length, size)))
            places, start = {}, 8 + length
            for name, one in header.items():
                if name == "__metadata__":
                    continue
                kind, shape, (first, last) = one["dtype"], tuple(one["shape"]), one["data_offsets"]
                expected = np.dtype(_DTYPES[kind]).itemsize * int(np.prod(shape, dtype=np.int64))
                if last - first != expected or start + last > size:
                    raise ValueError(f"{name} is cut off")
                places[name] = (kind, shape, start + first)
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise RunError(f"{path} cannot be read ({error}). It is damaged or not a safetensors file.") from error
        return cls(path, places)

    def map(self, name: str) -> NDArray[Any]:
        """A tensor as a read-only array over the file; bfloat16 as uint16."""
        kind, shape, offset = self.places[name]
        if 0 in shape:
            return np.empty(shape, dtype=_DTYPES[kind])
        return np.memmap(self.path, dtype=_DTYPES[kind], mode="r", offset=offset, shape=shape)


@dataclass(frozen=True)
class ExportedTable:
    """The rows of one table."""

    name: str
    num_rows: int  # in the file
    dim: int
    pooling: str | dict[str, str]  # sum or mean, of the ids of a bag; one for each of several features
    rows: int | None  # of a table with row numbers, their number; None: dynamic ids
    hashing: bool  # ids modulo rows
    order: Order  # frequency: hottest first; id: ascending
    id_is_position: bool  # the row at position n is that of id n
    shared: tuple[float, ...] | None = (
        None  # of dynamic ids: the vector of an id without a row; None: its initial value
    )
    file: str = ""  # relative to the export; empty if it has no rows
    tensors: Tensors | None = field(default=None, repr=False)  # of a safetensors file

    @property
    def offsets(self) -> dict[str, int]:
        """Where the tensors begin in the file, in bytes: id, weight and, of int8, scale."""
        return {name: place[2] for name, place in self._opened.places.items()}

    def ids(self) -> NDArray[np.int64]:
        """The id of every row [R], mapped."""
        return self._opened.map("id")

    def weights(self) -> NDArray[Any]:
        """The rows [R, D] as they are in the file, mapped."""
        return self._opened.map("weight")

    def scales(self) -> NDArray[np.float32] | None:
        """What rows of int8 are multiplied by [R], mapped."""
        return self._opened.map("scale") if "scale" in self._opened.places else None

    def values(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """The rows at these positions [n] as float32 [n, D]."""
        found: NDArray[np.float32] = self.weights()[positions].astype(np.float32)
        scales = self.scales()
        return found if scales is None else found * scales[positions, None]

    @property
    def _opened(self) -> Tensors:
        if self.tensors is None:
            raise RunError(
                f"the rows of table {self.name!r} are in {self.file or 'no file of this export'}; only those of a "
                "safetensors file can be looked up. Export again with --row-format safetensors."
            )
        return self.tensors


@dataclass(frozen=True)
class Export:
    """An export folder, opened; rows stay on the disk."""

    folder: Path
    precision: Precision
    row_format: RowFormat
    tables: dict[str, ExportedTable]  # in the order of the features of schema.json
    has_onnx: bool
    source: dict[str, Any]  # of the export: kind (model or checkpoint), and the step of a checkpoint


def is_export(folder: Path) -> bool:
    """Whether a folder holds an export."""
    return (folder / EXPORT).is_file()


def read_export(folder: Path, *, every_byte: bool = False) -> Export:
    """Open an export, checked: sizes of all files, checksums of all but the rows, or of all (`every_byte`)."""
    recover_folder(folder)
    if not is_export(folder):
        raise RunError(f"{folder} holds no export. `hotbed export RUN --out {folder}` writes one.")
    check_folder(folder, lambda name: every_byte or not name.startswith("rows/"))
    try:
        tree = json.loads((folder / EXPORT).read_text(encoding="utf-8"))
        version = tree["format_version"]
        if version > FORMAT_VERSION:
            raise RunError(
                f"{folder} has format version {version}; this hotbed reads up to {FORMAT_VERSION}. Use a newer hotbed."
            )
        tables = {name: _table(folder, name, one) for name, one in tree["tables"].items()}
        return Export(folder, tree["precision"], tree["row_format"], tables, tree["onnx"] is not None, tree["source"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder} is damaged ({type(error).__name__}: {error}).") from error


def _table(folder: Path, name: str, tree: dict[str, Any]) -> ExportedTable:
    shared = tree.pop("shared", None)
    path = folder / tree["file"]
    tensors = Tensors.open(path) if path.suffix == ".safetensors" else None
    table = ExportedTable(name=name, **tree, shared=None if shared is None else tuple(shared), tensors=tensors)
    if tensors is not None:
        shapes = {name: place[1] for name, place in tensors.places.items()}
        wanted = {"id": (table.num_rows,), "weight": (table.num_rows, table.dim)}
        if any(shapes.get(what) != shape for what, shape in wanted.items()):
            raise ValueError(f"{path.name} holds {shapes}, and {EXPORT} says {wanted}")
    return table
