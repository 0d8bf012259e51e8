"""One training batch through a translator: sweep, find, admit, give rows, mark uses; every change goes into its Entry."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import StoreError
from hotbed.ids import batch
from hotbed.ids.index import Entries, Ints, Tables
from hotbed.ids.journal import ADMITTED, EXPIRED, REJECTED, SEEN, CountChange, Entry, Memory, Uses
from hotbed.ids.rules import ALWAYS, CHANCE, COUNT, RuleArrays

_SWEEP_CHUNK = 1 << 20


class Moment(NamedTuple):
    """When a batch is translated."""

    batch: int
    now: int  # seconds
    seed: int
    quarantine: int
    trained: int  # the last batch that cannot be taken back


class Unknown(NamedTuple):
    """The ids of a batch that have no row, in order of first occurrence; [U] each."""

    tables: Tables
    ids: Ints
    counts: Ints

    def at(self, places: NDArray[Any]) -> Unknown:
        return Unknown(self.tables[places], self.ids[places], self.counts[places])


def learn(
    memory: Memory, rules: RuleArrays, entry: Entry, moment: Moment, tables: Tables, ids: Ints
) -> tuple[Ints, Ints]:
    """(rows [L], released rows); `entry` holds every change, also when an error ends this half way."""
    released = _sweep(memory, rules, entry, moment)
    rows = memory.index.find(tables, ids)
    num_unknown = int(np.count_nonzero(rows < 0))
    firsts, counts = np.empty(num_unknown, dtype=np.int64), np.empty(num_unknown, dtype=np.int64)
    counters = entry.after.counters.copy()
    count = batch.number_unknown(tables, ids, rows, rules.padded, rules.padding, counters[:, SEEN], firsts, counts)
    entry.after = entry.after._replace(counters=counters)
    unknown = Unknown(tables[firsts[:count]], ids[firsts[:count]], counts[:count])
    admitted = _admit(memory, rules, entry, moment, unknown)
    row_of_unknown = memory.shared[unknown.tables]
    row_of_unknown[admitted] = _give_rows(memory, entry, unknown, admitted)
    batch.answer(rows, row_of_unknown)
    _mark_uses(memory, rules, entry, moment, tables, rows)
    return rows, released


def _sweep(memory: Memory, rules: RuleArrays, entry: Entry, moment: Moment) -> Ints:
    """Let unused rows go where it is time; the rows that are free from now on."""
    due = rules.due(moment.batch)
    if not due.any():
        return np.empty(0, dtype=np.int64)
    entry.after, released = entry.after.release(moment.batch - moment.quarantine)
    oldest_kept = moment.batch - moment.quarantine
    assert not released.shape[0] or oldest_kept <= moment.trained, (
        f"rows that expired up to batch {oldest_kept} are to be used again, but batches after {moment.trained} may still be "
        f"taken back: at most {moment.quarantine} batches ahead"
    )
    rows = _unused(memory, rules, moment, due, entry.after.next_row)
    if rows.shape[0]:
        gone = Entries(*memory.index.owners_of(rows), rows)
        memory.index.remove(gone.tables, gone.ids)
        entry.gone = gone
        num_scores = rows.shape[0] if memory.columns.has_scores else 0
        nothing, no_scores = np.zeros(rows.shape[0], dtype=np.uint32), np.zeros(num_scores, dtype=np.uint32)
        entry.gone_uses = Uses(rows.astype(np.uint32), nothing, no_scores)
        entry.gone_uses.swap(memory.columns)
        quarantined = (*entry.after.quarantined, (moment.batch, rows))
        entry.after = entry.after._replace(quarantined=quarantined).counting(EXPIRED, gone.tables)
    return released


def _unused(memory: Memory, rules: RuleArrays, moment: Moment, due: NDArray[np.bool_], end: int) -> Ints:
    found = []
    for start in range(0, end, _SWEEP_CHUNK):
        out = np.empty(min(_SWEEP_CHUNK, end - start), dtype=np.int64)
        columns = memory.columns.last, memory.columns.scores
        limits = rules.expire, rules.span, rules.score, due
        count = batch.unused(memory.index.owners, start, *columns, *limits, moment.batch, moment.now, out)
        found.append(out[:count])
    return np.concatenate([np.empty(0, dtype=np.int64), *found])


def _admit(memory: Memory, rules: RuleArrays, entry: Entry, moment: Moment, unknown: Unknown) -> NDArray[np.bool_]:
    """Which unknown ids get a row, bool [U]; the others have been counted."""
    kinds = rules.admit[unknown.tables]
    admitted = np.asarray(kinds == ALWAYS)
    drawn = np.flatnonzero(kinds == CHANCE)
    if drawn.shape[0]:
        lucky = np.zeros(drawn.shape[0], dtype=np.bool_)
        some = unknown.at(drawn)
        batch.draw(some.tables, some.ids, some.counts, rules.chance, np.uint64(moment.seed), moment.batch, lucky)
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


def _give_rows(memory: Memory, entry: Entry, unknown: Unknown, admitted: NDArray[np.bool_]) -> Ints:
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


def _mark_uses(memory: Memory, rules: RuleArrays, entry: Entry, moment: Moment, tables: Tables, rows: Ints) -> None:
    columns = memory.columns
    if not columns.has_last:
        return
    most = rows.shape[0]
    uses = Uses(*(np.empty(size, dtype=np.uint32) for size in (most, most, most if columns.has_scores else 0)))
    when = moment.batch, moment.now
    changed = batch.touch(
        tables, rows, rules.expire, rules.span, memory.shared, *when, columns.last, columns.scores, *uses
    )
    entry.uses = Uses(*(column[:changed].copy() for column in uses))
