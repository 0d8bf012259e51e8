"""Tables in, a state_dict as another library names it out, and back; every name that does not fit is told, all at once.

    embedding_bag   <table>.weight: an nn.ModuleDict of nn.EmbeddingBag or nn.Embedding; of one table, or of a
                    hotbed.EmbeddingBag, also its own `weight`
    torchrec        embedding_bags.<table>.weight of an EmbeddingBagCollection, embeddings.<table>.weight of an
                    EmbeddingCollection (tables with pooling "none")
    fbgemm          the flat tensors of SplitTableBatchedEmbeddingBagsCodegen, with Adagrad's sums; or, to load, the list that
                    its split_embedding_weights() gives

What is written is copied, whole, to host memory; what is loaded leaves optimizer state as it is where it brings none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hotbed.embedding_bag import EmbeddingBag
from hotbed.errors import ConfigError, ShapeError
from hotbed.interop.fbgemm import Columns, Place, pack, unpack
from hotbed.optim import Adagrad, RowwiseAdagrad
from hotbed.tables.module import EmbeddingTables

Style = Literal["embedding_bag", "torchrec", "fbgemm"]
STYLES: tuple[Style, ...] = get_args(Style)
_SUMS = {Adagrad: "sum_of_squares", RowwiseAdagrad: "sum_of_mean_squares"}  # their only state; FBGEMM's momentum1


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
        sums = None if weights_only else _SUMS.get(type(tables.optimizer))
        columns = {name: _columns(tables, name, sums) for name in tables.tables}
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
    with tables.changes.loading(tables._claim, found, whole=len(has_sums) == len(found)):
        for name, columns in found.items():
            kept = {"weight": columns["weight"]}
            if name in has_sums:
                kept[_SUMS[type(tables.optimizer)]] = columns["sum"]
            tables._group_of(name).load(name, {what: one.detach() for what, one in kept.items()})


def _checked(tables: EmbeddingTables | EmbeddingBag, style: str) -> EmbeddingTables:
    """The tables, which a bag has within."""
    tables = tables.tables if isinstance(tables, EmbeddingBag) else tables
    if not isinstance(tables, EmbeddingTables):
        raise ConfigError(f"interop takes hotbed.EmbeddingTables or hotbed.EmbeddingBag, not {type(tables).__name__}")
    if style not in STYLES:
        raise ConfigError(f"style must be one of {', '.join(STYLES)}, not {style!r}")
    return tables


def _columns(tables: EmbeddingTables, name: str, sums: str | None = None) -> Columns:
    """Copies on the host: what a table hands out are views of its records."""
    tables._claim()
    found = tables._group_of(name).columns(name)
    columns = {"weight": found["weight"]} | ({"sum": found[sums]} if sums else {})
    return {what: one.detach().to("cpu", torch.float32, copy=True).contiguous() for what, one in columns.items()}


def _name(tables: EmbeddingTables, table: str, style: Style) -> str:
    if style == "embedding_bag":
        return f"{table}.weight"
    return f"{'embeddings' if tables.tables[table].pooling == 'none' else 'embedding_bags'}.{table}.weight"


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
        if type(tables.optimizer) not in _SUMS:
            kind = type(tables.optimizer).__name__
            return [f"table {name!r}: momentum1 means nothing to {kind}; weights_only=True leaves it out"]
        shapes["sum"] = [table.rows, 1 if isinstance(tables.optimizer, RowwiseAdagrad) else table.dim]
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
