"""What a batch of dynamic ids costs the host, part by part: `python -m benchmarks.ids_batch [--threads 1,2] [--scale 0.1]`.

Batches of 26 features with Zipf ids, all of them known: tables of Criteo-Kaggle's sizes, times `--scale`. Answers are checked
before anything is timed.

    lookups   translating every lookup, as it was done in the training thread before
    number    repeats removed                            look     rows of distinct ids found      in the reader thread
    settle    keys of a batch whose ids were looked up   new      the same, a tenth of them new   in the training thread
    create    initial rows of as many new ids, dim 64

Prints the median and the tenth percentile in milliseconds. With one thread it is processor time, which other work disturbs
least.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

import hotbed
from benchmarks.results_file import append_rows
from hotbed.bench.setting import ZIPF, scaled_rows
from hotbed.bench.workload import id_of_row, zipf_ids
from hotbed.ids import TableRules, Translator
from hotbed.ids.distinct import BatchIds, DistinctIds, KnownRows
from hotbed.ops.lookups import Span

BATCHES, REPEATS = 8, 40
_CHUNK = 1 << 18


class IdBatches:
    """Batches of ids, a translator that knows them, and the parts of translating one."""

    def __init__(self, rows: tuple[int, ...], batch: int) -> None:
        draw = torch.Generator().manual_seed(1)
        columns = [[id_of_row(zipf_ids(n, batch, ZIPF, draw)) for n in rows] for _ in range(BATCHES)]
        self.ids = [torch.stack(each, dim=1).contiguous().numpy() for each in columns]
        self.tables = np.tile(np.arange(len(rows), dtype=np.uint16), batch)
        self.translator = Translator([TableRules()] * len(rows))
        for table, count in enumerate(rows):
            for start in range(0, count, _CHUNK):
                known = id_of_row(torch.arange(start, min(start + _CHUNK, count))).numpy()
                self._train(BatchIds(np.full(known.shape[0], table, dtype=np.uint16), known))
        self.distinct, self.numbers = DistinctIds("ids-batch"), np.empty(self.tables.shape[0], dtype=np.int32)
        self.entries = [self.number(n) for n in range(BATCHES)]
        self.found = [self.look(n) for n in range(BATCHES)]
        self._check()
        self._next_id = 1 << 62

    def _train(self, given: BatchIds, known: KnownRows | None = None) -> None:
        self.translator.translate_distinct(given, True, known=known)
        self.translator.trained(self.translator.batch)

    def _check(self) -> None:
        """Entries have the rows that lookups have."""
        entries = self.number(0)
        columns = self.ids[0].shape[1]
        expected = self.translator.translate(self.tables, self.ids[0].reshape(-1), learns=False).keys
        found = self.found[0].rows[self.numbers].reshape(columns, -1).T.reshape(-1)
        assert np.array_equal(found, expected), "keys of entries are not those of lookups"
        assert entries.counts is not None
        assert int(entries.counts.sum()) == self.tables.shape[0], "lookups are missing"

    def lookups(self, n: int) -> None:
        self.translator.translate(self.tables, self.ids[n].reshape(-1), learns=True)
        self.translator.trained(self.translator.batch)

    def number(self, n: int) -> BatchIds:
        ids = self.ids[n]
        size, width = ids.shape
        spans = np.array([[ids.ctypes.data + 8 * f, width, size, f, f, width] for f in range(width)], dtype=np.int64)
        return self.distinct.gather(self.distinct.number(spans, self.numbers), self.numbers, width)

    def look(self, n: int) -> KnownRows:
        entries = self.entries[n]
        return self.translator.look_ahead(self.distinct, entries, np.empty(entries.ids.shape[0], dtype=np.int64))

    def settle(self, n: int) -> None:
        self._train(self.entries[n], self.found[n])

    def new(self, n: int) -> None:
        entries, rows = self.entries[n], self.found[n].rows.copy()
        ids = entries.ids.copy()
        ids[::10] = np.arange(self._next_id, self._next_id + ids[::10].shape[0])
        rows[::10] = -1
        self._next_id += ids.shape[0]
        self._train(entries._replace(ids=ids), self.found[n]._replace(rows=rows, is_whole=False))


def creating(num_rows: int, num_tables: int) -> Callable[[int], object]:
    """The initial rows of so many new ids."""
    tables = hotbed.EmbeddingTables(
        {f"C{i}": hotbed.Table(None, 64) for i in range(num_tables)}, hotbed.optim.RowwiseAdagrad(lr=0.01), hbm="1GiB"
    )
    keyspace = tables.groups[0].keyspace
    spans = tuple(Span(f"C{i}", i, num_rows // num_tables, num_tables) for i in range(num_tables))
    ids = torch.arange(spans[0].length * num_tables) * 7919
    keys = keyspace.keys(ids, spans, tuple(tables.tables), True)[0]
    return lambda _: keyspace.first(keys)


def timed(part: Callable[[int], object], threads: int) -> list[float]:
    """Milliseconds of every call."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    for n in range(2):
        part(n)
    times = []
    for n in range(REPEATS):
        began = clock()
        part(n % BATCHES)
        times.append(1e3 * (clock() - began))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2", help="counts, one after the other")
    parser.add_argument("--batch", type=int, default=16_384, help="samples")
    parser.add_argument("--scale", type=float, default=0.1, help="of Criteo-Kaggle's 33.76 million rows")
    parser.add_argument("--out", help="a CSV file to append to")
    given = parser.parse_args()
    rows, results = scaled_rows(given.scale), []
    work = IdBatches(rows, given.batch)
    num_entries = [entries.ids.shape[0] for entries in work.entries]
    print(f"{sum(rows):,} ids known; {work.tables.shape[0]:,} lookups a batch, {min(num_entries):,} distinct or more")
    for threads in map(int, given.threads.split(",")):
        torch.set_num_threads(threads)
        parts = [getattr(work, name) for name in ("lookups", "number", "look", "settle", "new")]
        for part in [*parts, creating(num_entries[0] // 10, len(rows))]:
            times = timed(part, threads)
            name = getattr(part, "__name__", "create").replace("<lambda>", "create")
            median, tenth = float(np.median(times)), float(np.quantile(times, 0.1))
            print(f"{threads} threads  {name:8} {median:7.2f} ms, tenth percentile {tenth:7.2f}")
            results.append({"threads": threads, "part": name, "ids": sum(rows), "ms_p50": median, "ms_p10": tenth})
    if given.out:
        append_rows(given.out, results)


if __name__ == "__main__":
    main()
