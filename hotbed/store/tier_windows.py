"""The windows of a compiled transfer over memory and ssd: slots of the memory tier for the keys that come and go.

In: the lists of keys that the device writes, window by window. Out: the same lists with slots instead, which a compiled
transfer (ops/move/transfer_loop.py) takes as the keys of an array: every missed row is in its slot, or was never written;
every victim has a slot to be written to. Rows that were not brought ahead are read from the ssd here, and the window waits.

A slot stays its row's until the window that reads or writes it is written. The thread that calls this is the only one that
changes the tier; the compiled thread copies records and marks states of slots that are kept for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotbed.host.intrinsics import load_acquire, pause, store_release, usleep
from hotbed.host.jit import njit
from hotbed.ops.index import MISSES, VICTIMS
from hotbed.ops.move.states import ABSENT
from hotbed.store import tier_kernels as kernels
from hotbed.store.memory_tier import Ints
from hotbed.store.tiered import TieredStore

TAG = 8  # place in a row of counts: the number of the window + 1, once all is there
_LOOKS, _NAP_US, _NAPS = 2000, 30, 3000  # before a nap, of a nap, and how many before the caller looks around: 0.1 s
_STOCK = 2  # windows that slots are kept free for


class StoppedError(Exception):
    """Nothing waits for the window from now on."""


@njit(nogil=True, cache=True)
def _watch(address: Any, value: Any) -> bool:
    """Whether the word at an address is `value` or more; waits a tenth of a second for it."""
    looks = 0
    while load_acquire(address) < value:  # ends: looks are counted
        looks += 1
        pause()
        if looks > _LOOKS:
            usleep(np.uint32(_NAP_US))
        if looks > _LOOKS + _NAPS:
            return False
    return True


@njit(nogil=True, cache=True)
def _publish(address: Any, value: Any) -> None:
    store_release(address, value)


def wait_for(word: Ints, value: int, is_stopped: Callable[[], bool]) -> None:
    """Until a word (an array of one) that others write is `value` or more; the GIL is free meanwhile."""
    while not _watch(word.ctypes.data, value):
        if is_stopped():
            raise StoppedError


class _WindowInFlight(NamedTuple):
    number: int
    clock: int  # at which its rows were used


class TierWindows:
    """The windows of one compiled transfer. `written`, the word that counts them, is set before the first is prepared."""

    def __init__(self, store: TieredStore, lists: tuple[Tensor, Tensor, Tensor]) -> None:
        self._store = store
        self._keys = [part.numpy() for part in lists]  # counts, keys of misses, keys of victims, by window
        counts, misses, victims = (torch.zeros(part.shape, dtype=torch.int64, device="cpu") for part in lists)
        self.lists = counts, misses, victims
        self._slots = [part.numpy() for part in self.lists]
        most = lists[1].shape[1]
        self._below: Ints = np.empty((2, most + 1024), dtype=np.int64)  # a chunk of keys more
        self._in_flight: deque[_WindowInFlight] = deque()
        self.written: Ints = np.zeros(1, dtype=np.int64)

    def is_listed(self, number: int) -> bool:
        """Whether the device has written the lists of a window."""
        counts = self._keys[0]
        return bool(counts[number % counts.shape[0], TAG] == number + 1)

    def prepare(self, number: int, num_batches: int, wait: Callable[[Ints, int], None]) -> None:
        """Find slots for the rows of the next window, whose lists the device is about to write; `wait` as `wait_for`."""
        counts, miss_keys, victim_keys = self._keys
        row = number % counts.shape[0]
        wait(counts[row, TAG : TAG + 1], number + 1)
        misses, victims = miss_keys[row, : counts[row, MISSES]], victim_keys[row, : counts[row, VICTIMS]]
        store, tier = self._store, self._store.tier
        self._let_go()
        if not self._in_flight:
            tier.done = tier.clock  # all windows before are written, also those of other transfers
        tier.clock += 1
        tier.planned += num_batches
        store.let_go()
        out_misses, below_misses, num_ahead = self._place(1, row, misses)
        out_victims, below_victims, _ = self._place(2, row, victims)
        store.num_hits += misses.size - below_misses.size - num_ahead
        on_ssd = below_misses[store.ssd.written(misses[below_misses])]
        self._make_room(on_ssd.size + below_victims.size, wait)
        if on_ssd.size:
            store.num_waits += 1
            out_misses[on_ssd] = tier.bring(misses[on_ssd])
        if below_victims.size:
            slots = tier.take(below_victims.size)
            tier.enter(victims[below_victims], slots, ABSENT)
            out_victims[below_victims] = slots
        store.stock = min(max(_STOCK * below_victims.size, store.stock - store.stock // 8), tier.num_slots // 8)
        self._in_flight.append(_WindowInFlight(number, tier.clock))
        self._slots[0][row, [MISSES, VICTIMS]] = misses.size, victims.size
        _publish(self._slots[0][row, TAG:].ctypes.data, number + 1)

    def _place(self, which: int, row: int, keys: Ints) -> tuple[Ints, Ints, int]:
        """(slots, positions of keys that have none, how many had been fetched ahead)."""
        tier, out, below = self._store.tier, self._slots[which][row, : keys.size], self._below[which - 1]
        now = tier.clock, tier.half_life
        num_below, num_ahead = kernels.place(tier.slot_of_key, keys, tier.info, out, below, *now)
        return out, below[:num_below], int(num_ahead)

    def _let_go(self) -> None:
        """Slots of windows that are written may be taken."""
        while self._in_flight and self._in_flight[0].number < self.written[0]:
            self._store.tier.done = self._in_flight.popleft().clock

    def _make_room(self, count: int, wait: Callable[[Ints, int], None]) -> None:
        """Have free slots; waits until earlier windows are written if theirs are needed."""
        tier, flying = self._store.tier, self._in_flight
        while not tier.make_room(count):
            assert flying, f"{count} slots wanted for one window, {tier.num_slots} are there"
            wait(self.written, flying[0].number + 1)
            self._let_go()
