"""Memory over ssd: rows that come from the device stay in memory while the policy keeps them, then go to the ssd.

A row that is written takes a slot in memory. When all slots are taken, the policy of the cache chooses rows that leave; they
are appended to the ssd as one batch. A row that is read from the ssd goes straight to the device and takes memory when it
comes back: it is not kept twice.

The price in addition to the records: 13 bytes of memory for each key that was ever used (4 here, 8 in the ssd's index, 1 for
its bitmaps), 25 per slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.errors import StoreError
from hotbed.host.pages import zeros
from hotbed.ops.index import ScoreFunction
from hotbed.ops.move import gather_rows, scatter_rows
from hotbed.store import ssd as on_ssd
from hotbed.store import tier_kernels as kernels
from hotbed.store.counts import TierContents, TierCounts, Tiers
from hotbed.store.ssd import FrozenRows, FrozenStore, SsdStore

BYTES_PER_SLOT = 8 + 4 + 4 + 1 + 8  # key, uses, last, dirty, and a place in the list of free slots
BYTES_PER_KEY = 4 + on_ssd.BYTES_PER_KEY
_FLUSH = 1 << 16  # rows written to the ssd at once


class TieredStore:
    """Records of all keys 0..R-1: `num_slots` of them in memory, the others on the ssd, in a store of its own."""

    def __init__(
        self,
        ssd: SsdStore,
        num_rows: int,
        width: int,
        num_slots: int,
        scoring: ScoreFunction,
        first: Callable[[Tensor], Tensor],
    ) -> None:
        if num_slots < 1:
            raise StoreError(
                "memory= holds no row in addition to the index of all rows. Give more memory, or use fewer rows."
            )
        self._ssd, self._first, self._width = ssd, first, width
        self._records = torch.from_numpy(zeros((num_slots, width), np.float32))
        self._slot_of_key = zeros((num_rows,), np.int32, huge=False)
        self._key_of_slot: NDArray[np.int64] = np.full(num_slots, -1, dtype=np.int64)
        self._uses, self._last = np.zeros(num_slots, np.int32), np.zeros(num_slots, np.int32)
        self._dirty = np.zeros(num_slots, np.uint8)
        self._free: NDArray[np.int64] = np.empty(0, dtype=np.int64)  # slots that were used before
        self._end = 0  # slots from here on were never taken
        self._clock, self._hand = 1, 0
        self._half_life = scoring.half_life
        self._choose = kernels.chooser(scoring)
        self._num_hits = 0  # requested rows that memory had

    def read(self, keys: Tensor, out: Tensor) -> None:
        """The records of `keys` [U] into `out` [U, W], on the host; what was never written reads as its initial value."""
        slots, here, below, _ = self._sort_out(keys, waits=False)
        self._num_hits += here.size
        found = torch.empty(here.size, self._width, dtype=torch.float32, device="cpu")
        gather_rows(self._records, torch.from_numpy(slots), found)
        out[torch.from_numpy(here)] = found
        if below.size:
            rows = torch.empty(below.size, self._width, dtype=torch.float32, device="cpu")
            self._ssd.read(keys[torch.from_numpy(below)].contiguous(), rows)
            out[torch.from_numpy(below)] = rows

    def expect(self, keys: Tensor) -> None:
        """These rows are on their way here: a reader that wants one before it is written must wait."""
        kernels.expect(self._slot_of_key, keys.numpy())

    def fetch(self, keys: Tensor, out: Tensor, source: Tensor) -> tuple[int, Tensor]:
        """Pack the rows that were ever written into `out` [>= U, W]: (their number, positions of late ones).

        source int32 [U]: the place of each key's row in `out`, or -1 for a row that still has its initial value. Late rows
        are those that are expected; they have no place yet.
        """
        slots, here, below, late = self._sort_out(keys, waits=True)
        places = source.numpy()
        places.fill(-1)
        places[here] = np.arange(here.size)
        gather_rows(self._records, torch.from_numpy(slots), out[: here.size])
        kernels.note_uses(slots, self._uses, self._last, self._clock, self._half_life)
        num_found = 0
        if below.size:
            places_below = torch.empty(below.size, dtype=torch.int32, device="cpu")
            wanted = torch.from_numpy(keys.numpy()[below])
            num_found, _ = self._ssd.fetch(wanted, out[here.size :], places_below)
            numbers = places_below.numpy()
            places[below] = np.where(numbers >= 0, numbers + here.size, -1)
        self._num_hits += here.size
        return here.size + num_found, torch.from_numpy(late)

    def write(self, keys: Tensor, records: Tensor) -> None:
        """Keep the records [U, W] of `keys` [U], distinct. Raises at a part that the ssd has no room for, which is not kept."""
        most = max(1, self._key_of_slot.size // 2)
        for start in range(0, keys.shape[0], most):
            self._write(keys[start : start + most], records[start : start + most])

    def forget(self, keys: Tensor) -> None:
        """These rows are gone: they read as their initial values again."""
        slots, _, _, _ = self._sort_out(keys, waits=False)
        self._dirty[slots] = 0
        kernels.leave(self._slot_of_key, self._key_of_slot, slots)
        self._slot_of_key[keys.numpy()] = 0
        self._free = np.concatenate([self._free, slots])
        self._ssd.forget(keys)

    def flush(self) -> None:
        """Write every changed row to the ssd."""
        dirty = np.flatnonzero(self._dirty)
        for start in range(0, dirty.size, _FLUSH):
            slots = dirty[start : start + _FLUSH]
            self._write_below(slots)
            self._dirty[slots] = 0

    def items(self, chunk: int = _FLUSH) -> Iterator[tuple[Tensor, Tensor]]:
        """(keys, records) of every row ever written, in key order; flushes."""
        self.flush()
        yield from self._ssd.items(chunk)

    def freeze(self) -> FrozenStore:
        """The rows as of now, on the ssd, for a checkpoint."""
        self.flush()
        return self._ssd.freeze()

    def holder(self) -> FrozenRows:
        """For a checkpoint, which links the files."""
        return FrozenRows(self.freeze)

    def count_as_saved(self) -> None:
        """Files are linked whole: changed rows are not tracked."""

    def adopt(self, folder: Path) -> None:
        """Replace all rows by those of a checkpoint's folder."""
        self._empty()
        self._ssd.adopt(folder)

    def contents(self) -> TierContents:
        """Copies, as of now, for a checkpoint."""
        parts = (self._key_of_slot[: self._end], self._last[: self._end], self._uses[: self._end], self._free)
        return TierContents(self._key_of_slot.size, self._clock, self._hand, *(part.copy() for part in parts))

    def restore_contents(self, held: TierContents) -> bool | None:
        """Read the rows that memory held back from the ssd; False, and no change, if it had another number of slots."""
        assert self._end == 0, f"{self.num_in_memory} rows are in memory"
        if held.num_slots != self._key_of_slot.size:
            return False
        slots = np.flatnonzero(held.keys >= 0)
        for start in range(0, slots.size, _FLUSH):
            some = slots[start : start + _FLUSH]
            records = torch.empty(some.size, self._width, dtype=torch.float32, device="cpu")
            self._ssd.read(torch.from_numpy(held.keys[some]), records)
            scatter_rows(self._records, torch.from_numpy(some), records)
        self._end, self._free = held.keys.size, held.free
        self._clock, self._hand = held.clock, held.hand
        parts = ((self._key_of_slot, held.keys), (self._last, held.last), (self._uses, held.uses))
        for mine, theirs in parts:
            mine[: self._end] = theirs
        self._slot_of_key[held.keys[slots]] = slots + 1
        return True

    def clear(self) -> None:
        """Every row reads as its initial value."""
        self._empty()
        self._ssd.clear()

    def _empty(self) -> None:
        """Nothing is in memory or on its way, also after an interrupted write."""
        for start in range(0, self._slot_of_key.size, _FLUSH):
            part = self._slot_of_key[start : start + _FLUSH]
            part[np.flatnonzero(part)] = 0
        self._key_of_slot[:] = -1
        self._dirty[:] = 0
        self._free, self._end = np.empty(0, dtype=np.int64), 0

    def close(self) -> None:
        """Delete what is on the ssd."""
        self._ssd.close()

    def tiers(self, num_keys: int) -> Tiers | None:
        """Counts and sizes of memory and ssd, where `num_keys` keys were ever used."""
        sizes = self._ssd.tiers(num_keys).sizes
        per_slot = self._width * 4 + BYTES_PER_SLOT
        return Tiers(
            self.counts,
            sizes._replace(
                memory_slots=self.num_slots,
                memory_rows=self.num_in_memory,
                memory_bytes=num_keys * BYTES_PER_KEY + self.num_slots_used * per_slot,
            ),
        )

    @property
    def counts(self) -> TierCounts:
        """All that happened so far."""
        hits = self._num_hits
        return self._ssd.counts._replace(from_memory=hits, bytes_from_memory=hits * self._width * 4)

    @property
    def max_bytes(self) -> int:
        """The cap of the ssd."""
        return self._ssd.max_bytes

    @property
    def num_slots(self) -> int:
        """Rows that memory can hold."""
        return self._key_of_slot.size

    @property
    def num_slots_used(self) -> int:
        """Slots that were ever used: their pages take memory."""
        return self._end

    @property
    def num_in_memory(self) -> int:
        """Rows that are in memory."""
        return self._end - self._free.size

    @property
    def array(self) -> None:
        """Rows move between memory and files."""

    @property
    def num_bytes(self) -> int:
        """Bytes of address space; pages become memory when they are used."""
        slots = (self._key_of_slot, self._uses, self._last, self._dirty)
        return (
            sum(part.nbytes for part in slots) + self._records.nbytes + self._slot_of_key.nbytes + self._ssd.num_bytes
        )

    def check_integrity(self) -> None:
        """The conservation laws of the memory tier; for tests."""
        used = np.flatnonzero(self._key_of_slot >= 0)
        keys = self._key_of_slot[used]
        assert np.unique(keys).size == keys.size, "a key has two slots"
        at = self._slot_of_key[keys]
        assert np.array_equal(np.where(at < 0, -at - 1, at) - 1, used), "a slot's key is elsewhere"
        assert used.size == self.num_in_memory, f"{used.size} slots in use, {self.num_in_memory} counted"
        assert not self._dirty[self._key_of_slot < 0].any(), "an empty slot is dirty"

    def _write(self, keys: Tensor, records: Tensor) -> None:
        self._clock += 1
        slots, here, below, _ = self._sort_out(keys, waits=False)
        kernels.note_uses(slots, self._uses, self._last, self._clock, self._half_life)
        taken = self._make_room(below.size)
        all_slots: NDArray[np.int64] = np.empty(keys.shape[0], dtype=np.int64)
        all_slots[here], all_slots[below] = slots, taken
        scatter_rows(self._records, torch.from_numpy(all_slots), records)
        kernels.enter(
            self._slot_of_key,
            self._key_of_slot,
            self._uses,
            self._last,
            self._dirty,
            keys.numpy(),
            all_slots,
            self._clock,
        )

    def _make_room(self, count: int) -> NDArray[np.int64]:
        """Slots [count] that are free now; the rows that were in them are on the ssd."""
        reused = self._free[:count]
        new = np.arange(self._end, min(self._end + count - reused.size, self._key_of_slot.size))
        wanted = count - reused.size - new.size
        victims: NDArray[np.int64] = np.empty(wanted, dtype=np.int64)
        if wanted:
            state = (self._key_of_slot, self._uses, self._last, self._clock, self._half_life)
            hand = self._choose(*state, self._hand, wanted, victims)
            self._write_below(victims[self._dirty[victims] != 0])
            self._hand = hand
            kernels.leave(self._slot_of_key, self._key_of_slot, victims)
            self._dirty[victims] = 0
        self._free, self._end = self._free[count:], self._end + new.size
        return np.concatenate([reused, new, victims])

    def _write_below(self, slots: NDArray[np.int64]) -> None:
        """Write rows to the ssd as one batch, in the order of their keys."""
        if not slots.size:
            return
        keys = self._key_of_slot[slots]
        order = np.argsort(keys)
        records = torch.empty(slots.size, self._width, dtype=torch.float32, device="cpu")
        gather_rows(self._records, torch.from_numpy(slots[order]), records)
        self._ssd.write(torch.from_numpy(keys[order]), records)

    def _sort_out(self, keys: Tensor, *, waits: bool) -> tuple[NDArray[np.int64], ...]:
        """(slots, positions) of keys in memory, positions of those that are not, and of those on their way."""
        parts = [np.empty(keys.shape[0], dtype=np.int64) for _ in range(4)]
        num_here, num_below, num_late = kernels.sort_out(self._slot_of_key, keys.numpy(), waits, *parts)
        counts = (num_here, num_here, num_below, num_late)
        return tuple(part[:count] for part, count in zip(parts, counts))
