"""A path in, a ModelSource out: the model, its columns, and where the rows of every table are.

The rows of a model folder or an export are read from its files in place. Rows of a checkpoint, of an export in Parquet, or of
an export with its own order come in `parts`, which the scorer puts in order in a scratch file.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.checkpoint.chain import Entry
from hotbed.checkpoint.layouts import newest_in
from hotbed.data.schema import Schema
from hotbed.errors import RunError, reason_of
from hotbed.run.export_format import Export, ExportedTable, Tensors, is_export, read_export
from hotbed.run.folder import MANIFEST, read_json, read_tensors
from hotbed.run.model_card import no_model, read_card
from hotbed.scorer.kernels import BF16_FILE, FP16_FILE, FP32_FILE, INT8_FILE
from hotbed.scorer.rows import ModelRowFile
from hotbed.types import RowPart

_KINDS = {"F32": FP32_FILE, "F16": FP16_FILE, "BF16": BF16_FILE, "I8": INT8_FILE}
_CHUNK = 1 << 16  # rows of an export that are read at a time


@dataclass(frozen=True)
class TableSource:
    """One table: how ids are read, and where its rows are."""

    name: str
    dim: int
    pooling: str | Mapping[str, str]  # one for each of several features
    hashing: bool
    rows: int | None  # None: dynamic ids
    file: ModelRowFile | None = None
    ids: NDArray[np.int64] | None = None  # of dynamic ids: those of the rows in the file
    shared: NDArray[np.float32] | None = None  # [D], what ids without a row read
    init: str = "constant(0)"  # initial values, of rows that are in no file
    seed: int = 0
    precision: str = "fp32"
    group: str = ""  # of a checkpoint: tables whose rows are numbered together

    @property
    def features(self) -> dict[str, str]:
        """The features that read it, and the pooling of each."""
        return {self.name: self.pooling} if isinstance(self.pooling, str) else dict(self.pooling)


@dataclass(frozen=True)
class ModelSource:
    """Everything a scorer needs."""

    place: Path
    version: str
    model: dict[str, Any]  # what build_model takes
    tables: dict[str, TableSource]  # in the order of the features
    dense: dict[str, Tensor]
    columns: Path  # folder of schema.json and counts/
    columns_mark: str  # of its content: with equal marks, ids are numbered alike
    parts: Callable[[], Iterator[RowPart]] | None = None
    chains: tuple[tuple[Entry, ...], ...] = field(
        default=(), repr=False
    )  # the checkpoints it consists of, of every rank, oldest first
    is_current: Callable[[], bool] = field(kw_only=True)  # whether its folders still hold what it was opened from
    reopen: Callable[[], ModelSource] = field(kw_only=True)

    @property
    def schema(self) -> Schema:
        return Schema.load(self.columns)

    @property
    def step(self) -> int | None:
        """The training step of these weights; None if it is not known."""
        if found := re.match(r"step-(\d+)-", self.version):
            return int(found[1])
        try:
            kept = (
                read_json(self.place.parent / "summary.json").get("best_step") if self.place.name == "model" else None
            )
        except RunError:
            return None
        return kept if isinstance(kept, int) else None


def open_source(place: Path) -> ModelSource:
    """Open a run (its model, else its newest checkpoint), a checkpoint or an export."""
    from hotbed.scorer.checkpoints import open_checkpoint

    if is_export(place):
        return open_export(place)
    if (place / "model.json").is_file():
        return open_model(place)
    if (place / "model").is_dir() or (place / "model.old").is_dir():
        return open_model(place / "model")
    if not place.exists():
        raise RunError(f"there is no {place}; give a run such as runs/demo, a checkpoint or an export.")
    if (place / "config.json").is_file() and newest_in(place / "checkpoints") is None:
        raise no_model(place)
    return open_checkpoint(place)


def open_model(folder: Path) -> ModelSource:
    """RUN/model."""
    manifest = read_marks(folder)
    card = read_card(folder)
    places = Tensors.open(folder / "tables.safetensors")
    try:
        tables = {name: _table(name, one, places) for name, one in card["tables"].items()}
        return ModelSource(
            folder,
            f"model-{zlib.crc32(manifest):08x}",
            card["model"],
            tables,
            read_tensors(folder / "dense.safetensors"),
            folder,
            columns_mark(folder, manifest),
            is_current=lambda: read_marks(folder) == manifest,
            reopen=lambda: open_model(folder),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{folder} is damaged ({type(error).__name__}: {error}).") from error


def read_marks(folder: Path) -> bytes:
    """The manifest of a model folder or an export; empty if it is not there, which `check_folder` reports."""
    try:
        return (folder / MANIFEST).read_bytes()
    except OSError:
        return b""


def columns_mark(folder: Path, manifest: bytes) -> str:
    """Sizes and checksums of schema.json and counts/, by the manifest of their folder."""
    try:
        marks = json.loads(manifest)
        return json.dumps({name: marks[name] for name in sorted(marks) if name.startswith(("schema.json", "counts/"))})
    except (ValueError, TypeError) as error:
        raise RunError(f"{folder / MANIFEST} is damaged ({type(error).__name__}: {error}).") from error


def _table(name: str, card: dict[str, Any], tensors: Tensors) -> TableSource:
    kind, shape, offset = tensors.places[f"{name}.weight"]
    file = ModelRowFile(tensors.path, _KINDS[kind], offset, shape[0])
    common = {key: card[key] for key in ("dim", "pooling", "hashing", "rows")}
    if card["rows"] is not None:
        return TableSource(name, **common, file=file)
    shared = None
    if f"{name}.shared" in tensors.places:
        shared = torch.from_numpy(np.array(tensors.map(f"{name}.shared")))
        if tensors.places[f"{name}.shared"][0] == "BF16":  # the bits, as numpy has none
            shared = shared.view(torch.int16).view(torch.bfloat16)
    return TableSource(
        name,
        **common,
        file=file,
        ids=np.array(tensors.map(f"{name}.id")),
        shared=None if shared is None else shared.float().numpy().reshape(-1),
        **{key: card[key] for key in ("init", "seed", "precision")},
    )


def open_export(folder: Path) -> ModelSource:
    """The folder that `hotbed export` wrote."""
    manifest = read_marks(folder)
    export = read_export(folder)
    if export.row_format == "none":
        raise RunError(f"{folder} holds no rows to score with. Export again with --row-format safetensors.")
    try:
        card = json.loads((folder / "model.json").read_text())
        tables = {name: _export_table(folder, one, card["tables"][name]) for name, one in export.tables.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder} is damaged ({type(error).__name__}: {error}).") from error
    moved = [one for one in export.tables.values() if tables[one.name].file is None]
    return ModelSource(
        folder,
        f"export-{zlib.crc32(manifest):08x}",
        card["model"],
        tables,
        read_tensors(folder / "dense.safetensors"),
        folder,
        columns_mark(folder, manifest),
        partial(_export_parts, export, moved) if moved else None,
        is_current=lambda: read_marks(folder) == manifest,
        reopen=lambda: open_export(folder),
    )


def _export_table(folder: Path, table: ExportedTable, card: dict[str, object]) -> TableSource:
    file = None
    if table.tensors is not None and (table.id_is_position or table.rows is None):
        kind, shape, offset = table.tensors.places["weight"]
        scale = table.tensors.places["scale"][2] if "scale" in table.tensors.places else 0
        file = ModelRowFile(folder / table.file, _KINDS[kind], offset, shape[0], scale)
    dynamic = {key: card[key] for key in ("init", "seed", "precision")} if table.rows is None else {}
    return TableSource(
        table.name,
        table.dim,
        table.pooling,
        table.hashing,
        table.rows,
        file,
        np.array(table.ids()) if file is not None and table.rows is None else None,
        None if table.shared is None else np.array(table.shared, dtype=np.float32),
        **dynamic,  # type: ignore[arg-type]
    )


def _export_parts(export: Export, tables: list[ExportedTable]) -> Iterator[RowPart]:
    """The rows of tables that are not ordered by row number, or are in Parquet."""
    for table in tables:
        if table.tensors is not None:
            ids = table.ids()
            for start in range(0, table.num_rows, _CHUNK):
                positions = np.arange(start, min(start + _CHUNK, table.num_rows))
                weights = torch.from_numpy(table.values(positions))
                yield RowPart(table.name, torch.from_numpy(np.array(ids[positions])), {"weight": weights})
        else:
            yield from _parquet_parts(export.folder / table.file, table)


def _parquet_parts(path: Path, table: ExportedTable) -> Iterator[RowPart]:
    try:
        for batch in pq.ParquetFile(path).iter_batches(_CHUNK):
            values = batch.column("weight").flatten().to_numpy(zero_copy_only=False).reshape(-1, table.dim)
            weights = values.astype(np.float32)
            if "scale" in batch.schema.names:
                weights = weights * batch.column("scale").to_numpy()[:, None]
            ids = torch.from_numpy(batch.column("id").to_numpy().astype(np.int64))
            yield RowPart(table.name, ids, {"weight": torch.from_numpy(weights)})
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise RunError(f"{path} cannot be read ({reason_of(error)}). It is damaged.") from error
