"""Ids of a group's tables in, keys out: the numbers that its rows are found by, 0 .. num_rows - 1.

PresetKeys here: tables of R rows each, one after the other, so a key is a sum and every row exists from the start. DynamicIds
(dynamic.py): rows are given to ids as training meets them. A group asks its keyspace and never which of the two it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.errors import ConfigError, HotbedError
from hotbed.ids import IdCounts, TableRules
from hotbed.ids.distinct import DistinctIds
from hotbed.ids.index import Ints
from hotbed.ops.init_rows import Init, stream_of
from hotbed.ops.keys import Addresses, FirstBad, make_keys
from hotbed.ops.lookups import Lookups, Origin, Span
from hotbed.ops.move import InitialRows, InitialTable, initial_records, initial_rows
from hotbed.ops.records import Layout
from hotbed.ops.shard import Shard
from hotbed.optim import RowOptimizer
from hotbed.store import Store
from hotbed.tables.group.ahead import IdsAhead
from hotbed.tables.snapshot.parts import KeysSink, KeysSnapshot, PresetSink, PresetSnapshot

if TYPE_CHECKING:
    from hotbed.store.held import Holder

CHUNK = 1 << 18  # rows read or written at once
_MAX_ROWS = 1 << 32  # of one table: the update sorts rows as 32-bit numbers


class Member(NamedTuple):
    """One table as its group sees it."""

    name: str
    rows: int
    base: int  # its first slot
    init: Init
    hashing: bool
    padding_id: int | None
    rules: TableRules | None = None  # of dynamic ids, which have no number of rows


class KeyRequest(NamedTuple):
    """What a rank asks the owners of its rows for."""

    keys: Tensor  # int64 [L], or dynamic ids
    tables: Tensor | None  # int32 [L]: the numbers of the tables of dynamic ids
    num_local: int  # keys that a rank may have; 0 for dynamic ids


class AheadKeys(Protocol):
    """Keys of dynamic ids, which only the host can translate: most of the work is done while earlier batches train."""

    names: list[str]  # of the tables, by number

    @property
    def num_used(self) -> int:
        """Keys that were ever given to an id."""

    def read_ahead(self, distinct: DistinctIds, spans: NDArray[np.int64], device: torch.device) -> IdsAhead:
        """In any thread: what does not depend on batches before, and a look at which ids are known."""

    def settle(self, ahead: IdsAhead, learns: bool) -> Any:
        """The keys of a batch, now, into its map; until when they hold. Part of a change where the batch learns."""


class Keyspace(Protocol):
    """How the ids of one group's tables become keys."""

    num_rows: int  # that there may be here
    most_rows: int  # that there may be on any rank
    initial: InitialRows  # what the rows of preset keys start from, as kernels need it

    @property
    def is_dynamic(self) -> bool:
        """Whether training batches change which id has which key."""

    @property
    def preset_rows(self) -> int | None:
        """The rows of all tables here; None where that is unknown."""

    @property
    def num_used(self) -> int:
        """Keys that may have been used so far."""

    @property
    def index_bytes(self) -> int:
        """Memory that finds the keys of ids."""

    def initialise(self, seed: int) -> None:
        """As new; initial values come from this seed."""

    def keys(
        self, ids: Tensor, spans: tuple[Span, ...], tables: tuple[str, ...], learns: bool
    ) -> tuple[Tensor, FirstBad, Origin]:
        """Keys [L] of ids [L], one table name per span; the first position with a bad id; until when the keys hold."""

    def places(self, ids: Tensor, spans: tuple[Span, ...], tables: tuple[str, ...]) -> tuple[Tensor, FirstBad, Origin]:
        """As `keys`, where other ranks own some of the ids: what `request` is made of."""

    def request(self, lookups: Lookups) -> KeyRequest:
        """The question to the owners of these lookups, whose slots and origin are those of `places`."""

    def answer(self, request: KeyRequest, times: Tensor | None, learns: bool) -> tuple[Tensor, Origin]:
        """Keys here of what all ranks ask for, each as often as `times` says; until when they hold."""

    def ids_of(self, table: str) -> Tensor:
        """The ids of one table that have a row here, ascending."""

    def rows_of(self, table: str) -> tuple[Tensor, Tensor]:
        """(ids ascending, their keys) of one table, here."""

    def chunks_of(self, table: str) -> Iterator[Tensor]:
        """All keys of one table, some at a time: it may be larger than memory. Ids ascend."""

    def owners_of(self, table: str, ids: Tensor) -> Tensor:
        """The rank that owns each id."""

    def name_of(self, key: int) -> tuple[str, int | None]:
        """(table, id) of a key."""

    def shared_key(self, table: str) -> int:
        """The key of the row that ids without one of their own share; -1: none does."""

    def refuse_whole(self, table: str) -> None:
        """Raise where a table has no rows 0, 1, ... that are all here."""

    def first(self, keys: Tensor) -> Tensor:
        """The initial records of keys, on the host; in any thread."""

    def first_of_ids(self, table: str, ids: Tensor) -> Tensor:
        """The initial records of ids that are here."""

    def fetch(self, store: Store, keys: Tensor, rows: Tensor, source: Tensor) -> tuple[int, int, Tensor]:
        """As Store.fetch, with initial records that no kernel can make: (rows found, rows in all, positions of late ones)."""

    def created(self, keys: Tensor) -> Tensor | None:
        """The initial records of keys, which are rows and not there yet; None where kernels make them of the keys."""

    def is_live(self, keys: Tensor) -> Tensor:
        """bool [N]: keys that an id has."""

    def snapshot(self, held: Holder, group: str, read: Callable[[Tensor], Tensor]) -> KeysSnapshot:
        """The rows of one moment by table, for a checkpoint."""

    def sink(self) -> KeysSink:
        """Takes saved rows back."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Whole numbers that are saved with every row."""

    @property
    def ahead(self) -> AheadKeys | None:
        """Who makes keys ahead of training; None where kernels make them of ids."""

    # What training batches do to keys; nothing where they are preset.

    @property
    def num_ahead(self) -> int:
        """Batches translated and not trained."""

    @property
    def has_released(self) -> bool:
        """Whether records must be forgotten before the next batch arrives."""

    def take_released(self) -> Ints:
        """The keys of those records."""

    def fits(self, origin: Origin, learns: bool) -> bool:
        """Whether a call now would give the keys of a batch of this origin."""

    def refuse_old(self, origin: Origin) -> None:
        """Raise when rows of a batch may belong to other ids by now."""

    def asks_again(self) -> bool:
        """Whether translating batches again is cheaper by now than setting them aside; takes note of the question."""

    def count(self) -> None:
        """The tables are called with the next batch that was translated: it counts as trained."""

    def roll_back(self) -> Ints:
        """Take back what is not trained; the keys that have no owner now."""

    def counts(self) -> dict[str, IdCounts]:
        """The history of ids, by table: seen, admitted, rejected, expired."""

    def set_clock(self, clock: Callable[[int], float]) -> None:
        """Set the clock by which ids expire: the number of a training batch -> seconds since 1970."""


