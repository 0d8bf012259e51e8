"""Who may move rows, and the one rule for moving them.

Plain lookups, saving and loading claim the tables: a feed that works ahead stops at a safe place, takes back its promises,
and resumes when its next batch is requested. One thread at a time: every call of the tables holds `changes.lock`.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hotbed.errors import HotbedError
from hotbed.ops.lookups import Lookups
from hotbed.tables.inputs import BatchInputs
from hotbed.tables.keyed import is_keyed, tensors_of
from hotbed.tables.transaction import Changes
from hotbed.types import Jagged

_log = logging.getLogger("hotbed.tables")


class BatchFeed(Protocol):
    """What a feed must be able to do for others."""

    process: int  # whose threads move its rows

    def pause(self, *, drop: bool) -> None:
        """Stop working ahead; with `drop` also forget what is known of batches ahead."""

    def finish(self) -> None:
        """The end; may be called again when it was interrupted."""


Contents = list[tuple[Tensor, int]]


def contents_of(ids: Any, bags: Any = None) -> Contents:
    """The tensors inside ids and bags, and how often each has been written to."""
    found: Contents = []
    if bags is not None:
        _add_contents(bags, found)
    _add_contents(ids, found)
    return found


def _add_contents(value: Any, found: Contents) -> None:
    if isinstance(value, Tensor):
        found.append((value, 0 if value.is_inference() else value._version))
    elif isinstance(value, Mapping):
        for part in value.values():
            if type(part) is Jagged:  # of which there may be many: 26 take 8 us here, 18 below
                for one in part:
                    if isinstance(one, Tensor):
                        found.append((one, 0 if one.is_inference() else one._version))
            else:
                _add_contents(part, found)
    elif isinstance(value, tuple):
        for part in value:
            if part is not None:
                _add_contents(part, found)
    elif is_keyed(value):
        _add_contents(tensors_of(value), found)


class PreparedBatch(NamedTuple):
    """A batch whose rows are in place, recognised by the objects the tables are called with."""

    ids: Any
    bags: Mapping[str, Any] | None
    given: BatchInputs
    lookups: list[Lookups]  # one for each group
    contents: Contents | None = None  # of ids and bags, when their rows were looked for
    ahead: Any = None  # what was read ahead of dynamic ids


class RoutedBatch:
    """A batch, and what its ranks have settled about it."""

    def __init__(self, batch: Any, given: BatchInputs, lookups: Callable[[bool], list[Lookups]]) -> None:
        self.batch = batch
        self.given = given
        self.lookups = lookups  # whether it learns -> what all ranks want of this one, by group


class Ownership:
    """Who may move the rows of one EmbeddingTables; callers hold `changes.lock`."""

    def __init__(self) -> None:
        self.changes = Changes()
        self.feed: BatchFeed | None = None
        self.left: deque[BatchFeed] = deque()  # feeds that are being closed
        self.planners: list[Any] = []  # recordings that the next feed can use again
        self.records = True  # recordings are made where they can be
        self._reasons: set[str] = set()  # why batches were not recorded, as far as it was logged
        self._planned: dict[int, PreparedBatch] = {}

    def log_eager(self, reason: str) -> None:
        """Log why a batch on CUDA goes launch by launch, once."""
        if reason not in self._reasons:
            self._reasons.add(reason)
            _log.info("batches are launched one kernel at a time, not replayed as CUDA graphs: %s", reason)

    def claim(self, *, drop: bool = False) -> None:
        """Ownership for the training thread itself; `drop`: what is known of batches ahead no longer holds."""
        self._refuse_fork()
        self._close_left()
        if self.feed is not None:
            self.feed.pause(drop=drop)
        self.changes.check()

    def take(self, feed: BatchFeed) -> None:
        """Ownership for a feed, until another feed's batch is requested."""
        self._refuse_fork()
        self._close_left()
        self.changes.check()
        if self.feed is not None and self.feed is not feed:
            self.feed.pause(drop=True)
        self.feed = feed

    def leave(self, feed: BatchFeed) -> None:
        """A feed has ended."""
        if self.feed is feed:
            self.feed = None

    def deliver(self, planned: PreparedBatch) -> None:
        """From now on the tables may be called with this batch."""
        self._planned[id(planned.ids)] = planned

    def withdraw(self, planned: PreparedBatch) -> None:
        """The batch has been trained."""
        if self._planned.get(id(planned.ids)) is planned:  # another feed may have delivered the same object
            del self._planned[id(planned.ids)]

    def find(self, ids: Any, bags: Mapping[str, Any] | None) -> PreparedBatch | None:
        """The plan of a batch that was delivered."""
        planned = self._planned.get(id(ids))
        if planned is None and isinstance(ids, Mapping):  # another mapping of the same tensors
            planned = next((one for one in reversed(self._planned.values()) if _has_parts(one.ids, ids)), None)
        elif planned is None or planned.ids is not ids:
            return None
        if planned is None:
            return None
        if bags or planned.bags:
            theirs, ours = bags or {}, planned.bags or {}
            if theirs.keys() != ours.keys() or not all(theirs[name] is ours[name] for name in ours):
                return None
        return planned if _is_unchanged(planned) else None

    def forget(self, feed: BatchFeed) -> None:
        """A feed is closed."""
        self.left = deque(one for one in self.left if one is not feed)

    def _refuse_fork(self) -> None:
        """Raise in a fork of a process that has an open loop: its threads, and the rows on their way, are there."""
        for feed in (self.feed, *self.left):
            if feed is not None and feed.process != os.getpid():
                raise HotbedError(
                    f"this process was forked from {feed.process} amid a prefetched loop over these tables, and only that one "
                    "has the threads that move their rows; fork before the loop or after its end, or create tables here and "
                    "load their checkpoint"
                )

    def _close_left(self) -> None:
        for feed in list(self.left):
            feed.finish()

    @property
    def broken(self) -> BaseException | None:
        """What broke a change off, if anything did."""
        return self.changes.broken


def _has_parts(one: Any, other: Mapping[str, Any]) -> bool:
    """Whether two mappings hold the same tensors under the same names."""
    if not isinstance(one, Mapping) or one.keys() != other.keys():
        return False
    for name, part in other.items():
        ours = one[name]
        if isinstance(part, Jagged) and isinstance(ours, Jagged):
            if any(mine is not theirs for mine, theirs in zip(ours, part)):
                return False
        elif ours is not part:
            return False
    return True


def _is_unchanged(planned: PreparedBatch) -> bool:
    """Whether its ids are still those whose rows are in place."""
    if planned.contents is None:
        return True
    now = contents_of(planned.ids, planned.bags)
    if len(now) != len(planned.contents):
        return False
    for (tensor, version), (before, version_before) in zip(now, planned.contents):
        if tensor is not before or version != version_before:
            return False
    return True
