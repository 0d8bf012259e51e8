"""The compiled steps of translating one batch: number, admit by chance and answer unknown ids; mark uses; find unused rows.

Numbers among the rows of a batch: -1 is padding, -3 - e the unknown id with number e, in order of first occurrence.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hotbed.host.intrinsics import prefetch
from hotbed.host.jit import njit
from hotbed.host.splitmix import GOLDEN, mix
from hotbed.ids.cells import GONE, hash_of
from hotbed.ids.rules import SCORE, SCORE_UNIT, STEPS, TIME

UNKNOWN_FROM = -3
_AHEAD = 16
_MOST = 2**32 - 1


@njit(nogil=True, cache=True)
def number_unknown(
    tables: Any, ids: Any, times: Any, unknown: Any, rows: Any, padded: Any, padding: Any, seen: Any, firsts: Any,
    counts: Any,
) -> int:  # fmt: skip
    """Number the ids without a row, which stand at the places `unknown`; how many there are.

    firsts[e], counts[e]: a place of e, and how often it occurs. The id at place i occurs times[i] times there, or once where
    `times` is empty. Lookups of padding are not seen.
    """
    size = 16
    while size < 2 * unknown.shape[0]:
        size *= 2
    numbers = np.full(size, -1, dtype=np.int32)
    mask = np.uint64(size - 1)
    found = 0
    for u in range(unknown.shape[0]):
        i = unknown[u]
        table = tables[i]
        more = times[i] if times.shape[0] > 0 else 1
        if padded[table] and ids[i] == padding[table]:
            seen[table] -= more
            continue
        place = (hash_of(table, ids[i]) >> np.uint64(20)) & mask
        while True:  # ends: half of the places are free
            number = numbers[place]
            if number < 0:
                number = found
                numbers[place] = found
                firsts[found], counts[found] = i, 0
                found += 1
                break
            if ids[firsts[number]] == ids[i] and tables[firsts[number]] == table:
                break
            place = (place + np.uint64(1)) & mask
        counts[number] += more
        rows[i] = UNKNOWN_FROM - number
    return found


@njit(nogil=True, cache=True)
def admit_by_chance(tables: Any, ids: Any, counts: Any, chance: Any, seed: Any, batch: int, admitted: Any) -> None:
    """Admit each id with the chance of its table for each of its occurrences: 64 bits of (seed, table, id, batch)."""
    base = mix(np.uint64(seed) + np.uint64(batch) * GOLDEN)
    for e in range(ids.shape[0]):
        start = mix(hash_of(tables[e], ids[e]) ^ base)
        for occurrence in range(counts[e]):
            bits = mix(start + np.uint64(occurrence) * GOLDEN)
            if bits < chance[tables[e]] or chance[tables[e]] == np.uint64(0xFFFFFFFFFFFFFFFF):
                admitted[e] = True
                break


@njit(nogil=True, cache=True)
def answer(rows: Any, unknown: Any, row_of_unknown: Any) -> None:
    """Put the rows of the unknown ids in their places."""
    for i in unknown:
        if rows[i] <= UNKNOWN_FROM:
            rows[i] = row_of_unknown[UNKNOWN_FROM - rows[i]]


@njit(nogil=True, cache=True)
def answer_known(tables: Any, ids: Any, rows: Any, places: Any, padded: Any, padding: Any, otherwise: Any) -> None:
    """For ids that teach nothing, at the places without a row: otherwise[table], and -1 for padding."""
    for i in places:
        if not (padded[tables[i]] and ids[i] == padding[tables[i]]):
            rows[i] = otherwise[tables[i]]


@njit(nogil=True, cache=True)
def touch(
    tables: Any, rows: Any, expire: Any, span: Any, shared: Any, batch: int, now: int, last: Any, scores: Any,
    out_rows: Any, out_last: Any, out_scores: Any,
) -> int:  # fmt: skip
    """Mark the rows of tables with expiry as used; the previous marks go to `out`. Returns how many changed."""
    changed = 0
    has_scores = scores.shape[0] > 0
    for i in range(rows.shape[0]):
        if i + _AHEAD < rows.shape[0] and rows[i + _AHEAD] >= 0:
            prefetch(last, 0, rows[i + _AHEAD])
        table, row = tables[i], rows[i]
        kind = expire[table]
        if kind == 0 or row < 0 or row == shared[table]:
            continue
        stamp = now if kind == TIME else batch
        before = np.int64(last[0, row])
        if before == stamp:
            continue
        out_rows[changed], out_last[changed] = row, before
        last[0, row] = stamp
        if has_scores:
            out_scores[changed] = scores[row]
            if kind == SCORE:
                scores[row] = min(decayed(scores[row], before, batch, span[table]) + SCORE_UNIT, _MOST)
        changed += 1
    return changed


@njit(nogil=True, cache=True, inline="always")
def decayed(score: Any, last: Any, batch: Any, half_life: Any) -> Any:
    """The score at a batch: halved for every multiple of the half-life since the last use."""
    halvings = batch // half_life - last // half_life
    return np.int64(score) >> min(halvings, 63)


@njit(nogil=True, cache=True)
def unused(
    owners: Any,
    start: int,
    last: Any,
    scores: Any,
    expire: Any,
    span: Any,
    least: Any,
    due: Any,
    batch: int,
    now: int,
    out: Any,
) -> int:
    """Rows start..start + len(out) - 1 that expire by the rule of a table that is due. Returns how many."""
    count = 0
    for row in range(start, start + out.shape[0]):
        owner, used = owners[row, 2], np.int64(last[0, row])
        if owner == 0 or owner >= np.uint32(GONE) or used == 0:
            continue
        table = np.int64(owner) - 1
        if not due[table]:
            continue
        kind = expire[table]
        if kind == STEPS:
            goes = used < batch - span[table]
        elif kind == TIME:
            goes = now - used > span[table]
        else:
            goes = decayed(scores[row], used, batch, span[table]) < least[table]
        if goes:
            out[count] = row
            count += 1
    return count
