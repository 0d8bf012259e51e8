"""RUN/model: enough to score raw rows elsewhere, without the dataset it was trained on.

model.json           names, widths and options: what build.py needs to build the model again; and the steps of the run so far
dense.safetensors    weights and buffers of the model
tables.safetensors   `<table>.weight`, without optimizer state; of dynamic ids also `<table>.id`, ascending, the id of
                     every row, and `<table>.shared`, the vector of ids that were not admitted, where the table has one
schema.json          the dataset's schema, without its splits
counts/              id lists of the vocabulary features
manifest.json        size and checksum of each

`load_learner`: a model folder in, a learner that scores out; and whether the ids of a dataset mean to it what they meant in
training.

Tables of dynamic ids are dynamic here, too: an id that training gave no row reads what it would have read there.

Tables that are sharded over ranks come to rank 0 in order, one stretch of ids at a time, so memory is a few stretches whatever
the size of a table. The owner of an id is known everywhere, so ids do not travel; dynamic ones do, once, because no rank
knows all of them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from hotbed.checkpoint.files import PiecewiseTensor, in_file_order
from hotbed.data.dataset import Dataset
from hotbed.data.schema import IdFeature, Schema
from hotbed.errors import DataError, ExitCode, RunError, SchemaError
from hotbed.files import copy_file, readable
from hotbed.host.devices import use_device
from hotbed.ids import Admit
from hotbed.models import rebuild_model
from hotbed.ops.init_rows import Constant, parse_init
from hotbed.ops.records import Precision
from hotbed.optim import SGD
from hotbed.parallel.world import ALONE, World
from hotbed.run.config_check import raise_problems
from hotbed.run.folder import one_version, read_tensors, write_folder, write_tensors
from hotbed.run.model_card import FORMAT_VERSION, count_ids, read_card, rows_of_unseen
from hotbed.tables.group.group import TableGroup
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.sizing.budget import Budgets
from hotbed.tables.sizing.fit import amounts_of, budgets_of, table_problems
from hotbed.tables.spec import Table
from hotbed.train.step import Learner
from hotbed.types import RowPart

_CHUNK = 1 << 18
_STRETCH = 1 << 17  # ids


def weights_of(tables: EmbeddingTables, world: World = ALONE) -> dict[str, PiecewiseTensor | Tensor]:
    """The content of tables.safetensors; weights may be larger than memory, ids are in memory anyway."""
    found: dict[str, PiecewiseTensor | Tensor] = {}
    for name, table in tables.tables.items():
        rows = table.rows
        ids = None
        if rows is None:
            ids = found[f"{name}.id"] = whole_ids(tables, name, world)
            rows = ids.shape[0]
            shared = tables.shared_row(name)
            if shared is not None:
                found[f"{name}.shared"] = shared["weight"]
        dtype = tables.group_of(name).weight_type
        found[f"{name}.weight"] = PiecewiseTensor(
            (rows, table.dim), dtype, partial(pieces_of, tables, name, ids, world)
        )
    return found


def save_schema(folder: Path, dataset: Dataset) -> None:
    """What ids mean: the schema, without its splits, and the id lists of the vocabulary features.

    A RunError if the dataset was replaced since it was opened: its id lists would number the rows of the model differently.
    """
    wanted = dataset.fingerprint
    dataclasses.replace(dataset.schema, splits={}).save(folder)
    (folder / "counts").mkdir()
    names = [f"{table}.parquet" for table, (one, *_) in dataset.schema.tables.items() if one.mode == "vocabulary"]
    try:
        for name in names:
            copy_file(dataset.path / "counts" / name, folder / "counts" / name)
        found = Dataset.open(dataset.path).fingerprint if names else wanted
    except (DataError, FileNotFoundError) as error:
        raise RunError(_replaced(dataset, f"can no longer be opened ({error})")) from error
    if found != wanted:
        raise RunError(_replaced(dataset, f"was replaced meanwhile (its fingerprint was {wanted} and is now {found})"))


def _replaced(dataset: Dataset, what: str) -> str:
    return (
        f"{dataset.path}, on which the model was trained, {what}. The model needs its id lists, so none is written; "
        "checkpoints stay. Bring the old dataset back and repeat the command, a run with --resume; or prepare new data into "
        "another folder and train again."
    )


def save_model(folder: Path, learner: Learner, dataset: Dataset, card: dict[str, Any], world: World = ALONE) -> None:
    """Write the whole folder in one step, on rank 0; `card` becomes model.json."""
    if not world.is_first:
        send_weights(learner, world)
        return

    def fill(new: Path) -> None:
        save_weights(new, learner, world)
        version = FORMAT_VERSION if any(one["rows"] is None for one in card["tables"].values()) else 1
        (new / "model.json").write_text(json.dumps({"format_version": version, **card}, indent=1) + "\n")
        save_schema(new, dataset)

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
        for _ in tensor.pieces() if isinstance(tensor, PiecewiseTensor) else ():
            pass


def load_weights(folder: Path, model: nn.Module, tables: EmbeddingTables) -> None:
    """Put saved weights in place; optimizer state stays as it is, but that of dynamic ids, which begins anew."""
    try:
        model.load_state_dict(read_tensors(folder / "dense.safetensors"))
        weights = read_tensors(folder / "tables.safetensors")
        dynamic = [name for name, table in tables.tables.items() if table.rows is None]
        for name in tables.tables:
            if name not in dynamic:
                if tables.group_of(name).shard.world > 1:
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


def load_learner(
    folder: Path, device: str = "auto", cache: float | None = None, hbm: str | None = None, batch_size: int = 4096
) -> Learner:
    """A trained model from its folder, ready to score; with a cache it need not fit on the device."""
    with one_version(folder):
        return _loaded(folder, device, cache, hbm, batch_size)


def _loaded(folder: Path, device: str, cache: float | None, hbm: str | None, batch_size: int) -> Learner:
    card = read_card(folder)
    on = use_device(device)
    tables = {name: _table(settings) for name, settings in card["tables"].items()}
    dynamic = [settings for settings in card["tables"].values() if settings["rows"] is None]
    precision = cast(Precision, dynamic[0]["precision"] if dynamic else "fp32")  # initial values are rounded to it
    known = count_ids(folder, [name for name, table in tables.items() if table.rows is None])
    optimizer = SGD(lr=0.0)  # stateless: a row takes no more than its weights
    amounts = amounts_of(tables, optimizer, precision, known)
    unseen = rows_of_unseen(Schema.load(folder), batch_size) if dynamic else 0
    budgets = budgets_of(Budgets(cache or None, hbm), amounts, unseen)
    raise_problems(table_problems(budgets, amounts, on), ExitCode.DOES_NOT_FIT)
    model = rebuild_model(card["model"]).to(on)
    rows = EmbeddingTables(
        tables,
        optimizer,
        seed=dynamic[0]["seed"] if dynamic else 0,
        device=on,
        cache=budgets.cache,
        hbm=budgets.hbm,
        precision=precision,
    )
    learner = Learner(rows, model, None, 0.0, on)
    load_weights(folder, learner.model, learner.tables)
    return learner


def _table(card: dict[str, Any]) -> Table:
    """Load a table: all weights if it has a number of rows; for dynamic ids, those that have a row."""
    common = {name: card[name] for name in ("rows", "dim", "pooling", "hashing")}
    if card["rows"] is not None:
        return Table(**common, init=Constant(0.0))
    shares = Admit(after=2) if card["shared"] else None  # nobody is admitted in scoring; ids without a row share one
    return Table(**common, init=parse_init(card["init"]), admit=shares)


def check_same_ids(model_folder: Path, dataset: Dataset) -> None:
    """A SchemaError unless the dataset's columns and ids mean to the model what they meant in training."""
    ours, theirs = Schema.load(model_folder), dataset.schema
    for what in ("dense", "features"):
        if [_meaning(one) for one in getattr(ours, what)] != [_meaning(one) for one in getattr(theirs, what)]:
            raise SchemaError(
                f"{dataset.path} has other {what} columns, or the same with other settings, than the model was trained on. "
                "Score the raw files instead: `hotbed predict RUN FILE...`."
            )
    for table, (feature, *_) in ours.tables.items():
        name = f"{table}.parquet"
        if feature.mode == "vocabulary" and not _same_ids(
            model_folder / "counts" / name, dataset.path / "counts" / name
        ):
            raise SchemaError(
                f"{dataset.path} numbers the ids of {table} differently from the dataset the model was trained on. "
                "Score the raw files instead: `hotbed predict RUN FILE...`."
            )


