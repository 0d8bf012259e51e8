"""Sharded or replicated, for one group: chosen from the rows of its first batches and the speed of the wires.

Both modes give the same rows to the bit, so the choice affects time only. The first batches are replicated, which counts
everything that the forecast of both modes needs: rows that a rank requests, rows of the union, rows without a replica. Only the
later batches of the trial are counted, when the replicas have been filled. All ranks choose at the same batch, from the same
numbers, and rank 0 logs the reason ("hotbed.parallel", at level INFO).

`CollectiveSpeed`: how fast the wires are. The time of an exchange or a gather over a mesh is a constant for each call and one
for each byte.

It is measured with two sizes on the mesh in use, so that it includes topology, backend and routing. Every rank gets the numbers
of the slowest.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from hotbed.errors import ConfigError
from hotbed.host.memory import in_words
from hotbed.ops.lookups import Lookups
from hotbed.optim import RowOptimizer
from hotbed.parallel.collect import carry, gather, gather_numbers, make_routings
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.replicated import ReplicatedFront, RowTally
from hotbed.parallel.routes import UnionKind
from hotbed.tables.group.group import TableGroup, UpdateStep

if TYPE_CHECKING:
    from hotbed.parallel.shard_front import ShardFront

Mode = Literal["sharded", "replicated", "all-reduce", "auto"]
_COPIES = ("replicated", "all-reduce")
_LOG = logging.getLogger("hotbed.parallel")
_SMALL, _LARGE = 1 << 10, 1 << 20  # bytes that a rank sends to all others together
_ROW = 64  # bytes
_TIMES = 5
TRIAL = 24  # batches before the choice
_IGNORED = 8  # of those, at the beginning
_KEY = 4  # bytes


class ModeCost(NamedTuple):
    """The cost of a step in one mode."""

    num_bytes: float  # that a rank sends
    seconds: float  # on the wires


class Costs(NamedTuple):
    """The cost of a step in both modes, for the rank with most rows."""

    sharded: ModeCost
    replicated: ModeCost

    @property
    def choice(self) -> str:
        return "replicated" if self.replicated.seconds < self.sharded.seconds else "sharded"


def costs_of(rows: RowTally, row_bytes: int, world: int, speeds: CollectiveSpeeds, want: UnionKind = "kept") -> Costs:
    """Costs of a step; `rows` were counted over some batches, a row on the wire has `row_bytes`.

    Sharded: rows come from their owners and gradients go to them. Replicated: gradients go there too, rows without a replica
    go to all ranks, and so do the new weights of the union if rows are kept. The keys and places of a union count as bytes
    only: they are exchanged ahead of the batch, so no step waits for them.
    """
    asked, union, new = (count / max(1, rows.batches) for count in rows[1:])
    away = (world - 1) / world
    exchanged = asked * away * row_bytes
    sharded = ModeCost(2 * exchanged, 2 * speeds.exchange.seconds(exchanged))
    kept = union if want == "kept" else 0.0
    gathered = [count * (world - 1) * row_bytes for count in (new, kept) if count]
    settled = asked * away * _KEY + kept * (world - 1) * _KEY
    seconds = speeds.exchange.seconds(exchanged) + sum(map(speeds.gather.seconds, gathered))
    return Costs(sharded, ModeCost(exchanged + sum(gathered) + settled, seconds))


class AutoFront:
    """Answers the lookups of one group in either mode."""

    def __init__(self, sharded: ShardFront, mesh: Mesh, group: TableGroup) -> None:
        self.layout = group.layout
        self._mesh, self._group = mesh, group
        self._sharded = sharded
        self._replicated = ReplicatedFront(sharded, mesh, group)
        self._front: ShardFront | ReplicatedFront = self._replicated
        self._before = RowTally()  # of the batches that are ignored
        self._num_batches = 0

    @property
    def wants(self) -> UnionKind:
        """The kind of union that batches need."""
        return self._front.wants

    def ensure(self, lookups: Lookups, learns: bool, claim: Callable[[], None]) -> Lookups:
        """See ShardFront."""
        return self._sharded.ensure(lookups, learns, claim)

    def lookup(self, lookups: Lookups) -> Tensor:
        """Pooled vectors [O, D]."""
        self._num_batches += 1
        if self._num_batches == _IGNORED + 1:
            self._before = self._replicated.tally
        elif self._num_batches == TRIAL + 1:
            self._choose()
        return self._front.lookup(lookups)

    def rows_of(self, lookups: Lookups) -> Tensor:
        """The weights [L, D] that the lookups read."""
        return self._front.rows_of(lookups)

    def update(self, lookups: Lookups, tables: tuple[str, ...], grad: Tensor, step: UpdateStep) -> None:
        """One step of the row optimizer."""
        self._front.update(lookups, tables, grad, step)

    def forget(self) -> None:
        """Rows have changed other than by updates."""
        self._front.forget()

    def _choose(self) -> None:
        mine = [now - before for now, before in zip(self._replicated.tally, self._before)]
        most = RowTally(*gather_numbers(self._mesh, mine, self._group.records.device).max(0).values.tolist())
        speeds = measure_speeds(self._mesh, self._group.records.device)
        costs = costs_of(most, self._sharded.row_bytes, self._mesh.size, speeds, self.wants)
        if self._mesh.rank == 0:
            _LOG.info("%s", _reason(self._group, most, speeds, costs))
        if costs.choice == "sharded":
            self._replicated.forget()
            self._front = self._sharded


def _reason(group: TableGroup, rows: RowTally, speeds: CollectiveSpeeds, costs: Costs) -> str:
    def per_step(way: ModeCost) -> str:
        return f"{way.seconds * 1e3:.3g} ms on the wires and {in_words(way.num_bytes)} sent"

    asked, union, new = (round(count / max(1, rows.batches)) for count in rows[1:])
    rates = [f"{1e-9 / speed.byte:.3g} GB/s" if speed.byte else "no limit" for speed in speeds]
    return (
        f"tables of dim {group.layout.dim} ({', '.join(group.members)}) are {costs.choice}: a step takes "
        f"{per_step(costs.sharded)} by a rank when sharded, {per_step(costs.replicated)} when replicated "
        f"(a rank asks for {asked:,} rows, owns {union:,} of the union, {new:,} of them new; measured over {rows.batches} "
        f"batches; an exchange takes {speeds.exchange.call * 1e6:.0f} us and {rates[0]}, a gather "
        f"{speeds.gather.call * 1e6:.0f} us and {rates[1]})"
    )


class CollectiveSpeed(NamedTuple):
    """The speed of one kind of collective."""

    call: float  # seconds
    byte: float  # seconds, for each that a rank sends

    def seconds(self, num_bytes: float) -> float:
        """Seconds of one call in which a rank sends `num_bytes`."""
        return self.call + self.byte * num_bytes


class CollectiveSpeeds(NamedTuple):
    """Speeds of the two kinds of collectives that carry rows."""

    exchange: CollectiveSpeed
    gather: CollectiveSpeed


def measure_speeds(mesh: Mesh, device: torch.device) -> CollectiveSpeeds:
    """A collective with the same result on all ranks. Takes some milliseconds."""
    world = mesh.size

    sizes = (_SMALL, _LARGE)
    counts = torch.tensor([[size // _ROW // world for size in sizes]], device="cpu").expand(world, -1)
    routing_of = dict(zip(sizes, make_routings(mesh, counts.contiguous(), device)))

    def exchanged(rows: Tensor) -> None:
        routing = routing_of[rows.nbytes]
        carry(mesh, rows[: routing.num_sent], routing)

    def gathered(rows: Tensor) -> None:
        part = rows[: rows.shape[0] // world]
        gather(mesh, part, [part.shape[0]] * world)

    times = [_time(run, size, device) for run in (exchanged, gathered) for size in sizes]
    worst = gather_numbers(mesh, times, device).max(0).values.tolist()
    return CollectiveSpeeds(_line(worst[0], worst[1], world), _line(worst[2], worst[3], world))


def _time(run: Callable[[Tensor], None], num_bytes: int, device: torch.device) -> float:
    """Median seconds."""
    rows = torch.zeros(num_bytes // _ROW, _ROW // 4, device=device, dtype=torch.float32)
    found = []
    for _ in range(1 + _TIMES):
        began = time.perf_counter()
        run(rows)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def _line(small: float, large: float, world: int) -> CollectiveSpeed:
    """A line through two measurements; a rank does not send its own share of the bytes."""
    sent = (world - 1) / world
    byte = max(0.0, large - small) / ((_LARGE - _SMALL) * sent) if world > 1 else 0.0
    return CollectiveSpeed(max(0.0, small - byte * _SMALL * sent), byte)


def check_mode(mode: str, optimizer: RowOptimizer | None) -> None:
    """Refuse an unknown mode, and replicas of rows that decay at every step."""
    if mode not in get_args(Mode):
        raise ConfigError(f"mode must be one of {', '.join(map(repr, get_args(Mode)))}, not {mode!r}")
    if mode in _COPIES and optimizer is not None and optimizer.decay_scope == "table":
        raise ConfigError(
            f"mode={mode!r} keeps copies of the rows that batches use, but decay_scope='table' changes all rows at every "
            "step; use decay_scope='touched', or mode='sharded'"
        )


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
    mode: Mode, sharded: ShardFront, mesh: Mesh, group: TableGroup
) -> ShardFront | ReplicatedFront | AutoFront:
    """The front that answers the lookups of a group."""
    if mode == "all-reduce":
        _refuse_all_reduce(sharded, group)
    if mode in _COPIES:
        return ReplicatedFront(sharded, mesh, group, everywhere=mode == "all-reduce")
    if mode == "sharded":
        return sharded
    if group.optimizer.decay_scope == "table":
        if mesh.rank == 0:
            _LOG.info("tables of dim %d are sharded: decay_scope='table' changes all rows", group.layout.dim)
        return sharded
    return AutoFront(sharded, mesh, group)
