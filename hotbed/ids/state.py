"""The state of a translator as plain arrays, for checkpoints, and back.

Columns of rows (rows_state): row (the key), table, id, shared (1: of no single id), and last_use and score where a rule asks.
The rest (rest_state): batch, first_row, next_row, shared_rows, expire_kinds [T], counters [T, 4], quarantined_rows and
quarantined_at, waiting_tables, waiting_ids and waiting_counts, and sketch_T for each table with one. All other rows are free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import StoreError
from hotbed.ids.index import IdIndex, Ints
from hotbed.ids.journal import ADMITTED, EXPIRED, Ledger, Memory
from hotbed.ids.rules import COUNT, NEVER, SCORE, SCORE_UNIT, TIME, RuleArrays

Arrays = Mapping[str, NDArray[Any]]


def save_rows(memory: Memory, rows: Ints, first_row: int) -> dict[str, NDArray[Any]]:
    """Columns of live rows."""
    live = memory.index.is_live(rows)
    assert live.all(), f"{np.count_nonzero(~live)} of {rows.shape[0]} rows have no owner: ask is_live first"
    tables, ids = memory.index.owners_of(rows)
    columns: dict[str, NDArray[Any]] = {"row": rows + first_row, "table": tables, "id": ids}
    columns["shared"] = memory.index.is_shared(rows).astype(np.uint8)
    if memory.columns.has_last:
        columns["last_use"] = memory.columns.last[0, rows]
    if memory.columns.has_scores:
        columns["score"] = memory.columns.scores[rows]
    return columns


def save_rest(memory: Memory, ledger: Ledger, expire: NDArray[np.uint8], first_row: int) -> dict[str, NDArray[Any]]:
    """Everything except the rows, as copies."""
    empty = np.empty(0, dtype=np.int64)
    at = [np.full(rows.shape[0], batch, dtype=np.int64) for batch, rows in ledger.quarantined]
    rest: dict[str, NDArray[Any]] = {
        "batch": np.array([ledger.batch], dtype=np.int64),
        "first_row": np.array([first_row], dtype=np.int64),
        "next_row": np.array([ledger.next_row], dtype=np.int64),
        "shared_rows": memory.shared.copy(),
        "expire_kinds": expire.copy(),
        "counters": ledger.counters.copy(),
        "quarantined_rows": np.concatenate([empty, *(rows for _, rows in ledger.quarantined)]),
        "quarantined_at": np.concatenate([empty, *at]),
        "waiting_tables": np.empty(0, dtype=np.uint16),
        "waiting_ids": empty,
        "waiting_counts": empty,
    }
    if memory.waiting is not None:
        entries, counts = memory.waiting.items()
        rest |= {"waiting_tables": entries.tables, "waiting_ids": entries.ids, "waiting_counts": counts}
    return rest | {f"sketch_{table}": sketch.cells.copy() for table, sketch in memory.sketches.items()}


class SavedState:
    """A saved rest, the numbers of the saved tables here, and what did not carry over, in words."""

    def __init__(self, rest: Arrays, table_of: Sequence[int] | None, rules: RuleArrays, now: int) -> None:
        self.rest, self.now = rest, now
        self.lost: list[str] = []
        num_saved, num_tables = rest["counters"].shape[0], rules.admit.shape[0]
        self.table_of = np.array(range(num_saved) if table_of is None else table_of, dtype=np.int64)
        if self.table_of.shape[0] != num_saved or np.any(self.table_of >= num_tables):
            raise StoreError(
                f"dynamic ids: the saved state has {num_saved} tables and this group {num_tables}; "
                f"table_of must name one of these, or -1, for each of those, not {self.table_of.tolist()}"
            )
        kinds = self.column("expire_kinds", num_tables, NEVER)
        by_time = (kinds == TIME) == (rules.expire == TIME)
        self.keeps_uses = (kinds != NEVER) & by_time  # [T]; steps and scores both count batches
        self.keeps_scores = (kinds == SCORE) & (rules.expire == SCORE)
        changed = np.flatnonzero((rules.expire != NEVER) & (kinds != rules.expire) & (kinds != NEVER))
        self.lost += [f"table {table}: expires by another rule, last uses or scores start again" for table in changed]

    def column(self, name: str, num_tables: int, fill: int) -> NDArray[np.int64]:
        """A saved array [tables] in the order of the tables here."""
        saved = self.rest[name]
        out = np.full((num_tables, *saved.shape[1:]), fill, dtype=np.int64)
        kept = self.table_of >= 0
        out[self.table_of[kept]] = saved[kept]
        return out


def load(memory: Memory, rules: RuleArrays, parts: Iterable[Arrays], saved: SavedState) -> Ledger:
    """Fill an empty memory; returns the ledger that goes with it."""
    rest, num_tables = saved.rest, rules.admit.shape[0]
    batch, next_row = int(rest["batch"][0]), int(rest["next_row"][0])
    if next_row > memory.index.capacity:
        raise StoreError(
            f"dynamic ids: the saved state has {next_row:,} rows, and this group at most {memory.index.capacity:,}. "
            "Give it a larger capacity."
        )
    dropped = sum(_load_rows(memory, rules, part, saved) for part in parts)
    if dropped:
        saved.lost.append(f"{dropped:,} rows of tables that are gone")
    _load_waiting(memory, rules, saved)
    _load_sketches(memory, saved)
    at = rest["quarantined_at"]
    quarantined = tuple((int(batch), rest["quarantined_rows"][at == batch]) for batch in np.unique(at))
    used = np.zeros(next_row, dtype=np.bool_)
    used[rest["quarantined_rows"]] = True
    for rows in memory.index.rows(shared=True):
        used[rows] = True
    counters = saved.column("counters", num_tables, 0)
    # rows without the history of their ids were admitted too
    counters[:, ADMITTED] = counters[:, EXPIRED] + rows_by_table(memory.index, num_tables)
    memory.shared = saved.column("shared_rows", num_tables, -1)
    return Ledger(batch, next_row, np.flatnonzero(~used), 0, quarantined, counters)


def rows_by_table(index: IdIndex, num_tables: int) -> Ints:
    """How many ids of each table have a row."""
    found = np.zeros(num_tables, dtype=np.int64)
    for entries in index.items():
        found += np.bincount(entries.tables, minlength=num_tables)
    return found


def _load_rows(memory: Memory, rules: RuleArrays, part: Arrays, saved: SavedState) -> int:
    """Give rows to their owners; returns how many belong to tables that are gone."""
    tables = saved.table_of[part["table"]]
    kept = tables >= 0
    rows = part["row"].astype(np.int64) - int(saved.rest["first_row"][0])
    single, shared = kept & (part["shared"] == 0), kept & (part["shared"] != 0)
    for row, table in zip(rows[shared], tables[shared]):
        memory.index.share(int(row), int(table))
    rows, tables = rows[single], tables[single]
    memory.index.insert(tables.astype(np.uint16), np.ascontiguousarray(part["id"][single]), rows)
    if memory.columns.has_last:
        kinds = rules.expire[tables]
        last = np.where(kinds == TIME, saved.now, max(1, int(saved.rest["batch"][0])))
        if "last_use" in part:
            last = np.where(saved.keeps_uses[tables], part["last_use"][single], last)
        memory.columns.last[0, rows] = np.where(kinds == NEVER, 0, last)
    if memory.columns.has_scores:
        scores = np.where(rules.expire[tables] == SCORE, SCORE_UNIT, 0)
        if "score" in part:
            scores = np.where(saved.keeps_scores[tables], part["score"][single], scores)
        memory.columns.scores[rows] = scores
    return int(np.count_nonzero(~kept))


def _load_waiting(memory: Memory, rules: RuleArrays, saved: SavedState) -> None:
    tables = saved.table_of[saved.rest["waiting_tables"]]
    kept = (tables >= 0) & (rules.admit[np.maximum(tables, 0)] == COUNT)
    if memory.waiting is not None:
        ids, counts = saved.rest["waiting_ids"][kept], saved.rest["waiting_counts"][kept]
        memory.waiting.set(tables[kept].astype(np.uint16), ids, counts)
    dropped = int(np.count_nonzero(~kept))
    if dropped:
        saved.lost.append(f"the counts of {dropped:,} pending ids of tables that no longer count")


def _load_sketches(memory: Memory, saved: SavedState) -> None:
    names = {int(new): f"sketch_{old}" for old, new in enumerate(saved.table_of) if f"sketch_{old}" in saved.rest}
    saved.lost += [
        f"{name}: its table has no sketch now" for table, name in names.items() if table not in memory.sketches
    ]
    for table, sketch in memory.sketches.items():
        cells = saved.rest.get(names.get(table, ""))
        if cells is None:
            continue
        if cells.shape == sketch.cells.shape and cells.dtype == sketch.cells.dtype:
            sketch.cells[:] = cells
        else:
            saved.lost.append(f"{names[table]}: its size or limit has changed, counting starts again")
