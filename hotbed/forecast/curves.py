"""Miss-ratio curves: a trace -> the misses of caches of every size, in one pass.

For LRU without look-ahead the curve is exact at every size: a row that is used again is a hit in all caches that hold more
rows than were used since. Rows are counted batch by batch, as a cache sees them, so the curve equals the simulator to the row.
Other policies have no such order; they are simulated at a few sizes, on the same trace.

In a trace with more than MOST_ENTRIES entries only rows whose hashed key is below a threshold are tracked, and every distance
is divided by their share (SHARDS, Waldspurger et al. 2015). The error is estimated from four parts of the sample, each taken
alone: half of their spread.

Shapes: E entries (distinct keys of all batches), D distinct rows, P sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.data.dataset import HotRows, num_warm
from hotbed.forecast.optimum import optimum
from hotbed.forecast.replay import AUTOMATIC, LookAhead, Replay
from hotbed.forecast.trace import Trace, TraceSource
from hotbed.host.jit import njit
from hotbed.host.splitmix import mixed

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MOST_ENTRIES = 4_000_000  # that are tracked; 0.3 us each
_PARTS = 4
_POINTS = 48
_SIMULATED = 6  # sizes of a policy's curve
_FIRST = -1  # distance of a row that was not used before


class Curve(NamedTuple):
    """Miss ratios of caches of `sizes` slots."""

    name: str
    num_rows: int  # distinct rows that occur
    sizes: Floats  # [P], ascending
    misses: Floats  # [P], over the distinct keys of batches
    missed_lookups: Floats  # [P], over lookups
    sampled: float = 1.0  # share of the rows that were tracked
    error: float = 0.0  # of `misses`, from parts of the sample; 0 if all were tracked
    is_whole: bool = True  # else simulated, at these sizes alone

    def at(self, num_slots: float) -> float:
        """The miss ratio of a cache, interpolated between two sizes."""
        return float(np.interp(num_slots, self.sizes, self.misses))


class Curves(NamedTuple):
    """All curves of a trace."""

    num_rows: int  # of all tables
    all: list[Curve]
    tables: list[Curve]

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return {name: [_figures(one) for one in part] for name, part in (("curves", self.all), ("tables", self.tables))}


def curves_of(
    given: TraceSource,
    replay: Replay,
    policies: Sequence[str],
    ahead: LookAhead = AUTOMATIC,
    between: tuple[int, int] | None = None,
    *,
    tables: bool,
    warmup: float = 0.0,
) -> Curves:
    """LRU at every size, each policy and the optimum at a few; with `tables`, also every table alone."""
    trace = given.trace
    least, most = between or (trace.most_keys, replay.keys.shape[0])
    sizes = sizes_between(max(least, trace.most_keys), max(most, trace.most_keys), _SIMULATED)
    found = [lru_curve(trace, "lru, no look-ahead")]
    for policy in policies:
        warm = partial(_warm, given, policy, warmup)
        found.append(policy_points(replay, policy, sizes, ahead, warm))
    fewest = np.array([optimum(trace, size) for size in sizes]) / max(trace.keys.shape[0], 1)
    best = Curve("optimum", replay.keys.shape[0], np.asarray(sizes, dtype=np.float64), fewest, fewest, is_whole=False)
    alone = table_curves(trace, given.names, given.ends) if tables else []
    return Curves(trace.num_rows, [*found, best], alone)


def _warm(given: TraceSource, policy: str, warmup: float, size: int) -> HotRows | None:
    count = num_warm(size, policy, warmup)
    return given.hot(count) if count else None


def _figures(curve: Curve) -> dict[str, Any]:
    parts = ("sizes", "misses", "missed_lookups")
    return {**curve._asdict(), **{name: getattr(curve, name).tolist() for name in parts}}


def lru_curve(trace: Trace, name: str = "all", most_entries: int = MOST_ENTRIES) -> Curve:
    """The curve of LRU without look-ahead, batch by batch."""
    share = min(1.0, most_entries / max(trace.keys.shape[0], 1))
    hashed = None if share == 1.0 else _hashed(trace.keys)
    whole = _tracked(trace, hashed, 0.0, share)
    sizes = _sizes(whole.num_rows)
    misses, missed_lookups = _ratios(trace, whole, share, sizes)
    error = 0.0
    if hashed is not None:
        step = share / _PARTS
        parts = [_tracked(trace, hashed, part * step, (part + 1) * step) for part in range(_PARTS)]
        spread = np.std([_ratios(trace, part, step, sizes)[0] for part in parts], axis=0, ddof=1)
        error = float(spread.max() / np.sqrt(_PARTS))
    return Curve(name, round(whole.num_rows), sizes, misses, missed_lookups, share, error)


def table_curves(
    trace: Trace, names: Sequence[str], ends: Sequence[int], most_entries: int = MOST_ENTRIES
) -> list[Curve]:
    """Every table alone with a cache of its own; keys of table f are below ends[f]. Leaves out tables without lookups."""
    table_of = np.searchsorted(np.asarray(ends), trace.keys, side="right")
    batch_of = np.repeat(np.arange(trace.num_batches), np.diff(trace.offsets))
    order = np.argsort(table_of, kind="stable")
    borders = np.searchsorted(table_of[order], np.arange(len(names) + 1))
    curves = []
    for f, name in enumerate(names):
        mine = order[borders[f] : borders[f + 1]]
        if mine.shape[0]:
            offsets = np.concatenate([[0], np.cumsum(np.bincount(batch_of[mine], minlength=trace.num_batches))])
            part = Trace(trace.keys[mine], trace.counts[mine], offsets, trace.num_rows)
            curves.append(lru_curve(part, name, most_entries // len(names)))
    return curves


def policy_points(
    replay: Replay,
    policy: str,
    sizes: Sequence[int],
    ahead: LookAhead = AUTOMATIC,
    hot: Callable[[int], HotRows | None] | None = None,
) -> Curve:
    """The curve of a policy, simulated at these sizes; `hot` are the rows that a cache of some size starts with.

    Counted over the distinct rows of every batch, as for the optimum: over windows, which are longer in larger caches, it would
    be another share at every size.
    """
    found = [replay.run(size, policy, ahead, hot=None if hot is None else hot(size)).counts for size in sizes]
    ratios = np.array([miss_share(counts.misses, replay.trace.keys.shape[0]) for counts in found])
    lookups = np.array([miss_share(counts.missed_lookups, replay.trace.num_lookups) for counts in found])
    return Curve(policy, replay.keys.shape[0], np.asarray(sizes, dtype=np.float64), ratios, lookups, is_whole=False)


def miss_share(misses: int, whole: int) -> float:
    """Share of all requested rows; rows that come in before the first batch count as misses."""
    return min(1.0, misses / max(whole, 1))


def sizes_between(least: int, most: int, count: int) -> list[int]:
    """`count` sizes in geometric progression, including both ends."""
    return [int(size) for size in np.unique(np.rint(np.geomspace(max(least, 1), max(least, most, 1), count)))]


class _TrackedRows(NamedTuple):
    distances: Ints  # of the tracked entries, in tracked rows
    times: NDArray[np.int32]
    num_rows: float  # of all


def _tracked(trace: Trace, hashed: Floats | None, low: float, high: float) -> _TrackedRows:
    """Stack distances of the rows whose hash is in a range."""
    keys, times, offsets = trace.keys, trace.counts, trace.offsets
    if hashed is not None:
        wanted = (hashed >= low) & (hashed < high)
        ends = np.concatenate([[0], np.cumsum(wanted)])
        keys, times, offsets = keys[wanted], times[wanted], ends[offsets]
    distinct, place = np.unique(keys, return_inverse=True)
    distances = np.empty(keys.shape[0], dtype=np.int64)
    _distances(place.astype(np.int64), offsets, distinct.shape[0], distances)
    return _TrackedRows(distances, times, distinct.shape[0] / (high - low))


def _ratios(trace: Trace, found: _TrackedRows, share: float, sizes: Floats) -> tuple[Floats, Floats]:
    """Miss ratios at sizes. Missing or surplus entries of the sample are attributed to the hottest rows (SHARDS-adj)."""
    ratios = []
    for weights, total in ((np.ones_like(found.times), trace.keys.shape[0]), (found.times, trace.num_lookups)):
        again = found.distances >= 0
        most = int(found.distances.max(initial=0))
        hits = np.cumsum(np.bincount(found.distances[again], weights=weights[again], minlength=most + 1))
        hits = np.concatenate([[0.0], hits])  # [n]: of a cache that holds n tracked rows
        missing = share * total - float(weights.sum(dtype=np.int64))
        place = np.minimum(sizes * share, hits.shape[0] - 1)
        caught = np.interp(place, np.arange(hits.shape[0]), hits) + (missing if share < 1 else 0.0)
        ratios.append(np.clip(1 - caught / max(share * total, 1.0), 0.0, 1.0))
    return ratios[0], ratios[1]


def _sizes(num_rows: float) -> Floats:
    return np.unique(np.rint(np.geomspace(1, max(num_rows, 1), _POINTS)))


def _hashed(keys: Ints) -> Floats:
    """0 to 1, the same for the same key."""
    bits = mixed(keys.astype(np.uint64)) >> np.uint64(11)
    return np.asarray(bits.astype(np.float64) / float(1 << 53))


@njit(nogil=True, cache=True)
def _distances(rows: Any, offsets: Any, num_rows: int, distances: Any) -> None:
    """For every entry, the rows used since the last use of its row; ties within a batch in the order of keys, as for victims.

    Every row's last use is a mark on a line; a Fenwick tree counts the marks after one. A full line is compacted.
    """
    room = 2 * num_rows + 1
    tree = np.zeros(room + 1, dtype=np.int32)
    place = np.zeros(num_rows, dtype=np.int64)  # of a row's mark, from 1; 0: none
    row_at = np.full(room + 1, -1, dtype=np.int64)
    marks = end = 0
    for b in range(offsets.size - 1):
        for e in range(offsets[b], offsets[b + 1]):
            at = place[rows[e]]
            if at == 0:
                distances[e] = _FIRST
                continue
            before = 0
            while at > 0:
                before += tree[at]
                at -= at & -at
            distances[e] = marks - before
        if end + offsets[b + 1] - offsets[b] > room:  # compact the line
            end = 0
            for at in range(1, room + 1):
                if row_at[at] >= 0:
                    row = row_at[at]
                    row_at[at] = -1
                    end += 1
                    row_at[end], place[row] = row, end
            for at in range(1, room + 1):
                tree[at] = 1 if at <= end else 0
            for at in range(1, room + 1):
                up = at + (at & -at)
                if up <= room:
                    tree[up] += tree[at]
        for e in range(offsets[b], offsets[b + 1]):
            row = rows[e]
            at = place[row]
            if at > 0:
                row_at[at] = -1
                while at <= room:
                    tree[at] -= 1
                    at += at & -at
            else:
                marks += 1
            end += 1
            at = end
            place[row], row_at[end] = end, row
            while at <= room:
                tree[at] += 1
                at += at & -at
