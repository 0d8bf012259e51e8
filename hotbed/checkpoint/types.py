"""The interface between tables and checkpoints: what tables hand over to be saved, and what they take back.

Tables give a Snapshot, which holds their rows as of one moment while training continues; a checkpoint is written from it in
another thread. Rows are passed as RowParts: some ids of one table with everything their records hold. A row that was never
written is in no part: its initial value is a pure function of (seed, table, id).

Order within one checkpoint: `frozen` folders first, then `gone`, then `parts`; the later one wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hotbed.ops.shard import WHOLE, Shard
from hotbed.types import FrozenFolder, RowPart, TableShape


class Snapshot(Protocol):
    """Rows as of one moment. Read by one thread at a time, which need not be the one that trains."""

    tables: dict[str, TableShape]

    def parts(self) -> Iterator[RowPart]:
        """Every row ever written that is in no frozen folder; of a touched snapshot, the rows changed since the last commit.

        No (table, id) comes twice. A part is valid until the next one is requested; then its memory is reused.
        """

    def gone(self) -> Iterator[tuple[str, Tensor]]:
        """(table, ids int64 [N]) that were forgotten since the last commit; empty in a full snapshot."""

    def rest(self) -> dict[str, Tensor]:
        """Everything else that training depends on, small: counts of updates, learning-rate factor, id index, policies."""

    @property
    def frozen(self) -> Sequence[FrozenFolder]:
        """Folders to link; may be empty."""

    def commit(self) -> None:
        """The checkpoint is safely on disk. Leaving without this call restores the marks of touched rows."""


class Sink(Protocol):
    """Takes rows back, from `begin` to `end`; nothing trains meanwhile."""

    tables: dict[str, TableShape]
    notes: list[str]  # for a person: parts of the rest that were left out, none of which changes a row

    def begin(self) -> None:
        """All rows back to their initial values; may be called again to start over."""

    def first(self, table: str, ids: Tensor, weight: Tensor | None = None) -> dict[str, Tensor]:
        """The columns of these rows at their initial values, as in a RowPart; or as if they had started with these weights."""

    def current(self, table: str, ids: Tensor) -> dict[str, Tensor]:
        """Likewise, as the rows are now; initial values of those that other ranks have."""

    def adopt(self, name: str, folder: Path) -> None:
        """Take the rows of a frozen folder by that name; its files must not be changed."""

    def thaw(
        self, name: str, folder: Path, tables: Mapping[str, TableShape], shard: Shard = WHOLE
    ) -> Iterator[RowPart]:
        """The rows of a frozen folder as tables of other shapes saved them; each part is valid until the next.

        `shard` is whose rows they were: keys in the files are numbers of that rank.
        """

    def gone(self, table: str, ids: Tensor) -> None:
        """These rows are forgotten again."""

    def add(self, part: RowPart) -> None:
        """Write these rows. The tensors may be reused after the call."""

    def rest(self, tensors: dict[str, Tensor]) -> None:
        """What Snapshot.rest gave."""

    def end(self) -> None:
        """All rows are in place and count as untouched from here on."""


class Rows(Protocol):
    """What checkpoints need of tables."""

    def snapshot(self, touched: bool = False) -> AbstractContextManager[Snapshot]:
        """The rows between two steps: all ever written, or those touched since the last commit."""

    def restore(self) -> Sink:
        """A sink for saved rows."""
