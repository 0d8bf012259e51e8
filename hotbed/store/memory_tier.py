"""The memory of a TieredStore: S slots over an ssd, which keys are in them, and who makes place for others.

In: keys. Out: slots, whose records may be read and written. A row that leaves is appended to the ssd first, many at a time.
Which rows leave is the policy's choice among those after a hand that goes round. Rows are kept while they are needed:

    until the windows that read or write them are done (`done`: the clock of the last that is), whatever happens
    until a batch ahead that will read them is planned (`planned`: how many are), unless there is no other slot

One thread at a time.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.errors import StoreError
from hotbed.host.handover import Runner
from hotbed.host.pages import zeros
from hotbed.ops.index import UNIT, ScoreFunction
from hotbed.ops.move import gather_rows
from hotbed.ops.move.states import ABSENT, SAVED, WRITTEN
from hotbed.store import tier_kernels as kernels
from hotbed.store.ssd import SsdStore

Ints = NDArray[np.int64]
BYTES_PER_SLOT = 8 + 12 + 1 + 8  # key, info, state, and a place in the list of free slots
FLUSH = 1 << 16  # rows written to the ssd at once
_ALL = 2**31 - 1  # batches
_SPARE = 2048  # rows that leave with those that must: few large batches instead of many small ones


class MemoryTier:
    """Records [S, W] of some of the keys 0..R-1."""

    def __init__(self, ssd: SsdStore, num_rows: int, width: int, num_slots: int, scoring: ScoreFunction) -> None:
        if num_slots < 1:
            raise StoreError(
                "memory= holds no row in addition to the index of all rows. Give more memory, or use fewer rows."
            )
        self._ssd, self._width = ssd, width
        self.records = torch.from_numpy(zeros((num_slots, width), np.float32))
        self.slot_of_key = zeros((num_rows,), np.int32, huge=False)
        self.key_of_slot: Ints = np.full(num_slots, -1, dtype=np.int64)
        self.info: NDArray[np.int32] = np.zeros((num_slots, 3), np.int32)  # see tier_kernels.py
        self.state = np.zeros(num_slots + 1, np.uint8)  # of ops/move/states.py; the last is of no slot, and absent
        self.free: Ints = np.empty(0, dtype=np.int64)  # slots that were used before
        self.end = 0  # slots from here on were never taken
        self.clock, self.hand = 1, 0
        self.planned, self.done = 0, 1
        self.half_life = scoring.half_life
        self._choose = kernels.chooser(scoring)

    @property
    def num_slots(self) -> int:
        return self.key_of_slot.size

    @property
    def num_free(self) -> int:
        """Slots that can be taken at once."""
        return self.free.size + self.num_slots - self.end

    @property
    def num_rows(self) -> int:
        """Rows that are here."""
        return self.end - self.free.size

    @property
    def num_bytes(self) -> int:
        """Bytes of address space; pages become memory when they are used."""
        return sum(part.nbytes for part in (self.key_of_slot, self.info, self.state, self.slot_of_key, self.records))

    def sort_out(self, keys: Ints, *, waits: bool) -> tuple[Ints, Ints, Ints, Ints]:
        """(slots, positions) of keys that are here, positions of those that are not, and of those on their way."""
        slots, here, below, late = (np.empty(keys.size, dtype=np.int64) for _ in range(4))
        num_here, num_below, num_late = kernels.sort_out(self.slot_of_key, keys, waits, slots, here, below, late)
        return slots[:num_here], here[:num_here], below[:num_below], late[:num_late]

    def note_uses(self, slots: Ints) -> int:
        """Rows were used; how many of them had been fetched ahead for this."""
        return int(kernels.note_uses(slots, self.info, self.clock, self.half_life))

    def keep(self, keys: Ints, until: int) -> Ints:
        """Rows that are here stay until this batch is planned; the keys of those that are neither here nor on their way."""
        rest: Ints = kernels.keep(self.slot_of_key, keys, self.info, until)
        return rest

    def take(self, count: int) -> Ints:
        """Slots [count] that are free, of which there must be as many. The caller enters rows, or gives them back."""
        reused = self.free[:count]
        new = np.arange(self.end, self.end + count - reused.size)
        assert count <= self.num_free, f"{count} slots wanted, {self.num_free} free"
        self.free, self.end = self.free[count:], self.end + new.size
        return np.concatenate([reused, new])

    def give_back(self, slots: Ints) -> None:
        """Slots that no row is in."""
        self.key_of_slot[slots] = -1
        self.free = np.concatenate([slots, self.free])

    def make_room(self, count: int, *, gently: bool = False) -> bool:
        """Have this many free slots, as far as rows may leave; whether there are. `gently`: only rows that nothing needs."""
        wanted = count - self.num_free
        if wanted <= 0:
            return True
        spare = min(_SPARE, self.num_slots // 16) if gently else 0
        for planned in (self.planned,) if gently else (self.planned, _ALL):
            while wanted > 0:
                victims, hand = self._choose_victims(min(wanted + spare, FLUSH), planned)
                if not victims.size:
                    break
                self.write_below(victims)
                self.hand = hand
                self.empty(victims)
                wanted -= victims.size
        return wanted <= 0

    def bring_ahead(self, keys: Ints, until: int, spare: int) -> int:
        """`bring` rows that are not requested yet, as many as have room without hurting others; how many came.

        Meanwhile other rows leave, so that `spare` slots are free afterwards: reading and appending take equally long.
        """
        self.make_room(keys.size, gently=True)
        keys = keys[: self.num_free]
        spare = min(spare + _SPARE, self.num_slots // 16)
        victims, hand = self._choose_victims(max(0, keys.size + spare - self.num_free), self.planned)
        appending = Runner(lambda: self.write_below(victims), "hotbed-append")
        if victims.size:
            appending.start()
        try:
            if keys.size:
                self.bring(keys, until)
        finally:
            appending.join()
        if appending.error is not None:
            raise appending.error
        self.hand = hand
        self.empty(victims)
        return keys.size

    def _choose_victims(self, count: int, planned: int) -> tuple[Ints, int]:
        """(slots to be emptied, at most `count`, and where the hand is then); see `choose`."""
        victims: Ints = np.empty(count, dtype=np.int64)
        if not count:
            return victims, self.hand
        state = (self.key_of_slot, self.info, self.clock, self.half_life, self.done, planned, self.hand)
        hand, found = self._choose(*state, count, victims)
        return victims[:found], int(hand)

    def empty(self, slots: Ints) -> None:
        """The rows of these slots have left."""
        kernels.leave(self.slot_of_key, self.key_of_slot, self.info, self.state, slots)
        self.free = np.concatenate([self.free, slots])

    def enter(self, keys: Ints, slots: Ints, value: int) -> None:
        """The rows of keys are in these slots, with a state."""
        kernels.enter(self.slot_of_key, self.key_of_slot, self.info, self.state, keys, slots, self.clock, value)

    def bring(self, keys: Ints, until: int = 0) -> Ints:
        """Read rows that are on the ssd, and not here, into free slots; all, or none.

        `until`: they are not requested yet, and kept until this batch is planned.
        """
        slots = self.take(keys.size)
        self.key_of_slot[slots] = keys
        try:
            self._ssd.read_into(slots, self.key_of_slot, self.records)
        except BaseException:
            self.give_back(slots)
            raise
        self.info[slots, kernels.USES] = 0 if until else UNIT
        self.info[slots, kernels.KEEP] = until
        self.enter(keys, slots, SAVED)
        return slots

    def write_below(self, slots: Ints) -> None:
        """Write those rows to the ssd that differ there, as one batch, in the order of their keys."""
        slots = slots[self.state[slots] == WRITTEN]
        if slots.size:
            keys = self.key_of_slot[slots]
            order = np.argsort(keys)
            records: Tensor = torch.empty(slots.size, self._width, dtype=torch.float32, device="cpu")
            gather_rows(self.records, torch.from_numpy(slots[order]), records)
            self._ssd.write(torch.from_numpy(keys[order]), records)

    def flush(self) -> None:
        """Write every changed row to the ssd."""
        changed = np.flatnonzero(self.state == WRITTEN)
        for start in range(0, changed.size, FLUSH):
            slots = changed[start : start + FLUSH]
            self.write_below(slots)
            self.state[slots] = SAVED

    def clear(self) -> None:
        """Nothing is here or on its way, also after an interrupted write."""
        for start in range(0, self.slot_of_key.size, FLUSH):
            part = self.slot_of_key[start : start + FLUSH]
            part[np.flatnonzero(part)] = 0
        self.key_of_slot[:] = -1
        self.state[:] = ABSENT
        self.info[:, kernels.KEEP] = 0
        self.free, self.end = np.empty(0, dtype=np.int64), 0

    def check_integrity(self) -> None:
        """The conservation laws; for tests."""
        used = np.flatnonzero(self.key_of_slot >= 0)
        keys = self.key_of_slot[used]
        assert np.unique(keys).size == keys.size, "a key has two slots"
        at = self.slot_of_key[keys]
        assert np.array_equal(np.where(at < 0, -at - 1, at) - 1, used), "a slot's key is elsewhere"
        assert used.size == self.num_rows, f"{used.size} slots in use, {self.num_rows} counted"
        assert not self.state[:-1][self.key_of_slot < 0].any(), "an empty slot has a state"
        assert not self.state[-1], "what is in no slot is there"
