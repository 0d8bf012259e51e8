"""The memory tier, compiled: which keys are in memory, and which rows leave it.

slot_of_key int32 [R]: 0 is not in memory, s + 1 is in slot s; negative while the row is on its way here: -1, or -(s + 2) for
one that has slot s. Slots have key_of_slot (-1: free), uses and last (see ops/index), and dirty (differs from the row below).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from hotbed.host.intrinsics import prefetch
from hotbed.host.jit import njit
from hotbed.ops.index import UNIT, ScoreFunction
from hotbed.ops.index.victims import aged, compiled_score, used_again

_AHEAD = 24
_LOOK = 4  # slots examined for each that is wanted


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
def note_uses(slots: Any, uses: Any, last: Any, clock: int, half: int) -> None:
    """Rows were used."""
    for s in slots:
        uses[s] = used_again(uses[s], clock - last[s], half)
        last[s] = clock


@cache
def chooser(scoring: ScoreFunction) -> Callable[..., int]:
    """`choose` for one policy."""
    tag, score = compiled_score(*scoring[:2])

    @njit(name=f"choose_{tag}", nogil=True, cache=True)
    def choose(key_of_slot: Any, uses: Any, last: Any, clock: int, half: int, hand: int, wanted: int, out: Any) -> int:
        """Fill `out` [wanted] with slots to be emptied: the lowest scores among the slots after the hand. Returns the new hand.

        Slots used at `clock` stay. A full scan of a large memory for a few rows would take longer than reading them.
        """
        num_slots = key_of_slot.size
        scores = np.empty(_LOOK * wanted, np.int64)
        seen = np.empty(_LOOK * wanted, np.int64)
        found = looked = 0
        while found < scores.size and looked < num_slots:
            if last[hand] != clock and key_of_slot[hand] >= 0:
                age = clock - last[hand]
                scores[found] = score(0, np.int64(aged(uses[hand], age, half)), age, 0)
                seen[found] = hand
                found += 1
            hand = hand + 1 if hand + 1 < num_slots else 0
            looked += 1
        assert found >= wanted
        order = np.argsort(scores[:found], kind="mergesort")
        for i in range(wanted):
            out[i] = seen[order[i]]
        return hand

    return choose


@njit(nogil=True, cache=True)
def leave(slot_of_key: Any, key_of_slot: Any, slots: Any) -> None:
    """The rows in these slots have left; those on their way here are still expected."""
    for s in slots:
        slot_of_key[key_of_slot[s]] = -1 if slot_of_key[key_of_slot[s]] < 0 else 0
        key_of_slot[s] = -1


@njit(nogil=True, cache=True)
def enter(
    slot_of_key: Any, key_of_slot: Any, uses: Any, last: Any, dirty: Any, keys: Any, slots: Any, clock: int
) -> None:
    """The rows of keys are in slots now, newer than on the ssd."""
    for i in range(keys.size):
        s = slots[i]
        if key_of_slot[s] != keys[i]:
            key_of_slot[s] = keys[i]
            uses[s] = UNIT
        slot_of_key[keys[i]] = np.int32(s + 1)
        last[s] = clock
        dirty[s] = 1
