"""One training batch through a translator: sweep, find, admit, give rows, mark uses; all changes go into its journal entry."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import StoreError
from hotbed.ids import batch
from hotbed.ids.distinct import BatchIds, KnownRows
from hotbed.ids.index import Entries, IdIndex, Ints, Tables
from hotbed.ids.journal import ADMITTED, EXPIRED, REJECTED, SEEN, CountChange, JournalEntry, Memory, RowUses
from hotbed.ids.rules import ALWAYS, CHANCE, COUNT, RuleArrays

_SWEEP_CHUNK = 1 << 20
_NONE: Ints = np.empty(0, dtype=np.int64)


class BatchContext(NamedTuple):
    """Number and time of a batch, and the settings that its changes depend on."""

    batch: int
    now: int  # seconds
    seed: int
    quarantine: int
    trained: int  # the last batch that cannot be undone


class UnknownIds(NamedTuple):
    """The ids of a batch that have no row, in order of first occurrence; [U] each."""

    tables: Tables
    ids: Ints
    counts: Ints

    def at(self, places: NDArray[Any]) -> UnknownIds:
        return UnknownIds(self.tables[places], self.ids[places], self.counts[places])


def learn(
    memory: Memory,
    rules: RuleArrays,
    entry: JournalEntry,
    context: BatchContext,
    given: BatchIds,
    known: KnownRows | None,
) -> tuple[Ints, Ints]:
    """(rows [E], released rows); `entry` holds every change, also when an error ends this halfway.

    Rows are those of `known`, where it still holds. Ids that are known need nothing else, but that their use is marked.
    """
    tables, ids = given.tables, given.ids
    released = _sweep(memory, rules, entry, context)
    rows, places = find(memory.index, given, known)
    counters = entry.after.counters.copy()
    entry.after = entry.after._replace(counters=counters)
    if given.totals is None:
        counters[:, SEEN] += np.bincount(tables, given.counts, counters.shape[0]).astype(np.int64)
    else:
        counters[:, SEEN] += given.totals
    if places.shape[0]:
        if given.firsts is not None:
            places = places[np.argsort(given.firsts[places], kind="stable")]
        firsts, counts = (np.empty(places.shape[0], dtype=np.int64) for _ in range(2))
        times = _NONE if given.counts is None else given.counts
        limits = rules.padded, rules.padding
        count = batch.number_unknown(tables, ids, times, places, rows, *limits, counters[:, SEEN], firsts, counts)
        unknown = UnknownIds(tables[firsts[:count]], ids[firsts[:count]], counts[:count])
        admitted = _admit(memory, rules, entry, context, unknown)
        row_of_unknown = memory.shared[unknown.tables]
        row_of_unknown[admitted] = _give_rows(memory, entry, unknown, admitted)
        batch.answer(rows, places, row_of_unknown)
    _mark_uses(memory, rules, entry, context, tables, rows)
    return rows, released


def find(index: IdIndex, given: BatchIds, known: KnownRows | None) -> tuple[Ints, Ints]:
    """(rows [E], -1 where an id has none; the places of those)."""
    if known is None or not known.holds(index):
        rows = index.find(given.tables, given.ids)
        return rows, np.flatnonzero(rows < 0)
    rows = known.rows
    places = _NONE if known.is_whole else np.flatnonzero(rows < 0)
    if places.shape[0]:  # they may have come since
        rows[places] = index.find(given.tables[places], given.ids[places])
        places = places[rows[places] < 0]
    return rows, places


def _sweep(memory: Memory, rules: RuleArrays, entry: JournalEntry, context: BatchContext) -> Ints:
    """Expire unused rows of tables that are due; returns the rows that are free from now on."""
    due = rules.due(context.batch)
    if not due.any():
        return np.empty(0, dtype=np.int64)
    entry.after, released = entry.after.release(context.batch - context.quarantine)
    oldest_kept = context.batch - context.quarantine
    assert not released.shape[0] or oldest_kept <= context.trained, (
        f"rows that expired up to batch {oldest_kept} are to be reused, but batches after {context.trained} may still be "
        f"undone: at most {context.quarantine} batches ahead"
    )
    rows = _unused(memory, rules, context, due, entry.after.next_row)
    if rows.shape[0]:
        gone = Entries(*memory.index.owners_of(rows), rows)
        memory.index.remove(gone.tables, gone.ids)
        entry.gone = gone
        num_scores = rows.shape[0] if memory.columns.has_scores else 0
        nothing, no_scores = np.zeros(rows.shape[0], dtype=np.uint32), np.zeros(num_scores, dtype=np.uint32)
        entry.gone_uses = RowUses(rows.astype(np.uint32), nothing, no_scores)
        entry.gone_uses.swap(memory.columns)
        quarantined = (*entry.after.quarantined, (context.batch, rows))
        entry.after = entry.after._replace(quarantined=quarantined).counting(EXPIRED, gone.tables)
    return released


def _unused(memory: Memory, rules: RuleArrays, context: BatchContext, due: NDArray[np.bool_], end: int) -> Ints:
    found = []
    for start in range(0, end, _SWEEP_CHUNK):
        out = np.empty(min(_SWEEP_CHUNK, end - start), dtype=np.int64)
        columns = memory.columns.last, memory.columns.scores
        limits = rules.expire, rules.span, rules.score, due
        count = batch.unused(memory.index.owners, start, *columns, *limits, context.batch, context.now, out)
        found.append(out[:count])
    return np.concatenate([np.empty(0, dtype=np.int64), *found])


def _admit(
    memory: Memory, rules: RuleArrays, entry: JournalEntry, context: BatchContext, unknown: UnknownIds
) -> NDArray[np.bool_]:
    """Which unknown ids get a row, bool [U]; the others have been counted."""
    kinds = rules.admit[unknown.tables]
    admitted = np.asarray(kinds == ALWAYS)
    drawn = np.flatnonzero(kinds == CHANCE)
    if drawn.shape[0]:
        lucky = np.zeros(drawn.shape[0], dtype=np.bool_)
        some = unknown.at(drawn)
        batch.admit_by_chance(
            some.tables, some.ids, some.counts, rules.chance, np.uint64(context.seed), context.batch, lucky
        )
        admitted[drawn] = lucky
    counted = np.flatnonzero(kinds == COUNT)
    if counted.shape[0] and memory.waiting is not None:
        tables, ids, counts = unknown.at(counted)
        before = memory.waiting.get(tables, ids)
        admitted[counted] = before + counts >= rules.after[tables]
        after = np.where(admitted[counted], 0, before + counts)
        entry.counted = CountChange(tables, ids, before, after)
        memory.waiting.set(tables, ids, after)
    for table, sketch in memory.sketches.items():
        of_table = np.flatnonzero(unknown.tables == table)
        if of_table.shape[0]:
            totals, changes = sketch.add(unknown.ids[of_table], unknown.counts[of_table])
            entry.sketched.append((table, changes))
            admitted[of_table] = totals >= rules.after[table]
    return admitted


def _give_rows(memory: Memory, entry: JournalEntry, unknown: UnknownIds, admitted: NDArray[np.bool_]) -> Ints:
    """Rows for the admitted ids, in their order."""
    tables, ids = unknown.tables[admitted], unknown.ids[admitted]
    after, rows = entry.after.take(ids.shape[0])
    if after.next_row > memory.index.capacity:
        raise StoreError(
            f"dynamic ids: {ids.shape[0]:,} more ids need {after.next_row:,} rows, and a group has at most "
            f"{memory.index.capacity:,}. Let fewer ids have rows (Admit), let unused ones go (Expire), or give tables "
            "another dim, which puts them into another group."
        )
    if ids.shape[0]:
        memory.index.insert(tables, ids, rows)
        entry.new = Entries(tables, ids, rows)
        after = after.counting(ADMITTED, tables)
    if ids.shape[0] < admitted.shape[0]:
        after = after.counting(REJECTED, unknown.tables[~admitted], unknown.counts[~admitted])
    entry.after = after
    return rows


def _mark_uses(
    memory: Memory, rules: RuleArrays, entry: JournalEntry, context: BatchContext, tables: Tables, rows: Ints
) -> None:
    columns = memory.columns
    if not columns.has_last:
        return
    most = rows.shape[0]
    uses = RowUses(*(np.empty(size, dtype=np.uint32) for size in (most, most, most if columns.has_scores else 0)))
    when = context.batch, context.now
    changed = batch.touch(
        tables, rows, rules.expire, rules.span, memory.shared, *when, columns.last, columns.scores, *uses
    )
    entry.uses = RowUses(*(column[:changed].copy() for column in uses))
