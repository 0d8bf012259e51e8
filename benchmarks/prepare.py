"""`hotbed prepare` on Criteo's text: `python -m benchmarks.prepare [--rows N | --raw FILE] [--out FILE.csv]`, two minutes.

First the gate: on the first rows, counts equal those of plain Python and the output is the same for one worker and two.
Then rounds, in each of which hotbed (both passes, output written), Polars and pyarrow (reading the text into columns,
nothing else) take turns over the same file, every one in a process of its own whose kernels are loaded and whose peak
memory is reported. The file is in the page cache. Best of the rounds; CPU seconds are shown next to the wall clock, because the
machine may be shared. Polars and pyarrow use all cores. Without Polars its rows are left out: pip install polars.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.results_file import append_rows

BAR_SPEED, BAR_MEMORY = 100.0, 2 << 30
NAMES = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))


def run_hotbed(raw: Path, out: Path) -> None:
    from hotbed.data.prepare.prepare import prepare

    prepare([raw], out, format="criteo", split="train=0.9,test=0.1")


def run_polars(raw: Path, out: Path) -> None:
    import polars

    table = polars.read_csv(raw, separator="\t", has_header=False, new_columns=list(NAMES))
    assert table.width == 40


def run_pyarrow(raw: Path, out: Path) -> None:
    import pyarrow as pa
    from pyarrow import csv

    columns = {name: pa.int64() if name[0] in "lI" else pa.string() for name in NAMES}
    table = csv.read_csv(
        raw,
        read_options=csv.ReadOptions(column_names=list(NAMES)),
        parse_options=csv.ParseOptions(delimiter="\t"),
        convert_options=csv.ConvertOptions(column_types=columns),
    )
    assert table.num_columns == 40


SYSTEMS = {"hotbed prepare": run_hotbed, "polars read_csv": run_polars, "pyarrow read_csv": run_pyarrow}


def child(system: str, raw: Path, few: Path, directory: Path) -> None:
    """One system once, after a small file; prints what it took."""
    run = SYSTEMS[system]
    run(few, directory / "few")
    used, started = time.process_time(), time.perf_counter()
    run(raw, directory / "out")
    seconds, cpu = time.perf_counter() - started, time.process_time() - used
    print(json.dumps([seconds, cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))


def measure(system: str, raw: Path, few: Path) -> tuple[float, float, int]:
    with tempfile.TemporaryDirectory(dir=raw.parent) as directory:
        command = [sys.executable, "-m", "benchmarks.prepare", "--child", system, str(raw), str(few), directory]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{system} failed:\n{done.stderr[-2000:]}")
        seconds, cpu, memory = json.loads(done.stdout.splitlines()[-1])
        return seconds, cpu, memory


def check(few: Path, directory: Path) -> None:
    """The gate."""
    import pyarrow.parquet as pq

    from hotbed.data.hash import hash_string
    from hotbed.data.prepare.prepare import prepare

    digests = []
    for workers in (1, 2):
        out = directory / f"gate{workers}"
        prepare([few], out, format="criteo", workers=workers)
        files = sorted(path for path in out.rglob("*") if path.is_file())
        digests.append([hashlib.sha256(path.read_bytes()).hexdigest() for path in files])
    assert digests[0] == digests[1], "one worker and two differ"
    lines = [line.split("\t") for line in few.read_text().splitlines()]
    for column in (1, 3, 26):
        listed = pq.read_table(directory / "gate1" / "counts" / f"C{column}.parquet")
        true = Counter(hash_string(line[13 + column]) for line in lines)
        assert dict(zip(listed["id"].to_pylist(), listed["count"].to_pylist())) == true, f"C{column} is counted wrongly"


def first_lines(raw: Path, few: Path, count: int = 20_000) -> None:
    with raw.open("rb") as source, few.open("wb") as target:
        for _, line in zip(range(count), source):
            target.write(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000, help="of a generated log, 243 bytes each")
    parser.add_argument("--raw", type=Path, help="a Criteo log to read instead")
    parser.add_argument("--rounds", type=int, default=3, help="how often every system has its turn (%(default)s)")
    parser.add_argument("--out", help="append results to this CSV file")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        system, *paths = given.child
        child(system, *map(Path, paths))
        return
    directory = Path(tempfile.mkdtemp(prefix="hotbed-prepare-"))
    try:
        raw = given.raw or directory / "log.tsv"
        if given.raw is None:
            from hotbed.data.synthetic.text_files import write_tsv

            write_tsv(raw, 0, given.rows)
        few = directory / "few.tsv"
        first_lines(raw, few)
        check(few, directory)
        report(raw, few, given.rounds, given.out)
    finally:
        shutil.rmtree(directory)


def report(raw: Path, few: Path, rounds: int, out: str | None) -> None:
    systems = dict(SYSTEMS)
    try:
        import polars  # noqa: F401
    except ImportError:
        del systems["polars read_csv"]
        print("polars is not installed and is left out")
    best: dict[str, tuple[float, float, int]] = {}
    for _ in range(rounds):
        for system in systems:
            found = measure(system, raw, few)
            known = best.get(system, found)
            best[system] = (min(found[0], known[0]), min(found[1], known[1]), max(found[2], known[2]))
    size = raw.stat().st_size / 1e6
    rows = []
    print(f"{size:,.0f} MB of Criteo's text, best of {rounds}")
    print(f"{'system':18} {'MB/s':>8} {'CPU s':>7} {'peak MiB':>9} {'hotbed / it':>12}")
    for system, (seconds, cpu, memory) in best.items():
        ratio = seconds / best["hotbed prepare"][0]
        print(f"{system:18} {size / seconds:8.0f} {cpu:7.2f} {memory / 2**20:9.0f} {ratio:12.2f}")
        rows.append(
            {
                "benchmark": "prepare",
                "system": system,
                "MB": round(size),
                "MB/s": round(size / seconds, 1),
                "cpu_seconds": round(cpu, 2),
                "peak_MiB": round(memory / 2**20),
                "hotbed_to_it": round(ratio, 3),
            }
        )
    if out:
        append_rows(out, rows)
    seconds, _, memory = best["hotbed prepare"]
    met = size / seconds >= BAR_SPEED and memory < BAR_MEMORY
    print(f"bar (100 MB/s, 2 GiB): {'met' if met else 'NOT met'}")
    raise SystemExit(not met)


if __name__ == "__main__":
    main()
