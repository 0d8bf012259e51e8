"""Wall clock per step, over groups of steps, and what happened meanwhile.

The device is waited for at the end of a group only, and of the device only the stream that trains: a pipeline goes on fetching
while the clock is read. For the same reason there are more batches than timed steps: a pipeline that sees the end of its
input has nothing left to fetch, which no long run would show.
"""

from __future__ import annotations

import itertools
import statistics
import time
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hotbed.bench.systems import System
from hotbed.bench.workload import GROUP, Setting, Workload
from hotbed.cache import CacheCounts

COUNTED = (
    *("windows", "hits", "misses", "created", "evictions", "written_back"),
    *("lookups", "missed_lookups", "bytes_in", "bytes_out"),
)


class Timing(NamedTuple):
    """One measurement."""

    ms_of_group: list[float]  # a step's milliseconds in each group
    counts_per_step: dict[str, float]  # empty without a cache
    stall_share: float | None  # of the time, the training stream waited for a window's rows

    def quantile(self, tenths: int) -> float:
        """Milliseconds that `tenths` of ten groups stay under."""
        if len(self.ms_of_group) == 1:
            return self.ms_of_group[0]
        return statistics.quantiles(self.ms_of_group, n=10, method="inclusive")[tenths - 1]

    @property
    def ms_mean(self) -> float:
        return statistics.fmean(self.ms_of_group)


class DensePart:
    """What comes after the lookup: a given gradient, or four layers of an MLP in bf16 with SGD."""

    def __init__(self, setting: Setting) -> None:
        torch.manual_seed(0)
        self._mlp: nn.Sequential | None = None
        if not setting.dense:
            self._grad = torch.randn(setting.batch, setting.width, device=setting.device) * 1e-3
            return
        width, w = setting.width, setting.dense
        layers: list[nn.Module] = [nn.Linear(width, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU()]
        layers += [nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 1)]
        self._mlp = nn.Sequential(*layers).to(setting.device, torch.bfloat16)
        self._optimizer = torch.optim.SGD(self._mlp.parameters(), lr=1e-3)

    def backward(self, out: Tensor) -> None:
        """Finish the step: gradients into the rows, and into the MLP where there is one."""
        if self._mlp is None:
            out.backward(self._grad.view(out.shape))  # type: ignore[no-untyped-call]
            return
        self._optimizer.zero_grad(set_to_none=True)
        self._mlp(out.flatten(1).to(torch.bfloat16)).float().mean().backward()
        self._optimizer.step()


def batches_needed(setting: Setting) -> int:
    """Warm-up, timed steps, and what a pipeline reads ahead of the last of them."""
    return setting.warmup + setting.steps + (setting.look_ahead or 32) + 3 * (setting.window or 8)


def time_steps(system: System, setting: Setting, workload: Workload, behind: DensePart) -> Timing:
    """Warm up, then time `steps` steps in groups; the pipeline runs on behind the last one until it is closed."""
    marks: list[float] = []
    before: CacheCounts | None = None
    after: CacheCounts | None = None
    done = -setting.warmup
    running: Any = system.vectors(workload)
    with closing(running) as vectors:
        for out in vectors:
            behind.backward(out)
            done += 1
            if done >= 0 and done % GROUP == 0:
                _wait(setting.device)
                before = system.counts() if not marks else before
                marks.append(time.perf_counter())
            if done == setting.steps:
                after = system.counts()
                # the training step's loss is the mean of a free output: it falls for ever, under Adam beyond all numbers
                if not setting.dense and not bool(torch.isfinite(out.detach()).all()):
                    raise ArithmeticError("vectors are not finite after training")
                break
            del out  # its memory serves the next lookup
    milliseconds = [(stop - start) * 1e3 / GROUP for start, stop in itertools.pairwise(marks)]
    if before is None or after is None:
        return Timing(milliseconds, {}, None)
    during = after.minus(before)
    counts = {name: getattr(during, name) / setting.steps for name in COUNTED}
    return Timing(milliseconds, counts, during.stall_seconds / (marks[-1] - marks[0]))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
