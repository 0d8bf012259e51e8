"""Id frequencies -> bytes on the wires: what one rank sends in one step, before any rank is started.

The distinct ids of a batch follow from counts alone, because ids occur independently. Bytes follow from distinct ids by the
formulas of docs/scaling.md, which are those of the collectives in hotbed/parallel. All figures are expectations for the mean
rank. Samples are assumed to be shuffled: a log in the order of time has bursts, and so fewer distinct ids in a batch than the
forecast.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, lgamma
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.data.dataset import Dataset, count_rows
from hotbed.errors import ConfigError

Floats = NDArray[np.float64]
Pooled = Literal["auto", "always", "never"]
_COUNT = 8  # bytes of a number of rows
_PLAIN_ID = 8  # bytes of an id that travels as it is
_PLACE = 4  # bytes of a row's place in the union
_EXACT_RANKS, _STEP = 4096, 1.005  # Zipf: ids up to here one by one, then in ranges that grow by this factor


class Frequencies(NamedTuple):
    """How often the ids of one feature are looked up: `numbers[i]` ids take `shares[i]` of the lookups each."""

    shares: Floats  # [C]
    numbers: Floats  # [C]
    total: int | None = None  # lookups of an epoch, drawn without replacement; None: with replacement
    per_sample: float = 1.0  # lookups
    placement: str = "row"  # of its table

    def distinct(self, num_samples: float) -> float:
        """Expected distinct ids of `num_samples` samples."""
        lookups = num_samples * self.per_sample
        if self.total is None:
            absent = np.exp(lookups * np.log1p(-np.minimum(self.shares, 1 - 1e-16)))
        else:
            counts = np.minimum(np.rint(self.shares * self.total).astype(np.int64), self.total)
            absent = np.array([_absent(int(count), self.total, min(lookups, self.total)) for count in counts])
        return float(((1.0 - absent) * self.numbers).sum())

    def parts(self, world: int) -> float:
        """Expected ranks that own some of the ids of one bag; every bag is assumed to have the mean number of distinct ids.

        Neighbouring rows have different owners, so each rank owns an equal share of the rows. A table on one rank has one
        owner; so have columns, in slices that make up one vector.
        """
        if self.placement != "row":
            return 1.0
        rows, distinct = float(self.numbers.sum()), self.distinct(1)
        return distinct if rows <= world else world * (1.0 - _absent(rows / world, rows, distinct))


def counted(counts: NDArray[np.int64], per_sample: float = 1.0) -> Frequencies:
    """From how often each id occurs in an epoch."""
    total = int(counts.sum())
    values, numbers = np.unique(counts[counts > 0], return_counts=True)
    return Frequencies(values / max(total, 1), numbers.astype(np.float64), total, per_sample)


def zipf(num_rows: int, exponent: float) -> Frequencies:
    """The synthetic ids of `hotbed bench`: the r-th of `num_rows` has the weight of r to r + 1 under x ** -exponent."""
    if num_rows < 1 or exponent <= 0 or exponent == 1:
        raise ConfigError(f"zipf needs rows >= 1 and an exponent > 0 other than 1; given: {num_rows}, {exponent}")
    if num_rows == 1:
        return Frequencies(np.ones(1), np.ones(1))
    borders = np.arange(1, min(num_rows, _EXACT_RANKS) + 1, dtype=np.float64)
    if num_rows > _EXACT_RANKS:
        lots = int(np.ceil(np.log(num_rows / _EXACT_RANKS) / np.log(_STEP)))
        borders = np.append(borders, np.unique(np.rint(np.geomspace(_EXACT_RANKS, num_rows, lots + 1)))[1:])
    below = (borders ** (1 - exponent) - 1) / (num_rows ** (1 - exponent) - 1)
    numbers = np.diff(borders)
    return Frequencies(np.diff(below) / numbers, numbers)


def read_frequencies(dataset: Dataset) -> list[Frequencies]:
    """Frequencies of every table, from the counts files of the train split."""
    num_samples = dataset.schema.splits["train"].rows
    found = []
    for name, features in dataset.schema.tables.items():
        _, counts = count_rows(features[0], dataset.counts(name))
        # ids that are not in the vocabulary share a row
        is_bag = any(one.multi for one in features)
        unlisted = 0 if is_bag else max(0, num_samples * len(features) - int(counts.sum()))
        counts = np.append(counts, unlisted)
        found.append(counted(counts, float(counts.sum()) / max(num_samples, 1)))
    return found


class Cluster(NamedTuple):
    """Ranks as hotbed.parallel.mesh lays them out."""

    nodes: int
    local: int  # ranks of a node

    @property
    def size(self) -> int:
        return self.nodes * self.local


class RowDemand(NamedTuple):
    """Rows that a rank requests of all ranks, including itself."""

    keys: float
    vectors: float  # rows, or pooled parts of bags


class Group(NamedTuple):
    """Tables of one record width."""

    features: Sequence[Frequencies]
    dim: int
    key_bytes: int = 4  # 8 where there are 2**31 keys or more
    value_bytes: int = 4  # 2 with 16-bit traffic

    def distinct(self, num_samples: float) -> float:
        """Expected distinct keys of `num_samples` samples."""
        return sum(feature.distinct(num_samples) for feature in self.features)

    def demand(self, world: int, batch: float, pooled: Pooled) -> RowDemand:
        """For each feature distinct rows, or parts of its bags, whichever moves fewer bytes."""
        found = []
        for feature in self.features:
            distinct = feature.distinct(batch)
            copies = world if feature.placement == "column" else 1  # of a key
            rows = RowDemand(distinct * copies, distinct)
            parts = RowDemand(batch * feature.per_sample * copies, batch * feature.parts(world))
            saves = pooled == "auto" and self.bytes_of(parts) < self.bytes_of(rows)
            is_bags = feature.per_sample != 1
            found.append(parts if is_bags and (saves or pooled == "always") else rows)
        return RowDemand(sum(one.keys for one in found), sum(one.vectors for one in found))

    def bytes_of(self, demand: RowDemand) -> float:
        """Keys there, vectors back, gradients there."""
        return demand.keys * self.key_bytes + 2 * demand.vectors * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of the weights of a row, a pooled part, or its gradient, on a wire."""
        return self.dim * self.value_bytes


