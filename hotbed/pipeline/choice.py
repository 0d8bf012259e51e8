"""Which planner takes a batch, decided in one place: a recorded one wherever it can, the eager one for all others.

What stays eager on CUDA, and why, is logged once ("hotbed.tables"): dynamic ids, rows spread over ranks, features that are not
pooled, weights of bags that want a gradient. Malformed batches go there too, which reports them.
"""

from __future__ import annotations

from typing import Any

from hotbed.cache import MOST_BATCHES
from hotbed.pipeline.batches import Ids
from hotbed.pipeline.eager import EagerPlanner
from hotbed.pipeline.planner import Candidate, Planner
from hotbed.pipeline.recorded import RecordedPlanner, recorded_for, why_not_recorded
from hotbed.tables.descriptions import MALFORMED, BatchParts, parts_of
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

    @property
    def planners(self) -> list[Planner]:
        """All that are in use."""
        return [self._eager, *self._recorded]

    def choose(self, batch: Any, named: Ids) -> Candidate:
        """A batch that was read, and who will plan it."""
        if not self._asked:
            self._asked, self._never = True, why_not_recorded(self._tables)
            self._say(self._never)
        if self._never is None:
            parts = parts_of(self._tables.features, named.ids, named.bags, self._tables.device)
            if not isinstance(parts, str):
                return self._describe(batch, named, parts)
            self._say(None if parts == MALFORMED else parts)
        return Candidate(batch, named, self._eager, None)

    def _describe(self, batch: Any, named: Ids, parts: BatchParts) -> Candidate:
        """For the largest planner of the batch's kinds, or one that is larger still."""
        last = next((planner for planner in reversed(self._recorded) if planner.kinds == parts.kinds), None)
        described = None if last is None else last.describe(parts)
        if last is not None and described is not None:
            return Candidate(batch, named, last, described)
        planner = recorded_for(self._tables, parts, self._window, last)
        planner.learns, planner.thread = self._eager.learns, self._eager.thread
        planner.start()
        self._recorded.append(planner)
        return Candidate(batch, named, planner, planner.describe(parts))

    def retire(self, successor: Planner) -> None:
        """Let go of the planners that this one replaced: none of their batches waits, and all of their rows are written."""
        if successor is self._eager:
            return
        later = self._recorded[self._recorded.index(successor) :]  # type: ignore[arg-type]
        for planner in self._recorded[: -len(later)]:
            if planner.kinds == later[0].kinds:
                planner.forget()
                planner.stop()
                self._recorded.remove(planner)
                self._tables.ownership.planners.remove(planner)

    def begin_anew(self) -> None:
        """The caches are others."""
        for planner in self._recorded:
            planner.stop()
        self._recorded.clear()
        self._asked = False

    def _say(self, reason: str | None) -> None:
        """On a CPU launch by launch is the way."""
        if reason is not None and self._tables.device.type == "cuda":
            self._tables.ownership.say_eager(reason)
