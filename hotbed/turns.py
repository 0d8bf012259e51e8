"""Whose turn it is to move rows: the training thread's own, or that of one feed working ahead of it.

Plain look-ups, saving and loading claim the tables: a feed that works ahead stops at a safe place, takes back its promises,
and goes on when it is next asked for a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from hotbed.errors import HotbedError
from hotbed.inputs import Given
from hotbed.ops.lookups import Lookups


class Feeding(Protocol):
    """What a feed must be able to do for others."""

    def pause(self, *, drop: bool) -> None:
        """Stop working ahead; with `drop` also forget what is known of batches ahead."""


class Planned(NamedTuple):
    """A batch whose rows are in place, recognised by the objects the tables are called with."""

    ids: Any
    bags: Mapping[str, Any] | None
    given: Given
    lookups: list[Lookups]  # one for each group


class Turns:
    """Of one EmbeddingTables; only the training thread calls it."""

    def __init__(self) -> None:
        self.feed: Feeding | None = None
        self.broken: BaseException | None = None
        self.lanes: dict[Any, Any] = {}  # recordings that the next feed can use again
        self._planned: dict[int, Planned] = {}

    def claim(self) -> None:
        """The training thread's own turn."""
        if self.feed is not None:
            self.feed.pause(drop=False)
        if self.broken is not None:
            raise HotbedError(
                "these tables lost rows when a copy in the background failed; load their last checkpoint"
            ) from self.broken

    def take(self, feed: Feeding) -> None:
        """A feed's turn, until another is asked for a batch."""
        if self.feed is not None and self.feed is not feed:
            self.feed.pause(drop=True)
        self.feed = feed

    def leave(self, feed: Feeding) -> None:
        """A feed has ended."""
        if self.feed is feed:
            self.feed = None

    def deliver(self, planned: Planned) -> None:
        """From now on the tables may be called with this batch."""
        self._planned[id(planned.ids)] = planned

    def withdraw(self, planned: Planned) -> None:
        """The batch has been trained."""
        self._planned.pop(id(planned.ids), None)

    def find(self, ids: Any, bags: Mapping[str, Any] | None) -> Planned | None:
        """The plan of a batch that was delivered."""
        planned = self._planned.get(id(ids))
        if planned is None or planned.ids is not ids:
            return None
        theirs, ours = bags or {}, planned.bags or {}
        same = theirs is ours or (theirs.keys() == ours.keys() and all(theirs[name] is ours[name] for name in ours))
        return planned if same else None
