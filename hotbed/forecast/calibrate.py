"""Measures the parts of a training step on this machine, in a few seconds, and keeps the result in a file.

It runs the code that trains, on the run's own batches and model. Large tables are made smaller:

    reader      the loader alone: samples/s, and core seconds per sample
    step        batches in memory, a cache that has every row: lookup, model, update
    row         the same batches through a cache that just holds one of them: the cost of a missed row
    slot        CUDA: ranking slots
    peak        CUDA: peak device memory, with that small cache

The file is calibration.json in $HOTBED_CACHE or ~/.cache/hotbed. An entry belongs to a host, a device, versions, a dataset and
the settings of a step (model, dim, batch size, optimizers). It is measured again after 30 days.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotbed.cache import CacheCounts
from hotbed.data.dataset import Dataset
from hotbed.forecast.measure import plan_seconds
from hotbed.host.atomic import place, rewriting
from hotbed.host.devices import pick_device, use_device
from hotbed.host.threads import num_cores
from hotbed.pipeline.reader import READ_AHEAD
from hotbed.run.config import RunConfig
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.sizing.fit import rows_of_batch
from hotbed.tables.spec import Table
from hotbed.train.build import Sketch, compiled_step, dense_optimizer, model_of, train_loader
from hotbed.train.interval import Interval
from hotbed.train.step import Learner, repeatable
from hotbed.types import Batch

MOST_AGE = 30 * 86400.0  # seconds
_COMPILES = 0.1  # seconds of steps before those that are measured, in which kernels are compiled
_LOOK_AHEAD = 4  # batches, while measuring
CALIBRATED_AHEAD = _LOOK_AHEAD + READ_AHEAD  # batches that are on the device then
_MOST_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}  # of the tables that are measured
_POOL = 10  # batches
_VERSION = 2


@dataclass(frozen=True)
class Calibration:
    """Seconds and bytes of the parts of a step of one rank."""

    measured_at: float
    seconds: float  # that measuring took
    cores: int
    reader: float  # seconds of a batch
    reader_cores: float  # core seconds of a batch
    first_batch: float  # seconds until the reader gives the first one
    step: float  # seconds, every row in the cache; on a CPU without planning
    step_cores: float  # core seconds
    row: float  # seconds that a missed row adds (CUDA: takes, in parallel to the step)
    slot: float  # CUDA: seconds that a slot adds; planning on a CPU is measured separately (measure.py)
    copy_speed: float  # bytes/s between host and device; 0 on a CPU
    peak_bytes: float  # CUDA: of a run, without rows and index


def calibrate(
    config: RunConfig, dataset: Dataset, found: Sketch, *, again: bool = False, short: bool = False
) -> Calibration:
    """The calibration of this machine and this kind of step, measured now if there is none or it is too old."""
    device = pick_device(config.train.device)
    name = _name(config, dataset, device, is_cached(found))
    known = _read_all()
    entry = None if again else _entry(known, name)
    if entry is not None:
        return entry
    measured = _measure(config, dataset, found, use_device(config.train.device), 0.15 if short else 0.5)
    known[name] = asdict(measured)
    _write_all(known)
    return measured


def is_cached(found: Sketch) -> bool:
    """Whether rows are looked up in a cache."""
    budgets = found.budgets
    return budgets.cache is not None or budgets.hbm is not None or budgets.ssd is not None


def known_calibration(config: RunConfig, dataset: Dataset, found: Sketch) -> Calibration | None:
    """The calibration, if there is one already."""
    return _entry(_read_all(), _name(config, dataset, pick_device(config.train.device), is_cached(found)))


def calibration_file() -> Path:
    """Where measurements are kept."""
    given = os.environ.get("HOTBED_CACHE")
    return (Path(given) if given else Path.home() / ".cache" / "hotbed") / "calibration.json"


def _measure(config: RunConfig, dataset: Dataset, found: Sketch, device: torch.device, budget: float) -> Calibration:
    began = time.perf_counter()
    reader, reader_cores, first_batch, pool = _reader(config, dataset, device, budget)
    with repeatable(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        rig = _Rig(config, dataset, found, device, pool)
        num_slots = rig.all_keys if is_cached(found) else None
        wide = rig.steady_run(num_slots, budget)
        costs = (
            _cache_costs(rig, wide, device, budget) if is_cached(found) else _Costs(0.0, 0.0, wide.seconds, wide.peak)
        )
    return Calibration(
        measured_at=time.time(),
        seconds=time.perf_counter() - began,
        cores=num_cores(),
        reader=reader,
        reader_cores=reader_cores,
        first_batch=first_batch,
        step=costs.step,
        step_cores=wide.cores / wide.seconds * costs.step,
        row=costs.row,
        slot=costs.slot,
        copy_speed=_copy_speed(device),
        peak_bytes=costs.peak_bytes,
    )


@dataclass(frozen=True)
class _Costs:
    row: float
    slot: float
    step: float
    peak_bytes: float


def _cache_costs(rig: _Rig, wide: _Run, device: torch.device, budget: float) -> _Costs:
    """What missed rows and slots add to a step whose rows are all in the cache."""
    num_slots = min(rig.num_rows, rig.most_keys + rig.most_keys // 50 + 1)
    narrow = rig.steady_run(num_slots, budget)
    misses = max(narrow.misses, 1.0)
    if device.type == "cuda":
        ranks = torch.randint(0, 2**40, (1 << 20,), device=device)
        slot = _timed(lambda: torch.sort(ranks), device, min(budget, 0.2)) / (1 << 20) / 2
        return _Costs(narrow.seconds / misses, slot, wide.seconds, narrow.peak)
    step = max(wide.seconds - rig.plan_seconds(rig.all_keys, 0.0), 0.2 * wide.seconds)
    row = max(narrow.seconds - step - rig.plan_seconds(num_slots, narrow.misses / rig.most_keys), 0.0) / misses
    return _Costs(row, 0.0, step, narrow.peak)


def _reader(
    config: RunConfig, dataset: Dataset, device: torch.device, budget: float
) -> tuple[float, float, float, list[Batch]]:
    """(seconds and core seconds of a batch, seconds until the first, some batches)."""
    loader = train_loader(config, dataset, device)
    with closing(loader.epoch(0)) as batches:
        next(batches)  # compiled code is loaded
    pool: list[Batch] = []
    done, first = 0, 0.0
    began, cores = time.perf_counter(), time.process_time()
    with closing(loader.epoch(0)) as batches:
        for batch in batches:
            done += 1
            first = first or time.perf_counter() - began
            if len(pool) < _POOL and batch.size == config.data.batch_size:
                pool.append(batch)
            if time.perf_counter() - began > max(4 * first, 2 * budget) and len(pool) == _POOL:
                break
    seconds = time.perf_counter() - began
    if not pool:
        pool = list(islice(loader.epoch(0), 1))
    return seconds / max(done, 1), (time.process_time() - cores) / max(done, 1), first, pool


@dataclass(frozen=True)
class _Run:
    seconds: float  # of a step
    cores: float
    misses: float  # of a step
    peak: float  # bytes


class _Rig:
    """The run's model over tables that are small enough to be created quickly."""

    def __init__(
        self, config: RunConfig, dataset: Dataset, found: Sketch, device: torch.device, pool: list[Batch]
    ) -> None:
        self._config, self._schema, self._device = config, dataset.schema, device
        self._found, self._pool = found, pool
        self._tables = _smaller(found.tables, found.amounts.record, _MOST_BYTES[device.type])
        keys = [sum(rows_of_batch(self._tables, batch).values()) for batch in pool]
        self.most_keys = max(keys)
        self.num_rows = sum(table.rows or 0 for table in self._tables.values())
        self.all_keys = min(self.num_rows, 2 * sum(keys))

    def plan_seconds(self, num_slots: int, miss_share: float) -> float:
        """Seconds that a cache of this size takes to plan the first batch."""
        ids = self._pool[0]
        counts = np.concatenate([_counts(column) for column in _columns(self._tables, ids)])
        return plan_seconds(num_slots, 2 * num_slots, counts, miss_share, 1, self._config.tables.policy)

    def steady_run(self, num_slots: int | None, budget: float) -> _Run:
        """A run without compilation. CUDA kernels are compiled for every new combination of arguments, once per machine."""
        if self._device.type != "cuda":
            return self.run(num_slots, budget)
        self.run(num_slots, _COMPILES)
        return min((self.run(num_slots, budget / 2) for _ in range(2)), key=lambda run: run.seconds)

    def run(self, num_slots: int | None, budget: float) -> _Run:
        """Train on the batches repeatedly for `budget` seconds; `num_slots` None: every row on the device."""
        device, config = self._device, self._config
        if device.type == "cuda":
            gc.collect()  # the last measurement holds memory until then
            torch.cuda.synchronize(device)
            torch._C._cuda_clearCublasWorkspaces()  # 64 MiB that every run has, and that may exist already
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        share = None if num_slots is None else min(1.0, num_slots / self.num_rows)
        tables = EmbeddingTables(
            self._tables, self._found.optimizer, device=device, cache=share, policy=config.tables.policy,
            precision=self._found.precision,
            store_precision="same" if share is None else config.tables.store_precision,
        )  # fmt: skip
        model = model_of(config, self._schema).to(device)
        dense = dense_optimizer(config, model)
        window, compiled = config.tables.window or None, compiled_step(config, model, dense, device)
        learner = Learner(tables, model, dense, config.dense.lr, device, window, _LOOK_AHEAD, compiled=compiled)
        watch = _Watch(tables, device, budget)

        def batches() -> Any:
            while not watch.is_over:
                yield from self._pool

        with closing(learner.ahead(batches())) as ahead:
            interval = Interval()
            for batch in ahead:
                result = learner.step(batch)
                interval.add(result.loss, result.logits, batch.labels)
                if len(interval) == config.train.log_every or watch.is_first:  # the first one loads code, untimed
                    interval.summary()
                    interval = Interval()
                if watch.step(len(self._pool)):
                    break
        return watch.result(before)