class SentBytes(NamedTuple):
    """Bytes that one rank sends to others."""

    in_node: float = 0.0
    across: float = 0.0

    @property
    def total(self) -> float:
        return self.in_node + self.across


class Exchanges(NamedTuple):
    """Bytes that one rank sends in one step, by what they are."""

    settling: SentBytes  # keys, and the counts that announce them
    rows: SentBytes
    gradients: SentBytes

    @property
    def total(self) -> SentBytes:
        return together(*self)


def together(*parts: SentBytes) -> SentBytes:
    """The sum of parts."""
    return SentBytes(sum(part.in_node for part in parts), sum(part.across for part in parts))


def sharded(
    cluster: Cluster,
    groups: Sequence[Group],
    batch: float,
    *,
    pooled: Pooled = "auto",
    once_per_node: bool = False,
) -> Exchanges:
    """Keys go to their owners; rows, or pooled parts of bags, come back; their gradients return.

    For rows every distinct key of a rank's batch goes once, for parts every lookup; `pooled` and `once_per_node` are those of
    ShardedTables. With the latter, a row crosses to a node once for all of its ranks.
    """
    settling, rows = [_numbers_of_routes(cluster, len(groups))], []
    is_merged = once_per_node and cluster.nodes > 1 < cluster.local
    for group in groups:
        demand = group.demand(cluster.size, batch, "never" if is_merged else pooled)
        keys, vectors = (
            all_to_all(cluster, num_bytes)
            for num_bytes in (demand.keys * group.key_bytes, demand.vectors * group.row_bytes)
        )
        if is_merged:
            crossing = group.distinct(batch * cluster.local) / cluster.local * _others(cluster.nodes)
            keys = keys._replace(across=crossing * group.key_bytes + _COUNT * (cluster.nodes - 1))
            vectors = vectors._replace(across=crossing * group.row_bytes)
        settling.append(keys)
        rows.append(vectors)
    return Exchanges(together(*settling), together(*rows), together(*rows))


