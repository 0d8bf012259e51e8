"""Wall-clock time per step, over groups of steps, with counters.

The clock waits for the device at the end of a group only, and only for the training stream: a pipeline continues fetching while
the clock is read. For the same reason there are more batches than timed steps: a pipeline at the end of its input has nothing
left to fetch, unlike in a long run.

`BusyClock`: how long a GPU works: the time in which at least one kernel or copy runs on it, by torch's profiler. A step that
takes longer than its GPU works waits for the host.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from hotbed.bench.setting import Setting
from hotbed.bench.systems import System, Vectors
from hotbed.bench.workload import Workload
from hotbed.cache import CacheCounts
from hotbed.store.counts import TierCounts

GROUP = 10  # steps between two looks at the clock
PROFILED = 10  # steps after those that are timed

COUNTED = (
    *("windows", "hits", "misses", "created", "evictions", "written_back"),
    *("lookups", "missed_lookups", "bytes_in", "bytes_out"),
)


Counts = tuple[CacheCounts | None, TierCounts | None]
Span = tuple[float, float]  # start, end


class Timing(NamedTuple):
    """One measurement."""

    ms_of_group: list[float]  # a step's milliseconds in each group
    counts_per_step: dict[str, float]  # empty without a cache
    stall_share: float | None  # share of the time in which the training stream waited for a window's rows
    gpu_ms: float | None = None  # time of a step in which a kernel or copy ran on the GPU; None on a CPU
    memory_share: float | None = None  # share of the missed rows that memory had; None without an ssd
    ahead_share: float | None = None  # share of the others that were fetched from the ssd before their window

    @property
    def where_rows_were(self) -> str:
        """The shares in words, to be appended; nothing without an ssd."""
        if self.memory_share is None or self.ahead_share is None:
            return ""
        return (
            f", {self.memory_share:.1%} of the missed rows found in memory, {self.ahead_share:.1%} of the others fetched "
            "from the ssd before their window"
        )

    def quantile(self, tenths: int) -> float:
        """The quantile of the groups' milliseconds, in tenths."""
        if len(self.ms_of_group) == 1:
            return self.ms_of_group[0]
        return statistics.quantiles(self.ms_of_group, n=10, method="inclusive")[tenths - 1]

    @property
    def ms_mean(self) -> float:
        return statistics.fmean(self.ms_of_group)


