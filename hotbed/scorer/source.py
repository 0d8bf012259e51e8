"""A path in; out what a scorer is made of: the model, its columns, and where the rows of every table are.

A model folder and an export have rows in files of their own, which are read in place. Rows of a checkpoint (and of an export
in Parquet, or in an order of its own) come as parts, which the scorer puts in order in a scratch file: `parts`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.checkpoint.chain import Entry
from hotbed.checkpoint.layouts import newest_in
from hotbed.checkpoint.types import RowPart
from hotbed.data.schema import Schema
from hotbed.errors import RunError
from hotbed.run.export_format import Tensors, is_export
from hotbed.run.files import MANIFEST, read_tensors
from hotbed.run.folder import read_json
from hotbed.run.model_card import no_model, read_card
from hotbed.scorer.kernels import BF16_FILE, FP16_FILE, FP32_FILE
from hotbed.scorer.rows import RowFile

_KINDS = {"F32": FP32_FILE, "F16": FP16_FILE, "BF16": BF16_FILE}


@dataclass(frozen=True)
class TableSource:
    """One table: how ids are read, and where its rows are."""

    name: str
    dim: int
    pooling: str
    hashing: bool
    rows: int | None  # None: dynamic ids
    file: RowFile | None = None
    ids: NDArray[np.int64] | None = None  # of dynamic ids: those of the rows in the file
    shared: NDArray[np.float32] | None = None  # [D], what ids without a row read
    init: str = "constant(0)"  # initial values, of rows that are in no file
    seed: int = 0
    precision: str = "fp32"


@dataclass(frozen=True)
class Source:
    """All that a scorer is made of."""

    place: Path
    version: str
    model: dict[str, Any]  # what build_model takes
    tables: dict[str, TableSource]  # in the order of the features
    dense: dict[str, Tensor]
    columns: Path  # folder of schema.json and counts/
    parts: Callable[[], Iterator[RowPart]] | None = None
    chain: tuple[Entry, ...] = field(default=(), repr=False)  # checkpoints of one process that it is, oldest first

    @property
    def schema(self) -> Schema:
        return Schema.load(self.columns)

    @property
    def step(self) -> int | None:
        """Of training, after which the weights were so; None where nothing tells."""
        if found := re.match(r"step-(\d+)-", self.version):
            return int(found[1])
        try:
            kept = (
                read_json(self.place.parent / "summary.json").get("best_step") if self.place.name == "model" else None
            )
        except RunError:
            return None
        return kept if isinstance(kept, int) else None


def open_source(place: Path) -> Source:
    """What a path holds: a run (its model, or the newest checkpoint of one that has none), a checkpoint, an export."""
    from hotbed.scorer.checkpoints import open_checkpoint
    from hotbed.scorer.exported import open_export

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


def open_model(folder: Path) -> Source:
    """RUN/model."""
    card = read_card(folder)
    places = Tensors.open(folder / "tables.safetensors")
    try:
        tables = {name: _table(name, one, places) for name, one in card["tables"].items()}
        return Source(
            folder,
            f"model-{zlib.crc32((folder / MANIFEST).read_bytes()):08x}",
            card["model"],
            tables,
            read_tensors(folder / "dense.safetensors"),
            folder,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{folder} is damaged ({type(error).__name__}: {error}).") from error


def _table(name: str, card: dict[str, Any], tensors: Tensors) -> TableSource:
    kind, shape, offset = tensors.places[f"{name}.weight"]
    file = RowFile(tensors.path, _KINDS[kind], offset, shape[0])
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
