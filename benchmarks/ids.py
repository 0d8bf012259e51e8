"""The index of dynamic ids compared with others: `python -m benchmarks.ids [--ids 50000000] [--out FILE.csv]`.

Every system gets the same distinct random 64-bit ids in batches of 100,000, then is asked for known and for unknown ones; its
answers are checked before they are timed. hotbed's ids belong to 26 tables, the others see one table: an easier task. A
system that cannot be imported is left out: pandas and rocksdict are not among hotbed's dependencies.

    insert, find, find_unknown   millions of ids a second; hotbed on one thread, and finding on two as well
    batch_ms_p50, _p99, _max     time of one batch of inserts, growing included
    bytes_per_id                 growth of resident memory divided by ids (RocksDB's are on disk)

Exits with 1 if hotbed misses its bars: 8 million finds and 3 million inserts a second on one core, 24 bytes an id.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.results_file import append_rows
from hotbed.ids import IdIndex, TableRules, Translator

BATCH = 100_000
NUM_TABLES = 26
BARS = {"insert": 3.0, "find": 8.0, "bytes_per_id": 24.0}


class Workload(NamedTuple):
    """Ids to insert, [N]; known and unknown ones to find, [Q]."""

    tables: np.ndarray
    ids: np.ndarray
    known: np.ndarray  # positions
    unknown: np.ndarray


def workload(num_ids: int, num_finds: int) -> Workload:
    """Ids below 2**62 are inserted, those above are unknown."""
    rng = np.random.default_rng(11)
    ids = np.unique(rng.integers(0, 2**62, num_ids + num_ids // 1000 + 1000))
    rng.shuffle(ids)
    ids = np.ascontiguousarray(ids[:num_ids])
    tables = rng.integers(0, NUM_TABLES, num_ids).astype(np.uint16)
    return Workload(tables, ids, rng.integers(0, num_ids, num_finds), rng.integers(2**62, 2**63 - 1, num_finds))


def parts(length: int) -> Iterator[slice]:
    for start in range(0, length, BATCH):
        yield slice(start, min(start + BATCH, length))


def resident() -> int:
    """Bytes of memory this process holds now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Hotbed:
    """IdIndex, as it is."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self.index = IdIndex()

    def insert(self, work: Workload, part: slice) -> None:
        self.index.insert(work.tables[part], work.ids[part], np.arange(part.start, part.stop))

    def find(self, tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return self.index.find(tables, ids, self.threads)


class HotbedTranslator:
    """Translator without rules: duplicates, unknown ids and the journal are seen to."""

    def __init__(self) -> None:
        self.translator = Translator([TableRules()] * NUM_TABLES)

    def insert(self, work: Workload, part: slice) -> None:
        self.translator.translate(work.tables[part], work.ids[part], learns=True)
        self.translator.trained(self.translator.batch)

    def find(self, tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
        keys = self.translator.translate(tables, ids, learns=False).keys
        return np.maximum(keys, -1)


class Dict:
    """A Python dict of ints."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    def insert(self, work: Workload, part: slice) -> None:
        self.rows.update(zip(work.ids[part].tolist(), range(part.start, part.stop)))

    def find(self, tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
        get = self.rows.get
        return np.fromiter((get(id_, -1) for id_ in ids.tolist()), dtype=np.int64, count=len(ids))


class Pandas:
    """Index.get_indexer. It cannot grow: it is built once from all ids."""

    built_at_once = True

    def __init__(self) -> None:
        import pandas

        self.pandas = pandas

    def insert(self, work: Workload, part: slice) -> None:
        self.index = self.pandas.Index(work.ids[part])
        self.index.get_indexer(work.ids[:1])  # its hash table is made at the first question

    def find(self, tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return np.asarray(self.index.get_indexer(ids))


class Arrow:
    """pyarrow.compute.index_in. It keeps nothing: every call builds the hash table again."""

    built_at_once = True
    few_questions = True

    def __init__(self) -> None:
        import pyarrow
        import pyarrow.compute

        self.pyarrow = pyarrow

    def insert(self, work: Workload, part: slice) -> None:
        self.values = self.pyarrow.array(work.ids[part])

    def find(self, tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
        found = self.pyarrow.compute.index_in(self.pyarrow.array(ids), value_set=self.values)
        return np.asarray(found.fill_null(-1)).astype(np.int64)


class RocksDB:
    """A RocksDB database on disk through rocksdict, written in batches without its journal."""

    def __init__(self) -> None:
        import rocksdict

        self.rocksdict = rocksdict
        self.folder = tempfile.mkdtemp(prefix="ids-rocksdb-")
        self.rows = rocksdict.Rdict(self.folder, options=rocksdict.Options(raw_mode=True))
        self.writing = rocksdict.WriteOptions()
        self.writing.disable_wal = True

    def insert(self, work: Workload, part: slice) -> None:
        batch = self.rocksdict.WriteBatch(raw_mode=True)
        for id_, row in zip(_bytes(work.ids[part]), _bytes(np.arange(part.start, part.stop))):
            batch.put(id_, row)
        self.rows.write(batch, self.writing)

    def find(self, tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
        missing = np.int64(-1).tobytes()
        return np.frombuffer(b"".join(row or missing for row in self.rows[_bytes(ids)]), dtype=np.int64)

    def close(self) -> None:
        self.rows.close()
        shutil.rmtree(self.folder)


def _bytes(numbers: np.ndarray) -> list[bytes]:
    data = numbers.astype(np.int64).tobytes()
    return [data[at : at + 8] for at in range(0, len(data), 8)]


def measure(name: str, system: Any, work: Workload) -> dict[str, object]:
    """One row of the table."""
    before = resident()
    whole = [slice(0, len(work.ids))] if hasattr(system, "built_at_once") else list(parts(len(work.ids)))
    times = [_timed(lambda part=part: system.insert(work, part)) for part in whole]
    num_bytes = resident() - before
    finds = len(work.known) if not hasattr(system, "few_questions") else min(len(work.known), 2 * BATCH)
    known, unknown = work.known[:finds], work.unknown[:finds]
    tables, ids = work.tables[known], work.ids[known]
    np.testing.assert_array_equal(system.find(tables[:BATCH], ids[:BATCH]), known[:BATCH], err_msg=name)
    assert (system.find(tables[:BATCH], unknown[:BATCH]) == -1).all(), name
    find = sum(_timed(lambda part=part: system.find(tables[part], ids[part])) for part in parts(finds))
    miss = sum(_timed(lambda part=part: system.find(tables[part], unknown[part])) for part in parts(finds))
    p50, p99 = np.percentile(times, [50, 99]) * 1e3
    return {
        "benchmark": "ids",
        "system": name,
        "ids": len(work.ids),
        "batch": BATCH,
        "insert_m_per_s": "" if hasattr(system, "few_questions") else round(len(work.ids) / sum(times) / 1e6, 3),
        "find_m_per_s": round(finds / find / 1e6, 3),
        "find_unknown_m_per_s": round(finds / miss / 1e6, 3),
        "batch_ms_p50": round(p50, 1),
        "batch_ms_p99": round(p99, 1),
        "batch_ms_max": round(max(times) * 1e3, 1),
        "longest_pause_ms": round(1e3 * system.index.longest_pause, 1) if isinstance(system, Hotbed) else "",
        "bytes_per_id": round(num_bytes / len(work.ids), 1),
    }


def _timed(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def systems() -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "hotbed IdIndex, 1 thread", Hotbed
    yield "hotbed IdIndex, 2 threads", lambda: Hotbed(2)
    yield "hotbed Translator", HotbedTranslator
    yield "pyarrow index_in", Arrow
    if importlib.util.find_spec("pandas"):
        yield "pandas Index.get_indexer", Pandas
    yield "dict", Dict
    if importlib.util.find_spec("rocksdict"):
        yield "RocksDB (rocksdict)", RocksDB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ids",
        type=int,
        default=50_000_000,
        help="to insert (%(default)s); 50 million take 7 GB in a dict, which is measured too",
    )
    parser.add_argument("--finds", type=int, default=2_000_000, help="ids asked for, known and unknown (%(default)s)")
    parser.add_argument("--rocksdb-ids", type=int, default=5_000_000, help="RocksDB gets fewer: it is slow")
    parser.add_argument("--out", help="CSV file to append to")
    args = parser.parse_args()
    for make in (Hotbed, HotbedTranslator):  # compile
        measure("warm up", make(), workload(50_000, 20_000))
    work, fewer = workload(args.ids, args.finds), workload(min(args.ids, args.rocksdb_ids), min(args.finds, 500_000))
    rows = []
    for name, make in systems():
        system = make()
        rows.append(measure(name, system, fewer if isinstance(system, RocksDB) else work))
        print("  ".join(f"{value}" for value in rows[-1].values()), flush=True)
        if hasattr(system, "close"):
            system.close()
        del system
    if args.out:
        append_rows(args.out, rows)
    bars = {"insert": rows[0]["insert_m_per_s"], "find": rows[0]["find_m_per_s"]}
    slow = [name for name, value in bars.items() if float(str(value)) < BARS[name]]
    large = float(str(rows[0]["bytes_per_id"])) > BARS["bytes_per_id"]
    print("bars met" if not slow and not large else f"under the bar: {[*slow, *(['bytes_per_id'] if large else [])]}")
    raise SystemExit(1 if slow or large else 0)


if __name__ == "__main__":
    main()
