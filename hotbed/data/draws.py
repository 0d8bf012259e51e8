"""Counter-based random numbers: a 64-bit word from (key, counter), without state.

In: keys made of a few integers (seed, epoch, column ...). Out: well-mixed 64-bit words and permutations. They are the same on
every machine, in any order, for any number of threads, because only integer arithmetic is used. Not for cryptography.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hotbed.host.jit import njit
from hotbed.host.splitmix import GOLDEN, mix

_MASK = (1 << 64) - 1
_PER_BUCKET = 1  # word on average, at most


def key_of(*parts: int) -> int:
    """One 64-bit key out of several integers; their order matters."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = _mixed(key + np.uint64((int(GOLDEN) + part) & _MASK))
    return int(key[0])


def words(key: int, count: int) -> NDArray[np.uint64]:
    """The first `count` words of a key's stream."""
    return _mixed(np.arange(count, dtype=np.uint64) * GOLDEN + np.uint64(key))


def permutation(key: int, count: int) -> NDArray[np.int64]:
    """A permutation of range(count) that depends only on the key: numbers sorted by their words."""
    return _sorted_by_word(np.uint64(key), count)


@njit(nogil=True, cache=True)
def _sorted_by_word(key: np.uint64, count: int) -> NDArray[np.int64]:
    """The order of words(key, count), found in O(count): words are spread evenly, so their first bits nearly sort them."""
    bits = 0
    while count >> bits > _PER_BUCKET:  # ends: the count is halved every time
        bits += 1
    ends = np.zeros((1 << bits) + 1, dtype=np.int64)
    for i in range(count):
        ends[_bucket(_word(key, i), bits) + 1] += 1
    for end in range(1, len(ends)):
        ends[end] += ends[end - 1]
    order = np.empty(count, dtype=np.int64)
    sorted_words = np.empty(count, dtype=np.uint64)
    for i in range(count):
        word = _word(key, i)
        bucket = _bucket(word, bits)
        sorted_words[ends[bucket]], order[ends[bucket]] = word, i
        ends[bucket] += 1
    for i in range(1, count):  # nothing leaves its bucket
        word, number, at = sorted_words[i], order[i], i
        while at > 0 and sorted_words[at - 1] > word:
            sorted_words[at], order[at] = sorted_words[at - 1], order[at - 1]
            at -= 1
        sorted_words[at], order[at] = word, number
    return order


@njit(nogil=True, cache=True)
def _word(key: np.uint64, i: int) -> np.uint64:
    return mix(np.uint64(i) * GOLDEN + key)


@njit(nogil=True, cache=True)
def _bucket(word: np.uint64, bits: int) -> np.int64:
    return np.int64(word >> np.uint64(64 - bits)) if bits else np.int64(0)


@njit(nogil=True, cache=True)
def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    out = np.empty_like(values)
    for i in range(len(values)):
        out[i] = mix(values[i])
    return out