def _meaning(column: Any) -> Any:
    """A column without what another log of the same kind may have otherwise."""
    if not isinstance(column, IdFeature):
        return column
    distinct = 0 if column.mode in ("hash", "raw") else column.distinct
    counted: dict[str, Any] = dict.fromkeys(("count_error", "distinct_estimate", "lookups", "unlisted_lookups"), 0)
    return dataclasses.replace(column, distinct=distinct, counting="exact", **counted)


def _same_ids(one: Path, other: Path) -> bool:
    if one.read_bytes() == other.read_bytes():
        return True
    return bool(pq.read_table(one, columns=["id"]).equals(pq.read_table(readable(other), columns=["id"])))


def whole_ids(tables: EmbeddingTables, table: str, world: World) -> Tensor:
    """The dynamic ids of a table that have a row on any rank, ascending, on rank 0; elsewhere nothing of any use."""
    parts = world.collect(tables.ids(table).numpy())
    return torch.from_numpy(np.sort(np.concatenate([np.empty(0, np.int64), *parts])))


def pieces_of(tables: EmbeddingTables, table: str, ids: Tensor | None, world: World) -> Iterator[Tensor]:
    """The weights of a table, in order, on rank 0; elsewhere nothing of any use. All ranks go through all pieces.

    `ids` are those of `whole_ids`, where they are dynamic.
    """
    if world.size == 1:
        return tables.weight_pieces(table)
    return _pieces(tables, table, world) if ids is None else _dynamic_pieces(tables, table, ids, world)


