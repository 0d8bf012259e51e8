"""The two seams of a feed: how batches are planned, and how the rows of a window are moved.

    Planner     batches become known, windows of them are planned      EagerPlanner, RecordedPlanner
    Transfer    the rows of a planned window are staged and exchanged   ThreadedTransfer, DirectTransfer, RecordedTransfer

Eager: launch by launch, for every kind of batch, rows moved by a thread of Python. Recorded: on CUDA, launches recorded as
CUDA graphs, rows moved by compiled code. A feed never asks which of the two the planner of a batch or
the transfer of a window is; choice.py decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from hotbed.ops.lookups import Lookups, Ticket
from hotbed.pipeline.batches import Ids
from hotbed.tables.inputs import BatchInputs
from hotbed.tables.ownership import PreparedBatch
from hotbed.tables.transaction import REFUSALS


class Candidate(NamedTuple):
    """A batch that was read, and its planner."""

    batch: Any
    named: Ids
    planner: Planner
    ids: Any  # as the planner takes them


class KnownBatch(NamedTuple):
    """A batch that the caches know of, or are about to."""

    batch: Any
    named: Ids
    given: BatchInputs
    planner: Planner
    ids: Any  # as the planner needs them
    place: Any  # where the planner finds the batch again; None before it arrives


class OpenWindow(NamedTuple):
    """A window that is being planned."""

    batches: list[KnownBatch]
    planner: Planner
    decisions: list[Any]  # by group; the planner's own


class PlannedWindow(NamedTuple):
    """What a planner decided."""

    transfer: Transfer
    placed: list[list[Lookups]]  # by group and batch
    arrived: list[KnownBatch]  # the batches that were made known in the same go


class Transfer(Protocol):
    """The rows of one window, on their way in and out."""

    @property
    def waits(self) -> bool:
        """Whether `wait` may take its time."""

    @property
    def holds_memory(self) -> bool:
        """Whether the device reads memory of this until it is past the window."""

    @property
    def is_staged(self) -> bool:
        """Whether the rows are on the device, so that there is nothing to wait for."""

    def wait(self) -> None:
        """Until `exchange` can be called."""

    def exchange(self) -> None:
        """Victims leave their slots, misses come; on the current stream. Part of a change."""


class Planner(Protocol):
    """Plans the windows of one feed. Methods that change an index are part of a change."""

    @property
    def takes_along(self) -> bool:
        """Whether batches can be made known in the same go as a window is planned."""

    @property
    def finds_late(self) -> bool:
        """Whether a bad id may be found when its batch is planned already."""

    def start(self) -> None:
        """The feed begins."""

    def stop(self) -> None:
        """The feed has ended, or will not use the planner again."""

    def abandon(self) -> None:
        """The process ends: finish within reason."""

    def prepare(self, candidate: Candidate) -> KnownBatch:
        """The batch as the tables see it; IdError and the like for one that is refused. Not yet known."""

    def arrive(self, batch: KnownBatch) -> KnownBatch:
        """Make a batch known, also again."""

    def num_keys(self, batch: KnownBatch) -> list[int]:
        """Distinct keys of a known batch, by group; waits for the device if it must."""

    def reserve(self, look_ahead: int) -> None:
        """Make room in the index for as many batches ahead, all like the one that arrived last."""

    @property
    def may_have_bad_ids(self) -> bool:
        """Whether `check` could raise."""

    def check(self, batch: KnownBatch | PreparedBatch) -> None:
        """Raise IdError for a bad id."""

    @property
    def begins_early(self) -> bool:
        """Whether a window can be begun before there is room to finish it."""

    def begin(self, batches: list[KnownBatch]) -> OpenWindow:
        """Look for the rows of the next batches."""

    def is_ready(self, window: OpenWindow) -> bool:
        """Whether `finish` would not wait for the device."""

    def finish(self, window: OpenWindow, ticket: Ticket, arriving: Sequence[Candidate]) -> PlannedWindow:
        """Decide what comes and goes, and start to move it. Lookups hold as long as the ticket does."""

    def drain(self) -> None:
        """Wait until every row that left is in its store; raises what went wrong."""

    def forget(self) -> None:
        """The batches that are known are about to be dropped."""


class RefusalGuard:
    """A batch that is refused inside is removed: reading on from the loader does not return it again."""

    __slots__ = ("_batches", "_place")

    def __init__(self, batches: deque[Any], place: int = 0) -> None:
        self._batches, self._place = batches, place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, REFUSALS):
            del self._batches[self._place]


class Window:
    """Batches whose rows are in place, or on their way."""

    def __init__(self, transfer: Transfer, ticket: Ticket) -> None:
        self.transfer = transfer
        self.ticket = ticket
        self.batches: deque[tuple[Any, PreparedBatch]] = deque()
        self.delivered: list[PreparedBatch] = []
        self.exchanged = False
