"""When ranks merge, and how their weights and moments are merged; docs/kstep.md has the formulas.

The flat weights and moments of this rank are merged in place. A merge is exact and waited for, or it overlaps with the next
steps: the weights that were sent are then replaced by the mean a fixed number of steps later, as x += mean - sent, so that the
result depends on step numbers alone and never on the speed of the wire.

`PendingMean`: a weighted mean over ranks on its way. Flat tensors of this rank -> the mean of all ranks, by one collective.

Every rank sends w x, w, its step number and the square of it. The sums give the mean, sum(w x) / sum(w), and show every rank
whether all sent the same step: their step numbers are equal exactly if W sum(s^2) = sum(s)^2.

`RankGroup` is the ranks that take part in a merge, as k-step optimizers see them: a few sums of one tensor over ranks.

`hotbed.parallel.mesh.Mesh` is one that knows nodes; `AllRanks` is used without a mesh: all ranks of the process group as
equals, with one flat all-reduce, or this process alone without a process group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hotbed.errors import RankError

Over = Literal["all", "node"]  # whose values a sum takes


class PendingSum(Protocol):
    """A sum in progress."""

    def wait(self) -> object:
        """Return when the sum is in its tensor, or raise its error."""


class RankGroup(Protocol):
    """All ranks make the same calls in the same order."""

    size: int
    local: int  # ranks per node

    def apart(self) -> RankGroup:
        """The same ranks with separate process groups: pending sums must not mix with other collectives."""

    def sum_(self, tensor: Tensor, over: Over = "all") -> None:
        """The sum over all ranks or over this rank's node, in place, the same bits on each."""

    def start_sum(self, tensor: Tensor, over: Over = "all") -> PendingSum:
        """The same in the background; do not use the tensor until `wait` has returned."""

    def broadcast_(self, tensor: Tensor) -> None:
        """The values of rank 0, everywhere."""


class AllRanks:
    """Every rank of the process group, assumed to be on one node."""

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.size = self.local = dist.get_world_size() if together else 1
        self._group = dist.new_group() if self.size > 1 else None

    def apart(self) -> AllRanks:
        return AllRanks()

    def sum_(self, tensor: Tensor, over: Over = "all") -> None:
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)

    def start_sum(self, tensor: Tensor, over: Over = "all") -> PendingSum:
        if self.size == 1:
            return _FinishedSum()
        started: PendingSum = dist.all_reduce(tensor, group=self._group, async_op=True)
        return started

    def broadcast_(self, tensor: Tensor) -> None:
        if self.size > 1:
            dist.broadcast(tensor, src=0, group=self._group)


class _FinishedSum:
    def wait(self) -> None:
        return


_NUM_EXTRA = 3
_FIRST_V = 8  # steps before the first merge of a frozen second moment, if k is not less
_NO_MEAN = -1.0  # instead of a mean of v, which is never negative: no rank had any weight
_STEP_CYCLE = 61  # step numbers are sent modulo this: their squares are exact in float32, also over thousands of ranks
MergeRule = Literal["params", "moments", "shared_v", "frozen_v"]
MERGE_RULES: tuple[MergeRule, ...] = ("params", "moments", "shared_v", "frozen_v")
SHARING: tuple[MergeRule, ...] = ("shared_v", "frozen_v")  # rules in which ranks share a second moment


class LocalState(NamedTuple):
    """The flat state of one rank; a moment that the inner rule lacks is empty."""

    x: Tensor  # weights, then running statistics
    m: Tensor  # first moment of the weights
    v: Tensor  # second moment
    shared: Tensor  # of the means of v in merges: the largest ("shared_v") or the last ("frozen_v"); else empty


class MomentDecay(NamedTuple):
    """The decay rates of the moments of one run of weights."""

    place: slice
    beta1: float
    beta2: float