class DensePart:
    """The rest of a step after the lookup: a given gradient, or four layers of an MLP in bf16 with SGD."""

    def __init__(self, setting: Setting) -> None:
        torch.manual_seed(0)
        self._mlp: nn.Sequential | None = None
        if not setting.dense:
            self._grad = torch.randn(setting.batch, setting.width, device=setting.device) * 1e-3
            self._parts = self._grad.view(setting.batch, len(setting.rows), setting.dim).unbind(1)
            return
        width, w = setting.width, setting.dense
        layers: list[nn.Module] = [nn.Linear(width, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU()]
        layers += [nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 1)]
        self._mlp = nn.Sequential(*layers).to(setting.device, torch.bfloat16)
        self._optimizer = torch.optim.SGD(self._mlp.parameters(), lr=1e-3)

    def backward(self, out: Vectors) -> None:
        """Finish the step: gradients into the rows, and into the MLP where there is one."""
        if self._mlp is None:
            if isinstance(out, dict):
                torch.autograd.backward(list(out.values()), self._parts)
            else:
                out.backward(self._grad.view(out.shape))  # type: ignore[no-untyped-call]
            return
        self._optimizer.zero_grad(set_to_none=True)
        block = torch.cat(list(out.values()), dim=1) if isinstance(out, dict) else out.flatten(1)
        self._mlp(block.to(torch.bfloat16)).float().mean().backward()
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._average()
        self._optimizer.step()

    def _average(self) -> None:
        assert self._mlp is not None
        grads = [parameter.grad for parameter in self._mlp.parameters() if parameter.grad is not None]
        flat = torch.cat([grad.float().view(-1) for grad in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for grad, mean in zip(grads, torch.split(flat, [grad.numel() for grad in grads])):
            grad.copy_(mean.view_as(grad))


def batches_needed(setting: Setting) -> int:
    """Warm-up and timed steps, and the read-ahead of a pipeline beyond the last of them."""
    steps = setting.warmup + max(setting.steps, PROFILED)
    return steps + (setting.look_ahead or 32) + 3 * (setting.window or 8)


def time_steps(system: System, setting: Setting, workload: Workload, behind: DensePart) -> Timing:
    """Warm up, then time `steps` steps in groups; the pipeline runs until it is closed after the last one."""
    marks: list[float] = []
    before: Counts = (None, None)
    after: Counts = (None, None)
    done = -setting.warmup
    running: Any = system.vectors(workload)
    with closing(running) as vectors:
        for out in vectors:
            behind.backward(out)
            done += 1
            if done >= 0 and done % GROUP == 0 and done <= setting.steps:
                _wait(setting.device)
                before = (system.counts(), system.tier_counts()) if not marks else before
                marks.append(time.perf_counter())
            if done == setting.steps:
                after = system.counts(), system.tier_counts()
                # with an MLP the loss is the mean of a free output: it falls without bound, under Adam to -inf
                if not setting.dense and not _is_finite(out):
                    raise ArithmeticError("vectors are not finite after training")
                break
            del out  # its memory is reused by the next lookup
    milliseconds = [(stop - start) * 1e3 / GROUP for start, stop in itertools.pairwise(marks)]
    if before[0] is None or after[0] is None:
        return Timing(milliseconds, {}, None)
    during = after[0].minus(before[0])
    counts = {name: getattr(during, name) / setting.steps for name in COUNTED}
    stall_share = during.stall_seconds / (marks[-1] - marks[0])
    return Timing(milliseconds, counts, stall_share, None, *_tier_shares(before[1], after[1]))


def time_gpu(system: System, setting: Setting, workload: Workload, behind: DensePart) -> float | None:
    """Milliseconds of a step in which the GPU works, by torch's profiler, after the warm-up; None on a CPU."""
    running: Any = system.vectors(workload)
    with closing(running) as vectors, BusyClock(setting.device) as busy:
        for done, out in enumerate(vectors, start=1 - setting.warmup):
            behind.backward(out)
            if done == 0 and not busy.start():
                return None
            if done == PROFILED:
                return busy.stop() / PROFILED
            del out
    return None


def _tier_shares(before: TierCounts | None, after: TierCounts | None) -> tuple[float | None, float | None]:
    """(memory_share, ahead_share) of a Timing."""
    if before is None or after is None:
        return None, None
    during = after.minus(before)
    return during.from_memory / max(1, during.requested), during.ahead / max(1, during.from_ssd)


def _is_finite(out: Vectors) -> bool:
    parts = out.values() if isinstance(out, dict) else [out]
    return all(bool(torch.isfinite(part.detach()).all()) for part in parts)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class BusyClock:
    """Profiles from `start` to `stop` on CUDA; elsewhere `start` returns False."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profile: Any = None

    def __enter__(self) -> BusyClock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profile is not None:  # an error interrupted it
            self._profile.stop()
            self._profile = None

    def start(self) -> bool:
        """Start profiling; whether this device has such a time."""
        if self._device.type != "cuda":
            return False
        torch.cuda.synchronize(self._device)
        self._profile = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
        self._profile.start()
        return True

    def stop(self) -> float:
        """Milliseconds in which the GPU worked since `start`."""
        torch.cuda.synchronize(self._device)
        profiled, self._profile = self._profile, None
        profiled.stop()
        return covered(_work(profiled.events())) / 1e3


def _work(events: Iterable[Any]) -> Iterator[Span]:
    """Kernels and copies, in microseconds, without user annotations."""
    for event in events:
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            yield event.time_range.start, event.time_range.end


def covered(spans: Iterable[Span]) -> float:
    """The total length that spans cover; overlaps count once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
