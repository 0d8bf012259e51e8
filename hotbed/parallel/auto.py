"""Sharded or replicated, for one group: the first batches are exchanged in both modes, and the faster one is kept.

Both modes give the same rows to the bit, so the choice affects time only. The first batches of a run are sharded, those that
follow are replicated; of each, the first few are ignored, until replicas are filled and buffers have their sizes. What is timed
are the exchanges of training itself: lookup and update, and the union of a batch where no prefetch makes it ahead of time. The
time of a mode is the median over its batches, of the slowest rank. All ranks choose at the same batch, from the same numbers,
and rank 0 logs the reason ("hotbed.parallel", at level INFO). `mode="sharded"` or "replicated" measures nothing.

A batch whose union does not fit into the replicas ends the trial, or the replicated mode: from then on, rows are sharded.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from hotbed.errors import ConfigError
from hotbed.host.memory import in_words
from hotbed.ops.lookups import Lookups
from hotbed.parallel.collect import gather_numbers
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.replicated import ReplicaRoom, ReplicatedFront
from hotbed.parallel.routes import Route, UnionKind, requests_of, route_of
from hotbed.tables.group.group import TableGroup, UpdateStep

if TYPE_CHECKING:
    from hotbed.parallel.shard_front import ShardFront

Mode = Literal["sharded", "replicated", "all-reduce", "auto"]
T = TypeVar("T")
_COPIES = ("replicated", "all-reduce")
_LOG = logging.getLogger("hotbed.parallel")
IGNORED = 8  # batches of each mode, at its beginning
TIMED = 8  # batches of each mode that follow


class ModeTime(NamedTuple):
    """What the exchanges of a batch took in one mode."""

    seconds: float
    num_bytes: float  # that a rank sent


class ModeChoice(NamedTuple):
    """The mode of one group, and why."""

    dim: int
    tables: tuple[str, ...]
    mode: str
    sharded: ModeTime | None = None  # None: not measured
    replicated: ModeTime | None = None
    batches: int = 0  # timed, of each mode
    reason: str = ""  # where nothing was measured

    def figures(self) -> dict[str, Any]:
        """For the summary of a run."""
        measured = {"sharded": self.sharded, "replicated": self.replicated}
        times = {name: None if one is None else one._asdict() for name, one in measured.items()}
        return {**self._asdict(), "tables": list(self.tables), **times, "said": str(self)}

    def __str__(self) -> str:
        about = f"tables of dim {self.dim} ({', '.join(self.tables)}) are {self.mode}: "
        if self.sharded is None or self.replicated is None:
            return about + self.reason

        def shown(one: ModeTime) -> str:
            return f"{one.seconds * 1e3:.3g} ms and {in_words(one.num_bytes)} sent by a rank"

        return (
            f"{about}the exchanges of a step take {shown(self.sharded)} when sharded, {shown(self.replicated)} when replicated "
            f"(measured: medians of {self.batches} batches each, of the slowest rank)"
        )


class ExchangeTimer:
    """Times the exchanges of some batches in one mode."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh, self._device = mesh, device
        self._lookups: list[float] = []
        self._updates: list[float] = []
        self._sent = 0

    def lookup(self, run: Callable[[], T], ahead: float) -> T:
        """Time a lookup; `ahead`: seconds that the batch has taken before it."""
        return self._timed(run, self._lookups, ahead)

    def update(self, run: Callable[[], T]) -> T:
        """Time an update."""
        return self._timed(run, self._updates, 0.0)

    def _timed(self, run: Callable[[], T], times: list[float], ahead: float) -> T:
        sent, began = self._now()
        result = run()
        sent_then, ended = self._now()
        times.append(ended - began + ahead)
        self._sent += sent_then - sent
        return result

    def _now(self) -> tuple[int, float]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        traffic = self._mesh.traffic
        return traffic.in_node + traffic.across, time.perf_counter()

    @property
    def found(self) -> ModeTime:
        """The times of a batch on this rank."""
        seconds = sum(statistics.median(times) for times in (self._lookups, self._updates) if times)
        return ModeTime(seconds, self._sent / max(1, len(self._lookups)))


