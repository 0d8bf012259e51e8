"""Dynamic ids of one group of tables: ids of a batch in, keys out; and what the row of a key starts from.

Ids become keys on the host, in the order of training batches, which a feed translates ahead of training. A batch counts as
trained when the tables are called with it. Whatever comes in between (another batch, evaluation, a checkpoint) sees the state
as trained: the batches ahead are set aside for a moment (`as_trained`), or taken back and translated again (`roll_back`). So
rows are those of a loop that looks nowhere ahead, to the bit.

Outside training an id that has no row reads its initial value and is not remembered: it has a temporary key (temporary.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.errors import BudgetError, HotbedError, StoreError
from hotbed.host.memory import in_words
from hotbed.ids import IdCounts, TableRules, Translator
from hotbed.ids.distinct import LENGTH, BatchIds, DistinctIds, KnownRows, spread
from hotbed.ids.index import Ints, Tables
from hotbed.ops.init_rows import stream_of
from hotbed.ops.keys import FirstBad
from hotbed.ops.lookups import KeyMeaning, LookupIds, Lookups, Origin, Span
from hotbed.ops.move import InitialRows, InitialTable, initial_records, initial_rows
from hotbed.ops.records import Layout
from hotbed.ops.shard import WHOLE, Shard
from hotbed.optim import RowOptimizer
from hotbed.store import Store
from hotbed.tables.group.ahead import IdsAhead, read_ahead
from hotbed.tables.group.keyspace import CHUNK, KeyRequest, Member, member_rows
from hotbed.tables.group.temporary import TEMPORARY, TemporaryKeys
from hotbed.tables.sizing.budget import BASE_BYTES, IdRoom
from hotbed.tables.snapshot.ids import IdsSink, IdsSnapshot

if TYPE_CHECKING:
    from hotbed.store.held import Holder

QUARANTINE = 384  # training batches for which the row of an expired id rests; no feed is that far ahead
FAR_AHEAD = 330  # batches translated and not trained: more than a feed needs, so a caller keeps them
_CHECK_EVERY = 16  # training batches between two looks at the bytes in use


class DynamicIds:
    """The keyspace of one group (keyspace.py)."""

    is_dynamic = True
    preset_rows: int | None = None

    def __init__(
        self, members: Sequence[Member], layout: Layout, optimizer: RowOptimizer, room: IdRoom, shard: Shard = WHOLE
    ) -> None:
        self.names = [member.name for member in members]
        self.num_rows = self.most_rows = room.rows
        self.room, self.shard = room, shard
        self._members, self._layout, self._optimizer = members, layout, optimizer
        self.temporary = TemporaryKeys()
        self._clock: Callable[[int], float] | None = None
        self._epoch = 0
        self._distinct = DistinctIds("hotbed-ids")
        self.initialise(0)

    def initialise(self, seed: int) -> None:
        """No id is known."""
        self.initial = member_rows(self._members, self._layout, self._optimizer, self.shard, seed)
        rules = [member.rules or TableRules() for member in self._members]
        self.translator = Translator(rules, seed=seed, capacity=self.room.rows, quarantine=QUARANTINE)
        if self._clock is not None:  # rows that are loaded begin with another translator
            self.translator.clock = self._clock
        self.num_ahead = 0  # batches translated and not trained
        self._released: list[Ints] = []
        self._was_asked = False  # as trained, since the last training batch
        self._epoch += 1
        self._first_epoch = self._epoch  # of these rows
        # a row is made of (id + stream of its table): tables that start alike are one table of such sums
        self._streams = np.array([stream_of(seed, name) for name in self.names], dtype=np.uint64)
        inits = list(dict.fromkeys(member.init for member in self._members))
        self._start_of_table = np.array([inits.index(member.init) for member in self._members])
        # kernels take a sum for the id of padding, which has no row here; two of them, so that every sum is served by one
        self._first, self._first_of_minus_one = (
            [self._initial_rows(InitialTable(0, 0, init, no_id)) for init in inits] for no_id in (-1, -2)
        )

    def _initial_rows(self, table: InitialTable) -> InitialRows:
        return initial_rows(self._layout.dim, self._optimizer, [table], self._layout.precision)

    @property
    def num_trained(self) -> int:
        """Training batches that the tables were called with."""
        return self.translator.batch - self.num_ahead

    @property
    def num_used(self) -> int:
        """Keys that were ever given to an id."""
        return self.translator.end

    @property
    def index_bytes(self) -> int:
        """Memory that finds the keys of ids, as the budget counts it."""
        return max(0, self.translator.num_bytes - BASE_BYTES)

    @property
    def ahead(self) -> DynamicIds:
        """This."""
        return self

    def read_ahead(self, distinct: DistinctIds, spans: NDArray[np.int64], device: torch.device) -> IdsAhead:
        """In any thread: what does not depend on batches before, and a look at which ids are known."""
        return read_ahead(distinct, self.translator, spans, len(self.names), device)

    def settle(self, ahead: IdsAhead, learns: bool) -> KeyMeaning:
        """The keys of a batch, now, into its map; until when they hold. Part of a change where the batch learns."""
        found = []

        def translate(given: BatchIds, known: KnownRows | None) -> Ints:
            keys, meaning = self._keys_of(given, learns, known)
            found.append(meaning)
            return keys

        ahead.settle(translate)
        return found[0]

    def keys(
        self, ids: Tensor, spans: tuple[Span, ...], tables: tuple[str, ...], learns: bool
    ) -> tuple[Tensor, FirstBad, Origin]:
        """Keys [L] of ids [L], on their device, one table name for each span; no id is bad.

        `learns`: the next training batch, part of a change: the ids may be new.
        """
        host = ids.cpu().numpy()
        words = np.array(
            [
                (host.ctypes.data + 8 * s.start, s.stride, s.length, self.names.index(name), s.start, s.stride)
                for s, name in zip(spans, tables)
            ],
            dtype=np.int64,
        ).reshape(-1, 6)
        numbers = np.empty(int(words[:, LENGTH].sum()), dtype=np.int32)
        given = self._distinct.gather(self._distinct.number(words, numbers), numbers, len(self.names))
        entry_keys, meaning = self._keys_of(given, learns)
        keys = np.empty(host.shape[0], dtype=np.int64)
        spread(words, numbers, entry_keys, keys)
        return torch.from_numpy(keys).to(ids.device), FirstBad(None), meaning

    def places(self, ids: Tensor, spans: tuple[Span, ...], tables: tuple[str, ...]) -> tuple[Tensor, FirstBad, Origin]:
        """Positions, and -1 for padding: only an id's owner knows its key. The ids come along."""
        numbers = torch.from_numpy(self.numbers_of(spans, tables, ids.shape[0]).astype(np.int32)).to(ids.device)
        places = torch.arange(ids.shape[0], device=ids.device)
        for number, member in enumerate(self._members):
            if member.padding_id is not None:
                places[(numbers == number) & (ids == member.padding_id)] = -1
        return places, FirstBad(None), LookupIds(ids, numbers)

    def request(self, lookups: Lookups) -> KeyRequest:
        """The ids themselves, with their tables."""
        origin = lookups.origin
        assert isinstance(origin, LookupIds), "lookups of ranks name their ids"
        return KeyRequest(origin.ids, origin.tables, 0)

    def answer(self, request: KeyRequest, times: Tensor | None, learns: bool) -> tuple[Tensor, KeyMeaning]:
        """The keys of ids that all ranks ask for, each once for every rank; they count as often as they come."""
        assert request.tables is not None, "dynamic ids are asked for by table"
        assert times is not None, "dynamic ids are asked for with how often they come"
        tables, counts = request.tables.cpu().numpy().astype(np.uint16), times.cpu().to(torch.int64)
        given = BatchIds(tables, request.keys.cpu().contiguous().numpy(), counts.contiguous().numpy())
        keys, meaning = self._keys_of(given, learns)
        return torch.from_numpy(keys).to(request.keys.device), meaning

    def _keys_of(self, given: BatchIds, learns: bool, known: KnownRows | None = None) -> tuple[Ints, KeyMeaning]:
        """Keys [E] of entries, and until when they hold."""
        if learns:
            rows = self._learn(given, known)
            meaning = KeyMeaning(True, self.translator.batch, self._epoch)
        else:
            with self.as_trained():
                rows = self.translator.translate_distinct(given, False, known=known).keys
            meaning = KeyMeaning(
                False, self.num_trained, self._epoch, self.temporary.give(given.tables, given.ids, rows)
            )
        return rows, meaning

    def fits(self, origin: Origin, learns: bool) -> bool:
        """Whether a call now would give these very keys."""
        assert isinstance(origin, KeyMeaning), "keys of dynamic ids hold for a while"
        return origin.epoch == self._epoch and origin.learns == learns and origin.number == self.num_trained + learns

    def refuse_old(self, origin: Origin) -> None:
        """Raise when rows of the batch may belong to other ids by now; nothing has changed."""
        assert isinstance(origin, KeyMeaning), "keys of dynamic ids hold for a while"
        if origin.epoch < self._first_epoch:
            raise HotbedError(
                "a batch of dynamic ids was looked up before rows were loaded, and its rows belong to other ids now; call "
                "backward before the load, or the tables again after it"
            )
        later = self.translator.batch - origin.number
        if later > QUARANTINE:
            raise HotbedError(
                f"a batch of dynamic ids was looked up {later} training batches ago, and its rows may have expired since; "
                f"call backward within {QUARANTINE} batches"
            )

    def count(self) -> None:
        """The tables are called with the next batch that was translated: it counts as trained."""
        self.num_ahead -= 1
        assert self.num_ahead >= 0, "a batch is trained that was not translated"
        self.translator.trained(self.num_trained)
        self._was_asked = False

    def roll_back(self) -> Ints:
        """Take back what is not trained; the keys that have no owner now, whose records must be forgotten."""
        lost = self.translator.roll_back(self.num_trained)
        self._epoch += self.num_ahead > 0
        self.num_ahead = 0
        self._released.clear()
        return lost

    @contextmanager
    def as_trained(self) -> Iterator[None]:
        """Inside, the state is that after the batch trained last."""
        with self.translator.rewound(self.num_trained):
            yield

    def asks_again(self) -> bool:
        """Whether translating batches again is cheaper by now than setting them aside; takes note of the question."""
        again, self._was_asked = self._was_asked and self.num_ahead > 0, True
        return again

    @property
    def has_released(self) -> bool:
        """Whether records must be forgotten before the next batch arrives."""
        return bool(self._released)

    def take_released(self) -> Ints:
        """The keys of those records."""
        released, self._released = self._released, []
        return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *released]))

    def counts(self) -> dict[str, IdCounts]:
        """By table, as trained."""
        trained = self.num_trained
        return {name: self.translator.counts(number, trained) for number, name in enumerate(self.names)}

    def set_clock(self, clock: Callable[[int], float]) -> None:
        """Ids of a training batch, by its number, are used at this time."""
        self._clock = self.translator.clock = clock

    def shared_key(self, table: str) -> int:
        """The key of the row that ids share until they are admitted; -1: none does."""
        return self.translator.shared_key(self.names.index(table))

    def owners_of(self, table: str, ids: Tensor) -> Tensor:
        """The rank that owns each id."""
        return self.shard.owner_of_ids(torch.tensor(self.names.index(table), device="cpu"), ids)

    def name_of(self, key: int) -> tuple[str, int | None]:
        """(table, id) of a key."""
        for table in self.names:
            ids, keys = self.rows_of(table)
            found = (keys == key).nonzero()
            if found.shape[0]:
                return table, int(ids[found[0, 0]])
        return "", None

    def refuse_whole(self, table: str) -> None:
        """Raise: there are no rows 0, 1, ..."""
        raise HotbedError(
            f"table {table!r} has dynamic ids, and no rows 0, 1, ... to give or take. tables.rows({table!r}) gives its "
            "ids and their rows; hotbed.checkpoint saves and loads them."
        )

    def ids_of(self, table: str) -> Tensor:
        """Ids of a table that have a row, ascending, as trained."""
        return self.rows_of(table)[0]

    def chunks_of(self, table: str) -> Iterator[Tensor]:
        """The keys of a table, ids ascending, some at a time."""
        keys = self.rows_of(table)[1]
        yield from (keys[start : start + CHUNK] for start in range(0, keys.shape[0], CHUNK))

    def live_keys(self) -> Ints:
        """All keys that an id has, as trained."""
        with self.as_trained():
            return np.concatenate([np.empty(0, dtype=np.int64), *self.translator.live_keys()])

    def is_live(self, keys: Tensor) -> Tensor:
        """bool [N]: rows that an id has. Those of ids that were only looked ahead when a checkpoint was taken have none."""
        numbers = keys.numpy()
        live = np.zeros(numbers.shape[0], dtype=np.bool_)
        inside = np.flatnonzero((numbers >= 0) & (numbers < self.num_rows))
        live[inside] = self.translator.is_live(numbers[inside])
        return torch.from_numpy(live)

    @property
    def columns(self) -> tuple[str, ...]:
        """Whole numbers that are saved with every row."""
        columns = self.translator.rows_state(np.empty(0, dtype=np.int64))
        return tuple(name for name in columns if name not in ("table", "id"))

    def snapshot(self, held: Holder, group: str, read: Callable[[Tensor], Tensor]) -> IdsSnapshot:
        """The rows of one moment by table, as trained."""
        return IdsSnapshot(self, self._layout, held, group, read)

    def sink(self) -> IdsSink:
        """Takes saved rows back, of a group that is as new."""
        return IdsSink(self)

    def rows_of(self, table: str) -> tuple[Tensor, Tensor]:
        """(ids ascending, their keys) of a table, as trained."""
        number = self.names.index(table)
        found_ids, found_keys = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        with self.as_trained():
            shared = self.translator.shared_key(number)
            for keys in self.translator.live_keys():
                tables, ids = self.translator.id_of(keys)
                own = (tables == number) & (keys != shared)
                found_ids.append(ids[own])
                found_keys.append(keys[own])
        ids, keys = np.concatenate(found_ids), np.concatenate(found_keys)
        order = np.argsort(ids)
        return torch.from_numpy(ids[order]), torch.from_numpy(keys[order])

    def first(self, keys: Tensor) -> Tensor:
        """The records [U, W] that the rows of keys [U] start from; in any thread."""
        numbers = keys.numpy()
        tables, ids = np.empty(numbers.shape[0], dtype=np.uint16), np.empty(numbers.shape[0], dtype=np.int64)
        is_temporary = numbers >= TEMPORARY
        tables[~is_temporary], ids[~is_temporary] = self.translator.id_of(numbers[~is_temporary])
        if is_temporary.any():
            tables[is_temporary], ids[is_temporary] = self.temporary.owners_of(numbers[is_temporary])
        return self._first_records(tables, ids)

    def first_of_ids(self, table: str, ids: Tensor) -> Tensor:
        """The records that the rows of these ids start from, whether they have one or not."""
        numbers = np.full(ids.shape[0], self.names.index(table), dtype=np.uint16)
        return self._first_records(numbers, ids.numpy())

    def fetch(self, store: Store, keys: Tensor, rows: Tensor, source: Tensor) -> tuple[int, int, Tensor]:
        """As Store.fetch, with initial values for what is not there: (rows found, rows in all, positions of late ones)."""
        known = torch.from_numpy(np.flatnonzero(keys.numpy() < TEMPORARY))
        if known.shape[0] == keys.shape[0]:
            num_found, late = store.fetch(keys, rows, source)
        else:
            places = torch.empty(known.shape[0], dtype=torch.int32, device="cpu")
            num_found, late = store.fetch(keys[known], rows, places)
            source.fill_(-1)
            source[known] = places
            late = known[late]
        new = source < 0
        new[late] = False
        created = new.nonzero().squeeze(1)
        num_rows = num_found + created.shape[0]
        if created.shape[0]:
            rows[num_found:num_rows] = self.first(keys[created])
            source[created] = torch.arange(num_found, num_rows, dtype=torch.int32, device="cpu")
        return num_found, num_rows, late

    def created(self, keys: Tensor) -> Tensor:
        """Made of ids, which only the host knows."""
        return self.first(keys)

    def _learn(self, given: BatchIds, known: KnownRows | None) -> Ints:
        room, translator = self.room, self.translator
        if room.memory is not None and translator.batch % _CHECK_EVERY == 0:
            used = translator.num_bytes + translator.end * room.per_row
            if used > room.memory + BASE_BYTES:
                raise self._no_room(f"their index and rows take {in_words(used)} of {in_words(room.memory)}")
        try:
            rows, released = translator.translate_distinct(given, True, known=known)
        except StoreError as error:
            if room.memory is None:
                raise
            resting = translator.num_resting
            most = f"{in_words(room.memory)} are for {room.rows:,}, and for the counts of as many that wait for one"
            if resting:
                most += f"; {resting:,} rows rest, as all do for {QUARANTINE} batches after their ids expired"
            raise self._no_room(most) from error
        self.num_ahead += 1
        if released.shape[0]:
            self._released.append(released)
        return rows

    def _no_room(self, reached: str) -> BudgetError:
        return BudgetError(
            f"the ids of tables {', '.join(self.names)} have reached their part of memory=: {len(self.translator):,} ids have "
            f"rows, and {reached}. Nothing is lost. Give more memory=, or ssd='FOLDER:BYTES' for the rows; let fewer ids have "
            "rows (admit=hotbed.Admit(after=2, sketch='64MiB'), which counts them in little memory), or let unused ones go "
            "(expire=hotbed.Expire(unused_steps=100_000))."
        )

    def numbers_of(self, spans: Sequence[Span], tables: Sequence[str], length: int) -> Tables:
        """The table of each lookup."""
        out = np.empty(length, dtype=np.uint16)
        for span, table in zip(spans, tables):
            if span.length:
                out[span.start : span.start + (span.length - 1) * span.stride + 1 : span.stride] = self.names.index(
                    table
                )
        return out

    def _first_records(self, tables: Tables, ids: Ints) -> Tensor:
        sums = torch.from_numpy((ids.astype(np.uint64) + self._streams[tables]).view(np.int64))
        if len(self._first) == 1:
            return self._first_of_sums(sums, 0)
        records = torch.empty(ids.shape[0], self._first[0].layout.width, dtype=torch.float32, device="cpu")
        starts = self._start_of_table[tables]
        for start in np.unique(starts):
            mine = torch.from_numpy(np.flatnonzero(starts == start))
            records[mine] = self._first_of_sums(sums[mine], start)
        return records

    def _first_of_sums(self, sums: Tensor, start: int) -> Tensor:
        records = initial_records(sums, self._first[start])
        minus_one = sums == -1
        if bool(minus_one.any()):
            records[minus_one] = initial_records(sums[minus_one], self._first_of_minus_one[start])
        return records