@dataclass
class MergeCounts:
    """The progress of a rank; equal on all ranks except for weight and updates."""

    step: int = 0  # made so far
    since: int = 0  # steps since a merge was last started
    weight: float = 0.0  # of this rank's steps since then
    shared_at: int = 0  # step at which `shared` was sent
    due_in: int = 0  # steps until the pending mean is used; 0: none is pending
    sent_at: int = 0  # step at which it was sent
    updates: int = 0  # of this rank since then

    def as_tensor(self) -> Tensor:
        return torch.tensor(astuple(self), dtype=torch.float64, device="cpu")

    @classmethod
    def from_tensor(cls, saved: Tensor) -> MergeCounts:
        numbers = saved.tolist()
        return cls(int(numbers[0]), int(numbers[1]), float(numbers[2]), *(int(one) for one in numbers[3:]))


class Merger:
    """Merges `local` over `ranks` every `k` steps, or with 0 only on request; a merge is used `delay` steps later."""

    def __init__(self, local: LocalState, ranks: RankGroup, rule: MergeRule, k: int, delay: int) -> None:
        self.local, self.ranks, self.rule, self.k, self.delay = local, ranks, rule, k, delay
        self.counts = MergeCounts()
        self._flight: PendingMean | None = None
        self._sent: Tensor | None = None
        self._arrived: Tensor | None = None  # a mean that was waited for before it was due

    def begin_step(self, weight: float) -> int:
        """The number of the step, from 1."""
        self.counts.step += 1
        self.counts.since += 1
        self.counts.weight += weight
        return self.counts.step

    def end_step(self, decays: Callable[[], list[MomentDecay]], *, moved: bool) -> None:
        """Use a mean that is due, and start a merge that is due."""
        counts = self.counts
        counts.updates += moved
        if counts.due_in:
            counts.due_in -= 1
            if counts.due_in == 0:
                self._use(decays())
        if self.k and self._interval(counts.step - counts.since) <= counts.since and self.ranks.size > 1:
            if self.delay and not self.knows_no_v:
                self._send()
            else:
                self._merge_now(moments=False)

    def merge(self, decays: Callable[[], list[MomentDecay]], *, moments: bool) -> None:
        """Use the pending mean now, then merge the steps since exactly."""
        if self.ranks.size == 1 or not self.local.x.numel():
            return
        in_flight = self.counts.due_in > 0
        if in_flight:
            self._use(decays())
        due = self.counts.since or moments or in_flight  # adding a mean leaves ranks equal up to rounding only
        if due and not self._merge_now(moments):
            self._level(moments)

    @property
    def knows_no_v(self) -> bool:
        """Whether ranks must divide by a shared second moment and no mean of it has arrived yet."""
        return self.rule == "frozen_v" and self.ranks.size > 1 and not self.counts.shared_at

    def shared_v(self, place: slice, beta2: float) -> Tensor | None:
        """The shared second moment, bias-corrected."""
        if not self.local.shared.numel() or not self.counts.shared_at:
            return None
        return self.local.shared[place] / (1 - beta2**self.counts.shared_at)

    def arriving(self) -> Tensor | None:
        """The update that will be used when due, waited for if necessary: mean - sent, or the mean of a shared v."""
        if self._flight is not None and self._sent is not None:
            mean = self._flight.mean()
            if mean is None:
                mean = self._sent.new_zeros(sum(one.numel() for one in self._traveling(False)))
                mean[self.local.x.numel() :].fill_(_NO_MEAN if self.rule == "frozen_v" else 0)
            else:
                mean[: self._sent.numel()].sub_(self._sent)
            self._arrived, self._flight, self._sent = mean, None, None
        return self._arrived

    def restore(self, counts: MergeCounts, arrived: Tensor | None) -> None:
        """Resume from here; a pending mean is received and dropped."""
        self.arriving()
        self.counts, self._arrived = counts, arrived

    def _interval(self, step: int) -> int:
        """Steps from `step`, when ranks have merged, to the next merge: shorter at first, while the second moment is young."""
        return min(self.k, max(_FIRST_V, step)) if self.rule == "frozen_v" else self.k

    def _traveling(self, moments: bool) -> list[Tensor]:
        local = self.local
        if moments or self.rule == "moments":
            return [local.x, local.m, local.v]
        return [local.x, local.v] if self.rule in SHARING else [local.x]

    def _send(self) -> None:
        counts, traveling = self.counts, self._traveling(False)
        self._flight = PendingMean(MeanInput(traveling, counts.weight, counts.step), self.ranks, overlap=True)
        self._sent = torch.cat(traveling) if self.rule == "moments" else self.local.x.clone()
        counts.due_in, counts.sent_at, counts.updates = min(self.delay, self._interval(counts.step)), counts.step, 0
        counts.since, counts.weight = 0, 0.0

    def _use(self, decays: list[MomentDecay]) -> None:
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
        elif self.rule in SHARING:
            self._share(rest[0], counts.sent_at)
        self._arrived, counts.due_in = None, 0

    def _merge_now(self, moments: bool) -> bool:
        """Whether there was anything to merge: a rank had samples since the last merge started."""
        counts, traveling = self.counts, self._traveling(moments)
        weight = counts.weight if counts.since else 1.0
        mean = PendingMean(MeanInput(traveling, weight, counts.step), self.ranks, overlap=False).mean()
        counts.since, counts.weight = 0, 0.0
        if mean is None:  # no rank moved
            return False
        parts = torch.split(mean, [one.numel() for one in traveling])
        averaged = traveling if moments or self.rule == "moments" else traveling[:1]
        for mine, part in zip(averaged, parts):
            mine.copy_(part)
        if self.rule in SHARING:
            self._share(parts[-1], counts.step)
        return True

    def _level(self, moments: bool) -> None:
        """Make ranks that have not moved equal to the bit, also in moments that differ by the rule. V is that of all."""
        local = self.local
        levelled = [local.x, local.m, local.v] if moments or self.rule == "moments" else [local.x]
        mean = PendingMean(MeanInput(levelled, 1.0, self.counts.step), self.ranks, overlap=False).mean()
        assert mean is not None
        for mine, part in zip(levelled, torch.split(mean, [one.numel() for one in levelled])):
            mine.copy_(part)

    def _share(self, mean_v: Tensor, step: int) -> None:
        if self.rule == "shared_v":
            torch.maximum(self.local.shared, mean_v, out=self.local.shared)
        elif mean_v.numel() and float(mean_v[0]) == _NO_MEAN:
            return
        else:
            self.local.shared.copy_(mean_v)
        self.counts.shared_at = step


