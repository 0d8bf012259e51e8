"""When ranks merge and what becomes of their weights and moments; docs/kstep.md has the formulas.

In: the flat weights and moments of this rank, told of every step. Out: the same tensors, merged in place. A merge is exact and
waited for, or it travels beside the next steps: what was sent is then replaced by the mean a fixed number of steps later, as
x += mean - sent, so that the result depends on step numbers alone and never on how fast the wire was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hotbed.optim.kstep.flight import Cargo, Flight
from hotbed.optim.kstep.ranks import Ranks

MergeRule = Literal["params", "moments", "shared_v"]
MERGE_RULES: tuple[MergeRule, ...] = ("params", "moments", "shared_v")


class Local(NamedTuple):
    """What one rank holds, flat; a moment that the inner rule lacks is empty."""

    x: Tensor  # weights, then running statistics
    m: Tensor  # first moment of the weights
    v: Tensor  # second moment
    shared: Tensor  # the largest mean of v that any merge has seen; empty but for "shared_v"


class Decay(NamedTuple):
    """How fast the moments of one stretch of weights forget."""

    place: slice
    beta1: float
    beta2: float


@dataclass
class Counts:
    """Where a rank is; equal on all ranks but for weight and updates."""

    step: int = 0  # made so far
    since: int = 0  # steps since a merge was last started
    weight: float = 0.0  # of this rank's steps since then
    shared_at: int = 0  # step at which `shared` was sent
    due_in: int = 0  # steps until the mean on its way is used; 0: none is on its way
    sent_at: int = 0  # step at which it was sent
    updates: int = 0  # that this rank has made since

    def as_tensor(self) -> Tensor:
        return torch.tensor(astuple(self), dtype=torch.float64, device="cpu")

    @classmethod
    def from_tensor(cls, saved: Tensor) -> Counts:
        numbers = saved.tolist()
        return cls(int(numbers[0]), int(numbers[1]), float(numbers[2]), *(int(one) for one in numbers[3:]))


class Merger:
    """Merges `local` over `ranks` every `k` steps, or only when told with 0; a merge is used `delay` steps later."""

    def __init__(self, local: Local, ranks: Ranks, rule: MergeRule, k: int, delay: int) -> None:
        self.local, self.ranks, self.rule, self.k, self.delay = local, ranks, rule, k, delay
        self.counts = Counts()
        self._flight: Flight | None = None
        self._sent: Tensor | None = None
        self._arrived: Tensor | None = None  # a flight that was waited for before it was due

    def begin_step(self, weight: float) -> int:
        """The number of the step, from 1."""
        self.counts.step += 1
        self.counts.since += 1
        self.counts.weight += weight
        return self.counts.step

    def end_step(self, decays: Callable[[], list[Decay]], *, moved: bool) -> None:
        """Use the mean that is due, and start the merge that is."""
        counts = self.counts
        counts.updates += moved
        if counts.due_in:
            counts.due_in -= 1
            if counts.due_in == 0:
                self._use(decays())
        if 0 < self.k <= counts.since and self.ranks.size > 1:
            if self.delay:
                self._send()
            else:
                self._merge_now(moments=False)

    def merge(self, decays: Callable[[], list[Decay]], *, moments: bool) -> None:
        """Use the mean on its way at once, then merge exactly what was done since."""
        if self.ranks.size == 1 or not self.local.x.numel():
            return
        in_flight = self.counts.due_in > 0
        if in_flight:
            self._use(decays())
        if self.counts.since or moments or in_flight:  # a mean that was added leaves ranks equal to rounding only
            self._merge_now(moments)

    def floor(self, place: slice, beta2: float) -> Tensor | None:
        """What is shared of the second moment, its bias taken out."""
        if not self.local.shared.numel() or not self.counts.shared_at:
            return None
        return self.local.shared[place] / (1 - beta2**self.counts.shared_at)

    def arriving(self) -> Tensor | None:
        """What will be used when due, waited for if need be: mean - sent, or the mean itself of a shared v."""
        if self._flight is not None and self._sent is not None:
            mean = self._flight.mean()
            if mean is None:
                mean = self._sent.new_zeros(sum(one.numel() for one in self._traveling(False)))
            else:
                mean[: self._sent.numel()].sub_(self._sent)
            self._arrived, self._flight, self._sent = mean, None, None
        return self._arrived

    def restore(self, counts: Counts, arrived: Tensor | None) -> None:
        """Go on from here; a mean still on its way is received and dropped."""
        self.arriving()
        self.counts, self._arrived = counts, arrived

    def _traveling(self, moments: bool) -> list[Tensor]:
        local = self.local
        if moments or self.rule == "moments":
            return [local.x, local.m, local.v]
        return [local.x, local.v] if self.rule == "shared_v" else [local.x]

    def _send(self) -> None:
        counts, traveling = self.counts, self._traveling(False)
        self._flight = Flight(Cargo(traveling, counts.weight, counts.step), self.ranks, overlap=True)
        self._sent = torch.cat(traveling) if self.rule == "moments" else self.local.x.clone()
        counts.due_in, counts.sent_at, counts.updates = self.delay, counts.step, 0
        counts.since, counts.weight = 0, 0.0

    def _use(self, decays: list[Decay]) -> None:
        arriving = self.arriving()
        assert arriving is not None
        local, counts = self.local, self.counts
        x, *rest = torch.split(arriving, [one.numel() for one in self._traveling(False)])
        local.x.add_(x)
        if self.rule == "moments":
            m, v = rest
            for place, beta1, beta2 in decays:
                local.m[place].add_(m[place], alpha=beta1**counts.updates)
                local.v[place].add_(v[place], alpha=beta2**counts.updates).clamp_min_(0)
        elif self.rule == "shared_v":
            self._share(rest[0], counts.sent_at)
        self._arrived, counts.due_in = None, 0

    def _merge_now(self, moments: bool) -> None:
        counts, traveling = self.counts, self._traveling(moments)
        weight = counts.weight if counts.since else 1.0
        mean = Flight(Cargo(traveling, weight, counts.step), self.ranks, overlap=False).mean()
        counts.since, counts.weight = 0, 0.0
        if mean is None:  # nobody moved
            return
        parts = torch.split(mean, [one.numel() for one in traveling])
        averaged = traveling if moments or self.rule == "moments" else traveling[:1]
        for mine, part in zip(averaged, parts):
            mine.copy_(part)
        if self.rule == "shared_v":
            self._share(parts[-1], counts.step)

    def _share(self, mean_v: Tensor, step: int) -> None:
        torch.maximum(self.local.shared, mean_v, out=self.local.shared)
        self.counts.shared_at = step
