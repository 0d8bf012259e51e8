"""A batch's inputs to one group of tables, described by a row of numbers that kernels read from device memory.

A recording replays the same launches for every batch. Whatever differs from batch to batch is therefore not an argument of a
launch but a number here: how many samples and lookups there are, whether rows learn, and where each feature's ids are.

    row    [ num_lookups, num_samples, learns, map, 0 ... | span | span | ... ]    8 numbers, then 8 for each feature of a group
    span   [ values, step, first, length, offsets, bag, weights, 0 ]

    map       address of the keys (int64) of numbered ids, where ids are dynamic; 0 where keys are made of ids
    values    address of the feature's ids (int64; with a map the numbers of ids, int32), `step` apart, `length` of them
    first     position of its first lookup, where lookups stand feature after feature
    offsets   address of where its bags begin (int64 [B + 1]); 0 where every bag has `bag` values
    weights   address of one float32 for each value; 0 without

Lookups stand as `tables/inputs.py` lays them out launch by launch: of single ids lookup i * P + p is feature p of sample i; of
bags they stand feature after feature, sample after sample. Buffers are as long as a recording's capacity. Lookups beyond
`num_lookups` are padding: their key is the largest number of its type, so they sort last and move no other lookup, and kernels
stop before them.

Shapes: B samples, P features (spans), L lookups, N = P * B bags.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.ops.keys.addresses import Addresses

HEADER = SPAN = 8  # numbers
NUM_LOOKUPS, NUM_SAMPLES, LEARNS, MAP = range(4)  # places in the header
VALUES, STEP, FIRST, LENGTH, OFFSETS, BAG, WEIGHTS = range(7)  # places in a span
BATCHES = 512  # whose descriptions are kept


class Capacity(NamedTuple):
    """The capacity of the buffers of a recording."""

    num_lookups: int
    num_samples: int

    def holds(self, need: Capacity) -> bool:
        return need.num_lookups <= self.num_lookups and need.num_samples <= self.num_samples


class Description(NamedTuple):
    """A batch, for one group."""

    words: NDArray[np.int64]  # [8 + 8 P]
    num_lookups: int  # L
    num_samples: int  # B
    kept: Any = None  # tensors whose addresses are among the words

    @property
    def need(self) -> Capacity:
        """What it takes to hold it."""
        return Capacity(self.num_lookups, self.num_samples)


class InputLayout(NamedTuple):
    """What the descriptions of one group have in common."""

    addresses: Addresses  # of every span
    is_bags: bool  # else one id per feature and sample
    columns: tuple[int, ...] = ()  # of bags: the place of each span among the vectors of a sample
    is_mean: tuple[bool, ...] = ()  # of bags: whether their vectors are averaged
    is_scaled: bool = False  # whether lookups have weights, or some are averaged
    is_mapped: bool = False  # whether values are numbers of ids, whose keys are in a map

    @property
    def num_spans(self) -> int:
        return int(self.addresses.base.shape[0])

    @property
    def key_type(self) -> torch.dtype:
        """32 bits where all keys fit, and one number is left for padding."""
        return torch.int32 if int((self.addresses.base + self.addresses.rows).max(initial=0)) < 2**31 else torch.int64


def bucket(count: int) -> int:
    """The next of 1, 1.25, 1.5 and 1.75 times a power of two: a capacity for counts about this large."""
    if count <= 4:
        return count
    quarter = 1 << (count.bit_length() - 3)
    return -(-count // quarter) * quarter


def describe(spans: list[list[int]], num_lookups: int, num_samples: int, learns: bool, kept: Any = None) -> Description:
    """A row of numbers; each span is given as its eight."""
    words = np.array([[num_lookups, num_samples, int(learns), 0, 0, 0, 0, 0], *spans], dtype=np.int64).reshape(-1)
    return Description(words, num_lookups, num_samples, kept)


def describe_ids(ids: Tensor, learns: bool = True) -> Description:
    """A batch of one feature with one id for each sample, int64 [B]."""
    size = int(ids.shape[0])
    return describe([[ids.data_ptr(), int(ids.stride(0)), 0, size, 0, 1, 0, 0]], size, size, learns, kept=ids)