class _Watch:
    """Times steps once all kernels have run, and counts the work of the cache meanwhile."""

    def __init__(self, tables: EmbeddingTables, device: torch.device, budget: float) -> None:
        self._tables, self._device, self._budget = tables, device, budget
        self._steps = self._warm = 0
        self._began = self._cores = 0.0
        self._counts = CacheCounts()
        self._seconds = self._used = 0.0
        self._ends: list[float] = []
        self.is_over = False

    @property
    def is_first(self) -> bool:
        """Whether no step has ended before this one."""
        return self._steps == 0

    def step(self, warm: int) -> bool:
        """After a step; True when there are enough."""
        self._steps += 1
        self._ends.append(time.perf_counter())
        if self._steps == warm:
            _finish(self._device)
            self._warm, self._counts = self._steps, self._tables.counters()
            self._began, self._cores = time.perf_counter(), time.process_time()
        elif self._warm and self._steps >= self._warm + 4 and time.perf_counter() - self._began > self._budget:
            _finish(self._device)
            self._seconds, self._used = time.perf_counter() - self._began, time.process_time() - self._cores
            self._counts = self._tables.counters().minus(self._counts)
            self.is_over = True
        return self.is_over

    def result(self, before: int) -> _Run:
        """Figures of a mean step."""
        steps = self._steps - self._warm
        peak = 0.0
        if self._device.type == "cuda":
            held = sum(group.num_bytes for group in self._tables.groups)
            peak = torch.cuda.max_memory_allocated(self._device) - before - held
        misses = self._counts.misses / max(self._counts.batches, 1)
        seconds = self._seconds / steps
        if self._device.type == "cpu":  # a step ends when it returns, so the median excludes disturbed ones
            ends = np.array(self._ends[self._warm - 1 :])
            seconds = float(np.median(ends[2:] - ends[:-2]) / 2)  # two at a time: windows have two batches
        return _Run(seconds, self._used / steps, misses, peak)


