"""Checkpoints against the disk, in one run: `python -m benchmarks.checkpoint [--gib 2] [--folder DIR] [--csv FILE]`.

save, load      bytes/s of a full checkpoint compared with dd writing (with fsync) and reading the same bytes, caches dropped
incremental     bytes of a checkpoint of 1 % and 10 % of the rows, compared with that of all
training        steps/s while a checkpoint is written in the background, compared with steps/s alone

Rows lie in one tensor of records, and a snapshot of it is the tensor itself: what is measured is the path between records
and the disk, not how tables keep track of what was touched.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

import hotbed
from benchmarks.results_file import append_rows
from hotbed.checkpoint import Policy, RowPart, Saver, State, TableShape
from hotbed.checkpoint.chain import find
from hotbed.checkpoint.read import load_rows

DIM, WIDTH, PART = 32, 36, 1 << 16
ROUNDS = 5
BATCH, FEATURES, ROWS = 4096, 26, 200_000


class Records:
    """Tables that are one tensor of records: 32 weights, one number of state, padding."""

    frozen = ()

    def __init__(self, num_rows: int, fill: bool) -> None:
        self.tables = {"t": TableShape(DIM, num_rows, states={"sum": 1})}
        self.records = torch.empty(num_rows, WIDTH)
        for start in range(0, num_rows, 1 << 20):
            part = self.records[start : start + (1 << 20)]
            part.copy_(torch.randn_like(part) if fill else torch.zeros_like(part))
        self.wanted: Tensor | None = None  # rows of an incremental checkpoint
        self.num_updates = 0
        self.notes: list[str] = []

    @contextmanager
    def snapshot(self, touched: bool = False) -> Iterator[Records]:
        self.touched = touched
        yield self

    def restore(self) -> Records:
        return self

    def parts(self) -> Iterator[RowPart]:
        ids_of_all = torch.arange(self.records.shape[0]) if self.wanted is None or not self.touched else self.wanted
        for ids in torch.split(ids_of_all, PART):
            some = self.records[ids] if self.touched else self.records[int(ids[0]) : int(ids[-1]) + 1]
            yield RowPart("t", ids, {"weight": some[:, :DIM], "sum": some[:, DIM : DIM + 1]})

    def gone(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def rest(self, tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        return tensors or {}

    def commit(self) -> None: ...

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def add(self, part: RowPart) -> None:
        first, count = int(part.ids[0]), len(part.ids)
        records = self.records[first : first + count].numpy()  # torch's threads would take turns with those that read
        records[:, :DIM] = part.columns["weight"].numpy()
        records[:, DIM : DIM + 1] = part.columns["sum"].numpy()


def dd(*words: str) -> float:
    """Seconds."""
    began = time.perf_counter()
    subprocess.run(["dd", "bs=8M", *words], check=True, capture_output=True)
    return time.perf_counter() - began


def drop(folder: Path) -> None:
    """Take the files of a folder out of the page cache."""
    os.sync()
    for path in [one for one in folder.rglob("*") if one.is_file()]:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def speeds(folder: Path, num_rows: int) -> list[dict[str, object]]:
    """Save and load compared with dd, in turns."""
    tables, back = Records(num_rows, fill=True), Records(num_rows, fill=False)
    root, plain = folder / "checkpoints", folder / "plain"
    plain.mkdir()
    taken: dict[str, list[float]] = {"save": [], "load": [], "dd write": [], "dd read": []}
    for round_ in range(ROUNDS + 1):
        shutil.rmtree(root, ignore_errors=True)
        os.sync()
        began = time.perf_counter()
        Saver(root, tables, Policy(full_every=1)).save(State(round_, {}, {}), wait=True)
        taken["save"].append(time.perf_counter() - began)
        size = find(root).manifest.num_bytes
        os.sync()
        count = f"count={size >> 23}"
        taken["dd write"].append(dd("if=/dev/zero", f"of={plain / 'x'}", count, "conv=fsync"))
        drop(folder)
        taken["dd read"].append(dd(f"if={plain / 'x'}", "of=/dev/null"))
        drop(folder)
        began = time.perf_counter()
        load_rows(find(root), back)
        taken["load"].append(time.perf_counter() - began)
        (plain / "x").unlink()
    assert torch.equal(back.records[:, : DIM + 1], tables.records[:, : DIM + 1])
    shutil.rmtree(root)
    found = []
    for name, baseline in (("save", "dd write"), ("load", "dd read")):
        ratios = [other / mine for mine, other in zip(taken[name], taken[baseline])][1:]  # the first one warms up
        speed = size / statistics.median(taken[name][1:]) / 1e6
        found.append(row(name, speed, "MB/s", statistics.median(ratios), 0.6))
    return found


def increments(folder: Path, num_rows: int) -> list[dict[str, object]]:
    """Bytes of incremental checkpoints in proportion to those of a full one; the bar is what is touched and a tenth."""
    tables = Records(num_rows, fill=True)
    saver = Saver(folder / "checkpoints", tables, Policy(full_every=9, keep=9))
    saver.save(State(0, {}, {}), wait=True)
    full = find(folder / "checkpoints").manifest.num_bytes
    found = []
    for step, share in enumerate((0.01, 0.1), 1):
        tables.wanted = torch.sort(torch.randperm(num_rows)[: int(share * num_rows)]).values
        began = time.perf_counter()
        saver.save(State(step, {}, {}), wait=True)
        seconds = time.perf_counter() - began
        size = find(folder / "checkpoints").manifest.num_bytes
        assert size <= 1.1 * share * full, f"{size} bytes for {share:.0%} of {full}"
        found.append(row(f"incremental, {share:.0%} of the rows", seconds, "s", size / full, None))
    shutil.rmtree(folder / "checkpoints")
    return found


def training(folder: Path, num_rows: int) -> list[dict[str, object]]:
    """Steps/s of a small model alone and during a save, in turns."""
    step = steps()
    saved = Records(num_rows, fill=True)
    saver = Saver(folder / "checkpoints", saved, Policy(full_every=1, keep=1))
    for _ in range(20):
        step()
    alone, during = [], []
    for round_ in range(ROUNDS):
        saver.save(State(round_, {}, {}))
        began, count = time.perf_counter(), 0
        while saver.busy:
            step()
            count += 1
        seconds = time.perf_counter() - began
        during.append(count / seconds)
        assert saver.settle()
        os.sync()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            step()
            count += 1
        alone.append(count / (time.perf_counter() - began))
    ratio = statistics.median(one / other for one, other in zip(during, alone))
    return [row("training during a save", statistics.median(during), "steps/s", ratio, 0.8)]


def steps() -> Callable[[], None]:
    """A step of training over new ids."""
    tables = hotbed.EmbeddingTables(
        {f"f{number}": hotbed.Table(rows=ROWS, dim=16) for number in range(FEATURES)}, hotbed.optim.Adagrad(lr=0.01)
    )
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(16 * FEATURES, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        ids = torch.randint(0, ROWS, (BATCH, FEATURES), generator=generator)
        optimizer.zero_grad()
        model(tables(ids)).square().mean().backward()
        optimizer.step()

    return step


def row(name: str, value: float, unit: str, ratio: float, bar: float | None) -> dict[str, object]:
    shown = "" if bar is None else f", bar {bar:.2f}: {'met' if ratio >= bar else 'MISSED'}"
    print(f"{name}: {value:,.1f} {unit}, ratio {ratio:.3f}{shown}")
    return {"benchmark": "checkpoint", "what": name, "value": f"{value:.1f}", "unit": unit, "ratio": f"{ratio:.3f}"}


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the rows")
    parser.add_argument("--folder", help="on the disk to measure; a temporary folder by default")
    parser.add_argument("--csv", help="append the results to this file")
    given = parser.parse_args()
    num_rows = int(given.gib * 2**30) // (4 * WIDTH)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        rows = speeds(folder, num_rows) + increments(folder, num_rows // 4) + training(folder, num_rows)
    if given.csv:
        append_rows(given.csv, rows)


if __name__ == "__main__":
    main()