def replicated(cluster: Cluster, groups: Sequence[Group], batch: float, *, new: float = 1.0) -> Exchanges:
    """Every row of the global batch is at every rank; sums of gradients go to its owner, and its new weights to everyone.

    `new` is the part of the global batch's rows that have no replica yet.
    """
    settling, rows, gradients = [_numbers_of_routes(cluster, len(groups))], [], []
    settling.append(all_gather(cluster, _COUNT * len(groups)))
    for group in groups:
        distinct = group.distinct(batch)
        owned = group.distinct(batch * cluster.size) / cluster.size  # of the union
        settling += [
            all_to_all(cluster, distinct * (group.key_bytes + _PLACE)),
            all_gather(cluster, owned * group.key_bytes),
        ]
        rows.append(all_gather(cluster, new * owned * group.row_bytes))
        gradients.append(all_to_all(cluster, distinct * group.row_bytes))
        gradients.append(all_gather(cluster, owned * group.row_bytes))
    return Exchanges(together(*settling), together(*rows), together(*gradients))


def plain(cluster: Cluster, groups: Sequence[Group], batch: float, *, pooled: bool = False) -> Exchanges:
    """An all-to-all of every lookup, without deduplication: ids of 8 bytes go, rows come, gradients go.

    With `pooled`, tables have whole owners, and one vector per sample and feature takes the place of its rows.
    """
    keys = rows = 0.0
    for group in groups:
        lookups = batch * sum(feature.per_sample for feature in group.features)
        keys += lookups * _PLAIN_ID
        rows += (batch * len(group.features) if pooled else lookups) * group.row_bytes
    return Exchanges(all_to_all(cluster, keys), all_to_all(cluster, rows), all_to_all(cluster, rows))


def dense(cluster: Cluster, num_weights: int, k: int = 1, parts: int = 1) -> SentBytes:
    """Dense weights, per step of a merge every k steps; `parts` is 3 if both moments are merged, 2 for one."""
    return SentBytes(*(value / k for value in all_reduce(cluster, 4.0 * num_weights * parts)))


def all_to_all(cluster: Cluster, num_bytes: float) -> SentBytes:
    """Bytes for all ranks in equal parts, one of them the rank itself; two hops where the mesh has two axes."""
    return SentBytes(num_bytes * _others(cluster.local), num_bytes * _others(cluster.nodes))


def all_gather(cluster: Cluster, num_bytes: float) -> SentBytes:
    """Bytes of each rank to all others: across nodes between peers first, then in the node."""
    return SentBytes((cluster.local - 1) * cluster.nodes * num_bytes, (cluster.nodes - 1) * num_bytes)


def all_reduce(cluster: Cluster, num_bytes: float) -> SentBytes:
    """Reduce-scatter in the node, a ring across nodes with a part each, all-gather in the node."""
    return SentBytes(2 * num_bytes * _others(cluster.local), 2 * num_bytes / cluster.local * _others(cluster.nodes))


def _others(size: int) -> float:
    return (size - 1) / size


def _numbers_of_routes(cluster: Cluster, num_groups: int) -> SentBytes:
    """Each rank sends each other the numbers of keys and vectors of each group that it requests, and whether it continues."""
    return all_to_all(cluster, _COUNT * (2 * num_groups + 1) * cluster.size)


def _absent(count: float, total: float, drawn: float) -> float:
    """The probability that none of `count` among `total` lookups is drawn, without replacement."""
    left = total - drawn
    log = lgamma(left + 1) - lgamma(left - count + 1) if count <= left else -inf
    return float(np.exp(log + lgamma(total - count + 1) - lgamma(total + 1)))
