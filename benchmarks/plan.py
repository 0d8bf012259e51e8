"""Plan against truth: `python -m benchmarks.plan [--data DIR] [--device cuda] [--csv FILE.csv]`, about five minutes.

Two real logs (criteo, frappe: files of docs/benchmarks.md in DIR), two synthetic ones (the demo's click log, a Zipf
1.05 log over ten of Criteo-Kaggle's tables), caches of 0.5, 1.5, 5 and 20 % of the rows. Each is forecast, then trained for
--steps steps by the machinery of `hotbed train`, in one process, the forecast first. Batches are the largest powers of two
whose rows fit the cache. Without --data the real logs are left out.

Bars: hit rate within 1 point, bytes within 3 %, device memory within 5 % (a CPU: what the cache takes; CUDA: the peak of
torch.cuda.max_memory_allocated), samples/s within 20 %. Exits with 1 if one is missed; --no-speed leaves the last one out,
for a machine that others use.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is loaded

import argparse
import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.results_file import append_rows
from benchmarks.traces import prepared
from benchmarks.workload import KAGGLE_ROWS, batches
from hotbed.data.dataset import Dataset
from hotbed.data.embedded import resolve
from hotbed.data.prepare.prepare import prepare
from hotbed.forecast.comparison import Pair, pairs, truth_of
from hotbed.forecast.forecast import make_forecast
from hotbed.forecast.request import ForecastRequest
from hotbed.forecast.trace import read_trace, rows_of
from hotbed.run.config import RunConfig
from hotbed.run.run_file import compose
from hotbed.train.build import build
from hotbed.train.run import run

SHARES = (0.005, 0.015, 0.05, 0.2)
REAL = ("criteo", "frappe")
BARS = {
    "hit_rate": 0.01,
    "bytes_in": 0.03,
    "bytes_out": 0.03,
    "cache_bytes": 0.05,
    "peak_device_bytes": 0.05,
    "samples_per_s": 0.2,
}
MOST_BATCH, LEAST_BATCH = 16384, 4


class Log(NamedTuple):
    """A dataset, and how many of its batches are trained at most."""

    name: str
    dataset: Dataset
    most_steps: int


def logs(data: Path | None, work: Path, most_steps: int) -> Iterator[Log]:
    """Real ones first."""
    for name in REAL if data is not None else ():
        assert data is not None
        yield Log(name, prepared(name, data, work), most_steps)
    yield Log("criteo-like", resolve("criteo-like:200000"), most_steps)
    yield Log("Zipf 1.05", _zipf(work, 120_000), most_steps)


def _zipf(work: Path, num_samples: int) -> Dataset:
    """Ten of Kaggle's tables, cut to a hundredth, one Zipf 1.05 id each; labels by chance."""
    rows = [max(3, count // 100) for count in sorted(KAGGLE_ROWS)[-10:]]
    (ids,) = batches(tuple(rows), num_samples, 1, seed=0)
    columns = {f"c{f}": ids[:, f].numpy() for f in range(len(rows))}
    label = np.random.default_rng(0).integers(0, 2, num_samples).astype(np.float32)
    pq.write_table(pa.table({"label": label, **columns}), work / "zipf.parquet")
    prepare([work / "zipf.parquet"], work / "zipf", label="label", ids=list(columns))
    return Dataset.open(work / "zipf")


def batch_size(dataset: Dataset, share: float) -> int | None:
    """The largest power of two whose rows fit with room to spare; None where the smallest does not."""
    num_slots = share * sum(rows_of(dataset))
    size = LEAST_BATCH
    if _most_keys(dataset, size) > 0.7 * num_slots:
        return None
    while size < MOST_BATCH and _most_keys(dataset, 2 * size) <= 0.7 * num_slots:
        size *= 2
    return size


def _most_keys(dataset: Dataset, size: int) -> int:
    return read_trace(dataset, batch_size=size, shuffle=True, max_batches=4).most_keys


def measure(log: Log, share: float, size: int, device: str, folder: Path) -> list[Pair]:
    """One forecast, one run."""
    sets = [f"tables.cache={share}", f"data.batch_size={size}", f"data.eval_batch_size={size}", "train.keep_best=false"]
    epochs = -(-log.most_steps * size // log.dataset.schema.splits["train"].rows)
    sets += [f"train.device={device}", f"train.max_steps={log.most_steps}", f"train.eval_every={10**9}"]
    sets += [f"train.epochs={epochs}"]
    config, problems = compose(None, {"data.path": str(log.dataset.path)}, sets)
    assert not problems, problems
    forecast = make_forecast(ForecastRequest(config, log.dataset, calibrate="again"))
    assert not forecast.problems, forecast.problems
    forecast = forecast.figures()
    epoch = -(-log.dataset.schema.splits["train"].rows // size)
    _train(
        config, log.dataset, folder / "warm", steps=min(epoch + 4, log.most_steps)
    )  # compiles, for the last batch too
    summary = _train(config, log.dataset, folder / "run")
    truth = truth_of(folder / "run", summary)
    if device.startswith("cuda"):
        truth["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        truth.pop("cache_bytes", None)
    return pairs(forecast, truth)


def _train(config: RunConfig, dataset: Dataset, folder: Path, steps: int | None = None) -> dict[str, object]:
    """Train; on CUDA the peak begins here."""
    gc.collect()
    if config.train.device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if steps is not None:
        config, _ = compose(None, _flat(config), [f"train.max_steps={steps}"])
    folder.mkdir(parents=True, exist_ok=True)
    built = build(config, dataset, folder)
    built.training.loaders.held_out.clear()
    return run(built.training, built.subject).summary


def _flat(config: RunConfig) -> dict[str, object]:
    from hotbed.forecast.what_if import flat_of

    return flat_of(config)


def shown(one: Pair) -> str:
    """forecast -> truth (off)."""
    share = one.name.endswith("hit_rate")
    words = [f"{100 * value:.2f} %" if share else f"{value:,.0f}" for value in (one.forecast or 0.0, one.truth or 0.0)]
    off = one.off or 0.0
    return f"{one.name} {words[0]} -> {words[1]} ({100 * off:+.2f}{' points' if share else ' %'})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="directory of the real logs; left out: synthetic ones alone")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--steps", type=int, default=400, help="most steps of a run")
    parser.add_argument("--only", help="this log alone")
    parser.add_argument("--no-speed", action="store_true", help="do not judge samples/s")
    parser.add_argument("--csv", help="append one row per figure to this file")
    args = parser.parse_args()
    missed, rows = 0, []
    with tempfile.TemporaryDirectory() as work:
        for log in logs(args.data, Path(work), args.steps):
            for share in SHARES if args.only in (None, log.name) else ():
                size = batch_size(log.dataset, share)
                if size is None:
                    print(f"{log.name} {100 * share:g} %: no batch of {LEAST_BATCH} samples fits, left out")
                    continue
                with tempfile.TemporaryDirectory(dir=work) as folder:
                    found = measure(log, share, size, args.device, Path(folder))
                print(f"{log.name} {100 * share:g} %, batch {size:,}:", flush=True)
                for one in found:
                    bar = None if args.no_speed and one.name == "samples_per_s" else BARS.get(one.name)
                    if one.name.startswith("bytes_") and (one.truth or 0) < 1:
                        continue
                    over = bar is not None and abs(one.off if one.off is not None else 1.0) > bar
                    missed += over
                    print(f"    {shown(one)}{'  <- over the bar' if over else ''}", flush=True)
                    rows.append(
                        {
                            "log": log.name,
                            "cache": share,
                            "batch": size,
                            "run_on": args.device,
                            **one._asdict(),
                            "off": one.off,
                        }
                    )
    if args.csv:
        append_rows(args.csv, rows)
    print(f"{missed} figures over their bar")
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
