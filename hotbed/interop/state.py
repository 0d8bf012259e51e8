"""Weights from and to torch's nn.EmbeddingBag, TorchRec and FBGEMM, by the names of their `state_dict` (docs/interop.md).

    state = hotbed.interop.state_dict(tables, style="torchrec")
    embedding_bag_collection.load_state_dict(state)
    hotbed.interop.load_state_dict(tables, embedding_bag_collection.state_dict(), style="torchrec")

A TorchRec KeyedJaggedTensor needs nothing of this: tables take one as it is (hotbed/tables/keyed.py).

Tables in, a state_dict as another library names it out, and back; every name that does not fit is reported, all at once.

    embedding_bag   <table>.weight: an nn.ModuleDict of nn.EmbeddingBag or nn.Embedding; of one table, or of a
                    hotbed.EmbeddingBag, also its own `weight`
    torchrec        embedding_bags.<table>.weight of an EmbeddingBagCollection, embeddings.<table>.weight of an
                    EmbeddingCollection (tables with pooling "none")
    fbgemm          the flat tensors of SplitTableBatchedEmbeddingBagsCodegen, with Adagrad's sums; or, to load, the list that
                    its split_embedding_weights() gives

What is written is copied, whole, to host memory; what is loaded leaves optimizer state as it is where it brings none.

`pack`: the state_dict of FBGEMM's SplitTableBatchedEmbeddingBagsCodegen in, tensors by table out, and back.

    weights_<place>           the rows of all tables in that place, one after the other, flat; place is host, dev or uvm
    weights_offsets [T]       where a table begins there         weights_placements [T]    which place: _PLACES
    momentum1_<place>, ...    the same for optimizer state: one number a row or a weight
    rows_per_table [T]        and D_offsets [T + 1], whose differences are the widths

Momentum1 of its exact Adagrad and row-wise Adagrad is the sum that hotbed keeps. Its Adam counts the steps of all rows as one,
hotbed's those of each row, so their states mean different things and do not travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hotbed.embedding_bag import EmbeddingBag
from hotbed.errors import ConfigError, ShapeError
from hotbed.optim import Adagrad, RowwiseAdagrad
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.spec import Pooling, Table

Place = Literal["host", "dev", "uvm"]
Columns = dict[str, Tensor]  # weight [R, D] and, where there is one, sum [R, 1] or [R, D]
_PLACES: dict[int, Place] = {0: "dev", 1: "uvm", 2: "uvm", 3: "host"}  # DEVICE, MANAGED, MANAGED_CACHING, HOST
_NUMBERS = {"dev": 0, "uvm": 1, "host": 3}
Style = Literal["embedding_bag", "torchrec", "fbgemm"]
STYLES: tuple[Style, ...] = get_args(Style)
_SUMS = {Adagrad: "sum_of_squares", RowwiseAdagrad: "sum_of_mean_squares"}  # their only state; FBGEMM's momentum1


def tables_of(collection: Any) -> dict[str, Table]:
    """The tables of a TorchRec EmbeddingBagCollection or EmbeddingCollection, for EmbeddingTables; or of their configs.

        tables = hotbed.EmbeddingTables(hotbed.interop.tables_of(collection), output="dict")
        hotbed.interop.load_state_dict(tables, collection.state_dict(), style="torchrec")

    Names, sizes, features and pooling are read; weights are loaded by `load_state_dict`.
    """
    configs = collection
    for name in ("embedding_bag_configs", "embedding_configs"):
        if hasattr(collection, name):
            configs = getattr(collection, name)()
    try:
        found = {one.name: _table_of(one) for one in configs}
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"tables_of takes a TorchRec EmbeddingBagCollection, an EmbeddingCollection or a list of their configs, not "
            f"{type(collection).__name__} ({error})"
        ) from error
    if len(found) != len(configs):
        raise ConfigError("two configs have the same name; tables need different ones")
    return found


def _table_of(config: Any) -> Table:
    pooling = getattr(config, "pooling", None)  # an EmbeddingConfig has none: vectors are not pooled
    words: dict[str, Pooling] = {"SUM": "sum", "MEAN": "mean", "NONE": "none"}
    word = "NONE" if pooling is None else str(getattr(pooling, "value", pooling)).upper()
    if word not in words:
        raise ConfigError(f"table {config.name!r}: pooling {pooling!r} is not supported; there are sum, mean and none")
    features = tuple(config.feature_names) or None
    return Table(config.num_embeddings, config.embedding_dim, words[word], features=features)


def state_dict(
    tables: EmbeddingTables | EmbeddingBag,
    *,
    style: Style = "embedding_bag",
    prefix: str = "",
    place: Place = "host",
    weights_only: bool = False,
) -> dict[str, Tensor]:
    """The weights of tables under the names of another library; of FBGEMM with the sums of Adagrad, unless `weights_only`.

    `prefix` comes before every name. `place` is where FBGEMM's tables are: host on a CPU, dev in device memory, uvm cached.
    """
    is_bag, tables = isinstance(tables, EmbeddingBag), _checked(tables, style)
    if style == "fbgemm":
        sums = dict.fromkeys(tables.tables) if weights_only else {name: _sum_of(tables, name) for name in tables.tables}
        if len({*sums.values()}) > 1:
            listed = "; ".join(f"{name}: {one or 'none'}" for name, one in sums.items())
            raise ConfigError(
                f"FBGEMM has one optimizer for all tables, and these keep different sums ({listed}); weights_only=True leaves "
                "them out"
            )
        columns = {name: _columns(tables, name, one) for name, one in sums.items()}
        return {prefix + name: tensor for name, tensor in pack(columns, place).items()}
    if is_bag and style == "embedding_bag":
        return {f"{prefix}weight": _columns(tables, name)["weight"] for name in tables.tables}
    return {prefix + _name(tables, name, style): _columns(tables, name)["weight"] for name in tables.tables}


def load_state_dict(
    tables: EmbeddingTables | EmbeddingBag,
    state: Mapping[str, Any] | Sequence[Tensor],
    *,
    style: Style = "embedding_bag",
    prefix: str = "",
    weights_only: bool = False,
) -> None:
    """Take the weights of another library, and of FBGEMM the sums of Adagrad, unless `weights_only`; nothing, or all.

    Every table must be there in its shape, and under `prefix` nothing else.
    """
    tables = _checked(tables, style)
    if style == "fbgemm":
        found = _of_fbgemm(tables, state, prefix)
    elif isinstance(state, Mapping):
        found = _by_name(tables, {name: one for name, one in state.items() if name.startswith(prefix)}, style, prefix)
    else:
        raise ShapeError(f"style {style!r} is loaded from a state_dict, a mapping of names, not {type(state).__name__}")
    wrong = [problem for name, columns in found.items() for problem in _misfits(tables, name, columns, weights_only)]
    if wrong:
        raise ShapeError("these weights do not fit the tables: " + "; ".join(wrong))
    has_sums = [name for name, columns in found.items() if "sum" in columns and not weights_only]
    with tables.changes.loading(tables.claim, found, whole=len(has_sums) == len(found)):
        for name, columns in found.items():
            kept = {"weight": columns["weight"]}
            if name in has_sums:
                kept[str(_sum_of(tables, name))] = columns["sum"]
            tables.group_of(name).load(name, {what: one.detach() for what, one in kept.items()})


def _checked(tables: EmbeddingTables | EmbeddingBag, style: str) -> EmbeddingTables:
    """The tables, which a bag has within."""
    tables = tables.tables if isinstance(tables, EmbeddingBag) else tables
    if not isinstance(tables, EmbeddingTables):
        raise ConfigError(f"interop takes hotbed.EmbeddingTables or hotbed.EmbeddingBag, not {type(tables).__name__}")
    if style not in STYLES:
        raise ConfigError(f"style must be one of {', '.join(STYLES)}, not {style!r}")
    return tables


def _sum_of(tables: EmbeddingTables, table: str) -> str | None:
    """The state of a table that is FBGEMM's momentum1; None where its own optimizer has none."""
    return _SUMS.get(type(tables.group_of(table).optimizer))


