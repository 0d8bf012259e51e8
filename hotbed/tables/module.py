"""EmbeddingTables: the nn.Module that users call.

Forward: ids -> pooled vectors. Backward: the gradient of the vectors is summed per row and the row optimizer runs at once,
in place. No gradient tensor of the size of a table exists, and the rows are not `parameters()`: the dense optimizer of the
model does not see them. Rows change only in train mode (`tables.train()`), under enabled gradients, and unless
`requires_grad_(False)` froze them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.cache import DEFAULT_POLICY, CacheCounts
from hotbed.errors import ConfigError, HotbedError, ShapeError
from hotbed.host.memory import parse_bytes
from hotbed.ids import IdCounts
from hotbed.ops.blocks import Scratch
from hotbed.ops.lookups import Lookups
from hotbed.ops.records import PRECISIONS, Precision
from hotbed.ops.shard import WHOLE, Shard
from hotbed.ops.streams import mark
from hotbed.optim import Adagrad, RowOptimizer
from hotbed.optim.schedules import as_factor, as_schedule
from hotbed.store.counts import TierCounts, Tiers, TierSizes
from hotbed.store.history import begin_history
from hotbed.tables.accumulation import Accumulation
from hotbed.tables.autograd import SCALED_RANKS, Front
from hotbed.tables.clipping import clip_together
from hotbed.tables.exchange import Exchange, LocalExchange
from hotbed.tables.group.cached import CachedRows
from hotbed.tables.group.group import TableGroup
from hotbed.tables.group.make import groups_of
from hotbed.tables.inputs import GroupInputs, read_inputs
from hotbed.tables.keyed import KeyedJagged
from hotbed.tables.lookup import Bags, BatchLookup, Ids, Vectors
from hotbed.tables.ownership import Ownership
from hotbed.tables.rates import RowRates
from hotbed.tables.recorded import RecordedLookups
from hotbed.tables.sizing.budget import Budgets, rooms_of
from hotbed.tables.sizing.fit import sizes_of, stored_bytes
from hotbed.tables.sizing.placement import group_shards, with_placements
from hotbed.tables.snapshot.snapshot import TablesSink, TablesSnapshot
from hotbed.tables.spec import Output, Table, features_of, output_of, own_rooms
from hotbed.tables.state_dict import load_columns, save_columns
from hotbed.tables.torch_hooks import eager, listen, refuse_average
from hotbed.tables.transaction import exclusive
from hotbed.telemetry.clock import StepClock
from hotbed.types import Jagged, RowPart

__all__ = ["EmbeddingTables", "Table"]


class EmbeddingTables(nn.Module):
    """Named embedding tables with fused row optimizers.

        tables = hotbed.EmbeddingTables(
            {"user": hotbed.Table(rows=1_000_000, dim=16), "ad": hotbed.Table(rows=50_000, dim=16)},
            optimizer=hotbed.optim.Adagrad(lr=0.05),
        )
        vectors = tables(ids)                # ids int64 [B, 2] -> [B, 2, 16]
        loss(model(vectors)).backward()      # the rows are updated here

    `output`: "stack" gives [B, F, D] and needs equal dims and pooled features, "concat" gives [B, sum of dims], "dict" gives
    {feature: [B, D]} (for pooling "none" the vectors of all values: [L, D] for a Jagged, [B, T, D] for a matrix [B, T]).
    "auto" is stack where possible, else dict.

    `cache=0.015` keeps that share of the rows on the device and the rest in host memory, with the same results to the bit;
    `hbm="2GiB"` says the same in bytes, index included, and `memory="64GiB"` is the most that the rest may take. With
    `ssd="/fast/rows:500GiB"` rows that memory does not hold are in files there (on a CPU `memory` and `ssd` are enough).
    `staging="256MiB"` bounds the host memory for rows on their way, which otherwise grows to the largest window; a CUDA device
    uses the same amount again. `policy` says which rows stay. `for batch in hotbed.prefetch(loader, tables)` brings rows in
    ahead of time; without it every batch waits for its own.

    `precision="bf16"` or "fp16" keeps the weights in 16 bits, the optimizer state in float32; vectors are float32. Updated
    weights are rounded up or down at random, so that small steps count on average: an approximation (docs/numerics.md).
    `store_precision="int8"` rounds the weights of rows that leave the cache for host memory to int8 in the same way.

    With several ranks (torch.distributed) such tables refuse to train, because the rows of the ranks would drift apart; use
    `hotbed.ShardedTables`, which shards them. `independent=True` is for ranks that each train a model of their own.
    """

    is_shared = False  # whether other ranks have a part in every batch

    @torch.inference_mode(False)  # rows outlive it
    def __init__(
        self,
        tables: Mapping[str, Table],
        optimizer: RowOptimizer | None = None,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        output: Output = "auto",
        cache: float | None = None,
        hbm: str | int | None = None,
        memory: str | int | None = None,
        ssd: str | None = None,
        staging: str | int | None = None,
        policy: str = DEFAULT_POLICY,
        precision: Precision = "fp32",
        store_precision: str = "same",
        independent: bool = False,
        shard: Shard = WHOLE,
        placement: str = "row",
        replicas: float = 0.0,
    ) -> None:
        super().__init__()
        listen()
        self._optimizer = optimizer if optimizer is not None else Adagrad()
        self.is_frozen = self._is_eval = False  # by requires_grad_(False); by tables.eval() itself
        self.tables = with_placements(tables, placement, shard.world)
        self.features = features_of(self.tables)
        self.output = output_of(output, self.tables, self.features)
        self._rates: RowRates | None = None
        self.lr_factor = 1.0
        self.num_updates = 0
        self.accumulation: Accumulation | None = None
        self.independent = independent
        if precision not in PRECISIONS:
            raise ConfigError(f"precision must be one of {', '.join(map(repr, PRECISIONS))}, not {precision!r}")
        shards = group_shards(self.tables, self.optimizer, precision, shard)
        sizes = sizes_of(self.tables, self.optimizer, precision, shards)
        place = torch.empty(0, device=device, dtype=torch.float32).device
        budgets = Budgets(cache, hbm, memory, ssd, store_precision, staging, replicas)
        stored = stored_bytes(self.tables, self.optimizer, precision, store_precision, shards)
        everywhere = sizes_of(self.tables, self.optimizer, precision)
        rooms = rooms_of(budgets, sizes, place.type, stored, everywhere)
        rooms = own_rooms(rooms, self.tables, budgets, shards)
        self._memory_budget = 0 if memory is None else parse_bytes(memory, "memory")
        self.replica_rooms = [room.replica_bytes for room in rooms]  # by group
        self.cache_budget = ("hbm", parse_bytes(hbm, "hbm")) if hbm is not None else ("memory", self._memory_budget)
        self.groups = groups_of(self.tables, self.optimizer, place, rooms, policy, precision, shards)
        for group in self.groups:
            group.initialise(seed)
        self.group_inputs = [
            GroupInputs(group, [feature for feature in self.features if feature.table in group.members])
            for group in self.groups
        ]
        self.exchange: Exchange = LocalExchange(self.groups, self.group_inputs)
        self._begin()
        self.schedule = as_schedule(self.optimizer.lr)

    def _begin(self) -> None:
        """What belongs to this process and this object alone: a copy has its own."""
        self.ownership = Ownership()
        self.changes = self.ownership.changes
        for group in self.groups:
            group.changes = self.changes
        self._lookup = BatchLookup(self.groups, None if self.caches else RecordedLookups(self))
        self.scratch = Scratch()
        self.clock = StepClock(partial(mark, self.device, timed=True) if self.device.type == "cuda" else None)

    @property
    def turns(self) -> Ownership:
        """`ownership`, by the name it had in 0.1."""
        warnings.warn("EmbeddingTables.turns is now called ownership.", DeprecationWarning, stacklevel=2)
        return self.ownership

    def __getstate__(self) -> dict[str, Any]:
        """For copy.deepcopy and pickle, which take rows that are all in one tensor and no others."""
        refuse_average()
        if self.is_shared or self.caches:
            raise HotbedError(
                f"tables {'spread over ranks' if self.is_shared else 'behind a cache'} cannot be copied or pickled: their rows "
                "are in slots, host memory and files. Make tables with the same arguments where you need them (in a spawned "
                "process: inside it), and bring the rows with hotbed.checkpoint.save and load, or with state_dict()"
            )
        self.claim()
        ours = ("ownership", "_lookup", "clock", "scratch")
        kept = {name: value for name, value in self.__dict__.items() if name not in ours}
        return kept | {"_rates": None} | {"accumulation": None if self.accumulation is None else Accumulation()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        listen()
        self._begin()

    @property
    def optimizer(self) -> RowOptimizer:
        """What moves the rows; chosen when the tables are made."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, other: RowOptimizer) -> None:
        raise ConfigError(
            f"the optimizer of tables cannot be replaced: each row carries the state of {self._optimizer}. Make tables with "
            f"optimizer={other} and bring the rows over with load_weight; to change the learning rate set tables.lr_factor"
        )

    @property
    def lr_factor(self) -> float:
        """Multiplies the learning rate of the rows, for schedules driven from outside: a finite number, 0 or more."""
        return self._lr_factor

    @lr_factor.setter
    def lr_factor(self, factor: float) -> None:
        self._lr_factor = as_factor(factor)
        if self._rates is not None:
            self._rates.follow()

    def set_lr(self, lr: float) -> None:
        """Learn with this rate from the next update on; a schedule of the optimizer keeps its shape, scaled to it."""
        base = self.schedule.at(self.num_updates)
        if base <= 0:
            raise ConfigError(
                f"the learning rate of update {self.num_updates} is {base:g} by the schedule of the optimizer, which no factor "
                f"makes {lr:g}; give tables an optimizer with a fixed lr"
            )
        self.lr_factor = lr / base

    @property
    def rates(self) -> RowRates:
        """The learning rate of the rows as a torch optimizer, for torch's schedulers; it steps nothing.

        scheduler = torch.optim.lr_scheduler.StepLR(tables.rates, step_size=1000)
        """
        if self._rates is None:
            self._rates = RowRates(self)
        return self._rates

    @property
    def learns(self) -> bool:
        """Whether backward moves rows: in train mode, unless `requires_grad_(False)` froze them."""
        return self.training and not self.is_frozen

    def freeze_rows(self, frozen: bool) -> None:
        """What `requires_grad_(False)` does, of the tables or of a module that holds them."""
        self.is_frozen = frozen

    def eval(self) -> EmbeddingTables:
        """Rows stay as they are, until `tables.train()`."""
        self._is_eval = True
        super().eval()
        return self

    def train(self, mode: bool = True) -> EmbeddingTables:
        """Rows move in backward, or not."""
        if mode and self._is_eval:
            if sys._getframe(1).f_code is nn.Module.train.__code__:  # of a module that holds the tables
                raise HotbedError(
                    "train() of a model would let rows learn that tables.eval() has stopped. To keep them as they are, call "
                    "tables.requires_grad_(False) instead of tables.eval(); to train them, tables.train() before model.train()"
                )
            self._is_eval = False
        super().train(mode)
        return self

    @eager
    def forward(
        self, ids: Tensor | Mapping[str, Tensor | Jagged] | KeyedJagged, bags: Mapping[str, Jagged] | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Look up a batch.

        Args:
            ids: int64 [B, F] with one column for each feature (in declared order) that is not in `bags`; or a mapping from
                every feature to a tensor [B], a tensor [B, T] (bags of T values) or a Jagged; or a TorchRec
                KeyedJaggedTensor whose keys are the features.
            bags: the multi-valued features, next to an id matrix.
        """
        if self.accumulation is not None and torch.is_grad_enabled() and self.learns:
            return self._accumulated(ids, bags)
        return self._looked_up(ids, bags)

    def _looked_up(self, ids: Ids, bags: Bags) -> Vectors:
        """The vectors of a batch; their gradient moves rows, if rows learn."""
        return self._lookup.vectors(self, ids, bags)

    def accumulate(self, mode: bool = True) -> EmbeddingTables:
        """From now on backward collects gradients, and rows move in `step()`: together, as those of one larger batch.

            tables.accumulate()
            for number, batch in enumerate(batches):
                loss = loss_of(model(tables(batch.ids)), batch) / 4
                loss.backward()
                if number % 4 == 3:
                    tables.step()
                    optimizer.step()
                    optimizer.zero_grad()

        The rows are those of a batch of all four, to the bit. A step that is left out (`zero_grad()`) changes nothing. A
        GradScaler takes tables like an optimizer: `scaler.step(tables)`. With ShardedTables all ranks step equally often.
        `accumulate(False)` ends it; pending gradients are an error.
        """
        waiting = [name for name, table in self.tables.items() if table.admit is not None]
        if mode and waiting:
            raise ConfigError(
                f"accumulate() cannot give the rows of one larger batch for ids that must be admitted ({', '.join(waiting)}): "
                "the first batches would not know what later ones admit. Leave out admit=, or train larger batches."
            )
        if not mode and self.accumulation is not None and self.accumulation.parts:
            raise HotbedError(
                "gradients are pending; call tables.step() or tables.zero_grad() before accumulate(False)"
            )
        if not mode and self.accumulation is not None:
            self.accumulation.is_over = True
        self.accumulation = (self.accumulation or Accumulation()) if mode else None
        return self

    @eager
    def step(self) -> bool:
        """Move rows by the gradients that were collected since the last step; whether there were any.

        Gradients of a loss that a GradScaler has scaled are unscaled; where they overflowed, rows stay.
        """
        if self.accumulation is None:
            raise HotbedError("rows move in backward; tables.accumulate() lets step() move them instead")
        return self.accumulation.step(self, self._looked_up)

    def clip_grad_norm(self, max_norm: float, parameters: Tensor | Iterable[Tensor] = ()) -> Tensor:
        """Clip the pending gradients, and those of `parameters`, by their common norm; returns that norm.

            tables.accumulate()
            loss_of(model(tables(ids))).backward()
            tables.clip_grad_norm(1.0, model.parameters())
            tables.step()
            optimizer.step()

        As torch.nn.utils.clip_grad_norm_ with the rows among the parameters. Of a loss that a GradScaler scaled, call
        `scaler.unscale_(tables)` and `scaler.unscale_(optimizer)` first.
        """
        if self.accumulation is None:
            raise HotbedError(
                "clip_grad_norm clips gradients before rows move, and rows move in backward; call tables.accumulate() before, "
                "and tables.step() after it. clip_norm= of the row optimizer clips every row by itself"
            )
        if self.is_shared:
            raise HotbedError(
                "the gradients of rows spread over ranks are summed in step(), so their norm is not known before it"
            )
        if not max_norm > 0:
            raise ConfigError(f"max_norm must be above 0, not {max_norm!r}")
        return clip_together(self.accumulation.in_order(), self.features, self.tables, parameters, max_norm)

    def forget_gradients(self) -> None:
        """Drop pending gradients, as `zero_grad()` of the tables, or of a module that holds them, does."""
        if self.accumulation is not None:
            self.accumulation.forget()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """What a GradScaler unscales: vectors whose gradients wait for a step."""
        if self.is_shared:
            raise HotbedError(SCALED_RANKS)
        return [{"params": [] if self.accumulation is None else self.accumulation.leaves}]

    def _accumulated(self, ids: Ids, bags: Bags) -> Vectors:
        assert self.accumulation is not None
        with torch.no_grad():
            out = self._looked_up(ids, bags)  # first: other ranks learn of inputs that do not fit
        return self.accumulation.collect(read_inputs(self.features, ids, bags, self.device), out)

    @property
    def fronts(self) -> list[Front]:
        """What answers lookups, by group."""
        return self.exchange.fronts

    @property
    def device(self) -> torch.device:
        """Where the rows are looked up."""
        return self.groups[0].residency.records.device

    def counters(self) -> CacheCounts:
        """What the caches have done since they were made; all zero without one. Waits for nothing."""
        counts = CacheCounts()
        for group in self.groups:
            counts = counts.plus(group.counters())
        return counts

    @property
    def caches(self) -> list[CachedRows]:
        """What has to bring rows in before a batch, one for each group; none where all rows are on the device."""
        return [cache for group in self.groups for cache in group.caches]

    def tiers(self) -> Tiers | None:
        """What memory and ssd did since this process opened them, and what they hold; None without an ssd."""
        counts, sizes = TierCounts(), TierSizes(memory_budget=self._memory_budget)  # which is for all groups together
        found = [tiers for group in self.groups if (tiers := group.tiers()) is not None]
        for one in found:
            counts, sizes = counts.plus(one.counts), sizes.plus(one.sizes)
        return Tiers(counts, sizes) if found else None

    @exclusive
    def flush(self) -> None:
        """Write every changed row of the caches back to host memory."""
        self.claim()
        for group in self.groups:
            group.flush()

    @exclusive
    def warm(self, keys: Tensor, uses: Tensor | None = None) -> None:
        """Bring keys (distinct, ascending) into the cache of every group. The static policy keeps them, LFU counts `uses`."""
        self.claim()
        for group in self.groups:
            group.warm(keys, uses)

    @exclusive
    def snapshot(self, touched: bool = False) -> TablesSnapshot:
        """The rows between two steps, for a checkpoint: all ever written, or those touched since the last commit."""
        return TablesSnapshot(self, touched)

    def restore(self) -> TablesSink:
        """A sink for saved rows; all ranks take one."""
        self.exchange.rows_replaced()
        return TablesSink(self)

    @exclusive
    def weight(self, table: str) -> Tensor:
        """The weights [rows, dim] of a table: a view, so writing to it changes the rows; behind a cache, a copy.

        From then on checkpoints compare the rows of this table: docs/checkpoints.md, "Full and incremental".
        """
        self.claim()
        return self.group_of(table).writable(table)["weight"]

    def weight_pieces(self, table: str) -> Iterator[Tensor]:
        """Copies of the weights of a table, some rows at a time, in order (of dynamic ids: as `ids`): for large tables.

        Each piece is read when the caller takes it, as the rows are then.
        """
        with self.changes.lock:
            self.claim()
            pieces = self.group_of(table).weight_pieces(table)
        while True:
            with self.changes.lock:
                self.claim()
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    @exclusive
    def load_weight(self, table: str, weight: Tensor) -> None:
        """Replace the weights [rows, dim] of a table; the optimizer state stays."""
        group = self.group_of(table)
        group.keyspace.refuse_whole(table)
        wanted = [self.tables[table].rows, self.tables[table].dim]
        if list(weight.shape) != wanted:
            raise ShapeError(f"the weights of table {table!r} are {wanted}, not {list(weight.shape)}")
        with self.changes.loading(self.claim, [table], whole=False):
            group.load(table, {"weight": weight})

    @exclusive
    def states(self, table: str) -> dict[str, Tensor]:
        """The optimizer state of a table by name, [rows, dim] or [rows, 1]: views."""
        self.claim()
        columns = self.group_of(table).writable(table)
        return {name: column for name, column in columns.items() if name != "weight"}

    @exclusive
    def rows(self, table: str) -> tuple[Tensor, dict[str, Tensor]]:
        """(ids [N] ascending, their `weight` [N, dim] and optimizer states [N, dim] or [N, 1]) of a table, on the host.

        Of dynamic ids, those that have a row; of a table with a number of rows, all.
        """
        self.claim()
        return self.group_of(table).rows(table)

    @exclusive
    def ids(self, table: str) -> Tensor:
        """The ids [N] of a table that have a row, ascending, on the host."""
        self.claim()
        return self.group_of(table).keyspace.ids_of(table)

    @exclusive
    def load_rows(self, parts: Iterable[RowPart]) -> None:
        """Replace the rows of all tables with dynamic ids: `weight` by id; optimizer state starts again."""
        begin_history(self)
        TablesSink(self).replace(parts)

    @exclusive
    def shared_row(self, table: str) -> dict[str, Tensor] | None:
        """The columns [1, dim] or [1, 1] of the row that ids of a table share until they are admitted, or None."""
        self.claim()
        return self.group_of(table).shared_row(table)

    def id_counts(self) -> dict[str, IdCounts]:
        """How many ids of each table with dynamic ids were seen, admitted, rejected and expired in training."""
        return {name: counts for group in self.groups for name, counts in group.keyspace.counts().items()}

    def set_id_clock(self, clock: Callable[[int], float]) -> None:
        """Let `Expire(unused="7d")` go by this time: the number of a training batch, from 1 -> seconds since 1970."""
        for group in self.groups:
            group.keyspace.set_clock(clock)

    @property
    def num_bytes(self) -> int:
        """Memory of all records, optimizer state included."""
        return sum(group.records.nbytes for group in self.groups)

    def extra_repr(self) -> str:
        rows = sum(table.rows or 0 for table in self.tables.values())
        return f"{len(self.tables)} tables, {rows:,} rows, {self.num_bytes / 2**20:,.1f} MiB, {self.optimizer}"

    def placed(self, group: Front, lookups: Lookups, learns: bool) -> Lookups:
        """Lookups whose rows are in their slots; where no feed saw to that, now."""
        if lookups.ticket is not None and lookups.ticket.holds(learns):
            return lookups
        return group.ensure(lookups, learns, self.ownership.claim)

    def stop_recording(self, *, feeds: bool = False) -> None:
        """Look up every batch launch by launch; with `feeds`, batches of `hotbed.prefetch` are planned that way too."""
        self._lookup.stop_recording()
        self.ownership.records = not feeds

    def claim(self) -> None:
        """Before anything reads or writes all rows."""
        self._lookup.check(self.device)
        self.ownership.claim()

    def group_of(self, table: str) -> TableGroup:
        """The group of a table."""
        for group in self.groups:
            if table in group.members:
                return group
        raise ConfigError(f"no table {table!r}; there are {', '.join(self.tables)}")

    @exclusive
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EmbeddingTables:
        """`.to(device)` moves the records; rows are float32 (or float64), so `.half()` and the like are refused.

        So does `to_empty(device=...)`: rows are made with their values, also under `torch.device("meta")`.
        """
        if getattr(fn, "__qualname__", "").startswith("Module.to_empty."):
            empty, fn = fn, lambda records: records.to(empty(records[:0]).device)
        self.claim()
        for group in self.groups:
            dtype = fn(group.records[:0]).dtype
            if dtype not in (torch.float32, torch.float64):
                raise ConfigError(
                    f"embedding rows are kept in float32 and cannot become {dtype}; convert the dense model alone "
                    "and use torch.autocast for its products"
                )
            group.move(fn)
        self._lookup.rows_moved()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    @exclusive
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        save_columns(self, destination, prefix)

    @exclusive
    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        known = load_columns(self, state_dict, prefix, missing_keys, error_msgs)
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known]