def _smaller(tables: dict[str, Table], record: int, most_bytes: int) -> dict[str, Table]:
    """The same tables with fewer rows, ids modulo rows."""
    rows = {name: table.rows or 1 << 20 for name, table in tables.items()}
    share = min(1.0, most_bytes / (sum(rows.values()) * record))
    return {
        name: dataclasses.replace(table, rows=max(1, int(rows[name] * share)), hashing=True, admit=None, expire=None)
        for name, table in tables.items()
    }


def _columns(tables: dict[str, Table], batch: Batch) -> list[Any]:
    """The rows of every table that a batch looks up, with repetitions."""
    single = [name for name in tables if name not in batch.bags]
    ids = {name: batch.ids[:, column] for column, name in enumerate(single)}
    ids |= {name: bag.values for name, bag in batch.bags.items()}
    return [ids[name].numpy() % (table.rows or 1) for name, table in tables.items()]


def _counts(rows: Any) -> Any:
    return np.unique(rows, return_counts=True)[1].astype(np.int32)


def _timed(work: Callable[[], object], device: torch.device, budget: float) -> float:
    """Seconds of one call, without the first."""
    work()
    _finish(device)
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < budget or calls < 3:
        work()
        calls += 1
        _finish(device)
    return (time.perf_counter() - began) / calls


def _copy_speed(device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    host, there = (
        torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True, device="cpu"),
        torch.empty(1 << 26, dtype=torch.uint8, device=device),
    )
    return (1 << 26) / _timed(lambda: there.copy_(host, non_blocking=True), device, 0.1)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(config: RunConfig, dataset: Dataset, device: torch.device, cached: bool) -> str:
    """The name of an entry: a hash of everything that a measurement depends on."""
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    kind = {
        "version": _VERSION,
        "cached": cached,
        "host": platform.node(),
        "device": f"{device.type} {hardware}",
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "data": dataset.fingerprint,
        "reading": asdict(config.data) | {"path": ""},
        "model": asdict(config.model),
        "rows": [config.tables.optimizer, config.tables.precision, config.tables.policy, config.tables.window]
        + [config.tables.store_precision] * (config.tables.store_precision != "same"),
        "dense": config.dense.optimizer,
    }
    return hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:24]


def _entry(known: dict[str, Any], name: str) -> Calibration | None:
    """The stored measurement; None if there is none, it is too old, or another version wrote it."""
    with suppress(TypeError):
        entry = Calibration(**known.get(name, {}))
        return entry if time.time() - entry.measured_at < MOST_AGE else None
    return None


def _read_all() -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(calibration_file().read_text())
        return found if isinstance(found, dict) else {}
    return {}


def _write_all(known: dict[str, Any]) -> None:
    """Write the file; a measurement that cannot be stored is made again."""
    path = calibration_file()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with rewriting(path, place, unique=True) as temporary:
            temporary.write_text(json.dumps(known, indent=1))
