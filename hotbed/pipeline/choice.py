"""Which planner takes a batch, decided in one place: a recorded one wherever it can, the eager one for all others.

A recording makes the keys of a batch itself, finds them in a map (of dynamic ids), or takes them (encodings.py): those of
features that are not pooled, of bags whose weights want a gradient. What stays eager on CUDA is logged once ("hotbed.tables"):
rows spread over ranks. Batches that are malformed go there too, which reports them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hotbed.cache import MOST_BATCHES
from hotbed.ops.inputs import Capacity
from hotbed.pipeline.batches import Ids
from hotbed.pipeline.eager import EagerPlanner
from hotbed.pipeline.encodings import (
    KEYS,
    NARROW,
    NARROW_KEYS,
    WIDE,
    BatchEncoding,
    IdEncoding,
    KeyEncoding,
    MapEncoding,
    lookups_by_group,
)
from hotbed.pipeline.ids_ahead import BatchAhead
from hotbed.pipeline.planner import Candidate, Planner
from hotbed.pipeline.recorded import RecordedPlanner, recorded_for, why_not_recorded
from hotbed.tables.descriptions import Kinds, parts_of, why_not_described
from hotbed.tables.module import EmbeddingTables


class PlannerChoice:
    """The planners of one feed."""

    def __init__(self, tables: EmbeddingTables, eager: EagerPlanner, window: int | None) -> None:
        self._tables = tables
        self._eager = eager
        self._window = window or MOST_BATCHES
        self._recorded: list[RecordedPlanner] = []  # in use; those made later hold larger batches
        self._never: str | None = None  # why no batch can be recorded
        self._asked = False
        dynamic = any(group.keyspace.is_dynamic for group in tables.caches)
        self._no_ids = dynamic or why_not_described(tables.features) is not None  # kernels cannot make the keys of ids

    @property
    def planners(self) -> list[Planner]:
        """All planners in use."""
        return [self._eager, *self._recorded]

    def choose(self, batch: Any, named: Ids) -> Candidate:
        """A batch that was read, and its planner."""
        if not self._asked:
            self._asked, self._never = True, why_not_recorded(self._tables)
            self._say(self._never)
        if self._never is None:
            candidate = self._by_ids(batch, named) or self._by_map(batch, named) or self._by_keys(batch, named)
            if candidate is not None:
                return candidate
        return Candidate(batch, named, self._eager, None)

    def _by_ids(self, batch: Any, named: Ids) -> Candidate | None:
        """For a recording that makes the keys itself; None for a batch that does not allow it."""
        if self._no_ids:
            return None
        parts = parts_of(self._tables.features, named.ids, named.bags, self._tables.device)
        if isinstance(parts, str):
            return None
        last = self._last(parts.kinds)
        encoding = IdEncoding(self._tables, parts.kinds) if last is None else last.encoding
        assert isinstance(encoding, IdEncoding), "kinds of features are described"
        described = encoding.describe(parts, self._eager.learns)
        planner = self._planner_for(encoding, [each.need for each in described], parts.varies, last)
        return Candidate(batch, named, planner, described)

    def _by_map(self, batch: Any, named: Ids) -> Candidate | None:
        """For a recording that finds the keys of dynamic ids in a map; None for a batch that was not read ahead."""
        if named.ahead is None:
            return None
        parts = parts_of(self._tables.features, named.ids, named.bags, self._tables.device)
        if isinstance(parts, str):
            return None
        width = NARROW if self._eager.learns and self._is_narrow(named.ahead) else WIDE
        last = self._last((width, *parts.kinds))
        encoding = MapEncoding(self._tables, parts.kinds, width) if last is None else last.encoding
        assert isinstance(encoding, MapEncoding), "the width of keys is named"
        described = encoding.describe(parts, self._eager.learns)
        planner = self._planner_for(encoding, [each.need for each in described], parts.varies, last)
        return Candidate(batch, named, planner, described)

    def _is_narrow(self, batch: BatchAhead) -> bool:
        """Whether the keys of all dynamic ids fit into 31 bits, also when all ids of a batch are new."""
        return all(
            ahead is None or group.keyspace.num_used + ahead.num_lookups < NARROW_KEYS
            for group, ahead in zip(self._tables.groups, batch.groups)
        )

    def _by_keys(self, batch: Any, named: Ids) -> Candidate | None:
        """For a recording that takes keys, which are made when the batch is made known; None for a malformed batch."""
        need = lookups_by_group(self._tables, named.ids, named.bags)
        if need is None:
            return None
        last = self._last(KEYS)
        encoding = KeyEncoding(self._tables) if last is None else last.encoding
        return Candidate(batch, named, self._planner_for(encoding, need, True, last), None)

    def _last(self, kinds: Kinds) -> RecordedPlanner | None:
        """The largest planner for these kinds."""
        return next((planner for planner in reversed(self._recorded) if planner.encoding.kinds == kinds), None)

    def _planner_for(
        self, encoding: BatchEncoding, need: Sequence[Capacity], varies: bool, last: RecordedPlanner | None
    ) -> RecordedPlanner:
        """The last one, or one that is larger still."""
        if last is not None and last.holds(need):
            return last
        least = [Capacity(0, 0)] * len(need) if last is None else last.capacities
        planner = recorded_for(self._tables, encoding, need, self._window, varies, least)
        planner.learns, planner.thread = self._eager.learns, self._eager.thread
        self._recorded.append(planner)  # before it starts: a feed that is left meanwhile stops it
        planner.start()
        return planner

    def retire(self, successor: Planner) -> None:
        """Let go of the planners that this one replaced: none of their batches waits, and all of their rows are written."""
        if successor is self._eager:
            return
        later = self._recorded[self._recorded.index(successor) :]  # type: ignore[arg-type]
        for planner in self._recorded[: -len(later)]:
            if planner.encoding.kinds == later[0].encoding.kinds:
                planner.forget()
                planner.stop()
                self._recorded.remove(planner)
                self._tables.ownership.planners.remove(planner)

    def begin_anew(self) -> None:
        """The caches are others; planners of those before are of no use, and their memory goes with them."""
        for planner in self._recorded:
            planner.stop()
        kept = self._tables.ownership.planners
        kept[:] = [planner for planner in kept if planner not in self._recorded]
        self._recorded.clear()
        self._asked = False

    def _say(self, reason: str | None) -> None:
        """On a CPU launch by launch is the way."""
        if reason is not None and self._tables.device.type == "cuda":
            self._tables.ownership.log_eager(reason)
