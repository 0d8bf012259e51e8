"""Bytes of tables and a model, compared with the free memory of the machine, before anything is allocated.

Whole tables take all their records on the device. With a cache the device holds the cache's share or budget, and host memory
the records that can ever be used: at most one per sample, for a feature with one id per sample. A batch must fit into the
cache at once. Dynamic ids have no number of rows; the caller says how many there will be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from hotbed.cache import BYTES_PER_SLOT
from hotbed.errors import BudgetError, ConfigError
from hotbed.host.memory import available_memory, in_words, parse_bytes
from hotbed.ops.int8 import packed_width
from hotbed.ops.records import Layout, Precision, layout_of
from hotbed.ops.shard import WHOLE, Shard
from hotbed.optim import SGD, RowOptimizer
from hotbed.tables.sizing.budget import Budgets, Size, cache_share, rooms_of, without_replicas
from hotbed.tables.sizing.enough import enough_for
from hotbed.types import Batch

_CPU = torch.device("cpu")


class OwnSettings(NamedTuple):
    """Settings of a table that differ from those of the others; None: the same. Tables with the same settings share a group."""

    optimizer: RowOptimizer | None = None
    precision: Precision | None = None
    policy: str | None = None
    cache: float | None = None
    frozen: bool = False
    table: str = (
        ""  # 16-bit weights are rounded by a stream of random bits of their group: such a table has one for itself
    )


class TableSize(Protocol):
    """What the size of a table depends on."""

    @property
    def rows(self) -> int | None:
        """The number of rows; None: dynamic ids."""

    @property
    def dim(self) -> int: ...

    @property
    def hashing(self) -> bool: ...

    @property
    def features(self) -> tuple[str, ...] | None:
        """The features that read it; None: the one of its name."""

    @property
    def own(self) -> OwnSettings | None:
        """Its own settings; None: those of all tables."""

    @property
    def placement(self) -> str | None:
        """What ranks have of it (placement.py); None: as the others."""


T = TypeVar("T", bound=TableSize)


class GroupKind(NamedTuple):
    """What the tables of a group have in common."""

    dim: int
    dynamic: bool
    own: OwnSettings | None
    by_column: bool = False  # every rank has a slice of every row

    def optimizer(self, usual: RowOptimizer) -> RowOptimizer:
        """The optimizer of its rows; frozen rows have no state."""
        if self.own is None:
            return usual
        return SGD(lr=0.0) if self.own.frozen else self.own.optimizer or usual

    def precision(self, usual: Precision) -> Precision:
        """The precision of its weights."""
        return (self.own and self.own.precision) or usual


def members_by_group(tables: Mapping[str, T]) -> dict[GroupKind, dict[str, T]]:
    """The tables of every group."""
    members: dict[GroupKind, dict[str, T]] = {}
    for name, table in tables.items():
        own = table.own
        if own is not None and own.precision not in (None, "fp32"):
            own = own._replace(table=name)
        kind = GroupKind(table.dim, table.rows is None, own, table.placement == "column")
        members.setdefault(kind, {})[name] = table
    return members


def sizes_of(
    tables: Mapping[str, TableSize],
    optimizer: RowOptimizer,
    precision: Precision,
    shards: Sequence[Shard] | None = None,
) -> list[Size]:
    """(rows here, bytes of a record) of every group; None for dynamic ids. `shards`: what is here, of every group."""
    found: list[Size] = []
    groups = members_by_group(tables)
    for shard, (kind, members) in zip(shards or [WHOLE] * len(groups), groups.items()):
        rows = None if kind.dynamic else shard.num_local(sum(table.rows or 0 for table in members.values()))
        found.append((rows, _layout(kind, optimizer, precision, shard).width * 4))
    return found


def _layout(kind: GroupKind, optimizer: RowOptimizer, precision: Precision, shard: Shard) -> Layout:
    return layout_of(kind.dim // shard.num_slices, kind.optimizer(optimizer), kind.precision(precision))


def stored_bytes(
    tables: Mapping[str, TableSize],
    optimizer: RowOptimizer,
    precision: Precision,
    store_precision: str,
    shards: Sequence[Shard] | None = None,
) -> tuple[int, ...]:
    """Bytes of a record below the device, of every group."""
    found = []
    groups = members_by_group(tables)
    for shard, kind in zip(shards or [WHOLE] * len(groups), groups):
        layout = _layout(kind, optimizer, precision, shard)
        if store_precision == "int8" and shard.by_column:
            raise ConfigError(
                "store_precision='int8' rounds by the largest weight of a row, and placement='column' has some of them; leave "
                "one out"
            )
        if store_precision == "int8" and layout.precision != "fp32":
            raise ConfigError(
                f"store_precision='int8' rounds weights of fp32, and these have precision={layout.precision!r}; leave one out"
            )
        found.append(4 * (packed_width(layout) if store_precision == "int8" else layout.width))
    return tuple(found)


class Amounts(NamedTuple):
    """Rows and bytes of tables; their records have one width."""

    rows: int  # including those of dynamic ids
    record: int  # bytes of one record
    groups: tuple[Size, ...]
    stored: tuple[int, ...]  # bytes of a record below the device, of every group

    @property
    def below(self) -> int:
        """Bytes of the longest record below the device."""
        return max(self.stored)

    @property
    def has_dynamic(self) -> bool:
        return any(rows is None for rows, _ in self.groups)

    @property
    def whole(self) -> int:
        return self.rows * self.record

    def cached(self, num_rows: int) -> int:
        """Bytes of a cache of `num_rows` rows with its index; batches in flight take memory in addition."""
        return num_rows * (self.record + BYTES_PER_SLOT)


def amounts_of(
    tables: Mapping[str, TableSize],
    optimizer: RowOptimizer,
    precision: Precision = "fp32",
    known: Mapping[str, int] | None = None,
    store_precision: str = "same",
) -> Amounts:
    """Amounts of tables of one dim; `known` is the number of ids of each table of dynamic ids."""
    (dim,) = {table.dim for table in tables.values()}
    rows = sum((known or {}).get(name, 0) if table.rows is None else table.rows for name, table in tables.items())
    groups = tuple(sizes_of(tables, optimizer, precision))
    stored = stored_bytes(tables, optimizer, precision, store_precision)
    return Amounts(rows, layout_of(dim, optimizer, precision).width * 4, groups, stored)


def budgets_of(budgets: Budgets, amounts: Amounts, batch_rows: int, world: int = 1) -> Budgets:
    """The same in bytes if ids are dynamic: a share is of the ids that there will be; without a budget there is room for all.

    `batch_rows`: rows that a batch may need in addition, of ids that training has never seen. Replicas have room for the rows
    of all `world` ranks.
    """
    if not amounts.has_dynamic or budgets.hbm is not None or (budgets.ssd is not None and budgets.cache is None):
        return budgets
    if budgets.cache is not None:
        rows = math.ceil(budgets.cache * amounts.rows)
    else:
        preset = sum(rows or 0 for rows, _ in amounts.groups)
        rows = max(
            amounts.rows + batch_rows, 2 * preset
        )  # with dynamic tables, the others get at most half of a budget
    needed = amounts.cached(max(rows, len(amounts.groups)))
    if world == 1 or not budgets.replicas:
        return budgets._replace(cache=None, hbm=str(needed))
    return budgets._replace(cache=None, hbm=str(needed * (world + 1)), replicas=world / (world + 1))


def table_problems(budgets: Budgets, amounts: Amounts, device: torch.device, most_used: int | None = None) -> list[str]:
    """What does not fit, with ways out; `most_used` bounds the rows that are ever used."""
    left, replicas = without_replicas(budgets)
    share = cache_share(left.cache, left.hbm, [(max(amounts.rows, 1), amounts.record)])
    free, host = available_memory(device), available_memory(_CPU)
    if budgets.ssd is not None and budgets.memory is not None:
        return _tier_problems(budgets, amounts, device)
    if share is None:
        if free is None or amounts.whole <= free:
            return []
        what = f"{amounts.rows:,} rows with their optimizer state take {in_words(amounts.whole)}"
        return [f"the tables do not fit: {what}, and {device} has {in_words(free)} left. {_ways_out(device)}"]
    problems = []
    on_device = amounts.cached(math.ceil(share * amounts.rows)) + replicas
    if free is not None and on_device > free:
        problems.append(
            f"the cache does not fit: it takes {in_words(on_device)}, and {device} has {in_words(free)} left. Lower "
            "--cache or --hbm (tables.cache, tables.hbm)"
        )
    below = (
        min(amounts.rows, most_used or amounts.rows) * amounts.below + amounts.rows
    )  # one byte per row: whether it was written
    what = f"the rows behind the cache do not fit: up to {in_words(below)} will be used"
    if host is not None and below + (on_device if device.type == "cpu" else 0) > host:
        problems.append(f"{what}, and the host has {in_words(host)} left. {_ways_out(_CPU)}")
    return problems


def _tier_problems(budgets: Budgets, amounts: Amounts, device: torch.device) -> list[str]:
    """Problems of memory over an ssd."""
    rooms = rooms_of(budgets, amounts.groups, device.type, amounts.stored)
    assert all(room.num_slots is not None for room in rooms), "an ssd is behind a cache"
    assert budgets.memory is not None, "an ssd is below memory"
    memory = parse_bytes(budgets.memory, "memory")
    needed = {device: amounts.cached(sum(room.num_slots or 0 for room in rooms))}
    needed[_CPU] = memory if rooms[0].place.memory_slots == 0 else memory + needed.get(_CPU, 0)
    problems = []
    for place, amount in needed.items():
        free = available_memory(place)
        if free is not None and amount > free:
            what = "Lower --memory" if place == _CPU else "Lower --cache or --hbm"
            problems.append(
                f"rows in {place} memory may take {in_words(amount)}, and it has {in_words(free)} left. {what}"
            )
    return problems


def _ways_out(device: torch.device) -> str:
    ways = (
        "Lower model.dim, take a row optimizer with less state (rowwise_adagrad, sgd), or make the vocabulary smaller with "
        "`hotbed prepare --min-count`"
    )
    if device.type == "cuda":
        return f"Keep a share of the rows there and the rest in host memory (--cache 0.015, or --hbm 2GiB). {ways}"
    return ways


def rows_of_batch(tables: Mapping[str, TableSize], batch: Batch) -> dict[str, int]:
    """The distinct rows of each table that one batch needs."""
    features = {name: table.features or (name,) for name, table in tables.items()}
    single = [one for of_table in features.values() for one in of_table if one not in batch.bags]
    ids = {name: batch.ids[:, column] for column, name in enumerate(single)}
    ids |= {name: bag.values for name, bag in batch.bags.items()}
    by_table = {name: torch.cat([ids[one] for one in of_table]) for name, of_table in features.items()}
    return {
        name: torch.unique(by_table[name] % table.rows if table.hashing and table.rows else by_table[name]).numel()
        for name, table in tables.items()
    }


class BatchSample(NamedTuple):
    """Batches whose rows were counted."""

    split: str
    batch_size: int
    num_counted: int
    num_batches: int  # of an epoch

    @property
    def setting(self) -> str:
        return "data.batch_size" if self.split == "train" else "data.eval_batch_size"

    def __str__(self) -> str:
        some, every = min(self.num_counted, self.num_batches), self.num_batches
        which = f"all {every:,}" if some == every else f"the first {some:,} of {every:,}"
        what = f"the largest of {which} batches" if every > 1 else "the one batch"
        return f"{what} of {self.split} ({self.batch_size:,} samples each)"


def too_small(
    counted: BatchSample, needed: int, num_slots: int, amounts: Amounts, *, on_ssd: bool = False, part: float = 1.0
) -> BudgetError:
    """The error for a cache that cannot hold a batch, with sizes that can; `on_ssd`: memory is the cache.

    `part`: of the budget, for the cache of the group.
    """
    rows = None if amounts.has_dynamic else amounts.rows
    enough, least = (
        enough_for(needed, rows, amounts.record, on_ssd=on_ssd, to_spare=to_spare, part=part)
        for to_spare in (True, False)
    )
    spare = f", which leaves some to spare ({least} holds the batches counted)" if least != enough else ""
    whole = "" if amounts.has_dynamic or on_ssd else f" Without a cache all rows take {in_words(amounts.whole)}."
    return BudgetError(
        f"the cache is too small: {counted} needs {needed:,} rows at once, and the cache holds {num_slots:,}. Take {enough} "
        f"or more{spare}, or smaller batches (--set {counted.setting}=N).{whole}",
        enough.num_slots,
    )


def model_problems(model: nn.Module, device: torch.device) -> list[str]:
    """A problem if the dense weights do not fit; the model may be on the meta device."""
    free = available_memory(device)
    weights = sum(one.numel() for one in model.parameters())
    needed = weights * 4 * 4  # float32, with the gradient and the two states of Adam
    if free is None or needed <= free:
        return []
    return [
        f"the model does not fit: its {weights:,} dense weights with gradient and optimizer state take {in_words(needed)}, "
        f"and {device} has {in_words(free)} left. Lower model.dim or the widths in model.options"
    ]
