"""The state_dict of FBGEMM's SplitTableBatchedEmbeddingBagsCodegen in, tensors by table out, and back.

    weights_<place>           the rows of all tables in that place, one after the other, flat; place is host, dev or uvm
    weights_offsets [T]       where a table begins there         weights_placements [T]    which place: _PLACES
    momentum1_<place>, ...    the same for optimizer state: one number a row or a weight
    rows_per_table [T]        and D_offsets [T + 1], whose differences are the widths

Momentum1 of its exact Adagrad and row-wise Adagrad is the sum that hotbed keeps. Its Adam counts the steps of all rows as one,
hotbed's those of each row, so their states mean different things and do not travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from hotbed.errors import ShapeError

Place = Literal["host", "dev", "uvm"]
Columns = dict[str, Tensor]  # weight [R, D] and, where there is one, sum [R, 1] or [R, D]
_PLACES: dict[int, Place] = {0: "dev", 1: "uvm", 2: "uvm", 3: "host"}  # DEVICE, MANAGED, MANAGED_CACHING, HOST
_NUMBERS = {"dev": 0, "uvm": 1, "host": 3}


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
            f"this is no state_dict of FBGEMM's SplitTableBatchedEmbeddingBagsCodegen: {', '.join(absent)} is not in it, "
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
