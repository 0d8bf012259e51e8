"""Replicas of rows on every rank (parallel/replicated.py): the run and the rooms of its groups in, their bytes out.

Exact for the batches that were counted: the rows of a batch of all ranks together are counted, not estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hotbed.forecast.memory import MemoryPart
from hotbed.forecast.request import ForecastRequest
from hotbed.forecast.traffic import part_of_tables
from hotbed.host.memory import parse_bytes
from hotbed.parallel.replicated import ReplicaRoom, num_replicas, refusal, replica_bytes
from hotbed.tables.sizing.budget import Room


class ReplicaForecast(NamedTuple):
    """What replicas take, and what does not fit."""

    parts: list[MemoryPart]
    notes: list[str]
    problems: list[str]


def replicas_of(request: ForecastRequest, rooms: Sequence[Room]) -> ReplicaForecast:
    """The replicas of all groups together; none where rows are sharded, or where nothing is known of the rooms."""
    mode = request.config.parallel.mode
    if request.world == 1 or mode == "sharded" or not rooms:
        return ReplicaForecast([], [], [])
    num_bytes = 0
    notes: list[str] = []
    problems: list[str] = []
    for number, room in enumerate(rooms):
        found = _room_of(request, number, room)
        per_replica = _replica_bytes(request, number)
        union = _largest_union(request, number)
        most = found.most(per_replica)
        if most is not None and union > most:
            needs = f"a batch of all ranks needs {union:,} rows at once (parallel.mode={mode})"
            said = str(refusal(found, per_replica, union, needs))
            (notes if mode == "auto" else problems).append(said)
        num_bytes += num_replicas(union, found, per_replica, _is_kept(request, number)) * per_replica
    where = "device" if request.config.tables.hbm or not request.config.tables.ssd else "memory"
    return ReplicaForecast([MemoryPart(where, "replicas of rows", num_bytes, False)], notes, problems)


def _room_of(request: ForecastRequest, number: int, room: Room) -> ReplicaRoom:
    budgets, (rows, _) = request.sketch.budgets, request.sketch.amounts.groups[number]
    name = "hbm" if budgets.hbm is not None else "memory"
    given = budgets.hbm if budgets.hbm is not None else budgets.memory
    whole = parse_bytes(given, name) if given is not None else 0
    return ReplicaRoom(room.replica_bytes, None if rows is None else rows * request.world, whole, name)


def _is_kept(request: ForecastRequest, number: int) -> bool:
    """Rows of dynamic ids are not."""
    return request.sketch.amounts.groups[number][0] is not None


def _replica_bytes(request: ForecastRequest, number: int) -> int:
    record = request.sketch.amounts.groups[number][1]
    width = next(iter(request.sketch.tables.values())).dim * 4
    return replica_bytes(record if request.config.parallel.mode == "all-reduce" else width, _is_kept(request, number))


def _largest_union(request: ForecastRequest, number: int) -> int:
    """Distinct rows of a group that the largest counted batch needs, on all ranks together."""
    given = request.given
    if len(request.groups) == 1:
        return given.trace.most_keys
    return part_of_tables(given.trace, given.ends, request.groups[number]).most_keys
