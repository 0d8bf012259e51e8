"""Memory over ssd: rows that come from the device stay in memory while the policy keeps them, then go to the ssd.

A row that is written takes a slot in memory (memory_tier.py). When all slots are taken, the policy of the cache chooses rows
that leave; they are appended to the ssd as one batch. Rows of batches ahead are brought from the ssd before they are requested
(`foresee`, then `work_ahead`), in the order in which they will be. A row that is requested sooner goes straight to the device
and takes memory when it comes back.

The price in addition to the records: 13 bytes of memory for each key that was ever used (4 here, 8 in the ssd's index, 1 for
its bitmaps), 29 per slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotbed.ops.index import ScoreFunction
from hotbed.ops.move import gather_rows, scatter_rows
from hotbed.ops.move.states import SAVED, WRITTEN
from hotbed.store import ssd as on_ssd
from hotbed.store import tier_kernels as kernels
from hotbed.store.counts import TierContents, TierCounts, Tiers
from hotbed.store.memory_tier import BYTES_PER_SLOT, FLUSH, Ints, MemoryTier
from hotbed.store.ssd import FrozenRows, FrozenStore, SsdStore

__all__ = ["BYTES_PER_KEY", "BYTES_PER_SLOT", "TieredStore"]

BYTES_PER_KEY = 4 + on_ssd.BYTES_PER_KEY
_AHEAD_SHARE = 2  # of the slots, one in this many may be kept for batches ahead
_PIECE = 1 << 15  # keys of batches ahead that are looked at in one go: a window that comes meanwhile waits as long
_SMALL = 8  # slots for each key of a piece, at least


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
        self.ssd, self._first, self._width = ssd, first, width
        self.tier = MemoryTier(ssd, num_rows, width, num_slots, scoring)
        self.num_hits = 0  # requested rows that memory had, without its being asked ahead
        self.num_ahead = self.num_waits = 0  # rows fetched ahead; windows that had to wait for the ssd
        self.stock = 0  # slots to have free for the next window
        self._foreseen: deque[tuple[Ints, int]] = deque()  # keys that batches ahead need, and until when
        self._kept: deque[tuple[int, int]] = deque()  # (until when, how many) keys were looked at
        self._num_kept = 0

    def read(self, keys: Tensor, out: Tensor) -> None:
        """The records of `keys` [U] into `out` [U, W], on the host; what was never written reads as its initial value."""
        slots, here, below, _ = self.tier.sort_out(keys.numpy(), waits=False)
        self.num_hits += here.size
        found = torch.empty(here.size, self._width, dtype=torch.float32, device="cpu")
        gather_rows(self.tier.records, torch.from_numpy(slots), found)
        out[torch.from_numpy(here)] = found
        if below.size:
            rows = torch.empty(below.size, self._width, dtype=torch.float32, device="cpu")
            self.ssd.read(keys[torch.from_numpy(below)].contiguous(), rows)
            out[torch.from_numpy(below)] = rows

    def expect(self, keys: Tensor) -> None:
        """These rows are on their way here: a reader that wants one before it is written must wait."""
        kernels.expect(self.tier.slot_of_key, keys.numpy())

    def fetch(self, keys: Tensor, out: Tensor, source: Tensor) -> tuple[int, Tensor]:
        """Pack the rows that were ever written into `out` [>= U, W]: (their number, positions of late ones).

        source int32 [U]: the place of each key's row in `out`, or -1 for a row that still has its initial value. Late rows
        are those that are expected; they have no place yet.
        """
        slots, here, below, late = self.tier.sort_out(keys.numpy(), waits=True)
        places = source.numpy()
        places.fill(-1)
        places[here] = np.arange(here.size)
        gather_rows(self.tier.records, torch.from_numpy(slots), out[: here.size])
        num_found = 0
        if below.size:
            places_below = torch.empty(below.size, dtype=torch.int32, device="cpu")
            wanted = torch.from_numpy(keys.numpy()[below])
            num_found, _ = self.ssd.fetch(wanted, out[here.size :], places_below)
            numbers = places_below.numpy()
            places[below] = np.where(numbers >= 0, numbers + here.size, -1)
        self.num_hits += here.size - self.tier.note_uses(slots)
        self.num_waits += num_found > 0
        return here.size + num_found, torch.from_numpy(late)

    def write(self, keys: Tensor, records: Tensor) -> None:
        """Keep the records [U, W] of `keys` [U], distinct. Raises at a part that the ssd has no room for, which is not kept."""
        most = max(1, self.num_slots // 2)
        for start in range(0, keys.shape[0], most):
            self._write(keys.numpy()[start : start + most], records[start : start + most])

    def forget(self, keys: Tensor) -> None:
        """These rows are gone: they read as their initial values again."""
        slots, _, _, _ = self.tier.sort_out(keys.numpy(), waits=False)
        self.tier.empty(slots)
        self.tier.slot_of_key[keys.numpy()] = 0
        self.ssd.forget(keys)

    def advance(self, num_batches: int) -> None:
        """The next batches are planned, and their rows are about to be fetched."""
        tier = self.tier
        tier.planned += num_batches
        tier.done = tier.clock
        self.let_go()

    def let_go(self) -> None:
        """Release what was kept for batches that have been planned by now."""
        while self._kept and self._kept[0][0] <= self.tier.planned:
            self._num_kept -= self._kept.popleft()[1]

    def foresee(self, keys: Ints, distance: int) -> None:
        """Rows that the batch will request that is planned after `distance` others. `work_ahead` brings them to memory.

        Whatever they are, no result depends on it.
        """
        inside: Ints = np.empty(keys.size, dtype=np.int64)
        count = kernels.inside(keys, self.tier.slot_of_key.size, inside)
        size = min(_PIECE, max(1, self.num_slots // _SMALL))
        for start in range(0, count, size):
            self._foreseen.append((inside[start : min(start + size, count)], self.tier.planned + distance + 1))

    def work_ahead(self) -> bool:
        """Do a piece of what can be done before the next window; whether there was any."""
        tier = self.tier
        if tier.num_free < self.stock and tier.make_room(min(self.stock, tier.num_free + _PIECE), gently=True):
            return True
        while self._foreseen:
            keys, until = self._foreseen[0]
            if until > tier.planned:
                if self._num_kept + keys.size > tier.num_slots // _AHEAD_SHARE:
                    return False  # until others are let go
                self._fetch_ahead(keys, until)
                self._foreseen.popleft()
                return True
            self._foreseen.popleft()  # its window was planned before
        return False

    def _fetch_ahead(self, keys: Ints, until: int) -> None:
        """Keep the rows of keys in memory; those that are on the ssd are brought, as many as there is room for."""
        tier = self.tier
        self._kept.append((until, keys.size))
        self._num_kept += keys.size
        wanted = np.unique(tier.keep(keys, until))  # a list that was overwritten may have one twice
        wanted = wanted[self.ssd.written(wanted)]
        if wanted.size:
            self.num_ahead += tier.bring_ahead(wanted, until, self.stock)

    def flush(self) -> None:
        """Write every changed row to the ssd."""
        self.tier.flush()

    def keys(self) -> Iterator[Ints]:
        """Keys that have a record, in memory and then on the ssd."""
        in_memory = self.tier.key_of_slot[: self.tier.end]
        yield in_memory[in_memory >= 0]
        yield from self.ssd.keys()

    def items(self, chunk: int = FLUSH) -> Iterator[tuple[Tensor, Tensor]]:
        """(keys, records) of every row ever written, in key order; flushes."""
        self.flush()
        yield from self.ssd.items(chunk)

    def freeze(self) -> FrozenStore:
        """The rows as of now, on the ssd, for a checkpoint."""
        self.flush()
        return self.ssd.freeze()

    def holder(self) -> FrozenRows:
        """For a checkpoint, which links the files."""
        return FrozenRows(self.freeze, self.ssd.saved)

    def count_as_saved(self) -> None:
        """The files are those of a checkpoint; memory has changed nothing."""
        self.ssd.count_as_saved()

    def adopt(self, folder: Path) -> None:
        """Replace all rows by those of a checkpoint's folder."""
        self._empty()
        self.ssd.adopt(folder)

    def contents(self) -> TierContents:
        """Copies, as of now, for a checkpoint."""
        tier, end = self.tier, self.tier.end
        parts = (
            tier.key_of_slot[:end],
            tier.info[:end, kernels.LAST],
            np.maximum(tier.info[:end, kernels.USES], 1),  # whoever loads them has foreseen nothing
            tier.free,
        )
        return TierContents(tier.num_slots, tier.clock, tier.hand, *(part.copy() for part in parts))

    def restore_contents(self, held: TierContents) -> bool | None:
        """Read the rows that memory held back from the ssd; False, and no change, if it had another number of slots."""
        tier = self.tier
        assert tier.end == 0, f"{tier.num_rows} rows are in memory"
        if held.num_slots != tier.num_slots:
            return False
        slots = np.flatnonzero(held.keys >= 0)
        for start in range(0, slots.size, FLUSH):
            self.ssd.read_into(slots[start : start + FLUSH], held.keys, tier.records)
        tier.key_of_slot[: held.keys.size] = held.keys
        tier.end, tier.free = held.keys.size, held.free
        tier.clock = tier.done = held.clock
        tier.hand = held.hand
        tier.info[: tier.end, kernels.LAST], tier.info[: tier.end, kernels.USES] = held.last, held.uses
        tier.state[slots] = SAVED
        tier.slot_of_key[held.keys[slots]] = slots + 1
        return True

    def clear(self) -> None:
        """Every row reads as its initial value."""
        self._empty()
        self.ssd.clear()

    def _empty(self) -> None:
        self.tier.clear()
        self._foreseen.clear()
        self._kept.clear()
        self._num_kept = 0

    def close(self) -> None:
        """Delete what is on the ssd."""
        self.ssd.close()

    def tiers(self, num_keys: int) -> Tiers | None:
        """Counts and sizes of memory and ssd, where `num_keys` keys were ever used."""
        sizes = self.ssd.tiers(num_keys).sizes
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
        hits = self.num_hits
        return self.ssd.counts._replace(
            from_memory=hits, bytes_from_memory=hits * self._width * 4, ahead=self.num_ahead, waits=self.num_waits
        )

    @property
    def max_bytes(self) -> int:
        """The cap of the ssd."""
        return self.ssd.max_bytes

    @property
    def num_slots(self) -> int:
        """Rows that memory can hold."""
        return self.tier.num_slots

    @property
    def num_slots_used(self) -> int:
        """Slots that were ever used: their pages take memory."""
        return self.tier.end

    @property
    def num_in_memory(self) -> int:
        """Rows that are in memory."""
        return self.tier.num_rows

    @property
    def array(self) -> None:
        """Rows move between memory and files."""

    @property
    def tiered(self) -> TieredStore:
        """This one."""
        return self

    @property
    def num_bytes(self) -> int:
        """Bytes of address space; pages become memory when they are used."""
        return self.tier.num_bytes + self.ssd.num_bytes

    def check_integrity(self) -> None:
        """The conservation laws of the memory tier; for tests."""
        self.tier.check_integrity()

    def _write(self, keys: Ints, records: Tensor) -> None:
        tier = self.tier
        tier.done = tier.clock  # who moves rows of windows without asking has done so
        tier.clock += 1
        slots, here, below, _ = tier.sort_out(keys, waits=False)
        tier.note_uses(slots)
        room = tier.make_room(below.size)
        assert room, f"{below.size} rows to write, {tier.num_free} of {tier.num_slots} slots can be had"
        all_slots: Ints = np.empty(keys.size, dtype=np.int64)
        all_slots[here], all_slots[below] = slots, tier.take(below.size)
        scatter_rows(tier.records, torch.from_numpy(all_slots), records)
        tier.enter(keys, all_slots, WRITTEN)