def _columns(tables: EmbeddingTables, name: str, sums: str | None = None) -> Columns:
    """Copies on the host: what a table hands out are views of its records."""
    tables.claim()
    found = tables.group_of(name).columns(name)
    columns = {"weight": found["weight"]} | ({"sum": found[sums]} if sums else {})
    return {what: one.detach().to("cpu", torch.float32, copy=True).contiguous() for what, one in columns.items()}


def _name(tables: EmbeddingTables, table: str, style: Style) -> str:
    if style == "embedding_bag":
        return f"{table}.weight"
    is_pooled = set(tables.tables[table].pooling_of(table).values()) != {"none"}
    return f"{'embedding_bags' if is_pooled else 'embeddings'}.{table}.weight"


def _by_name(tables: EmbeddingTables, state: Mapping[str, Any], style: Style, prefix: str) -> dict[str, Columns]:
    """The weights of every table; a ShapeError names those that are absent and those that nobody wants."""
    names = {prefix + _name(tables, table, style): table for table in tables.tables}
    if style == "embedding_bag" and len(names) == 1 and list(state) == [f"{prefix}weight"]:
        names = {f"{prefix}weight": next(iter(tables.tables))}
    absent, extra = [name for name in names if name not in state], [name for name in state if name not in names]
    if absent or extra:
        raise ShapeError(
            f"the state_dict does not fit the tables in style {style!r}"
            + (f"; absent: {_some(absent)}" if absent else "")
            + (f"; not wanted: {_some(extra)}" if extra else "")
            + ". prefix= says what comes before the names"
        )
    return {table: {"weight": state[name]} for name, table in names.items()}


def _of_fbgemm(tables: EmbeddingTables, state: Mapping[str, Any] | Sequence[Tensor], prefix: str) -> dict[str, Columns]:
    names = list(tables.tables)
    if isinstance(state, Mapping):
        inside = {name.removeprefix(prefix): one for name, one in state.items() if name.startswith(prefix)}
        return unpack(inside, names)
    if len(state) != len(names):
        raise ShapeError(f"FBGEMM gave the weights of {len(state)} tables, and there are {len(names)}: {_some(names)}")
    return {name: {"weight": weight} for name, weight in zip(names, state)}


