"""All settings, all systems, one after the other in one process.

In: settings that share their ids, and names of systems. Out: a Result or a Skip for every pair, as soon as it is known. A
system that is missing, has no room, fails its check or raises is skipped with a reason, and the others go on. Between two
systems all memory is given back.
"""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from hotbed.bench.check import check
from hotbed.bench.results import Result
from hotbed.bench.systems import BASELINES, KINDS, first_line, missing, no_room
from hotbed.bench.timing import DensePart, batches_needed, time_steps
from hotbed.bench.workload import Setting, Workload, make_workload
from hotbed.errors import BudgetError, ConfigError

_TRIALS, _COPIES = 5, 10  # ten copies at a time, so that launching them does not show


class Skip(NamedTuple):
    """A system that was not timed."""

    system: str
    setting: Setting
    reason: str
    is_fault: bool = False  # it was there and fit, but was wrong or broke
    trace: str = ""


class BenchContext(NamedTuple):
    """What all systems share."""

    workload: Workload
    distinct: float  # rows a batch touches
    copy_speed: float  # bytes per second
    absent: dict[str, str]  # why a system cannot be had


def run(settings: Sequence[Setting], systems: Sequence[str]) -> Iterator[Result | Skip]:
    """Measure every system at every setting, in this order; settings differ in dim, optimizer and dense alone."""
    ground = _prepare(settings, systems)
    verdicts: dict[tuple[str, str, int], Skip | None] = {}
    for setting in settings:
        baseline = BASELINES[setting.device.type]
        baseline_ms: float | None = None
        for name in systems:
            outcome = _attempt(name, setting, ground, verdicts)
            _release()
            if isinstance(outcome, Result):
                baseline_ms = outcome.ms if name == baseline else baseline_ms
                if baseline_ms is not None:
                    outcome = outcome._replace(baseline=baseline, ratio=outcome.ms / baseline_ms)
            yield outcome


def _prepare(settings: Sequence[Setting], systems: Sequence[str]) -> BenchContext:
    one = settings[0]
    if one.device.type == "cuda":
        torch.cuda.set_device(one.device)  # FBGEMM builds on the current device
    workload = make_workload(one.rows, one.batch, max(map(batches_needed, settings)), one.device)
    absent = {name: reason for name in systems if (reason := missing(name))}
    return BenchContext(workload, workload.distinct_keys(), copy_speed(one.device), absent)


def _attempt(
    name: str, setting: Setting, ground: BenchContext, verdicts: dict[tuple[str, str, int], Skip | None]
) -> Result | Skip:
    reason = ground.absent.get(name) or no_room(name, setting)
    if reason:
        return Skip(name, setting, reason)
    case = (name, setting.optimizer, setting.dim)
    try:
        if case not in verdicts:
            wrong = check(name, setting)
            verdicts[case] = Skip(name, setting, f"check failed: {wrong}", is_fault=True) if wrong else None
            _release()
        verdict = verdicts[case]
        return _measure(name, setting, ground) if verdict is None else verdict._replace(setting=setting)
    except (ConfigError, BudgetError) as error:
        return Skip(name, setting, str(error))
    except Exception as error:  # a peer may raise anything, and the others must go on
        return Skip(name, setting, f"failed: {first_line(error)}", is_fault=True, trace=traceback.format_exc())


def _measure(name: str, setting: Setting, ground: BenchContext) -> Result:
    behind = DensePart(setting)
    on_device = setting.device.type == "cuda"
    shared = torch.cuda.memory_allocated(setting.device) if on_device else 0
    if on_device:
        torch.cuda.reset_peak_memory_stats(setting.device)
    system = KINDS[name].make(setting)
    timing = time_steps(system, setting, ground.workload, behind)
    peak = torch.cuda.max_memory_allocated(setting.device) - shared if on_device else 0
    return Result(name, system.rule, setting, timing, peak, step_bytes(setting, ground.distinct), ground.copy_speed)


def _release() -> None:
    """Give memory back: what is unreachable, and what torch keeps for later on the device and pinned on the host."""
    gc.collect()
    if not torch.cuda.is_available():
        return
    with suppress(RuntimeError):  # a device that a system broke tells so again, to the next one
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        empty_host_cache = getattr(torch._C, "_host_emptyCache", None)
        if empty_host_cache is not None:
            empty_host_cache()


def step_bytes(setting: Setting, distinct: float) -> float:
    """The fewest bytes of one embedding step through the device's memory.

    Vectors written and their gradients read once; ids read twice; each distinct row read for the lookup, then read and
    written with its optimizer state for the update.
    """
    vectors = 2 * 4 * setting.batch * setting.width
    ids = 2 * 8 * setting.batch * len(setting.rows)
    return vectors + ids + distinct * (4 * setting.dim + 2 * setting.record_bytes)


def copy_speed(device: torch.device) -> float:
    """Bytes per second of a large copy within the device's memory, read and written bytes both counted."""
    size = 1 << (30 if device.type == "cuda" else 27)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(_TRIALS):
        _finish(device)
        start = time.perf_counter()
        for _ in range(_COPIES):
            target.copy_(source)
        _finish(device)
        times.append((time.perf_counter() - start) / _COPIES)
    return 2 * size / statistics.median(times)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
