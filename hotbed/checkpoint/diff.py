"""Compares two checkpoints: settings, tables, rows and dense weights.

Rows are compared in as many passes as it takes to hold about a gigabyte of each at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.checkpoint.chain import Entry, chain_of
from hotbed.checkpoint.files import DENSE, mean_of
from hotbed.checkpoint.owners import Owners
from hotbed.checkpoint.read import Report, check_sizes, differences, gone_of, refuse_slices, rows_of, tensors_of
from hotbed.types import RowPart

_PASS_BYTES = 1 << 30
_PLACE = ("row",)  # where the record of a dynamic id is: not a difference
_SHARED = " (shared row)"  # of a table of dynamic ids: it is saved under id 0, which may have a row of its own


@dataclass
class TableDiff:
    """Rows of one table, from the first checkpoint to the second."""

    same: int = 0
    changed: int = 0
    added: int = 0
    gone: int = 0
    largest: float | None = None  # change of one weight
    largest_id: int | None = None


class DenseDiff(NamedTuple):
    """One dense tensor; `largest` is None where it cannot be compared."""

    name: str
    what: str
    largest: float | None


@dataclass
class Diff:
    """All differences."""

    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)
    tables: dict[str, TableDiff] = field(default_factory=dict)  # and shared rows, as tables of one row
    dense: list[DenseDiff] = field(default_factory=list)
    frozen: int = 0  # ssd segments, which are not compared


class _TableRows(NamedTuple):
    """Some rows of one table, ids ascending."""

    ids: NDArray[np.int64]
    weights: Tensor  # [N, D]
    bits: NDArray[np.uint8]  # [N, bytes of all columns]


def diff(one: Sequence[Entry], other: Sequence[Entry], report: Report = lambda _: None) -> Diff:
    """Compare two checkpoints, each with its chain; of every rank that wrote it."""
    for entries in (one, other):
        refuse_slices(entries, "a comparison")
    chains = [chain_of(entry) for entry in one], [chain_of(entry) for entry in other]
    links = [entry for ranks in chains for chain in ranks for entry in chain]
    check_sizes(links)
    found = Diff(settings=_settings(one[0].manifest.document, other[0].manifest.document))
    before, after = one[0].manifest.tables, other[0].manifest.tables
    for name in {**before, **after}:
        if name not in before or name not in after:
            found.shapes[name] = "only in the first" if name in before else "only in the second"
        elif before[name] != after[name]:
            pairs = differences(before[name], after[name]).items()
            found.shapes[name] = ", ".join(f"{what} {old} -> {new}" for what, (old, new) in pairs)
    found.dense = _dense(*(mean_of([tensors_of(entry, DENSE) for entry in entries]) for entries in (one, other)))
    found.frozen = sum(len(entry.manifest.linked) for entry in links)
    size = sum(entry.manifest.num_bytes for entry in links)
    passes = size // (2 * _PASS_BYTES) + 1
    for number in range(passes):
        held = [_rows(ranks, number, passes, report) for ranks in chains]
        for name in {**before, **after, **held[0], **held[1]}:
            tally = found.tables.setdefault(name, TableDiff())
            _compare(tally, held[0].get(name), held[1].get(name))
    return found


def _rows(chains: Sequence[Sequence[Entry]], number: int, passes: int, report: Report) -> dict[str, _TableRows]:
    """The rows of a checkpoint whose ids fall into this pass, of all ranks."""
    parts: dict[str, list[_TableRows]] = {}
    for chain in chains:
        for table, some in _rows_of_rank(chain, number, passes, report).items():
            parts.setdefault(table, []).extend(some)
    return {table: _newest(some) for table, some in parts.items()}


def _rows_of_rank(chain: Sequence[Entry], number: int, passes: int, report: Report) -> dict[str, list[_TableRows]]:
    """By table, oldest first."""
    parts: dict[str, list[_TableRows]] = {}
    owners = Owners(chain)
    for entry in chain:
        for table, ids in gone_of(entry):
            for place, held in enumerate(parts.get(table, [])):
                parts[table][place] = _taken(held, ~np.isin(held.ids, ids.numpy()))
        for part in rows_of(entry, report):
            if "weight" not in part.columns:
                continue  # its records are in ssd files
            mine = (part.ids % passes == number) & owners.owned(part)
            is_shared = part.columns["shared"] != 0 if "shared" in part.columns else torch.zeros_like(mine)
            for name, chosen in ((part.table, mine & ~is_shared), (part.table + _SHARED, mine & is_shared)):
                if bool(chosen.any()):
                    parts.setdefault(name, []).append(_chosen(part, chosen))
    return parts


def _chosen(part: RowPart, which: Tensor) -> _TableRows:
    columns = {name: one[which].contiguous() for name, one in part.columns.items() if name not in _PLACE}
    bits = [one.reshape(len(one), -1).view(torch.uint8) for one in columns.values()]
    return _TableRows(part.ids[which].numpy().copy(), columns["weight"], torch.cat(bits, 1).numpy())


def _newest(parts: list[_TableRows]) -> _TableRows:
    whole = _TableRows(
        np.concatenate([one.ids for one in parts]),
        torch.cat([one.weights for one in parts]),
        np.concatenate([one.bits for one in parts]),
    )
    _, places = np.unique(whole.ids[::-1], return_index=True)
    return _taken(whole, len(whole.ids) - 1 - places)


def _taken(held: _TableRows, places: NDArray[Any]) -> _TableRows:
    return _TableRows(held.ids[places], held.weights[torch.from_numpy(places)], held.bits[places])


def _compare(tally: TableDiff, one: _TableRows | None, other: _TableRows | None) -> None:
    if one is None or other is None:
        tally.gone += 0 if one is None else len(one.ids)
        tally.added += 0 if other is None else len(other.ids)
        return
    both, in_one, in_other = np.intersect1d(one.ids, other.ids, assume_unique=True, return_indices=True)
    tally.gone += len(one.ids) - len(both)
    tally.added += len(other.ids) - len(both)
    if one.bits.shape[1] != other.bits.shape[1]:  # another dim or optimizer: all of them
        tally.changed += len(both)
        return
    changed = (one.bits[in_one] != other.bits[in_other]).any(1)
    tally.changed += int(changed.sum())
    tally.same += len(both) - int(changed.sum())
    if changed.any() and one.weights.shape[1] == other.weights.shape[1]:
        moves = (other.weights[in_other].double() - one.weights[in_one].double()).abs().amax(1)
        largest = int(moves.argmax())
        if tally.largest is None or float(moves[largest]) > tally.largest:
            tally.largest, tally.largest_id = float(moves[largest]), int(both[largest])


def _dense(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[DenseDiff]:
    found = []
    for name in {**one, **other}:
        if name not in one or name not in other:
            found.append(DenseDiff(name, "only in the first" if name in one else "only in the second", None))
        elif one[name].shape != other[name].shape:
            found.append(DenseDiff(name, f"shape {list(one[name].shape)} became {list(other[name].shape)}", None))
        elif not torch.equal(one[name], other[name]):
            found.append(DenseDiff(name, "changed", float((other[name].double() - one[name].double()).abs().max())))
    return found


def _settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    before, after = _flat(one.get("config") or {}), _flat(other.get("config") or {})
    paths = {**before, **after}
    return {path: (before.get(path), after.get(path)) for path in paths if before.get(path) != after.get(path)}


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{name}": value
        for section, settings in tree.items()
        if isinstance(settings, Mapping)
        for name, value in settings.items()
    }
