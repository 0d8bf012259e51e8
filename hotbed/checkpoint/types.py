"""The interface between tables and checkpoints: what tables hand over to be saved, and what they take back.

Tables give a Snapshot, which holds their rows as of one moment while training continues; a checkpoint is written from it in
another thread. Rows are passed as RowParts: some ids of one table with everything their records hold. A row that was never
written is in no part: its initial value is a pure function of (seed, table, id).

Order within one checkpoint: `frozen` folders first, then `gone`, then `parts`; the later one wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from hotbed.ops.shard import WHOLE, Shard


@dataclass(frozen=True)
class TableShape:
    """One table as a manifest describes it; equal shapes mean that rows fit as they are."""

    dim: int
    rows: int | None  # None: dynamic ids
    precision: str = "fp32"  # of the weights: fp32, fp16 or bf16
    optimizer: str = ""  # name of the row optimizer, e.g. adagrad
    states: dict[str, int] = field(default_factory=dict)  # columns of each of its states: dim or 1
    numbers: tuple[str, ...] = ()  # further columns of one integer per row, such as last_use
    hashing: bool = False  # ids modulo rows: with another number of rows, ids mean something else
    init: str = ""  # distribution of initial values, as text
    seed: int = 0
    group: str = field(default="", compare=False)  # of tables with settings of their own, the first of their group

    @property
    def group_name(self) -> str:
        """The name of its group."""
        return group_name(self.dim, self.rows is None, self.group)


def group_name(dim: int, dynamic: bool, own: str = "") -> str:
    """The name of a group of tables of this dim, in manifests; `own`: the first of those with settings of their own."""
    return f"dim-{dim}" + ("-dynamic" if dynamic else "") + (f"-{own}" if own else "")


class RowPart(NamedTuple):
    """Rows of one table, on the host."""

    table: str
    ids: Tensor  # int64 [N], distinct
    columns: dict[str, Tensor]  # "weight" [N, D], every state [N, D] or [N, 1], every further number int64 [N]

    @property
    def num_bytes(self) -> int:
        """Bytes of columns and ids."""
        return self.ids.nbytes + sum(column.numel() * column.element_size() for column in self.columns.values())


class FrozenFolder(Protocol):
    """Files that never change again, such as segments of an ssd store; a checkpoint links them instead of copying."""

    @property
    def name(self) -> str:
        """A folder name, distinct within a snapshot, and the same in every snapshot of these tables."""

    def link_into(self, folder: Path) -> None:
        """Hard-link (or copy, on another file system) every file into the folder, which exists and is empty.

        The files are on the disk (fsync) when this returns.
        """


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
