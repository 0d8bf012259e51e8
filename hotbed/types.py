"""The arrows between rooms: what the loader hands to the trainer, the trainer to the tables, the tables to the model.

Rows on their way from tables to checkpoints and back are RowParts, of tables that a TableShape describes.

Shapes: B samples of a batch, F id features, N dense features, L values of all bags of one feature, D vector width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Jagged(NamedTuple):
    """The bags of one feature: sample b owns values[offsets[b]:offsets[b + 1]].

    sample   0        1    2
    values   [7 3 3]  []   [5]      ->  values  [7, 3, 3, 5]
                                        offsets [0, 3, 3, 4]
    """

    values: Tensor  # int64 [L]
    offsets: Tensor  # int64 [B + 1], starts at 0, never falls, ends at L
    weights: Tensor | None = None  # float32 [L]


@dataclass(frozen=True)
class Batch:
    """Samples as the loader yields them. `ids` holds the single-valued features in schema order, `bags` the others."""

    labels: Tensor  # float32 [B], 0 or 1
    dense: Tensor  # float32 [B, N]
    ids: Tensor  # int64 [B, F]
    bags: dict[str, Jagged] = field(default_factory=dict)
    targets: Tensor | None = None  # float32 [B, K], the labels of further tasks
    weights: Tensor | None = None  # float32 [B], how much each sample counts

    @property
    def size(self) -> int:
        """B, the number of samples."""
        return int(self.labels.shape[0])

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device (copies overlap compute when the source is pinned)."""
        if self.labels.device == torch.device(device):
            return self

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        bags = {
            name: Jagged(move(bag.values), move(bag.offsets), None if bag.weights is None else move(bag.weights))
            for name, bag in self.bags.items()
        }
        optional = (None if one is None else move(one) for one in (self.targets, self.weights))
        return Batch(move(self.labels), move(self.dense), move(self.ids), bags, *optional)


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
    owner: int | None = None  # the rank that has all rows; None: they are spread over the ranks
    columns: tuple[int, int] | None = None  # (first, end) of what this rank has of every row; None: all

    @property
    def span(self) -> tuple[int, int]:
        """(first, end) of the columns here."""
        return self.columns or (0, self.dim)

    @property
    def placement(self) -> tuple[int | None, tuple[int, int] | None]:
        """How this rank's part of the table is placed."""
        return self.owner, self.columns

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
    first_column: int = 0  # of the weights and their states, in rows of which ranks have slices

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
