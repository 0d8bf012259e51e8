"""A split of a dataset in, batches out, decoded ahead of time by background threads.

The order of an epoch is a pure function of (seed, epoch). Without shuffling it is the order on disk. With shuffling, the row
groups are permuted, then joined into blocks of at least SHUFFLE_ROWS rows, and the rows of each block are permuted: every
row can share a batch with every other one over the epochs, while only a few blocks are in memory. Batches are cut from that
stream.

A thread decodes one row group at a time, directly into the memory of its batches (slab.py). The number of threads changes only
the speed, and an epoch can resume at any batch after decoding at most one block. Memory: the batches of the blocks that
threads + 1 row groups belong to (35 MB a block for 26 ids and 13 numbers a row), and a decoded row group per thread. A batch
belongs to the caller; its memory is reused once it is dropped (decode.py).

The loader of one rank among several yields that rank's part of every batch (`Share`), which may be empty in the last one;
blocks at the borders of its part are also decoded by its neighbour.

`Share` partitions the rows of an epoch among ranks. An epoch is a sequence of N rows in the order of the loader. Rank r of W
takes B_r samples of every batch of B, where B_r is B // W, plus one on the first B % W ranks. It owns one contiguous range,
which starts at N * (B_0 + ... + B_{r-1}) // B. So all ranks end together: every batch but the last is full on every rank, the
last may be short or empty on some, and there are ceil(N / B) batches for any W.

When a run resumes inside an epoch with another number of ranks, the remaining rows of all ranks are joined in rank order and
partitioned again. No row is dropped or repeated, and batches keep their numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from itertools import accumulate, pairwise
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.data.dataset import Dataset, RowGroup
from hotbed.data.draws import key_of, permutation
from hotbed.data.loader.decode import Buffers, ColumnSet, decode, fetch_ahead
from hotbed.data.loader.slab import Slab, SlabRange, slab_ranges
from hotbed.errors import ConfigError
from hotbed.files import is_remote
from hotbed.host.pool import num_threads
from hotbed.host.threads import run_ahead
from hotbed.telemetry.spans import recorded
from hotbed.types import Batch

SHUFFLE_ROWS = 1 << 17
PLAIN_ROWS = 1 << 15
Run = tuple[int, int]  # first row of the epoch, and the one after the last
RankHistory = Sequence[tuple[int, int]]  # (first batch, ranks) since the epoch began


class Share(NamedTuple):
    """The part of one rank among `world`."""

    rank: int = 0
    world: int = 1

    def size_of(self, batch_size: int) -> int:
        """Its samples of a full batch."""
        return batch_size // self.world + (self.rank < batch_size % self.world)

    def runs_from(self, num_rows: int, batch_size: int, history: RankHistory, batch: int) -> list[Run]:
        """Its rows of an epoch from a batch on; `history` ends with the current number of ranks."""
        first, world = history[-1]
        assert world == self.world, f"an epoch of {world} ranks, but there are {self.world}"
        left: list[Run] = [(0, num_rows)]
        for (begin, ranks), (end, _) in pairwise(history):
            shares = [Share(rank, ranks) for rank in range(ranks)]
            left = [run for share in shares for run in share._rest(left, batch_size, end - begin)]
        return self._rest(left, batch_size, batch - first)

    def _rest(self, runs: list[Run], batch_size: int, num_batches: int) -> list[Run]:
        """Its remaining rows of `runs` after `num_batches` batches."""
        total = sum(stop - start for start, stop in runs)
        before = sum(Share(rank, self.world).size_of(batch_size) for rank in range(self.rank))
        mine = self.size_of(batch_size)
        begin, end = (total * part // batch_size for part in (before, before + mine))
        return _cut(runs, min(begin + num_batches * mine, end), end)


def _cut(runs: list[Run], begin: int, end: int) -> list[Run]:
    """Rows begin .. end - 1 of the concatenated runs."""
    starts = [0, *accumulate(stop - start for start, stop in runs)]
    found = []
    for (start, stop), place in zip(runs, starts):
        first, last = start + max(begin - place, 0), min(stop, start + end - place)
        if first < last:
            found.append((first, last))
    return found


class ShuffleBlock(NamedTuple):
    """Row groups that are decoded and shuffled together."""

    number: int  # its place in the epoch
    first_row: int  # rows of the epoch before it
    groups: tuple[RowGroup, ...]

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)


class BlockRange(NamedTuple):
    """Some rows of a block."""

    block: ShuffleBlock
    begin: int
    end: int


ALL = Share()
_LEAST_THREADS, _MOST_THREADS = 2, 8
_REMOTE_AHEAD = 12  # row groups whose bytes are fetched before a thread decodes them: about 40 MB of Criteo


class Loader:
    """Batches of one split, epoch by epoch.

    `batch_size` and `num_rows` are those of all ranks together, `share` selects the part of this rank.
    `threads=0`: half the threads of torch, at least 2 and at most 8.
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
        threads: int = 0,
        pin_memory: bool = False,
        shuffle_rows: int = SHUFFLE_ROWS,
        share: Share = ALL,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("threads", threads or 1), ("shuffle_rows", shuffle_rows)):
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
        self._threads = threads or min(_MOST_THREADS, max(_LEAST_THREADS, num_threads() // 2))
        self._buffers = Buffers(pin_memory=pin_memory and torch.cuda.is_available())  # used again in the next epoch
        self._block_rows = shuffle_rows if shuffle else PLAIN_ROWS
        self.num_rows = sum(group.rows for group in self._groups)
        self._is_remote = is_remote(dataset.path)

    @property
    def described(self) -> str:
        """For the first line of a run."""
        return f"{self.num_rows:,} train samples"

    def __len__(self) -> int:
        """Batches in an epoch."""
        return (self.num_rows + self.batch_size - 1) // self.batch_size

    def size_of(self, batch: int) -> int:
        """Samples of a batch, of all ranks together."""
        return min(self.batch_size, self.num_rows - batch * self.batch_size)

    def epoch(self, epoch: int, start_batch: int = 0, history: RankHistory = ()) -> Generator[Batch, None, None]:
        """The batches of an epoch from `start_batch` on; the last one may be smaller. Close it to stop early.

        `history` is that of an epoch that was started with other numbers of ranks.
        """
        return self._read(ColumnSet(self._schema), epoch, start_batch, history)

    def id_batches(self, epoch: int, start_batch: int = 0, history: RankHistory = ()) -> Generator[Batch, None, None]:
        """The same batches with ids only: no dense columns, labels NaN. Nothing else is decoded."""
        return self._read(ColumnSet(self._schema, only_ids=True), epoch, start_batch, history)

    def _read(
        self, columns: ColumnSet, epoch: int, start_batch: int, history: RankHistory
    ) -> Generator[Batch, None, None]:
        if not 0 <= start_batch <= len(self):
            raise ConfigError(f"start_batch is {start_batch}; the epoch has {len(self)} batches.")
        history = history or [(0, self._share.world)]
        runs = self._share.runs_from(self.num_rows, self.batch_size, history, start_batch)
        pieces = [piece for run in runs for piece in _pieces(self._blocks(epoch), run)]
        return self._cut(epoch, pieces, len(self) - start_batch, columns)

    def _blocks(self, epoch: int) -> list[ShuffleBlock]:
        """Row groups in the order of the epoch, joined into blocks of enough rows."""
        groups = self._groups
        if self._shuffle:
            groups = tuple(groups[i] for i in permutation(key_of(self._seed, epoch, 0), len(groups)))
        blocks: list[ShuffleBlock] = []
        joined: list[RowGroup] = []
        first_row = rows = 0
        for group in groups:
            joined.append(group)
            rows += group.rows
            if rows >= self._block_rows or group is groups[-1]:
                blocks.append(ShuffleBlock(len(blocks), first_row, tuple(joined)))
                first_row, rows, joined = first_row + rows, 0, []
        return blocks

    def _cut(
        self, epoch: int, pieces: list[BlockRange], num_batches: int, columns: ColumnSet
    ) -> Generator[Batch, None, None]:
        """`num_batches` batches from the stream of pieces; empty ones at the end if it is too short."""
        buffers = self._buffers

        def read(job: _DecodeTask) -> _DecodeTask:
            begin, target = job.piece.begin, job.target
            place = job.order.get()[job.first : job.first + sum(group.rows for group in job.groups)]
            target.add_bags(decode(columns, job.groups, place, target.spots(columns, begin), buffers), begin)
            return job

        jobs = (
            _looked_ahead(self._jobs(epoch, pieces, columns, buffers))
            if self._is_remote
            else (self._jobs(epoch, pieces, columns, buffers))
        )
        with closing(run_ahead(recorded("decode", read), jobs, threads=self._threads, ahead=self._threads)) as stream:
            for job in stream:
                slabs = deque(job.target.finished() if job.is_last else ())
                del job  # the caller must hold the only reference to a batch
                while slabs:
                    for batch in slabs.popleft().batches(self._part):
                        num_batches -= 1
                        yield batch
                        del batch
            for _ in range(num_batches):
                yield from Slab(columns, 0, buffers).batches(self._part)

    def _jobs(
        self, epoch: int, pieces: list[BlockRange], columns: ColumnSet, buffers: Buffers
    ) -> Iterator[_DecodeTask]:
        """One task per row group; with bags, one per block, because their positions depend on the whole block."""
        counts = [piece.end - piece.begin for piece in pieces]
        for piece, target in zip(pieces, slab_ranges(columns, counts, self._part, buffers)):
            block = piece.block
            order = _BlockOrder(key_of(self._seed, epoch, 1 + block.number) if self._shuffle else None, block.rows)
            if columns.multi:
                yield _DecodeTask(piece, target, order, block.groups, 0, True)
                continue
            starts = [0, *accumulate(group.rows for group in block.groups)]
            read = [
                (start, group)
                for start, group in zip(starts, block.groups)
                if self._shuffle or (start < piece.end and start + group.rows > piece.begin)
            ]
            for number, (start, group) in enumerate(read, 1):
                yield _DecodeTask(piece, target, order, (group,), start, number == len(read))


class _BlockOrder:
    """The position of every row of a block, computed by the first thread that needs it."""

    def __init__(self, key: int | None, rows: int) -> None:
        self._key, self._rows = key, rows
        self._lock = Lock()
        self._place: NDArray[np.int64] | None = None

    def get(self) -> NDArray[np.int64]:
        with self._lock:
            if self._place is None:
                self._place = np.arange(self._rows) if self._key is None else permutation(self._key, self._rows)
            return self._place


class _DecodeTask(NamedTuple):
    """One task of a thread."""

    piece: BlockRange
    target: SlabRange  # of the piece
    order: _BlockOrder  # of the block
    groups: tuple[RowGroup, ...]
    first: int  # row of the block
    is_last: bool  # of the piece


def _looked_ahead(jobs: Iterator[_DecodeTask]) -> Iterator[_DecodeTask]:
    """The same tasks; the bytes of those that follow are on their way from the store."""
    waiting: deque[_DecodeTask] = deque()
    for job in jobs:
        for group in job.groups:
            fetch_ahead(group)
        waiting.append(job)
        if len(waiting) > _REMOTE_AHEAD:
            yield waiting.popleft()
    yield from waiting


def _pieces(blocks: list[ShuffleBlock], run: Run) -> list[BlockRange]:
    """The rows of a run, block by block."""
    found = []
    for block in blocks:
        begin, end = max(run[0] - block.first_row, 0), min(run[1] - block.first_row, block.rows)
        if begin < end:
            found.append(BlockRange(block, begin, end))
    return found
