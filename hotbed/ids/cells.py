"""One bucket of the index: 12 cells in one cache line, searched eight at a time.

A bucket is 64 bytes, seen as words uint64 [8] and as numbers uint32 [16]:

    words 0, 1 (low half)   12 tags of one byte: 0 is empty, else eight bits of the hash
    word 1 (high half)      how many ids are in a later bucket because this one was full when they came
    numbers 4..15           the row number of each cell

An id is searched for in its home bucket and, while the count of displaced ids is not zero, in the next. Removing an id updates
these counts, so a bucket that was full once is as good as new when it is empty: no tombstones, no rebuilding. The owner of a
row is in owners uint32 [R, 3]: id (low, high half) and the table's word, table + 1 with SHARED or GONE, 0 for a row that never
had an owner. The owner of a row is known after it is gone, until the row is given to another id: its record may be on its way.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hotbed.errors import HotbedError
from hotbed.host.intrinsics import trailing_zeros
from hotbed.host.jit import njit
from hotbed.host.splitmix import GOLDEN, mix

CELLS = 12
SHARD_BITS = 6
NUM_SHARDS = 1 << SHARD_BITS
SHARED = 1 << 31  # in the table's word of an owner: the row of all ids of the table that have no row of their own
GONE = 1 << 30  # the same: the last owner of a row that has none now
TABLE = (1 << 17) - 1  # the same: table + 1

ONE = np.uint64(1)
PASSED = np.uint64(1 << 32)
_LOW_BITS = np.uint64(0x0101010101010101)
_HIGH_BITS = np.uint64(0x8080808080808080)
_HIGH_BITS_4 = np.uint64(0x80808080)
_HALF = np.uint64(0xFFFFFFFF)


@njit(nogil=True, cache=True, inline="always")
def hash_of(table: Any, id_: Any) -> Any:
    """64 bits of (table, id): a bijection of the ids of one table."""
    return mix(np.uint64(id_) ^ ((np.uint64(table) + ONE) * GOLDEN))


@njit(nogil=True, cache=True, inline="always")
def shard_of(hash_: Any) -> Any:
    return hash_ >> np.uint64(64 - SHARD_BITS)


@njit(nogil=True, cache=True, inline="always")
def bucket_of(hash_: Any, num_buckets: Any) -> Any:
    """The home bucket inside a shard: in hash order, so that a shard twice as large is filled from front to back."""
    return (((hash_ >> np.uint64(24)) & _HALF) * np.uint64(num_buckets)) >> np.uint64(32)


@njit(nogil=True, cache=True, inline="always")
def tag_of(hash_: Any) -> Any:
    return max(hash_ & np.uint64(0xFF), ONE)


@njit(nogil=True, cache=True, inline="always")
def matches(words: Any, bucket: Any, tag: Any) -> Any:
    """(bits of cells 0..7, bits of cells 8..11) that may hold the tag: bit 8 c + 7. The lowest bit is always correct."""
    pattern = tag * _LOW_BITS
    x, y = words[bucket, 0] ^ pattern, words[bucket, 1] ^ pattern
    return (x - _LOW_BITS) & ~x & _HIGH_BITS, (y - _LOW_BITS) & ~y & _HIGH_BITS_4


@njit(nogil=True, cache=True, inline="always")
def lowest(near: Any, far: Any) -> Any:
    """The cell of the lowest bit of `matches`; there must be one."""
    if near:
        return trailing_zeros(near) >> np.uint64(3)
    return np.uint64(8) + (trailing_zeros(far) >> np.uint64(3))


@njit(nogil=True, cache=True, inline="always")
def without_lowest(near: Any, far: Any) -> Any:
    if near:
        return near & (near - ONE), far
    return near, far & (far - ONE)


@njit(nogil=True, cache=True, inline="always")
def has_passed(words: Any, bucket: Any) -> Any:
    """Whether an id was displaced from this bucket to the next."""
    return (words[bucket, 1] >> np.uint64(32)) != np.uint64(0)


@njit(nogil=True, cache=True, inline="always")
def owns(owners: Any, row: Any, table: Any, id_: Any) -> Any:
    """Whether the row belongs to (table, id); compares the whole id."""
    bits = np.uint64(id_)
    same = owners[row, 0] == np.uint32(bits & _HALF) and owners[row, 1] == np.uint32(bits >> np.uint64(32))
    return same and owners[row, 2] == np.uint32(table) + np.uint32(1)


@njit(nogil=True, cache=True, inline="always")
def is_live(word: Any) -> Any:
    """Whether a row with this table's word belongs to an id, or is shared."""
    return word != np.uint32(0) and not word & np.uint32(GONE)


@njit(nogil=True, cache=True, inline="always")
def id_of_owner(owners: Any, row: Any) -> Any:
    return np.int64(np.uint64(owners[row, 0]) | (np.uint64(owners[row, 1]) << np.uint64(32)))


@njit(nogil=True, cache=True, inline="always")
def put(words: Any, numbers: Any, first: Any, num_buckets: Any, hash_: Any, row: Any) -> None:
    """Insert a row; `first` is the shard's first bucket. The shard grows before all its cells are taken."""
    end = np.uint64(first) + np.uint64(num_buckets)
    bucket = np.uint64(first) + bucket_of(hash_, num_buckets)
    near, far = matches(words, bucket, np.uint64(0))
    passed = 0
    while not (near or far):  # ends: buckets are counted
        words[bucket, 1] += PASSED
        bucket += ONE
        if bucket == end:
            bucket = np.uint64(first)
        passed += 1
        if passed == num_buckets:
            raise HotbedError(
                "the index of dynamic ids is full, and did not grow; load the last checkpoint into new tables"
            )
        near, far = matches(words, bucket, np.uint64(0))
    cell = lowest(near, far)
    words[bucket, cell >> np.uint64(3)] |= tag_of(hash_) << ((cell & np.uint64(7)) << np.uint64(3))
    numbers[bucket, np.uint64(4) + cell] = np.uint32(row)
