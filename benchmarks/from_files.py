"""The training step from files, compared with FBGEMM on one GPU: `python -m benchmarks.from_files [--csv FILE]`, 3 minutes.

Criteo's columns (a label, 13 numbers, 26 ids over Kaggle's 33.76 million rows, Zipf 1.05) in a dataset as `hotbed prepare`
leaves one, read shuffled in batches of 16,384 from a warm file cache; then lookup, an MLP of 1,024 in bf16, backward and
update with row-wise Adagrad. Before anything is timed, each system must pass the check of `hotbed bench`, and the batches
must hold the rows that were written. Systems take turns; a bar is judged by the median of the ratios of the rounds.

hotbed, files, cached     1.5 % of the rows on the GPU, under hotbed.prefetch
hotbed, files, hbm        every row on the GPU
FBGEMM, files, hbm        every row on the GPU, fed by hotbed's reader: pinned batches, copied while the step before runs
FBGEMM, ids, hbm          the same, with all ids on the GPU before the first step: nothing is read

Bar: the first at or above the third. The fourth says what a reader costs. Exits with 1 if the bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from benchmarks.gpu_bars import ANCHOR
from benchmarks.results_file import append_rows
from hotbed.bench.check import check
from hotbed.bench.setting import Setting, scaled_rows
from hotbed.bench.systems import KINDS, why_missing
from hotbed.bench.timing import DensePart, batches_needed, time_steps
from hotbed.bench.workload import FlatIds, Workload, make_workload
from hotbed.data.arrow_file import ArrowWriter
from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader
from hotbed.data.prepare.write import GROUP_ROWS, PART_ROWS
from hotbed.data.schema import DenseColumn, IdFeature, Schema, Split

ROUNDS = 3
NUM_DENSE = 13
OURS, ALL_OURS, THEIRS, UNREAD = "hotbed, files, cached", "hotbed, files, hbm", "FBGEMM, files, hbm", "FBGEMM, ids, hbm"
SYSTEMS = {OURS: "hotbed-cached", ALL_OURS: "hotbed-hbm", THEIRS: "fbgemm-hbm", UNREAD: "fbgemm-hbm"}


@dataclass(frozen=True)
class Again:
    """A stream of ids that starts over in every loop."""

    begin: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.begin()


def write_files(folder: Path, setting: Setting, workload: Workload) -> Dataset:
    """The ids of the workload, batch after batch, as a dataset."""
    ids = torch.cat([one.cpu() for one in workload.batches if isinstance(one, Tensor)]).to(torch.int32).numpy()
    rng = np.random.default_rng(0)
    columns = {"label": (rng.random(len(ids)) < 0.25).astype(np.float32)}
    for number in range(NUM_DENSE):
        columns[f"I{number}"] = rng.lognormal(size=len(ids)).round(2).astype(np.float32)
    for number in range(ids.shape[1]):
        columns[f"C{number}"] = np.ascontiguousarray(ids[:, number])
    fields = [pa.field(name, pa.from_numpy_dtype(column.dtype), nullable=False) for name, column in columns.items()]
    table = pa.table(columns, schema=pa.schema(fields))
    (folder / "train").mkdir(parents=True)
    files, sizes = [], []
    for start in range(0, len(ids), PART_ROWS):
        part = table.slice(start, PART_ROWS)
        files.append(f"train/part-{len(files):05d}.arrow")
        sizes.append(part.num_rows)
        with ArrowWriter(folder / files[-1], part.schema) as writer:
            writer.write(part, GROUP_ROWS)
    dense = tuple(DenseColumn(f"I{number}") for number in range(NUM_DENSE))
    features = tuple(IdFeature(f"C{i}", rows, mode="direct") for i, rows in enumerate(setting.rows))
    positives = int(columns["label"].sum())
    Schema("label", dense, features, {"train": Split(tuple(files), tuple(sizes), positives)}).save(folder)
    return Dataset.open(folder)


def check_files(dataset: Dataset, setting: Setting, workload: Workload, threads: int) -> None:
    """End the program unless the files hold the rows of the workload."""
    loader = Loader(dataset, "train", batch_size=setting.batch, threads=threads)
    batches = 0
    for batch, ids in zip(loader.epoch(0), workload.batches):
        if not isinstance(ids, Tensor) or not torch.equal(batch.ids, ids.cpu()):
            raise SystemExit(f"batch {batches} of the files is not the one that was written")
        batches += 1
    if batches != len(workload.batches):
        raise SystemExit(f"the files hold {batches} batches; {len(workload.batches)} were written")


def stream(name: str, setting: Setting, workload: Workload, loader: Loader) -> Workload:
    """What a system reads its ids from."""
    if name == UNREAD:
        return workload

    def matrices() -> Iterator[Any]:
        with closing(loader.epoch(0)) as batches:
            for batch in batches:
                if batch.size == setting.batch:
                    yield batch.ids

    def flat() -> Iterator[FlatIds]:
        for ids in matrices():
            yield workload.flat[0]._replace(values=ids.to(setting.device, non_blocking=True).t().reshape(-1))

    def on_device() -> Iterator[Tensor]:
        for ids in matrices():
            yield ids.to(setting.device, non_blocking=True)

    plain = Again(matrices if name == OURS else on_device)  # prefetch copies by itself
    streams: Any = {"flat": Again(flat), "batches": plain}  # systems only walk over their ids: streams will do
    return replace(workload, **streams)


def measure(name: str, setting: Setting, workload: Workload, loader: Loader) -> float:
    """Milliseconds of a step: the median of its groups."""
    behind = DensePart(setting)
    system = KINDS[SYSTEMS[name]].make(setting)
    timing = time_steps(system, setting, stream(name, setting, workload, loader), behind)
    milliseconds = statistics.median(timing.ms_of_group)
    del system, behind
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return milliseconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=8, help="of the reader")
    parser.add_argument("--steps", type=int, default=200, help="timed, a multiple of 10")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often every system has its turn (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the tables' rows; less than 1 is another problem")
    parser.add_argument("--batch", type=int, default=ANCHOR.batch, help="samples a step (%(default)s)")
    parser.add_argument("--device", default="cuda", help="on cpu, hotbed alone: a trial of this program")
    parser.add_argument("--folder", type=Path, help="where files are made; a folder for temporary files if not given")
    parser.add_argument("--csv", default="", help="file to append the table to")
    asked = parser.parse_args()
    if asked.steps < 10 or asked.steps % 10 or asked.rounds < 1 or asked.batch < 1:
        parser.error("--steps is a multiple of 10, --rounds and --batch at least 1")
    if asked.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            f"--device {asked.device}: torch finds no CUDA device; --device cpu tries the program, hotbed alone"
        )
    device = torch.device("cuda", 0) if asked.device == "cuda" else torch.device(asked.device)
    setting = replace(ANCHOR, dense=1024, steps=asked.steps, batch=asked.batch, device=device)
    setting = replace(setting, rows=scaled_rows(asked.scale) if asked.scale != 1 else setting.rows)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    names = [name for name, kind in SYSTEMS.items() if device.type in KINDS[kind].devices and not why_missing(kind)]
    for kind in {SYSTEMS[name] for name in names}:
        wrong = check(kind, setting)
        if wrong:
            raise SystemExit(f"{kind} is wrong: {wrong}")
    folder = Path(tempfile.mkdtemp(prefix="hotbed-from-files-", dir=asked.folder))
    try:
        workload = make_workload(setting, batches_needed(setting))
        dataset = write_files(folder, setting, workload)
        check_files(dataset, setting, workload, asked.threads)
        loader = Loader(
            dataset, "train", batch_size=setting.batch, shuffle=True, threads=asked.threads, pin_memory=True
        )
        found: dict[str, list[float]] = {name: [] for name in names}
        for number in range(asked.rounds):
            for name in names:
                found[name].append(measure(name, setting, workload, loader))
                print(f"round {number + 1}  {name:22s} {found[name][-1]:7.3f} ms a step", flush=True)
    finally:
        shutil.rmtree(folder)
    return judge(found, setting, asked)


def judge(found: dict[str, list[float]], setting: Setting, asked: argparse.Namespace) -> int:
    rows = []
    for name, milliseconds in found.items():
        speed = setting.batch / statistics.median(milliseconds) * 1e3
        print(f"{name:22s} {statistics.median(milliseconds):7.3f} ms  {speed:12,.0f} samples/s")
        rows.append({"benchmark": "from_files", "system": name, "batch": setting.batch, "dim": setting.dim})
        rows[-1] |= {"threads": asked.threads, "ms": round(statistics.median(milliseconds), 3)}
        rows[-1] |= {"ms_low": round(min(milliseconds), 3), "ms_high": round(max(milliseconds), 3)}
        rows[-1] |= {"samples_per_s": round(speed), "scale": asked.scale, "device": str(setting.device)}
    if asked.csv:
        append_rows(asked.csv, rows)
    if THEIRS not in found:
        print("FBGEMM is not here: no bar can be judged")
        return 1
    verdict = 0
    for theirs, is_bar in ((THEIRS, True), (UNREAD, False)):
        ratios = sorted(one / other for one, other in zip(found[OURS], found[theirs]))
        ratio = statistics.median(ratios)
        word = ("met   " if ratio <= 1 else "MISSED") if is_bar else "      "
        print(f"{word} {OURS} over {theirs}: {ratio:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}), bar 1.0")
        verdict |= int(is_bar and ratio > 1)
    return verdict


if __name__ == "__main__":
    raise SystemExit(main())
