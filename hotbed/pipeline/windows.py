"""What a feed has in hand: batches that are known, a window being planned, a window whose rows are on their way."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from torch import Tensor

from hotbed.cache import Decision
from hotbed.ops.lookups import Lookups, Ticket
from hotbed.pipeline.batches import Ids
from hotbed.pipeline.recorded_planners import LaneWindow
from hotbed.pipeline.transfer_thread import Move
from hotbed.tables.group.cached import Ahead
from hotbed.tables.inputs import Given
from hotbed.tables.ownership import Planned
from hotbed.tables.transaction import REFUSALS


class Waiting(NamedTuple):
    """A batch that is known."""

    batch: Any
    named: Ids
    given: Given
    lookups: list[Lookups]  # by group; slots are keys; none in a lane
    aheads: list[Ahead]  # by group; none in a lane
    flat: list[Tensor]  # ids by group, in a lane
    number: int  # in the lane


class Trial:
    """A batch that is refused inside is out of the way: whoever goes on with the loader does not get it again."""

    __slots__ = ("_batches", "_place")

    def __init__(self, batches: deque[Any], place: int = 0) -> None:
        self._batches, self._place = batches, place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, REFUSALS):
            del self._batches[self._place]


class Begun(NamedTuple):
    """A window that is being planned."""

    batches: list[Waiting]
    decisions: list[Decision]  # by group


class Window:
    """Batches whose rows are in place, or on their way."""

    def __init__(self, move: Move | list[LaneWindow], ticket: Ticket) -> None:
        self.move = move
        self.ticket = ticket
        self.batches: deque[tuple[Any, Planned]] = deque()
        self.delivered: list[Planned] = []
        self.exchanged = False
