"""The ssd store compared with fio and dd: `python -m benchmarks.ssd [--folder DIR] [--size 2GiB] [--out CSV]`.

Reads: random records out of one segment file, in batches as training fetches them, compared with fio with the same block size,
the same number of reads in flight and the same file: once with the file in the page cache, once with none of it there. fio
reads with threads (psync) and with io_uring; the better one is the bar. Writes: the whole file in batches, then fsync,
compared with dd with conv=fsync. Each is the median of some rounds, in which the two take turns. Exits with 1 if a bar of 70 %
is missed.

`--sweep` reads with other numbers of threads as well, for docs/decisions/0005-ssd-reads.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.results_file import append_rows
from hotbed.host.memory import parse_bytes
from hotbed.store.ssd import SsdStore, read
from hotbed.store.ssd.format import HEADER_BYTES, record_bytes

BAR = 0.7
DEPTH = read.NUM_THREADS
BATCH = 20_000
ROUNDS = 5
WARM_READS, COLD_READS = 400_000, 40_000
FIO = {"psync": (1, DEPTH), "io_uring": (DEPTH, 1), "io_uring 2": (DEPTH // 2, 2)}  # name: (depth of a job, jobs)


class Result(NamedTuple):
    """One line: what hotbed does in a second, and what the others do."""

    what: str
    record_bytes: int
    hotbed: float
    peer: str
    peers: float

    @property
    def ratio(self) -> float:
        return self.hotbed / self.peers


def fio(path: Path, block: int, engine: str, cold: bool) -> float:
    """Reads a second."""
    depth, jobs = FIO[engine]
    reads = COLD_READS if cold else WARM_READS
    command = ["fio", "--name=read", f"--filename={path}", "--rw=randread", f"--bs={block}", "--thread", "--readonly"]
    command += [f"--ioengine={engine.split(maxsplit=1)[0]}", f"--iodepth={depth}", f"--numjobs={jobs}", "--norandommap"]
    command += [f"--number_ios={reads // jobs}", f"--invalidate={int(cold)}", "--randrepeat=0", "--group_reporting"]
    command += ["--gtod_reduce=1", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
    return float(job["total_ios"] / job["runtime"] * 1000)


def dd(folder: Path, num_bytes: int) -> float:
    """Bytes a second, on the disk."""
    target = folder / "dd"
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=1M", f"count={num_bytes >> 20}", "conv=fsync"]
    started = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    seconds = time.perf_counter() - started
    target.unlink()
    return num_bytes / seconds


class Filled(NamedTuple):
    """A store whose rows are all in one segment."""

    store: SsdStore
    num_rows: int
    width: int

    def path(self) -> Path:
        return next(iter(self.store._segments)).path

    def forget_cache(self) -> None:
        for segment in self.store._segments:
            os.fsync(segment.handle)
            os.posix_fadvise(segment.handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def fill_cache(self) -> None:
        with self.path().open("rb") as file:
            while file.read(1 << 22):
                pass

    def read(self, num_reads: int) -> float:
        """Records a second."""
        out, source = torch.empty(BATCH, self.width), torch.empty(BATCH, dtype=torch.int32)
        batches = [torch.randint(0, self.num_rows, [BATCH]).unique() for _ in range(num_reads // BATCH)]
        started = time.perf_counter()
        num_found = sum(self.store.fetch(keys, out, source[: keys.shape[0]])[0] for keys in batches)
        assert num_found == sum(keys.shape[0] for keys in batches)
        return num_found / (time.perf_counter() - started)


def filled(folder: Path, payload: int, num_bytes: int) -> tuple[Filled, float]:
    """A store of that size, and the bytes a second at which it was written."""
    width = payload // 4
    num_rows = num_bytes // record_bytes(width) // BATCH * BATCH
    segment = HEADER_BYTES + num_rows * record_bytes(width)
    store = SsdStore(folder, num_rows, width, lambda keys: torch.zeros(keys.numel(), width), max_bytes=4 * segment,
                     segment_bytes=segment)  # fmt: skip
    records = torch.randn(BATCH, width)
    started = time.perf_counter()
    for start in range(0, num_rows, BATCH):
        store.write(torch.arange(start, start + BATCH), records)
    store.flush()
    return Filled(store, num_rows, width), segment / (time.perf_counter() - started)


def in_turns(ours: Callable[[], float], others: dict[str, Callable[[], float]]) -> tuple[float, str, float]:
    """(our median, the best other, its median)."""
    rates: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, other in {"hotbed": ours, **others}.items():
            rates.setdefault(name, []).append(other())
    medians = {name: median(values) for name, values in rates.items()}
    best = max(others, key=lambda name: medians[name])
    print("   ", ", ".join(f"{name} {value:,.0f}" for name, value in medians.items()))
    return medians["hotbed"], best, medians[best]


def measure(folder: Path, payload: int, num_bytes: int) -> list[Result]:
    """All results of one record size."""
    stride = record_bytes(payload // 4)

    def write() -> float:
        one, rate = filled(folder / "rows", payload, num_bytes)
        one.store.close()
        return rate

    filled(folder / "rows", payload, 4 * BATCH * stride)[0].store.close()  # what is compiled is compiled before
    print(f"records of {payload} bytes ({stride} on disk)\n  write, bytes/s")
    results = [Result("write", payload, *in_turns(write, {"dd": lambda: dd(folder, num_bytes)}))]
    one, _ = filled(folder / "rows", payload, num_bytes)
    one.read(BATCH)  # threads start
    for what, cold in (("warm read", False), ("cold read", True)):
        print(f"  {what}, records/s")
        (one.forget_cache if cold else one.fill_cache)()

        def ours(cold: bool = cold) -> float:
            if cold:
                one.forget_cache()
            return one.read(COLD_READS if cold else WARM_READS)

        peers = {name: lambda name=name, cold=cold: fio(one.path(), stride, name, cold) for name in FIO}  # type: ignore[misc]
        results.append(Result(what, payload, *in_turns(ours, peers)))
    adopting(one, folder)
    one.store.close()
    return results


def adopting(one: Filled, folder: Path) -> None:
    """How long a checkpoint of the segment takes, and taking it back."""
    saved, size = folder / "saved", one.store.sizes().ssd_bytes
    started = time.perf_counter()
    with one.store.freeze() as frozen:
        frozen.link_into(saved)
    linked = time.perf_counter()
    one.store.adopt(saved)
    seconds = time.perf_counter() - linked
    print(f"  freeze and link {linked - started:.3f} s, adopt {size / seconds / 1e9:.2f} GB/s")
    shutil.rmtree(saved)


def sweep(folder: Path, num_bytes: int) -> None:
    """Reads by other numbers of threads."""
    for payload in (144, 528):
        one, _ = filled(folder / "rows", payload, num_bytes)
        for threads in (1, 2, 8, 16, 32, 64):
            read.NUM_THREADS = threads
            one.fill_cache()
            one.read(BATCH)
            warm = median(one.read(WARM_READS) for _ in range(ROUNDS))
            rates = []
            for _ in range(ROUNDS):
                one.forget_cache()
                rates.append(one.read(COLD_READS))
            print(f"  {payload} bytes, {threads} threads: warm {warm:,.0f}, cold {median(rates):,.0f} records/s")
        one.store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure; left out: the temporary one")
    parser.add_argument("--size", default="2GiB", help="bytes of the file")
    parser.add_argument("--sweep", action="store_true", help="other numbers of threads instead")
    parser.add_argument("--out", help="append the results to this CSV file")
    args = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed; on Debian: apt-get install fio")
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        num_bytes = parse_bytes(args.size, "--size")
        if args.sweep:
            sweep(Path(work), num_bytes)
            return
        results = [result for payload in (144, 528) for result in measure(Path(work), payload, num_bytes)]
    for one in results:
        print(
            f"{one.what:10} {one.record_bytes:4} bytes: {one.hotbed:14,.0f} = {one.ratio:.2f} x {one.peer} {one.peers:,.0f}"
        )
    if args.out:
        append_rows(args.out, [{"benchmark": "ssd", **one._asdict(), "ratio": round(one.ratio, 3)} for one in results])
    sys.exit(any(one.ratio < BAR for one in results))


if __name__ == "__main__":
    main()
