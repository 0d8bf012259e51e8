"""Who answers the lookups of a call: this process alone (here), or all ranks together (parallel/sharded.py).

Tables are given one of the two and ask it; nothing in them depends on which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from hotbed.ops.lookups import Lookups
from hotbed.tables.autograd import Front
from hotbed.tables.group.group import TableGroup
from hotbed.tables.inputs import BatchInputs, GroupInputs, flatten
from hotbed.tables.ownership import PreparedBatch, RoutedBatch


class Stage(Protocol):
    """What the batches of one feed go through before they are looked up."""

    def settle(self, batches: Iterable[tuple[Any, Any, Any]]) -> Iterator[RoutedBatch]:
        """(batch, ids, bags) of this rank, settled with the other ranks ahead of time; in any thread."""

    def close(self) -> None:
        """The feed has ended."""


class Exchange(Protocol):
    """The exchange of one EmbeddingTables."""

    fronts: list[Front]  # what answers lookups, by group

    @property
    def replica_bytes(self) -> int:
        """Device memory of replicas of other ranks' rows, with their index."""

    @property
    def modes(self) -> list[dict[str, Any]]:
        """For each group whose mode was chosen: the mode, and what was measured."""

    def new_stage(self) -> Stage | None:
        """For one more feed, all ranks in the same order; None: batches are looked up as they are."""

    def settle(self, given: BatchInputs, planned: PreparedBatch | None) -> Any:
        """What must be known of a call without a plan, or with one that no longer holds, before ids are translated."""

    def wishes(self, given: BatchInputs, settled: Any, learns: bool) -> list[Lookups]:
        """What such a call requests from each group here. For dynamic ids, a call that learns is the next training batch."""

    def calls(self, placed: list[Lookups], planned: PreparedBatch | None) -> list[Lookups]:
        """The lookups of the call itself, once the rows that are wanted here are in place."""

    def agree(self, fronts: Sequence[Front], lookups: Lookups, factor: float, number: int) -> None:
        """See Partners: the first part of a change, which a RankError refuses."""

    def refuse(self, error: BaseException) -> None:
        """See Partners."""

    def refuse_batch(self, error: BaseException) -> None:
        """Instead of a call with the next batch of a feed, which has failed here."""

    def rows_replaced(self) -> None:
        """Rows have changed by other means than updates."""


class LocalExchange:
    """All rows are here."""

    def __init__(self, groups: Sequence[TableGroup], inputs: Sequence[GroupInputs]) -> None:
        self.fronts: list[Front] = [*groups]
        self.replica_bytes = 0
        self.modes: list[dict[str, Any]] = []
        self._groups, self._inputs = groups, inputs

    def new_stage(self) -> Stage | None:
        """Batches are looked up as they are."""
        return None

    def settle(self, given: BatchInputs, planned: PreparedBatch | None) -> Any:
        """Nothing."""
        return None

    def wishes(self, given: BatchInputs, settled: Any, learns: bool) -> list[Lookups]:
        """The lookups of the batch."""
        return [flatten(group, one, given, learns) for group, one in zip(self._groups, self._inputs)]

    def calls(self, placed: list[Lookups], planned: PreparedBatch | None) -> list[Lookups]:
        """The very lookups."""
        return placed

    def agree(self, fronts: Sequence[Front], lookups: Lookups, factor: float, number: int) -> None:
        """There is nobody to ask."""

    def refuse(self, error: BaseException) -> None:
        """There is nobody to tell."""

    def refuse_batch(self, error: BaseException) -> None:
        """There is nobody to tell."""

    def rows_replaced(self) -> None:
        """Nobody else has a copy."""