def load_whole(tables: EmbeddingTables, table: str, weight: Tensor) -> None:
    """Put the rows of whole weights [rows, dim] that are this rank's in their places; optimizer state stays."""
    with tables.changes.loading(tables.claim, [table], whole=False):
        _load_whole(tables, table, weight)


def _load_whole(tables: EmbeddingTables, table: str, weight: Tensor) -> None:
    tables.claim()
    group = tables.group_of(table)
    for ids in _stretches(group, table):
        keys, mine = _mine(group, table, ids)
        given = weight[ids[group.shard.owner_of(keys) == group.shard.rank]][
            :, slice(*group.shard.columns_of(group.dim))
        ]
        records = group.read_rows(mine)
        group.layout.weights(records).copy_(given)
        with tables.changes.changing("loading rows"):
            group.write_rows(mine, records)
    with tables.changes.changing("loading rows"):
        group.forget()
    tables.exchange.rows_replaced()


def _pieces(tables: EmbeddingTables, table: str, world: World) -> Iterator[Tensor]:
    tables.claim()
    group = tables.group_of(table)
    for ids in _stretches(group, table):
        keys, mine = _mine(group, table, ids)
        parts = world.collect(_bits(group.layout.weights(group.read_rows(mine))).numpy())
        whole = torch.empty(ids.shape[0], group.dim, dtype=group.weight_type, device="cpu")
        for rank, part in enumerate(parts):
            shard = group.shard._replace(rank=rank)
            here = (shard.owner_of(keys) == rank).nonzero().squeeze(1)
            whole[here, slice(*shard.columns_of(group.dim))] = torch.from_numpy(part).view(group.weight_type)
        yield whole


def _dynamic_pieces(tables: EmbeddingTables, table: str, ids: Tensor, world: World) -> Iterator[Tensor]:
    tables.claim()
    group = tables.group_of(table)
    mine, keys = group.keyspace.rows_of(table)
    lasts = [int(ids[min(start + _STRETCH, len(ids)) - 1]) for start in range(0, len(ids), _STRETCH)]
    done = 0
    for stretch, last in enumerate(world.from_first(lasts)):
        end = int(torch.searchsorted(mine, last, right=True))
        parts = world.collect(_bits(group.layout.weights(group.read_rows(keys[done:end]))).numpy())
        done = end
        here = ids[stretch * _STRETCH : (stretch + 1) * _STRETCH]
        owners = group.keyspace.owners_of(table, here)
        whole = torch.empty(here.shape[0], group.layout.dim, dtype=group.weight_type, device="cpu")
        for rank, part in enumerate(parts):
            whole[owners == rank] = torch.from_numpy(part).view(group.weight_type)
        yield whole


def _stretches(group: TableGroup, table: str) -> Iterator[Tensor]:
    rows = group.members[table].rows
    for start in range(0, rows, _STRETCH):
        yield torch.arange(start, min(start + _STRETCH, rows), device="cpu")


def _mine(group: TableGroup, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of all these ids, and the numbers of those that are here."""
    keys = ids + group.members[table].base
    return keys, group.shard.local_of(keys[group.shard.owner_of(keys) == group.shard.rank])


def _bits(weights: Tensor) -> Tensor:
    """As whole numbers of the same width, where numpy has no such type."""
    weights = weights.contiguous()
    return weights.view(torch.int16) if weights.dtype == torch.bfloat16 else weights
