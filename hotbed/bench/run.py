"""All settings, all systems, one after the other in one process.

Every pair of a setting and a system gives a Result or a Skip, as soon as it is known. A system that is missing, does not fit,
fails its check or raises is skipped with a reason, and the others continue. Between two systems all memory is freed.

How long the GPU works is measured after everything is timed (`with_gpu_time`): once used, torch's profiler makes every later
launch of the process slower, by 0.2 to 0.4 ms per step on an H200.
"""

from __future__ import annotations

import gc
import itertools
import logging
import statistics
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from hotbed.bench.check import check
from hotbed.bench.results import Result
from hotbed.bench.setting import BrokenRankError, Setting, in_ranks
from hotbed.bench.systems import BASELINES, OURS, first_line, open_system, why_missing, why_no_room
from hotbed.bench.timing import DensePart, Timing, batches_needed, time_gpu, time_steps
from hotbed.bench.workload import Workload, make_workload
from hotbed.errors import BudgetError, ConfigError

_log = logging.getLogger("hotbed.bench")
_TRIALS, _COPIES = 5, 10  # ten copies at a time, so that launching them does not matter


class Skip(NamedTuple):
    """A system that was not timed."""

    system: str
    setting: Setting
    reason: str
    is_fault: bool = False  # it was installed and fit, but was wrong or failed
    trace: str = ""


class BenchContext(NamedTuple):
    """Shared by all systems."""

    workload: Workload
    distinct: float  # rows a batch touches
    copy_speed: float  # bytes per second
    absent: dict[str, str]  # why a system is not available


class Measurement(NamedTuple):
    """The measurement of one process."""

    rule: str
    timing: Timing
    peak_bytes: int


Verdicts = dict[tuple[object, ...], Skip | None]


def run(systems: Mapping[Setting, Sequence[str]]) -> Iterator[Result | Skip]:
    """Measure the systems of every setting, in this order; ids are drawn again if they differ from the last setting's."""
    absent = {name: reason for name in set().union(*systems.values()) if (reason := why_missing(name))}
    verdicts: Verdicts = {}
    speed = 0.0
    count = max(map(batches_needed, systems))
    for (device, *_), group in itertools.groupby(systems, key=ids_key):
        some = list(group)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # FBGEMM builds on the current device
        workload = make_workload(some[0], count)
        speed = speed or copy_speed(device)
        context = BenchContext(workload, workload.distinct_keys(), speed, absent)
        for setting in some:
            yield from _run(setting, systems[setting], context, verdicts)
        del workload, context
        _release()


def with_gpu_time(results: Sequence[Result]) -> Iterator[Result]:
    """The same results in the same order, with the GPU's working time if available; nothing is timed after this."""
    for (device, *_), group in itertools.groupby(results, key=lambda result: ids_key(result.setting)):
        some = list(group)
        if device.type != "cuda" or all(one.timing.gpu_ms is not None for one in some):
            yield from some
            continue
        workload = make_workload(some[0].setting, max(batches_needed(one.setting) for one in some))
        for one in some:
            yield _profile(one, workload) if one.timing.gpu_ms is None else one
            _release()
        del workload


def _profile(result: Result, workload: Workload) -> Result:
    setting = result.setting
    try:
        with open_system(result.system, setting) as system:
            gpu_ms = time_gpu(system, setting, workload, DensePart(setting))
    except Exception as error:  # the timing itself is valid
        _log.warning("%s: the time of the GPU is not known: %s", result.system, first_line(error))
        return result
    return result._replace(timing=result.timing._replace(gpu_ms=gpu_ms))


def ids_key(setting: Setting) -> tuple[torch.device, *tuple[object, ...]]:
    """What the ids of a setting depend on."""
    return setting.device, setting.rows, setting.batch, setting.ids, setting.zipf


def _run(
    setting: Setting, systems: Sequence[str], context: BenchContext, verdicts: Verdicts
) -> Iterator[Result | Skip]:
    baseline = BASELINES[setting.device.type]
    baseline_ms: float | None = None
    for name in systems:
        outcome = _attempt(name, setting, context, verdicts)
        _release()
        if isinstance(outcome, Result):
            baseline_ms = outcome.ms if name == baseline else baseline_ms
            if baseline_ms is not None:
                outcome = outcome._replace(baseline=baseline, ratio=outcome.ms / baseline_ms)
        yield outcome


def _attempt(name: str, setting: Setting, context: BenchContext, verdicts: Verdicts) -> Result | Skip:
    reason = context.absent.get(name) or why_no_room(name, setting)
    if reason:
        return Skip(name, setting, reason)
    case = (name, setting.optimizer, setting.dim, setting.ids, setting.output, setting.ssd, setting.ranks)
    try:
        if case not in verdicts:
            wrong = check(name, setting)
            verdicts[case] = Skip(name, setting, f"check failed: {wrong}", is_fault=True) if wrong else None
            _release()
        verdict = verdicts[case]
        return _measure(name, setting, context) if verdict is None else verdict._replace(setting=setting)
    except (ConfigError, BudgetError) as error:
        return Skip(name, setting, str(error))
    except BrokenRankError as error:
        last = str(error).strip().splitlines()[-1]
        return Skip(name, setting, f"failed: {last}", is_fault=True, trace=str(error))
    except Exception as error:  # a peer may raise anything, and the others must continue
        return Skip(name, setting, f"failed: {first_line(error)}", is_fault=True, trace=traceback.format_exc())


def _measure(name: str, setting: Setting, context: BenchContext) -> Result:
    if setting.ranks and name in OURS:
        found: Measurement = in_ranks(measure_rank, setting, name)[0]
    else:
        found = _time(name, setting, context.workload)
    return Result(name, found.rule, setting, *found[1:], step_bytes(setting, context.distinct), context.copy_speed)


def measure_rank(setting: Setting, name: str) -> Measurement:
    """In one of several ranks."""
    workload = make_workload(setting, batches_needed(setting)).part(dist.get_rank(), setting.ranks)
    found = _time(name, setting, workload)
    with open_system(name, setting) as system:  # the process ends after this, so the profiler does no harm
        gpu_ms = time_gpu(system, setting, workload, DensePart(replace(setting, batch=workload.batch)))
    return found._replace(timing=found.timing._replace(gpu_ms=gpu_ms))


def _time(name: str, setting: Setting, workload: Workload) -> Measurement:
    behind = DensePart(replace(setting, batch=workload.batch))
    on_device = setting.device.type == "cuda"
    shared = torch.cuda.memory_allocated(setting.device) if on_device else 0
    if on_device:
        torch.cuda.reset_peak_memory_stats(setting.device)
    with open_system(name, setting) as system:
        timing = time_steps(system, setting, workload, behind)
        peak = torch.cuda.max_memory_allocated(setting.device) - shared if on_device else 0
        return Measurement(system.rule, timing, peak)


def _release() -> None:
    """Free memory: unreachable objects, and what torch caches on the device and pinned on the host."""
    gc.collect()
    if not torch.cuda.is_available():
        return
    with suppress(RuntimeError):  # a device that a system broke raises again, in the next one
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
    ids = 2 * 8 * setting.batch * setting.ids_per_sample
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
