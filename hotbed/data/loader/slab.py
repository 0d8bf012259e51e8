"""The memory of future batches: the rows of an epoch's stream are decoded into slabs.

The stream is cut into slabs with the same number of rows (the last may be shorter); a slab is one batch, or several small ones.
A block of row groups writes into the slabs that it overlaps, and two adjacent blocks may share one, so no row is copied again
to complete a batch. Only bags are joined, in a slab that several blocks fill, because their lengths are known last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotbed.data.loader.decode import Buffers, ColumnSet
from hotbed.data.loader.scatter import RowPlaces
from hotbed.types import Batch, Jagged

SLAB_ROWS = 1 << 14  # at least, if batches are smaller


class Slab:
    """Consecutive rows of the stream."""

    def __init__(self, columns: ColumnSet, rows: int, buffers: Buffers) -> None:
        self.rows = rows
        self._buffers = buffers
        self._labels = (
            torch.full((1,), torch.nan, dtype=torch.float32, device="cpu").expand(rows)
            if columns.only_ids
            else buffers.empty((rows,), torch.float32)
        )
        self._dense = buffers.empty((rows, len(columns.dense)), torch.float32)
        self._ids = buffers.empty((rows, len(columns.single)), torch.int64)
        self._num_dense, self._has_weight = columns.num_dense, columns.has_weight
        self._bags: dict[str, list[tuple[int, Jagged]]] = {name: [] for name in columns.multi}  # first row, bags

    @property
    def addresses(self) -> list[int]:
        return [self._labels.data_ptr(), self._dense.data_ptr(), self._ids.data_ptr()]

    def add_bags(self, row: int, bags: dict[str, Jagged], begin: int, end: int) -> None:
        """Add bags of rows begin .. end - 1 of a block at `row`; blocks come in any order."""
        for name, bag in bags.items():
            self._bags[name].append((row, slice_bags(bag, begin, end, self._buffers)))

    def batches(self, batch_rows: int) -> Iterator[Batch]:
        """The rows as batches of `batch_rows`, once all are filled."""
        bags = {}
        for name, parts in self._bags.items():
            bags[name] = self._joined([bag for _, bag in sorted(parts, key=lambda part: part[0])])
        if self.rows <= batch_rows:
            yield Batch(self._labels, self._numbers(0, self.rows), self._ids, bags, *self._targets(0, self.rows))
            return
        for begin in range(0, self.rows, batch_rows):
            end = min(begin + batch_rows, self.rows)
            some = {name: slice_bags(bag, begin, end, self._buffers) for name, bag in bags.items()}
            dense, targets = self._numbers(begin, end), self._targets(begin, end)
            yield Batch(self._labels[begin:end], dense, self._ids[begin:end], some, *targets)

    def _numbers(self, begin: int, end: int) -> Tensor:
        """The dense columns of some rows, without targets."""
        num = self._num_dense
        return self._dense[begin:end] if num == self._dense.shape[1] else self._dense[begin:end, :num].contiguous()

    def _targets(self, begin: int, end: int) -> tuple[Tensor | None, Tensor | None]:
        """Labels of further tasks, and weights, of some rows; None where the dataset has none."""
        found = self._dense[begin:end, self._num_dense :]
        weights = found[:, -1].contiguous() if self._has_weight else None
        targets = found[:, : found.shape[1] - self._has_weight].contiguous()
        return targets if targets.shape[1] else None, weights

    def _joined(self, parts: list[Jagged]) -> Jagged:
        if len(parts) == 1:
            return parts[0]
        values = self._buffers.empty((sum(len(part.values) for part in parts),), torch.int64)
        offsets = self._buffers.empty((self.rows + 1,), torch.int64)
        offsets[0] = value = row = 0
        for part in parts:
            offsets[row + 1 : row + len(part.offsets)] = part.offsets[1:] + value
            values[value : value + len(part.values)] = part.values
            row, value = row + len(part.offsets) - 1, value + len(part.values)
        return Jagged(values, offsets)


class SlabRange(NamedTuple):
    """The slabs that the needed rows of a block go to."""

    slabs: list[Slab]
    slab_rows: int  # of all but the last of the stream
    first: int  # the row of the first slab
    num_rows: int

    def spots(self, columns: ColumnSet, begin: int) -> RowPlaces:
        """The targets, for a block whose first needed row is `begin`."""
        addresses = np.asarray([slab.addresses for slab in self.slabs], dtype=np.int64)
        unwanted = np.empty(1 + len(columns.flat), dtype=np.int64)
        return RowPlaces(addresses, unwanted, self.slab_rows, self.first, begin, begin + self.num_rows)

    def add_bags(self, bags: dict[str, Jagged], begin: int) -> None:
        """Add the bags of a block whose first needed row is `begin`."""
        if not bags:
            return
        end = begin + self.num_rows
        at = begin - self.first  # row of the block where the first slab begins
        for slab in self.slabs:
            first = max(at, begin)
            slab.add_bags(first - at, bags, first, min(at + slab.rows, end))
            at += self.slab_rows

    def finished(self) -> list[Slab]:
        """The slabs that end within these rows."""
        end = self.first + self.num_rows
        return [slab for number, slab in enumerate(self.slabs) if number * self.slab_rows + slab.rows <= end]


def slab_ranges(columns: ColumnSet, counts: Sequence[int], batch_rows: int, buffers: Buffers) -> Iterator[SlabRange]:
    """The slabs for consecutive ranges of `counts` rows; memory is allocated on demand."""
    slab_rows = batch_rows * max(1, SLAB_ROWS // batch_rows)
    total = sum(counts)
    slabs: list[Slab] = []
    begin = 0
    for count in counts:
        first = begin // slab_rows * slab_rows
        slabs = slabs[-1:] if begin > first else []
        for start in range(first + slab_rows * len(slabs), begin + count, slab_rows):
            slabs.append(Slab(columns, min(slab_rows, total - start), buffers))
        yield SlabRange(list(slabs), slab_rows, begin - first, count)
        begin += count


def slice_bags(bag: Jagged, begin: int, end: int, buffers: Buffers) -> Jagged:
    """The bags of rows begin .. end - 1; values are not copied."""
    low, high = int(bag.offsets[begin]), int(bag.offsets[end])
    offsets = buffers.empty((end - begin + 1,), torch.int64)
    return Jagged(bag.values[low:high], torch.sub(bag.offsets[begin : end + 1], low, out=offsets))