def _misfits(tables: EmbeddingTables, name: str, columns: Columns, weights_only: bool) -> list[str]:
    table, wrong = tables.tables[name], []
    if table.rows is None:
        return [
            f"table {name!r} has dynamic ids, and no rows 0, 1, ... to load; hotbed.checkpoint saves and loads them"
        ]
    shapes = {"weight": [table.rows, table.dim]}
    if "sum" in columns and not weights_only:
        sums = _sum_of(tables, name)
        if sums is None:
            kind = "a frozen table" if table.frozen else type(tables.group_of(name).optimizer).__name__
            return [f"table {name!r}: momentum1 means nothing to {kind}; weights_only=True leaves it out"]
        shapes["sum"] = [table.rows, 1 if sums == _SUMS[RowwiseAdagrad] else table.dim]
    for what, shape in shapes.items():
        one = columns[what]
        if not isinstance(one, Tensor) or hasattr(one, "full_tensor"):
            wrong.append(f"{what} of {name!r} is a {type(one).__name__}, spread over ranks; gather it first")
        elif list(one.shape) != shape:
            wrong.append(f"{what} of {name!r} is {list(one.shape)}, and the table's {shape}")
        elif not one.is_floating_point():
            wrong.append(f"{what} of {name!r} is {one.dtype}, and no weights can be")
    return wrong


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def pack(tables: Mapping[str, Columns], place: Place) -> dict[str, Tensor]:
    """A state_dict for FBGEMM of tables that all are in one place; load it with strict=False."""
    if place not in _NUMBERS:
        raise ShapeError(f"FBGEMM keeps tables in host, dev or uvm, not {place!r}")
    columns = list(tables.values())
    state: dict[str, Tensor] = {}
    for name, ours in (("weights", "weight"), ("momentum1", "sum")):
        parts = [one[ours].reshape(-1) for one in columns if ours in one]
        if not parts:
            continue
        sizes = torch.tensor([0, *(part.numel() for part in parts)], device="cpu")
        state |= {f"{name}_{one}": torch.empty(0, dtype=torch.float32, device="cpu") for one in _NUMBERS}
        state[f"{name}_{place}"] = torch.cat(parts)
        state[f"{name}_offsets"] = sizes.cumsum(0)[:-1]
        state[f"{name}_placements"] = torch.full((len(parts),), _NUMBERS[place], dtype=torch.int32, device="cpu")
    widths = torch.tensor([0, *(one["weight"].shape[1] for one in columns)], device="cpu")
    state["D_offsets"] = widths.cumsum(0).to(torch.int32)
    state["rows_per_table"] = torch.tensor([one["weight"].shape[0] for one in columns], device="cpu")
    return state


def unpack(state: Mapping[str, Any], names: list[str]) -> dict[str, Columns]:
    """The tables of a state_dict in their order, under these names; flat tensors are cut, not copied."""
    needed = ["weights_offsets", "weights_placements", "rows_per_table", "D_offsets"]
    absent = [name for name in needed if name not in state]
    if absent:
        raise ShapeError(
            f"this is not a state_dict of FBGEMM's SplitTableBatchedEmbeddingBagsCodegen: {', '.join(absent)} is not in it, "
            f"but {', '.join(sorted(state)[:5]) or 'nothing'}. A list is taken for split_embedding_weights()."
        )
    rows, widths = state["rows_per_table"].tolist(), state["D_offsets"].diff().tolist()
    if len(widths) != len(rows) or len(rows) != len(names):
        raise ShapeError(
            f"FBGEMM's state has {len(rows)} tables read by {len(widths)} features, and hotbed's tables are "
            f"{len(names)}; tables are matched by their order, and FBGEMM's must not be shared by features"
        )
    found: dict[str, Columns] = {}
    for number, name in enumerate(names):
        length, width = rows[number], widths[number]
        found[name] = {"weight": _cut(state, "weights", number, length * width).view(length, width)}
        if "momentum1_offsets" in state:
            per_row = _total(state, "momentum1") == sum(rows)
            size = length if per_row else length * width
            found[name]["sum"] = _cut(state, "momentum1", number, size).view(length, -1)
    return found


def _cut(state: Mapping[str, Any], name: str, number: int, size: int) -> Tensor:
    """The flat numbers of one table."""
    place = _PLACES.get(int(state[f"{name}_placements"][number]), "host")
    start = int(state[f"{name}_offsets"][number])
    flat: Tensor = state[f"{name}_{place}"].reshape(-1)
    if start + size > flat.shape[0]:
        raise ShapeError(
            f"FBGEMM's {name}_{place} has {flat.shape[0]:,} numbers; table {number} is at {start:,} to {start + size:,}"
        )
    return flat[start : start + size]


def _total(state: Mapping[str, Any], name: str) -> int:
    return sum(int(state[f"{name}_{place}"].numel()) for place in _NUMBERS if f"{name}_{place}" in state)
