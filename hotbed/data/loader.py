"""A split of a dataset in, batches out, decoded ahead of need by background threads.

The order of an epoch is a pure function of (seed, epoch). Without shuffling it is the order on disk. With shuffling, the row
groups are permuted, then joined into blocks of at least SHUFFLE_ROWS rows, and the rows of each block are permuted: every
row can meet every other one over the epochs, while only a few blocks are in memory. Batches are cut from that stream.

A block is what a thread decodes at once, so the number of threads changes nothing but the speed, and an epoch can resume at
any batch after decoding at most one block for it. Memory: threads + 2 blocks (35 MB each for 26 ids and 13 numbers a row).

A loader of one rank among several yields that rank's part of every batch (deal.py), which may be empty in the last one; blocks
at the borders of its part are decoded by its neighbour too.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch

from hotbed.data.ahead import run_ahead
from hotbed.data.dataset import Dataset, RowGroup
from hotbed.data.deal import Dealt, Run, Share
from hotbed.data.decode import decode, join_batches, pin, slice_batch
from hotbed.data.draws import key_of, permutation
from hotbed.errors import ConfigError
from hotbed.types import Batch

SHUFFLE_ROWS = 1 << 17
PLAIN_ROWS = 1 << 15


class Block(NamedTuple):
    """Row groups that are decoded and shuffled together."""

    number: int  # its place in the epoch
    first_row: int  # rows of the epoch before it
    groups: tuple[RowGroup, ...]

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)


class Piece(NamedTuple):
    """Some rows of a block."""

    block: Block
    begin: int
    end: int


ALL = Share()


class Loader:
    """Batches of one split, epoch by epoch.

    `batch_size` and `num_rows` are those of all ranks together, `share` says which of them this loader reads for.
    `pin_memory` puts batches in page-locked memory where a CUDA device is present, so that copies to it can overlap.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        threads: int = 2,
        pin_memory: bool = False,
        shuffle_rows: int = SHUFFLE_ROWS,
        share: Share = ALL,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("threads", threads), ("shuffle_rows", shuffle_rows)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; a loader needs at least 1.")
        if batch_size < share.world:
            raise ConfigError(
                f"batch_size is {batch_size}, the samples of a batch of all {share.world} ranks; each needs at least 1."
            )
        self.batch_size = batch_size  # of all ranks together
        self._share, self._part = share, share.size_of(batch_size)
        self.dataset = dataset
        self._schema = dataset.schema
        self._groups = dataset.split(split)
        self._shuffle = shuffle
        self._seed = seed
        self._threads = threads
        self._pin_memory = pin_memory and torch.cuda.is_available()
        self._block_rows = shuffle_rows if shuffle else PLAIN_ROWS
        self.num_rows = sum(group.rows for group in self._groups)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return (self.num_rows + self.batch_size - 1) // self.batch_size

    def size_of(self, batch: int) -> int:
        """Samples of a batch, of all ranks together."""
        return min(self.batch_size, self.num_rows - batch * self.batch_size)

    def epoch(self, epoch: int, start_batch: int = 0, dealt: Dealt = ()) -> Generator[Batch, None, None]:
        """The batches of an epoch from `start_batch` on; the last one may be smaller. Close it to stop early.

        `dealt` is the history of an epoch that other numbers of ranks have begun.
        """
        if not 0 <= start_batch <= len(self):
            raise ConfigError(f"start_batch is {start_batch}; the epoch has {len(self)} batches.")
        history = dealt or [(0, self._share.world)]
        runs = self._share.runs_from(self.num_rows, self.batch_size, history, start_batch)
        pieces = [piece for run in runs for piece in _pieces(self._blocks(epoch), run)]
        return self._cut(epoch, pieces, len(self) - start_batch)

    def _blocks(self, epoch: int) -> list[Block]:
        """Row groups in the order of the epoch, joined until each block has enough rows."""
        groups = self._groups
        if self._shuffle:
            groups = tuple(groups[i] for i in permutation(key_of(self._seed, epoch, 0), len(groups)))
        blocks: list[Block] = []
        joined: list[RowGroup] = []
        first_row = rows = 0
        for group in groups:
            joined.append(group)
            rows += group.rows
            if rows >= self._block_rows or group is groups[-1]:
                blocks.append(Block(len(blocks), first_row, tuple(joined)))
                first_row, rows, joined = first_row + rows, 0, []
        return blocks

    def _cut(self, epoch: int, pieces: list[Piece], num_batches: int) -> Generator[Batch, None, None]:
        """So many batches out of the stream of pieces; where it ends early, they are empty."""

        def read(piece: Piece) -> Batch:
            block = piece.block
            place = np.arange(block.rows)
            if self._shuffle:
                place = permutation(key_of(self._seed, epoch, 1 + block.number), block.rows)
            whole = decode(self._schema, block.groups, place, self._pin_memory)
            return slice_batch(whole, piece.begin, piece.end)

        rest: Batch | None = None
        with closing(run_ahead(read, pieces, threads=self._threads, ahead=self._threads)) as stream:
            for rows in stream:
                begin = 0
                if rest is not None:
                    begin = min(self._part - rest.size, rows.size)
                    rest = join_batches(rest, slice_batch(rows, 0, begin))
                    if rest.size < self._part:
                        continue
                    yield self._finish(rest)
                    num_batches, rest = num_batches - 1, None
                while begin + self._part <= rows.size:
                    yield self._finish(slice_batch(rows, begin, begin + self._part))
                    begin, num_batches = begin + self._part, num_batches - 1
                if begin < rows.size:
                    rest = slice_batch(rows, begin, rows.size)
        if rest is not None:
            yield self._finish(rest)
            num_batches -= 1
        for _ in range(num_batches):
            yield decode(self._schema, (), np.arange(0), self._pin_memory)

    def _finish(self, batch: Batch) -> Batch:
        return pin(batch) if self._pin_memory else batch


def _pieces(blocks: list[Block], run: Run) -> list[Piece]:
    """The rows of a run, block by block."""
    found = []
    for block in blocks:
        begin, end = max(run[0] - block.first_row, 0), min(run[1] - block.first_row, block.rows)
        if begin < end:
            found.append(Piece(block, begin, end))
    return found