class AutoFront:
    """Answers the lookups of one group in either mode."""

    def __init__(self, sharded: ShardFront, mesh: Mesh, group: TableGroup, room: ReplicaRoom) -> None:
        self.layout = group.layout
        self.choice: ModeChoice | None = None  # None: the trial is not over
        self._mesh, self._group = mesh, group
        self._sharded = sharded
        self._replicated = ReplicatedFront(sharded, mesh, group, room)
        self._front: ShardFront | ReplicatedFront = sharded
        self._timers = [ExchangeTimer(mesh, group.records.device) for _ in range(2)]  # sharded, replicated
        self._timer: ExchangeTimer | None = None  # of the batch
        self._num_batches = 0

    @property
    def wants(self) -> UnionKind:
        """The kind of union that batches need: all of the trial have one, so that a mode can take any of them over."""
        return self._replicated.wants if self.choice is None else self._front.wants

    @property
    def replica_bytes(self) -> int:
        """See ReplicatedFront."""
        return self._replicated.replica_bytes

    def ensure(self, lookups: Lookups, learns: bool, claim: Callable[[], None]) -> Lookups:
        """See ShardFront."""
        return self._sharded.ensure(lookups, learns, claim)

    def checked(self, route: Route) -> Route:
        """The route of a batch, without a union that does not fit; on all ranks."""
        most = self._replicated.most_replicas
        if most is None or route.union is None or route.union.num_rows <= most:
            return route
        return route._replace(union=None)

    def lookup(self, lookups: Lookups) -> Tensor:
        """Pooled vectors [O, D]."""
        route = route_of(requests_of(lookups))
        if self.choice is None:
            self._num_batches += 1
            self._try(self._num_batches)
        if route.union is None and (self.choice is None or self.choice.mode == "replicated"):
            self._keep_sharded()
        front, timer = self._front, self._timer
        if timer is None:
            return front.lookup(lookups)
        ahead = route.kept_union().seconds if front is self._replicated else 0.0
        return timer.lookup(lambda: front.lookup(lookups), ahead)

    def rows_of(self, lookups: Lookups) -> Tensor:
        """The weights [L, D] that the lookups read."""
        return self._front.rows_of(lookups)

    def update(self, lookups: Lookups, tables: tuple[str, ...], grad: Tensor, step: UpdateStep) -> None:
        """One step of the row optimizer."""
        front, timer = self._front, self._timer
        if timer is None:
            front.update(lookups, tables, grad, step)
        else:
            timer.update(lambda: front.update(lookups, tables, grad, step))

    def forget(self) -> None:
        """Rows have changed other than by updates."""
        self._replicated.forget()

    def _try(self, number: int) -> None:
        """Batch `number` of the trial, from 1, or the first one after it."""
        which, place = divmod(number - 1, IGNORED + TIMED)
        if which == 2:
            self._choose()
            return
        self._front = (self._sharded, self._replicated)[which]
        self._timer = self._timers[which] if place >= IGNORED else None

    def _choose(self) -> None:
        mine = [float(value) for timer in self._timers for value in timer.found]
        worst = gather_numbers(self._mesh, mine, self._group.records.device).max(0).values.tolist()
        sharded, replicated = ModeTime(*worst[:2]), ModeTime(*worst[2:])
        mode = "replicated" if replicated.seconds < sharded.seconds else "sharded"
        self._settle(self._choice(mode)._replace(sharded=sharded, replicated=replicated, batches=TIMED))

    def _keep_sharded(self) -> None:
        """A batch does not fit into the replicas."""
        most = self._replicated.most_replicas
        reason = f"the rows of a batch of all ranks do not fit into the {most:,} replicas that hbm= has room for"
        self._settle(self._choice("sharded")._replace(reason=reason))

    def _choice(self, mode: str) -> ModeChoice:
        return ModeChoice(self.layout.dim, tuple(self._group.members), mode)

    def _settle(self, choice: ModeChoice) -> None:
        self.choice, self._timer = choice, None
        self._front = self._replicated if choice.mode == "replicated" else self._sharded
        if choice.mode == "sharded":
            self._replicated.forget()
        if self._mesh.rank == 0:
            _LOG.info("%s", choice)


def check_mode(mode: str, groups: Iterable[TableGroup]) -> None:
    """Refuse an unknown mode, and replicas of rows that change other than by the updates of batches."""
    if mode not in get_args(Mode):
        raise ConfigError(f"mode must be one of {', '.join(map(repr, get_args(Mode)))}, not {mode!r}")
    wrong = [f"{why} (tables {', '.join(group.members)})" for group in groups if (why := _why_no_copies(group))]
    if mode in _COPIES and wrong:
        raise ConfigError(
            f"mode={mode!r} keeps copies of the rows that batches use, but {'; '.join(wrong)}; leave that out, or use "
            "mode='sharded'"
        )


def _why_no_copies(group: TableGroup) -> str:
    """Why copies of rows would not stay what their owner has; empty where they do."""
    if group.optimizer.decay_scope == "table":
        return "decay_scope='table' changes all rows at every step"
    if any(rows.rounds_below for rows in group.caches):
        return "store_precision='int8' rounds rows when they leave the cache of their owner"
    return ""


def _refuse_all_reduce(sharded: ShardFront, group: TableGroup) -> None:
    """A ConfigError where every rank applying an update would not give the rows of their owners."""
    why = ""
    if group.optimizer.scale_by_count:
        why = "scale_by_count divides by the occurrences in all batches, which only owners count"
    elif group.layout.precision != "fp32":
        why = f"precision={group.layout.precision!r} rounds at random, which only owners do"
    elif sharded.shared is not None:
        why = "ids that wait for admission share a row, which is summed apart"
    if why:
        raise ConfigError(f"mode='all-reduce' applies every update on every rank: {why}; use mode='replicated'")


def choose_front(
    mode: Mode, sharded: ShardFront, mesh: Mesh, group: TableGroup, room: ReplicaRoom
) -> ShardFront | ReplicatedFront | AutoFront:
    """The front that answers the lookups of a group."""
    if group.shard.by_column:
        if mode in _COPIES:
            raise ConfigError(
                f"mode={mode!r} keeps copies of whole rows, and every rank has a slice of those with placement='column' "
                f"({', '.join(group.members)}); use mode='sharded' or 'auto', or placement='row' or 'table'"
            )
        return sharded
    if mode == "all-reduce":
        _refuse_all_reduce(sharded, group)
    if mode in _COPIES:
        return ReplicatedFront(sharded, mesh, group, room, everywhere=mode == "all-reduce")
    if mode == "sharded":
        return sharded
    if why := _why_no_copies(group):
        if mesh.rank == 0:
            _LOG.info("tables of dim %d are sharded: %s", group.layout.dim, why)
        return sharded
    return AutoFront(sharded, mesh, group, room)