class MeanInput(NamedTuple):
    """The input of one rank to a mean."""

    parts: Sequence[Tensor]  # flat
    weight: float
    step: int


class PendingMean:
    """Starts when built; runs in the background with `overlap`, else it is finished."""

    def __init__(self, cargo: MeanInput, ranks: RankGroup, *, overlap: bool) -> None:
        self._size, self._step = ranks.size, cargo.step
        number = cargo.step % _STEP_CYCLE
        self._wire = torch.cat([*cargo.parts, cargo.parts[0].new_tensor([cargo.weight, number, number * number])])
        self._wire[:-_NUM_EXTRA].mul_(cargo.weight)
        self._waiting = ranks.start_sum(self._wire) if overlap else None
        if not overlap:
            ranks.sum_(self._wire)

    def mean(self) -> Tensor | None:
        """The mean of all parts, concatenated; None if no rank had any weight. Call it once."""
        if self._waiting is not None:
            self._waiting.wait()
        weight, numbers, squares = self._wire[-_NUM_EXTRA:].tolist()
        if self._size * squares != numbers * numbers:
            raise RankError(
                f"ranks meet in a merge after different numbers of steps (this one after {self._step}): all ranks need the "
                "same k, and call step() and merge() equally often; a rank without samples calls step(weight=0)"
            )
        return self._wire[:-_NUM_EXTRA].div_(weight) if weight > 0 else None
