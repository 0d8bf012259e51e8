"""The memory tier, compiled: which keys are in memory, and which rows leave it.

slot_of_key int32 [R]: 0 is not in memory, s + 1 is in slot s; negative while the row is on its way here: -1, or -(s + 2) for
one that has slot s. Slots have key_of_slot (-1: free), a state (ops/move/states.py) and `info` int32 [S, 3]: uses and last (see
ops/index), and the batch until which the row is kept. A row that was fetched ahead and not requested yet has no uses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from hotbed.host.intrinsics import load32, load64, prefetch, prefetch_line, store32, store64
from hotbed.host.jit import njit
from hotbed.host.jobs import begin, kernel_address, run
from hotbed.host.pool import Pool, num_threads, shared
from hotbed.ops.index import UNIT, ScoreFunction
from hotbed.ops.index.victims import aged, compiled_score, used_again
from hotbed.ops.move.states import ABSENT

USES, LAST, KEEP = range(3)  # columns of `info`
_AHEAD = 24
_LOOK = 4  # slots examined for each that is wanted
_KEYS_OF_CHUNK = 1024
_WATCH = 1500  # looks before a worker sleeps: about 0.1 ms
_MOST_WORKERS = 7


@njit(nogil=True, cache=True)
def expect(slot_of_key: Any, keys: Any) -> None:
    """Mark keys as on their way."""
    for key in keys:
        if slot_of_key[key] >= 0:
            slot_of_key[key] = -slot_of_key[key] - 1


@njit(nogil=True, cache=True)
def sort_out(slot_of_key: Any, keys: Any, waits: bool, slots: Any, here: Any, below: Any, late: Any) -> Any:
    """Positions of keys that are here (with their slots), not here, and (with `waits`) on their way; how many of each."""
    lines = slot_of_key.reshape(-1, 1)
    num_here = num_below = num_late = 0
    for i in range(keys.size):
        if i + _AHEAD < keys.size:
            prefetch(lines, keys[i + _AHEAD], 0)
        at = slot_of_key[keys[i]]
        if at < 0 and waits:
            late[num_late] = i
            num_late += 1
            continue
        if at < 0:
            at = -at - 1
        if at > 0:
            slots[num_here] = at - 1
            here[num_here] = i
            num_here += 1
        else:
            below[num_below] = i
            num_below += 1
    return num_here, num_below, num_late


@njit(nogil=True, cache=True)
def note_uses(slots: Any, info: Any, clock: int, half: int) -> int:
    """Rows were used; how many of them had been fetched ahead for this."""
    num_ahead = 0
    for i in range(slots.size):
        if i + _AHEAD < slots.size:
            prefetch(info, slots[i + _AHEAD], 0)
        s = slots[i]
        num_ahead += info[s, USES] == 0
        info[s, USES] = used_again(info[s, USES], clock - info[s, LAST], half)
        info[s, LAST] = clock
    return num_ahead


@njit(nogil=True, cache=True)
def inside(keys: Any, num_rows: int, out: Any) -> int:
    """The keys that are in 0..num_rows-1; how many."""
    count = 0
    for key in keys:
        if 0 <= key < num_rows:
            out[count] = key
            count += 1
    return count


@cache
def chooser(scoring: ScoreFunction) -> Callable[..., Any]:
    """`choose` for one policy."""
    tag, score = compiled_score(*scoring[:2])

    @njit(name=f"choose_{tag}", nogil=True, cache=True)
    def choose(
        key_of_slot: Any, info: Any, clock: int, half: int, done: int, planned: int, hand: int, wanted: int, out: Any
    ) -> Any:
        """(New hand, how many) slots to be emptied, in `out` [wanted]: the lowest scores among those after the hand.

        Slots used after `done` stay, and so do those kept until a batch after `planned`. A full scan of a large memory for a
        few rows would take longer than reading them.
        """
        num_slots = key_of_slot.size
        scores = np.empty(_LOOK * wanted, np.int64)
        seen = np.empty(_LOOK * wanted, np.int64)
        found = looked = 0
        while found < scores.size and looked < num_slots:
            if info[hand, LAST] <= done and key_of_slot[hand] >= 0 and info[hand, KEEP] <= planned:
                age = clock - info[hand, LAST]
                scores[found] = score(0, np.int64(aged(info[hand, USES], age, half)), age, 0)
                seen[found] = hand
                found += 1
            hand = hand + 1 if hand + 1 < num_slots else 0
            looked += 1
        if found <= wanted:
            out[:found] = seen[:found]
            return hand, found
        limit = np.partition(scores[:found], wanted - 1)[wanted - 1]  # sorting took five times as long
        count, ties = 0, wanted
        for i in range(found):
            ties -= scores[i] < limit
        for i in range(found):
            if scores[i] < limit or (scores[i] == limit and ties > 0):
                ties -= scores[i] == limit
                out[count] = seen[i]
                count += 1
        return hand, count

    return choose


@njit(nogil=True, cache=True)
def leave(slot_of_key: Any, key_of_slot: Any, info: Any, state: Any, slots: Any) -> None:
    """The rows in these slots have left; those on their way here are still expected."""
    for s in slots:
        slot_of_key[key_of_slot[s]] = -1 if slot_of_key[key_of_slot[s]] < 0 else 0
        key_of_slot[s] = -1
        info[s, KEEP] = 0
        state[s] = ABSENT


@njit(nogil=True, cache=True)
def enter(
    slot_of_key: Any, key_of_slot: Any, info: Any, state: Any, keys: Any, slots: Any, clock: int, value: int
) -> None:
    """The rows of keys are in slots from now on, with this state; uses of rows that were there are kept."""
    for i in range(keys.size):
        s = slots[i]
        if key_of_slot[s] != keys[i]:
            key_of_slot[s] = keys[i]
            info[s, USES] = UNIT
        slot_of_key[keys[i]] = np.int32(s + 1)
        info[s, LAST] = clock
        state[s] = value


# The lists of a window, by threads that need no GIL: one looked for 140,000 rows longer than they took to copy.

_SLOT_OF_KEY, _KEYS, _NUM, _INFO, _OUT, _BELOW, _COUNTS, _CLOCK, _HALF, _ABSENT, _UNTIL = range(11)  # arguments


def _place_chunk(arguments: Any, chunk: Any, scratch: Any) -> None:
    """As `place` and `keep`, for the keys of one chunk; below [chunk * size..] and counts [chunk, 2] are its own."""
    slot_of_key, keys = load64(arguments + 8 * _SLOT_OF_KEY), load64(arguments + 8 * _KEYS)
    info, out, below = load64(arguments + 8 * _INFO), load64(arguments + 8 * _OUT), load64(arguments + 8 * _BELOW)
    clock, half = load64(arguments + 8 * _CLOCK), load64(arguments + 8 * _HALF)
    absent, until = load64(arguments + 8 * _ABSENT), load64(arguments + 8 * _UNTIL)
    first, num_below, num_ahead = chunk * _KEYS_OF_CHUNK, 0, 0
    stop = min(first + _KEYS_OF_CHUNK, load64(arguments + 8 * _NUM))
    for i in range(first, min(first + _AHEAD, stop)):
        prefetch_line(slot_of_key + 4 * load64(keys + 8 * i))
    for i in range(first, stop):
        if i + _AHEAD < stop:
            prefetch_line(slot_of_key + 4 * load64(keys + 8 * (i + _AHEAD)))
        at = np.int64(load32(slot_of_key + 4 * load64(keys + 8 * i)))
        if at > 0:
            prefetch_line(info + 12 * (at - 1))
            store64(out + 8 * i, at - 1)
        else:
            store64(out + 8 * i, absent)
            if at == 0:
                store64(below + 8 * (first + num_below), i)
                num_below += 1
    for i in range(first, stop):
        at = info + 12 * load64(out + 8 * i)
        if at == info + 12 * absent:
            continue
        if until > 0:
            store32(at + 4 * KEEP, max(np.int64(load32(at + 4 * KEEP)), until))
        else:
            uses = np.int64(load32(at + 4 * USES))
            num_ahead += uses == 0
            store32(at + 4 * USES, used_again(uses, clock - load32(at + 4 * LAST), half))
            store32(at + 4 * LAST, clock)
    counts = load64(arguments + 8 * _COUNTS) + 16 * chunk
    store64(counts, num_below)
    store64(counts + 8, num_ahead)


@cache
def _place_kernel() -> int:
    return kernel_address(_place_chunk)


@njit(nogil=True, cache=True)
def _place(
    pool: Any, scratch: Any, kernel: Any, slot_of_key: Any, keys: Any, info: Any, out: Any, below: Any, clock: Any,
    half: Any, until: Any,
) -> Any:  # fmt: skip
    num_chunks = -(-keys.size // _KEYS_OF_CHUNK)
    counts = np.empty((num_chunks, 2), np.int64)
    arguments = begin(pool)
    store64(arguments + 8 * _SLOT_OF_KEY, slot_of_key.ctypes.data)
    store64(arguments + 8 * _KEYS, keys.ctypes.data)
    store64(arguments + 8 * _NUM, keys.size)
    store64(arguments + 8 * _INFO, info.ctypes.data)
    store64(arguments + 8 * _OUT, out.ctypes.data)
    store64(arguments + 8 * _BELOW, below.ctypes.data)
    store64(arguments + 8 * _COUNTS, counts.ctypes.data)
    store64(arguments + 8 * _CLOCK, clock)
    store64(arguments + 8 * _HALF, half)
    store64(arguments + 8 * _ABSENT, info.shape[0])
    store64(arguments + 8 * _UNTIL, until)
    if num_chunks:
        run(pool, kernel, num_chunks, 0)
    num_below = num_ahead = 0
    for chunk in range(num_chunks):
        for i in range(counts[chunk, 0]):  # moves to the left
            below[num_below + i] = below[chunk * _KEYS_OF_CHUNK + i]
        num_below += counts[chunk, 0]
        num_ahead += counts[chunk, 1]
    return num_below, num_ahead


def placing_pool() -> Pool:
    """A few threads: others copy rows at the same time."""
    return shared("hotbed-tier", max(0, min(_MOST_WORKERS, num_threads() // 4)), watch=_WATCH)


def place(slot_of_key: Any, keys: Any, info: Any, out: Any, below: Any, clock: int, half: int) -> Any:
    """out[i] = the slot of keys[i], which is used now; S, and its position in `below`, where it is not here.

    (How many are not here, how many had been fetched ahead.) Distinct keys, none on its way.
    """
    parts = (slot_of_key, keys, info, out, below)
    return placing_pool().call(_place, _place_kernel(), *parts, clock, half, 0)


def keep(slot_of_key: Any, keys: Any, info: Any, until: int) -> Any:
    """Rows that are here stay until this batch is planned; the keys of those that are neither here nor on their way."""
    out, below = np.empty(keys.size, np.int64), np.empty(keys.size + _KEYS_OF_CHUNK, np.int64)
    parts = (slot_of_key, keys, info, out, below)
    num_below, _ = placing_pool().call(_place, _place_kernel(), *parts, 0, 1, until)
    return keys[below[:num_below]]