class PresetKeys:
    """Every table has rows 0, 1, ... R - 1 from the start; those of one rank are numbered anew (Shard)."""

    is_dynamic = False
    ahead: AheadKeys | None = None
    index_bytes = 0
    num_ahead = 0
    has_released = False
    columns: tuple[str, ...] = ()

    def __init__(self, members: Sequence[Member], layout: Layout, optimizer: RowOptimizer, shard: Shard) -> None:
        too_large = [f"{m.name} ({m.rows:,})" for m in members if m.rows >= _MAX_ROWS]
        if too_large:
            raise ConfigError(
                f"tables with 2^32 rows or more: {', '.join(too_large)}. Memory is laid out for all numbered rows, used or "
                "not. Give rows=None (tables.dynamic of a run): any 64-bit id, a row for each that training meets, and the "
                "same initial values. Or hash ids into fewer rows: hashing=True"
            )
        self._members = {member.name: member for member in members}
        self._layout, self._optimizer, self._shard = layout, optimizer, shard
        self._addresses: dict[tuple[str, ...], Addresses] = {}
        num_keys = sum(member.rows for member in members)
        self.num_rows = self.preset_rows = self.num_used = shard.num_local(num_keys)
        self.most_rows = shard.most_local(num_keys)
        self.initialise(0)

    def initialise(self, seed: int) -> None:
        """Initial values come from this seed."""
        self.initial = member_rows(self._members.values(), self._layout, self._optimizer, self._shard, seed)

    def keys(
        self, ids: Tensor, spans: tuple[Span, ...], tables: tuple[str, ...], learns: bool
    ) -> tuple[Tensor, FirstBad, Origin]:
        """They hold for ever."""
        if tables not in self._addresses:  # every batch asks the same
            self._addresses[tables] = addresses_of(self._members, tables)
        return *make_keys(ids, spans, self._addresses[tables]), None

    def places(self, ids: Tensor, spans: tuple[Span, ...], tables: tuple[str, ...]) -> tuple[Tensor, FirstBad, Origin]:
        """Keys, the same on all ranks."""
        return self.keys(ids, spans, tables, False)

    def request(self, lookups: Lookups) -> KeyRequest:
        """Keys, once all are known to be good."""
        lookups.check_ids()
        return KeyRequest(lookups.slots.to(torch.int64), None, self.most_rows)

    def answer(self, request: KeyRequest, times: Tensor | None, learns: bool) -> tuple[Tensor, Origin]:
        """The very keys."""
        return request.keys, None

    def ids_of(self, table: str) -> Tensor:
        """The ids of one table that are this rank's, ascending."""
        member = self._members[table]
        stop = member.base + member.rows
        first, last = self._shard.local_of(torch.tensor([member.base, stop - 1], device="cpu")).tolist()
        keys = self._shard.keys_of(torch.arange(first, last + 1, device="cpu"))
        return keys[(keys >= member.base) & (keys < stop)] - member.base

    def rows_of(self, table: str) -> tuple[Tensor, Tensor]:
        """(ids ascending, their keys) of one table, here."""
        ids = self.ids_of(table)
        return ids, self._local_keys(table, ids)

    def chunks_of(self, table: str) -> Iterator[Tensor]:
        """Keys in order, of a table that is all here."""
        self.refuse_whole(table)
        member = self._members[table]
        stop = member.base + member.rows
        for start in range(member.base, stop, CHUNK):
            yield torch.arange(start, min(start + CHUNK, stop), device="cpu")

    def owners_of(self, table: str, ids: Tensor) -> Tensor:
        """The rank that owns each id."""
        return self._shard.owner_of(ids + self._members[table].base)

    def name_of(self, key: int) -> tuple[str, int | None]:
        """(table, id) of a key."""
        named = int(self._shard.keys_of(torch.tensor(key, device="cpu")))
        for table, member in self._members.items():
            if member.base <= named < member.base + member.rows:
                return table, named - member.base
        return "", None

    def shared_key(self, table: str) -> int:
        """Every id has a row of its own."""
        return -1

    def refuse_whole(self, table: str) -> None:
        """Raise where other ranks have some of the rows."""
        if self._shard.world > 1:
            raise HotbedError(
                f"the rows of table {table!r} are spread over {self._shard.world} ranks; tables.rows({table!r}) gives the "
                "ids and rows of this one"
            )

    def first(self, keys: Tensor) -> Tensor:
        """The initial records of keys."""
        return initial_records(keys, self.initial)

    def first_of_ids(self, table: str, ids: Tensor) -> Tensor:
        """The initial records of ids that are here."""
        return self.first(self._local_keys(table, ids))

    def fetch(self, store: Store, keys: Tensor, rows: Tensor, source: Tensor) -> tuple[int, int, Tensor]:
        """Rows that were never written are created by a kernel, from their keys."""
        num_found, late = store.fetch(keys, rows, source)
        return num_found, num_found, late

    def created(self, keys: Tensor) -> None:
        """Kernels make them."""

    def is_live(self, keys: Tensor) -> Tensor:
        """All."""
        return torch.ones(keys.shape[0], dtype=torch.bool, device="cpu")

    def snapshot(self, held: Holder, group: str, read: Callable[[Tensor], Tensor]) -> KeysSnapshot:
        """Rows by table."""
        return PresetSnapshot(self._layout, list(self._members.values()), self._shard, held)

    def sink(self) -> KeysSink:
        """Rows go where their ids say."""
        return PresetSink(self._local_keys)

    def take_released(self) -> Ints:
        """None."""
        return np.empty(0, dtype=np.int64)

    def fits(self, origin: Origin, learns: bool) -> bool:
        """Keys hold for ever."""
        return True

    def refuse_old(self, origin: Origin) -> None:
        """Keys hold for ever."""

    def asks_again(self) -> bool:
        """There is nothing to translate."""
        return False

    def count(self) -> None:
        """Nothing is learned from ids."""

    def roll_back(self) -> Ints:
        """Nothing is learned from ids."""
        return np.empty(0, dtype=np.int64)

    def counts(self) -> dict[str, IdCounts]:
        """Counts of dynamic ids; here there are none."""
        return {}

    def set_clock(self, clock: Callable[[int], float]) -> None:
        """Nothing expires."""

    def _local_keys(self, table: str, ids: Tensor) -> Tensor:
        """Where ids [N] of a table that are here have their rows."""
        # numpy adds in this thread alone; torch's threads would compete with those that read a checkpoint: 0.8 instead of
        # 0.15 s a GB
        return self._shard.local_of(torch.from_numpy(ids.numpy() + self._members[table].base))


def member_rows(
    members: Iterable[Member], layout: Layout, optimizer: RowOptimizer, shard: Shard, seed: int
) -> InitialRows:
    """What rows start from, as the kernels need it."""
    tables = [InitialTable(m.base, stream_of(seed, m.name), m.init, m.padding_id) for m in members]
    return initial_rows(layout.dim, optimizer, tables, layout.precision, shard)


def addresses_of(members: Mapping[str, Member], tables: Sequence[str]) -> Addresses:
    """How preset ids become keys, one table name per span."""
    named = [members[table] for table in tables]
    return Addresses(
        base=np.array([m.base for m in named], dtype=np.int64),
        rows=np.array([m.rows for m in named], dtype=np.int64),
        hashing=np.array([m.hashing for m in named], dtype=np.bool_),
        has_padding=np.array([m.padding_id is not None for m in named], dtype=np.bool_),
        padding=np.array([m.padding_id or 0 for m in named], dtype=np.int64),
    )
