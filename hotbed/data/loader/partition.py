"""The rows of an epoch dealt to ranks: batch size, number of ranks and their history in, runs of rows of every rank out.

An epoch is a line of N rows in the order of the loader. Rank r of W takes B_r samples of every batch of B, where B_r is
B // W and one more on the first B % W ranks, and owns one stretch of the line, from N * (B_0 + ... + B_{r-1}) // B on. So
stretches are as long as they must be for all ranks to end together: every batch but the last is full on every rank, the last
may be short or empty on some, and there are ceil(N / B) batches whatever W is.

When a run goes on with another number of ranks inside an epoch, what each rank had left is joined in the order of the ranks and
dealt again. No row is dropped or comes twice, and batches keep their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

Run = tuple[int, int]  # first row of the epoch, and the one after the last
Dealt = Sequence[tuple[int, int]]  # (first batch, ranks) since the epoch began


class Share(NamedTuple):
    """One rank among `world`."""

    rank: int = 0
    world: int = 1

    def size_of(self, batch_size: int) -> int:
        """Its samples of a full batch."""
        return batch_size // self.world + (self.rank < batch_size % self.world)

    def runs_from(self, num_rows: int, batch_size: int, dealt: Dealt, batch: int) -> list[Run]:
        """Its rows of an epoch from a batch on; `dealt` ends with the ranks there are now."""
        first, world = dealt[-1]
        assert world == self.world, f"dealt to {world} ranks, but there are {self.world}"
        left: list[Run] = [(0, num_rows)]
        for (begin, ranks), (end, _) in pairwise(dealt):
            shares = [Share(rank, ranks) for rank in range(ranks)]
            left = [run for share in shares for run in share._rest(left, batch_size, end - begin)]
        return self._rest(left, batch_size, batch - first)

    def _rest(self, runs: list[Run], batch_size: int, num_batches: int) -> list[Run]:
        """What it has of these rows after so many batches."""
        total = sum(stop - start for start, stop in runs)
        before = sum(Share(rank, self.world).size_of(batch_size) for rank in range(self.rank))
        mine = self.size_of(batch_size)
        begin, end = (total * part // batch_size for part in (before, before + mine))
        return _cut(runs, min(begin + num_batches * mine, end), end)


def _cut(runs: list[Run], begin: int, end: int) -> list[Run]:
    """Rows begin .. end - 1 of the runs, one after the other."""
    starts = [0, *accumulate(stop - start for start, stop in runs)]
    found = []
    for (start, stop), place in zip(runs, starts):
        first, last = start + max(begin - place, 0), min(stop, start + end - place)
        if first < last:
            found.append((first, last))
    return found
