"""What must always hold in an IdIndex, checked cell by cell; for tests and for doubts, in a few seconds for 50 million ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hotbed.host.jit import njit
from hotbed.ids.cells import CELLS, GONE, NUM_SHARDS, bucket_of, hash_of, id_of_owner, shard_of, tag_of

if TYPE_CHECKING:
    from hotbed.ids.index import IdIndex

FAULTS = (
    "a cell has a tag that its id does not have",
    "a cell stands in a shard that its id does not belong to",
    "a cell names a row that belongs to no single id",
    "two cells name the same row",
    "an id stands behind a bucket that has an empty cell and no passers-by counted",
)


def check_integrity(index: IdIndex) -> None:
    """Raise AssertionError with the terms of the broken equation."""
    words, numbers, owners = index._arrays()
    seen = np.zeros(index.end, dtype=np.uint8)
    for shard in range(NUM_SHARDS):
        first, num_buckets = (int(number) for number in index._shards[shard])
        passed = np.zeros(num_buckets, dtype=np.int64)
        count, fault, bucket = _walk(words, numbers, owners, shard, first, num_buckets, seen, passed)
        assert fault < 0, f"{FAULTS[fault]}: shard {shard}, bucket {bucket}"
        assert count == index._counts[shard], (
            f"shard {shard}: {count} cells in use != {index._counts[shard]} ids counted"
        )
        assert count <= index._limits[shard], f"shard {shard}: {count} ids > {index._limits[shard]} allowed"
        written = (words[first : first + num_buckets, 1] >> np.uint64(32)).astype(np.int64)
        wrong = np.flatnonzero(written != passed)
        assert not wrong.shape[0], (
            f"shard {shard}, bucket {wrong[0]}: passers-by counted {written[wrong[0]]} != met {passed[wrong[0]]}"
        )
    in_use = owners[: index.end, 2]
    num_owned = int(np.count_nonzero((in_use != 0) & (in_use < GONE)))
    assert num_owned == int(seen.sum()) == len(index), (
        f"rows owned {num_owned} != cells {seen.sum()} != ids {len(index)}"
    )


@njit(nogil=True, cache=True)
def _walk(
    words: Any, numbers: Any, owners: Any, shard: int, first: int, num_buckets: int, seen: Any, passed: Any
) -> Any:
    """(cells in use, number of the fault or -1, its bucket); `seen` marks rows, `passed` counts passers-by."""
    count = 0
    for bucket in range(num_buckets):
        for cell in range(CELLS):
            tag = (words[first + bucket, cell >> 3] >> np.uint64(8 * (cell & 7))) & np.uint64(0xFF)
            if tag == np.uint64(0):
                continue
            count += 1
            row = np.int64(numbers[first + bucket, 4 + cell])
            if row >= seen.shape[0] or owners[row, 2] == 0 or owners[row, 2] >= np.uint32(GONE):
                return count, 2, bucket
            hash_ = hash_of(owners[row, 2] - np.uint32(1), id_of_owner(owners, row))
            if tag_of(hash_) != tag:
                return count, 0, bucket
            if shard_of(hash_) != np.uint64(shard):
                return count, 1, bucket
            if seen[row]:
                return count, 3, bucket
            seen[row] = 1
            home = np.int64(bucket_of(hash_, num_buckets))
            while home != bucket:  # ends: it passes every bucket of the shard in turn
                if (words[first + home, 1] >> np.uint64(32)) == np.uint64(0):
                    return count, 4, bucket
                passed[home] += 1
                home = (home + 1) % num_buckets
    return count, -1, 0
