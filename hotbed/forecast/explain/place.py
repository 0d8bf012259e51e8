"""The newest checkpoint -> the place of a row, the norms of its values, and its score among all rows in the cache.

A checkpoint includes the content of the cache and everything the policy knew: keys, last uses and aged counts of the slots. So
places and scores are exact. Rows are found by reading all files of rows once.

Shapes: N rows in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.cache.policies import make_policy
from hotbed.checkpoint.chain import Entry, chain_of
from hotbed.checkpoint.read import check_sizes, refuse_slices, rows_of
from hotbed.forecast.explain.run import OpenRun, RowRequest
from hotbed.forecast.trace import Trace
from hotbed.ops.shard import Shard
from hotbed.scorer.checkpoints import parts_of
from hotbed.tables.snapshot.snapshot import saved_shard

CACHE, MEMORY, SSD, DEVICE, NEVER, GONE = "cache", "memory", "ssd", "device", "never trained", "no row"


class Norms(NamedTuple):
    """Norms of the values of a row."""

    weight: float
    states: dict[str, float]  # of the row optimizer
    numbers: dict[str, int]  # of dynamic ids: last use and the like


@dataclass(frozen=True)
class RowScore:
    """How the policy ranks a row in the cache; the lowest leave first."""

    policy: str
    score: int
    lowest: int
    threshold: int  # rows at or below it leave with the next window, if that needs as many slots as earlier ones
    rank: int  # rows that leave before it
    num_rows: int
    uses: int  # aged count
    age: int  # batches since its last use
    next_use: int  # steps of the policy; 0: in no batch that is known
    stays: bool


class RowPlace(NamedTuple):
    """Where a row is."""

    where: str
    place: int | None  # among the rows of its tier, in the order of keys
    rank: int | None = None  # that owns it, of several


def norms_of(opened: OpenRun, request: RowRequest) -> Norms | None:
    """Norms of the saved row; None: it was never trained, or was removed."""
    found = saved_row(opened.entries, request.table, request.id)
    if not found:
        return None
    whole = {name for name, one in found.items() if not one.is_floating_point()}
    return Norms(
        _norm(found["weight"]),
        {name: _norm(one) for name, one in found.items() if name not in whole and name != "weight"},
        {name: int(one) for name, one in found.items() if name in whole},
    )


def key_of(opened: OpenRun, request: RowRequest, norms: Norms | None) -> int | None:
    """The key of the row in its group; None: a dynamic id without a row."""
    if request.row is not None:
        return opened.base_of(request.table) + request.row
    return None if norms is None else norms.numbers.get("row")


def place_of(opened: OpenRun, request: RowRequest, key: int | None, norms: Norms | None) -> RowPlace:
    """The tier that has the row."""
    if key is None:
        return RowPlace(GONE, None)
    group = opened.tables[request.table].group_name
    shapes = {name: one for name, one in opened.tables.items() if one.group_name == group}
    rank, local, shard = None, key, saved_shard(shapes, Shard(0, opened.world))
    if opened.world > 1 and request.row is not None:
        rank = int(shard.owner_of(torch.tensor([key], device="cpu"))[0])
        local = int(shard.local_of(torch.tensor([key], device="cpu"))[0])
    held = opened.cache_of(request.table, rank or 0)
    if held is None:
        return RowPlace(DEVICE, key, rank) if norms is not None else RowPlace(NEVER, None, rank)
    for tier, name in ((CACHE, "device.keys"), (MEMORY, "memory.keys")):
        if name in held:
            keys = np.sort(held[name].numpy().astype(np.int64))
            at = int(np.searchsorted(keys, local))
            if at < keys.shape[0] and keys[at] == local:
                return RowPlace(tier, at, rank)
    if norms is None:
        return RowPlace(NEVER, None, rank)
    return RowPlace(SSD if opened.config.tables.ssd else MEMORY, None, rank)


def score_of(
    opened: OpenRun, request: RowRequest, key: int, upcoming: Trace | None, leaving: float, stride: int = 1
) -> RowScore | None:
    """The score of a row in the cache; `upcoming` are the next batches, `leaving` rows leave with a window."""
    held = opened.cache_of(request.table)
    if held is None:
        return None
    keys = held["device.keys"].numpy().astype(np.int64)
    at = np.flatnonzero(keys == key)
    if not at.shape[0]:
        return None
    policy = make_policy(bytes(held["policy"].tolist()).decode())
    age = int(held["device"][1]) - held["device.last"].numpy().astype(np.int64)
    uses = held["device.uses"].numpy().astype(np.int64) >> np.minimum(age // policy.half_life, 31)
    hot = np.isin(keys, held["device.hot"].numpy()).astype(np.int64)
    next_use = _next_uses(keys, upcoming, stride)
    scores: NDArray[Any] = policy.bind({"where": np.where})(next_use, uses, age, hot)
    order = np.sort(scores)
    i = int(at[0])
    threshold = int(order[min(max(round(leaving), 1), order.shape[0]) - 1])
    return RowScore(
        policy.name, int(scores[i]), int(order[0]), threshold, int((scores < scores[i]).sum()), int(keys.shape[0]),
        int(uses[i]), int(age[i]), int(next_use[i]), bool(scores[i] > threshold),
    )  # fmt: skip


def _next_uses(keys: NDArray[np.int64], upcoming: Trace | None, stride: int) -> NDArray[np.int64]:
    """Steps of the policy to the next use of every key; 0 where none is known."""
    found = np.zeros(keys.shape[0], np.int64)
    if upcoming is None:
        return found
    order = np.argsort(keys)
    for number in range(upcoming.num_batches - 1, -1, -1):
        places = np.minimum(np.searchsorted(keys[order], upcoming.batch(number)), keys.shape[0] - 1)
        places = places[keys[order][places] == upcoming.batch(number)]
        found[order[places]] = 1 + number // stride
    return found


def _norm(values: Tensor) -> float:
    return float(values.double().norm())


def saved_row(entries: Sequence[Entry], table: str, id_: int) -> dict[str, Tensor]:
    """Weight, optimizer states and further numbers; empty if the row was never written, or was removed."""
    refuse_slices(entries, "explain")
    found: dict[str, Tensor] = {}
    for rank, entry in enumerate(entries):
        chain = chain_of(entry)
        check_sizes(chain)
        for part in parts_of(chain, Shard(rank, len(entries)), rows_of):
            if part.table == table:
                at = (part.ids == id_).nonzero()
                if at.shape[0]:
                    row = int(at[-1])
                    columns = {name: one[row].clone() for name, one in part.columns.items()}
                    found = found | columns if columns else {}
    return found if "weight" in found else {}
