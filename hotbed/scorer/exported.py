"""An export in, a Source out: rows in place where its files have them by their number, as parts elsewhere."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hotbed.checkpoint.types import RowPart
from hotbed.errors import RunError
from hotbed.run.export_format import EXPORT, Export, ExportedTable, read_export
from hotbed.run.files import read_tensors
from hotbed.scorer.kernels import BF16_FILE, FP16_FILE, FP32_FILE, INT8_FILE
from hotbed.scorer.rows import RowFile
from hotbed.scorer.source import Source, TableSource

_KINDS = {"F32": FP32_FILE, "F16": FP16_FILE, "BF16": BF16_FILE, "I8": INT8_FILE}
_CHUNK = 1 << 16


def open_export(folder: Path) -> Source:
    """`hotbed export`'s folder."""
    export = read_export(folder)
    if export.row_format == "none":
        raise RunError(f"{folder} holds no rows to score with. Export again with --rows safetensors.")
    try:
        card = json.loads((folder / "model.json").read_text())
        tables = {name: _table(folder, one, card["tables"][name]) for name, one in export.tables.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder} is damaged ({type(error).__name__}: {error}).") from error
    moved = [one for one in export.tables.values() if tables[one.name].file is None]
    return Source(
        folder,
        f"export-{zlib.crc32((folder / EXPORT).read_bytes()):08x}",
        card["model"],
        tables,
        read_tensors(folder / "dense.safetensors"),
        folder,
        partial(_parts, export, moved) if moved else None,
    )


def _table(folder: Path, table: ExportedTable, card: dict[str, object]) -> TableSource:
    file = None
    if table.tensors is not None and (table.id_is_position or table.rows is None):
        kind, shape, offset = table.tensors.places["weight"]
        scale = table.tensors.places["scale"][2] if "scale" in table.tensors.places else 0
        file = RowFile(folder / table.file, _KINDS[kind], offset, shape[0], scale)
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


def _parts(export: Export, tables: list[ExportedTable]) -> Iterator[RowPart]:
    """The rows of tables that have an order of their own, or are in Parquet."""
    for table in tables:
        if table.tensors is not None:
            ids = table.ids()
            for start in range(0, table.num_rows, _CHUNK):
                positions = np.arange(start, min(start + _CHUNK, table.num_rows))
                weights = torch.from_numpy(table.values(positions))
                yield RowPart(table.name, torch.from_numpy(np.array(ids[positions])), {"weight": weights})
        else:
            yield from _of_parquet(export.folder / table.file, table)


def _of_parquet(path: Path, table: ExportedTable) -> Iterator[RowPart]:
    try:
        for batch in pq.ParquetFile(path).iter_batches(_CHUNK):
            values = batch.column("weight").flatten().to_numpy(zero_copy_only=False).reshape(-1, table.dim)
            weights = values.astype(np.float32)
            if "scale" in batch.schema.names:
                weights = weights * batch.column("scale").to_numpy()[:, None]
            ids = torch.from_numpy(batch.column("id").to_numpy().astype(np.int64))
            yield RowPart(table.name, ids, {"weight": torch.from_numpy(weights)})
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise RunError(f"{path} cannot be read ({str(error).splitlines()[0]}). It is damaged.") from error
