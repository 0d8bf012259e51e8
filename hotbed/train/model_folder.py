"""RUN/model: enough to score raw rows elsewhere, without the dataset it was trained on.

model.json           names, widths and options: what build.py needs to build the model again
dense.safetensors    weights and buffers of the model
tables.safetensors   `<table>.weight`, without optimizer state; of dynamic ids also `<table>.id`, ascending, the id of
                     every row, and `<table>.shared`, the vector of ids that were not admitted, where the table has one
schema.json          the dataset's schema, without its splits
counts/              id lists of the vocabulary features
manifest.json        size and checksum of each
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.checkpoint.files import InPieces, in_file_order
from hotbed.checkpoint.types import RowPart
from hotbed.data.dataset import Dataset
from hotbed.errors import RunError
from hotbed.parallel.world import ALONE, World
from hotbed.run.files import read_tensors, write_folder, write_tensors
from hotbed.run.model_card import FORMAT_VERSION
from hotbed.tables.module import EmbeddingTables
from hotbed.train.spread import load_whole, pieces_of, whole_ids
from hotbed.train.step import Learner

_CHUNK = 1 << 18


def weights_of(tables: EmbeddingTables, world: World = ALONE) -> dict[str, InPieces | Tensor]:
    """The content of tables.safetensors; weights may be larger than memory, ids are in memory anyway."""
    found: dict[str, InPieces | Tensor] = {}
    for name, table in tables.tables.items():
        rows = table.rows
        ids = None
        if rows is None:
            ids = found[f"{name}.id"] = whole_ids(tables, name, world)
            rows = ids.shape[0]
            shared = tables.shared_row(name)
            if shared is not None:
                found[f"{name}.shared"] = shared["weight"]
        dtype = tables._group_of(name).weight_type
        found[f"{name}.weight"] = InPieces((rows, table.dim), dtype, partial(pieces_of, tables, name, ids, world))
    return found


def save_model(folder: Path, learner: Learner, dataset: Dataset, card: dict[str, Any], world: World = ALONE) -> None:
    """Write the whole folder in one step, on rank 0; `card` becomes model.json."""
    if not world.is_first:
        send_weights(learner, world)
        return

    def fill(new: Path) -> None:
        save_weights(new, learner, world)
        version = FORMAT_VERSION if any(one["rows"] is None for one in card["tables"].values()) else 1
        (new / "model.json").write_text(json.dumps({"format_version": version, **card}, indent=1) + "\n")
        dataclasses.replace(dataset.schema, splits={}).save(new)
        (new / "counts").mkdir()
        for feature in dataset.schema.features:
            if feature.mode == "vocabulary":
                name = f"{feature.name}.parquet"
                shutil.copyfile(dataset.path / "counts" / name, new / "counts" / name)

    write_folder(folder, fill)


def save_weights(folder: Path, learner: Learner, world: World = ALONE) -> None:
    """What scoring needs of a learner; other ranks send their part meanwhile."""
    write_tensors(folder / "dense.safetensors", learner.model.state_dict())
    write_tensors(folder / "tables.safetensors", weights_of(learner.tables, world))


def send_weights(learner: Learner, world: World) -> None:
    """This rank's part in `save_weights` of rank 0."""
    weights = weights_of(learner.tables, world)
    for name in in_file_order(weights):
        tensor = weights[name]
        for _ in tensor.pieces() if isinstance(tensor, InPieces) else ():
            pass


def load_weights(folder: Path, model: nn.Module, tables: EmbeddingTables) -> None:
    """Put saved weights in place; optimizer state stays as it is, but that of dynamic ids, which begins anew."""
    try:
        model.load_state_dict(read_tensors(folder / "dense.safetensors"))
        weights = read_tensors(folder / "tables.safetensors")
        dynamic = [name for name, table in tables.tables.items() if table.rows is None]
        for name in tables.tables:
            if name not in dynamic:
                if tables._group_of(name).shard.world > 1:
                    load_whole(tables, name, weights[f"{name}.weight"])
                else:
                    tables.load_weight(name, weights[f"{name}.weight"])
        if dynamic:
            tables.load_rows(part for name in dynamic for part in _parts(name, weights))
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"the weights of {folder} do not fit the model: {error}") from error


def _parts(table: str, weights: dict[str, Tensor]) -> Iterator[RowPart]:
    """The rows of dynamic ids, some at a time."""
    ids, weight = weights[f"{table}.id"], weights[f"{table}.weight"]
    for start in range(0, ids.shape[0], _CHUNK):
        yield RowPart(table, ids[start : start + _CHUNK], {"weight": weight[start : start + _CHUNK]})
    if f"{table}.shared" in weights:
        shared = {"weight": weights[f"{table}.shared"], "shared": torch.ones(1, dtype=torch.int64, device="cpu")}
        yield RowPart(table, torch.zeros(1, dtype=torch.int64, device="cpu"), shared)
