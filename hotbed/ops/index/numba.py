"""The index on the CPU, compiled. Threads share what only reads the index or writes to cells and slots of its own keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.host.intrinsics import prefetch
from hotbed.host.jit import njit
from hotbed.host.pool import in_parallel, threads_for
from hotbed.host.splitmix import GOLDEN
from hotbed.ops.index import (
    CLAIMED,
    EMPTY,
    FREE,
    HITS,
    MISSES,
    UNIT,
    UNPLACED,
    WAYS,
    ArrivalCells,
    Cells,
    Lists,
    SlotState,
    WindowClock,
)
from hotbed.ops.index.victims import Victims, used_again

_AHEAD = 16  # keys between asking for a cache line and reading it
_LINE = 8  # keys of a cache line
_DIGIT_BITS = 11
_DIGITS = 1 << _DIGIT_BITS
_NOTHING = np.uint64(0xFFFFFFFFFFFFFFFF)
_S29, _S32 = np.uint64(29), np.uint64(32)
TIDY = 2  # a table more than half full is tidied when one cell in this many was taken anew: 6 ns each, at 3 ns a cell
_EMPTY, _FREE, _CLAIMED, _WAYS, _UNIT, _UNPLACED = EMPTY, FREE, CLAIMED, WAYS, UNIT, UNPLACED


@njit(nogil=True, cache=True, inline="always")
def _home(key: Any, num_buckets: int) -> Any:
    x = np.uint64(key)
    x = ((x ^ (x >> _S29)) * GOLDEN) >> _S32
    return np.int64((x * np.uint64(num_buckets)) >> _S32)


@njit(nogil=True, cache=True, inline="always")
def _way_of(keys: Any, bucket: Any, key: Any) -> Any:
    """The first cell of this bucket that holds the key (or is empty, if that is asked for), or -1.

    Eight at once, which are a cache line: few buckets have more keys than that.
    """
    first = np.uint64(bucket) * np.uint64(_WAYS)
    for _ in range(_WAYS // _LINE):
        found = _LINE
        for way in range(_LINE - 1, -1, -1):
            found = way if keys[first + np.uint64(way)] == key else found
        if found < _LINE:
            return np.int64(first) + found
        first += np.uint64(_LINE)
    return -1


@njit(nogil=True, cache=True, inline="always")
def _find(keys: Any, spilled: Any, key: Any) -> Any:
    """The key's cell, or -1."""
    bucket = _home(key, spilled.size)
    for _ in range(spilled.size):  # all buckets of a nearly full table may be marked
        cell = _way_of(keys, bucket, key)
        if cell >= 0 or spilled[bucket] == 0:
            return cell
        bucket = bucket + 1 if bucket + 1 < spilled.size else 0
    return -1


@njit(nogil=True, cache=True, inline="always")
def _insert(keys: Any, spilled: Any, key: Any) -> Any:
    """A cell for a key that has none; -1 when all are taken."""
    bucket = _home(key, spilled.size)
    for _ in range(spilled.size):
        cell = _way_of(keys, bucket, _EMPTY)
        if cell >= 0:
            keys[cell] = key
            return cell
        spilled[bucket] = 1
        bucket = bucket + 1 if bucket + 1 < spilled.size else 0
    return -1


@njit(nogil=True, cache=True)
def _number(lookups: Any, words: Any, split: Any, distinct: Any, number_of: Any) -> Any:
    """Number the distinct keys of a batch in the order in which they come: (how many there are, all bits of all keys).

    words [a power of two] is a hash table, all NOTHING: the lower `split` bits of a word are a number, the others a key. Where
    three quarters of it are not enough there are -1.
    """
    size, shift = words.size, np.uint64(64)
    while size > 1:  # ends: it is halved
        size >>= 1
        shift -= np.uint64(1)
    mask, low, most = np.uint64(words.size - 1), (np.uint64(1) << split) - np.uint64(1), np.uint64(words.size * 3 // 4)
    count, seen = np.uint64(0), np.uint64(0)
    for i in range(lookups.size):
        key = np.uint64(lookups[i])
        if lookups[i] < 0:
            number_of[i] = -1
            continue
        seen |= key
        mine, place = key << split, (key * GOLDEN) >> shift
        word = words[place]
        if (word ^ mine) > low:
            while word != _NOTHING and (word ^ mine) > low:  # ends: a quarter of the words is free
                place = (place + np.uint64(1)) & mask
                word = words[place]
            if word == _NOTHING:
                if count == most:
                    return np.int64(-1), seen
                word = mine | count
                words[place] = word
                distinct[count] = key
                count += np.uint64(1)
        number_of[i] = np.int32(word & low)
    return np.int64(count), seen


def _numbered(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """(distinct keys [U], the number of every key among them [L], -1 for none).

    The hash table has half as many words as there are keys, so that it stays in the second-level cache; eight times as many
    where hardly a key comes twice.
    """
    distinct, number_of = np.empty(keys.size, dtype=np.int64), np.empty(keys.size, dtype=np.int32)
    split, count, bits, seen = keys.size.bit_length(), -1, max(8, (keys.size // 2).bit_length()), np.uint64(0)
    while count < 0:  # ends: in a table twice as large as the batch
        words = np.full(1 << bits, _NOTHING, dtype=np.uint64)
        count, seen = _number(keys, words, np.uint64(split), distinct, number_of)
        bits += 3
    assert int(seen).bit_length() <= 64 - split, f"keys of {int(seen).bit_length()} bits, {64 - split} at most"
    return distinct[:count], number_of


@njit(nogil=True, cache=True)
def _search(
    thread: int, num_threads: int, distinct: Any, keys: Any, future: Any, spilled: Any, bits: Any, cells: Any
) -> None:
    """The cells of a thread's share of the keys, -1 for none; nothing is inserted meanwhile."""
    buckets, futures = keys.reshape(-1, _WAYS), future.reshape(-1, _WAYS)
    stop = distinct.size * (thread + 1) // num_threads
    for i in range(distinct.size * thread // num_threads, stop):
        if i + _AHEAD < stop:
            home = _home(distinct[i + _AHEAD], spilled.size)
            prefetch(buckets, home, 0)
            prefetch(buckets, home, _LINE)
            prefetch(futures, home, 0)
        cells[i] = _find(keys, spilled, distinct[i])
        if cells[i] >= 0:
            future[cells[i]] |= bits


@njit(nogil=True, cache=True)
def _add(distinct: Any, keys: Any, future: Any, spilled: Any, bits: Any, cells: Any, counts: Any) -> None:
    """Cells for the keys that have none."""
    for i in range(distinct.size):
        if cells[i] < 0:
            cells[i] = _insert(keys, spilled, distinct[i])
            counts[1 if cells[i] >= 0 else _UNPLACED] += 1
            if cells[i] >= 0:
                future[cells[i]] |= bits
    counts[0] += distinct.size


@njit(nogil=True, cache=True)
def _search_and_add(distinct: Any, keys: Any, future: Any, spilled: Any, bits: Any, cells: Any, counts: Any) -> None:
    """_search and _add in one pass, by one thread: a key that is not there finds its bucket in the cache."""
    buckets, futures = keys.reshape(-1, _WAYS), future.reshape(-1, _WAYS)
    num_new, num_unplaced = 0, 0
    for i in range(distinct.size):
        if i + _AHEAD < distinct.size:
            home = _home(distinct[i + _AHEAD], spilled.size)
            prefetch(buckets, home, 0)
            prefetch(buckets, home, _LINE)
            prefetch(futures, home, 0)
        cell = _find(keys, spilled, distinct[i])
        if cell < 0:
            cell = _insert(keys, spilled, distinct[i])
            num_new += cell >= 0
            num_unplaced += cell < 0
        if cell >= 0:
            future[cell] |= bits
        cells[i] = cell
    counts[0] += distinct.size
    counts[1] += num_new
    counts[_UNPLACED] += num_unplaced


def _threads(num_keys: int) -> int:
    """A key is a wait for memory or two, as long as it takes to go through 32 values."""
    return threads_for(32 * num_keys)


def arrive(table: Cells, keys: Tensor, bits: int, counts: Tensor, lists_new: bool = False) -> ArrivalCells:
    """Cells for the keys [L] of a batch, -1 for none; `bits` are set in their futures."""
    distinct, number_of = _numbered(keys.numpy())
    cells = np.empty(distinct.size, dtype=np.int32)
    key, _, future, spilled = table.arrays
    shared, threads = (distinct, key, future, spilled, np.int32(bits), cells), _threads(distinct.size)
    new_keys = None
    if threads == 1 and not lists_new:
        _search_and_add(*shared, counts.numpy())
    else:
        in_parallel(_search, *shared, threads=threads)
        new_keys = distinct[cells < 0] if lists_new else None
        _add(*shared, counts.numpy())
    return ArrivalCells(torch.from_numpy(cells), torch.from_numpy(number_of), new_keys)


@njit(nogil=True, cache=True)
def _collect(
    thread: int, num_threads: int, batch: Any, slot_of: Any, future: Any, last: Any, uses: Any, dirty: Any, clock: int,
    since: int, half: int, train: Any, past: Any, misses: Any, counts: Any,
) -> None:  # fmt: skip
    """A thread's share of a batch: its misses begin where its share does; counts [T, 2]: hits, misses."""
    places, futures = slot_of.reshape(-1, 1), future.reshape(-1, 1)
    lasts, all_uses = last.reshape(-1, 1), uses.reshape(-1, 1)
    start, stop = batch.size * thread // num_threads, batch.size * (thread + 1) // num_threads
    hits, num_misses = 0, 0
    for i in range(start, stop):
        if i + 2 * _AHEAD < stop:
            prefetch(places, batch[i + 2 * _AHEAD], 0)
            prefetch(futures, batch[i + 2 * _AHEAD], 0)
            soon = slot_of[batch[i + _AHEAD]]
            if soon >= 0:
                prefetch(lasts, soon, 0)
                prefetch(all_uses, soon, 0)
        cell = batch[i]
        slot = slot_of[cell]
        future[cell] &= ~past
        if slot >= 0:
            hits += last[slot] < since
            uses[slot] = used_again(uses[slot], clock - last[slot], half)
            last[slot] = clock
            dirty[slot] |= train
        elif slot == _FREE:
            slot_of[cell] = _CLAIMED
            misses[start + num_misses] = cell
            num_misses += 1
    counts[thread, 0], counts[thread, 1] = hits, num_misses


def collect(
    table: Cells, slots: SlotState, batch: ArrivalCells, keys: Tensor, clock: int, since: int, half: int, train: bool,
    past: int, misses: Tensor, counts: Tensor,
) -> None:  # fmt: skip
    """Plan one batch: counts grow by hits (first use since `since`) and misses, whose cells `misses` holds.

    The bits of `past` are cleared in its futures.
    """
    assert batch.cells is not None
    cells, threads = batch.cells.numpy(), _threads(batch.cells.shape[0])
    (_, slot_of, future, _), (_, last, uses, dirty) = table.arrays, slots.arrays
    totals, listed = counts.numpy(), misses.numpy()
    found = listed[totals[MISSES] :] if threads == 1 else np.empty(cells.size, dtype=np.int32)
    numbers = np.empty((threads, 2), dtype=np.int64)
    settings = (clock, since, half, np.uint8(train), np.int32(past))
    in_parallel(_collect, cells, slot_of, future, last, uses, dirty, *settings, found, numbers, threads=threads)
    for thread, (num_hits, num_misses) in enumerate(numbers.tolist()):
        start = cells.size * thread // threads
        if threads > 1:
            listed[totals[MISSES] : totals[MISSES] + num_misses] = found[start : start + num_misses]
        totals[HITS] += num_hits
        totals[MISSES] += num_misses


@njit(nogil=True, cache=True)
def _sweep(cells: Any, keys: Any, slot_of: Any, future: Any, bits: Any, counts: Any) -> None:
    for cell in cells:
        if future[cell] & bits:
            future[cell] &= ~bits
            if future[cell] == 0 and slot_of[cell] == _FREE:
                keys[cell] = _EMPTY
                counts[6] += 1


def sweep(table: Cells, bits: int, counts: Tensor, past: Sequence[ArrivalCells] | None = None) -> None:
    """Clear `bits` in the futures of these batches, which are past, or of all. Cells that nothing uses are freed."""
    if past is not None and not past:
        return
    arrays = (*table.arrays[:3], np.int32(bits), counts.numpy())
    if past is None:
        _sweep(np.arange(table.key.shape[0], dtype=np.int32), *arrays)
        return
    for batch in past:
        assert batch.cells is not None
        _sweep(batch.cells.numpy(), *arrays)


def rank(table: Cells, slots: SlotState, victims: Victims, moment: WindowClock, count: int) -> Tensor:
    """Slots int64 [M], the lowest in rank; free ones before all others, never one that the window uses."""
    (cell, last, uses, _), (key, _, future, _) = slots.arrays, table.arrays
    return torch.from_numpy(victims.choose((cell, last, uses, key, future), moment, count))


def note(table: Cells, victims: Victims, batches: Iterable[ArrivalCells]) -> None:
    """The slots of these batches were used, or a batch that used them is past: their ranks have changed."""
    if victims.has_line:
        slot_of = table.arrays[1]
        for batch in batches:
            assert batch.cells is not None
            slots = slot_of[batch.cells.numpy()]
            victims.note(slots[slots >= 0])


@njit(nogil=True, cache=True)
def _sort_misses(cells: Any, keys: Any, spare: Any) -> Any:
    """Cells by their keys, ascending: radix, eleven bits a pass. The array that holds the result."""
    count, largest = cells.size, np.int64(0)
    pairs, others = spare[:count], spare[count : 2 * count]
    lines = keys.reshape(-1, 1)
    for i in range(count):
        if i + _AHEAD < count:
            prefetch(lines, cells[i + _AHEAD], 0)
        key = keys[cells[i]]
        pairs[i, 0], pairs[i, 1] = key, cells[i]
        largest = max(largest, key)
    starts, shift = np.empty(_DIGITS, dtype=np.int64), 0
    while largest >> shift > 0:  # ends: shift grows
        starts[:] = 0
        for i in range(count):
            starts[(pairs[i, 0] >> shift) & (_DIGITS - 1)] += 1
        total = 0
        for digit in range(_DIGITS):
            here = starts[digit]
            starts[digit] = total
            total += here
        for i in range(count):
            digit = (pairs[i, 0] >> shift) & (_DIGITS - 1)
            others[starts[digit], 0], others[starts[digit], 1] = pairs[i, 0], pairs[i, 1]
            starts[digit] += 1
        pairs, others = others, pairs
        shift += _DIGIT_BITS
    return pairs


@njit(nogil=True, cache=True)
def _assign(
    cells: Any, spare: Any, order: Any, keys: Any, slot_of: Any, future: Any, cell_in: Any, last: Any, uses: Any, dirty: Any,
    clock: int, train: Any, miss_keys: Any, miss_slots: Any, victim_slots: Any, host_miss_keys: Any, victim_keys: Any,
    counts: Any,
) -> None:  # fmt: skip
    misses = _sort_misses(cells, keys, spare)
    places, futures, cell_keys = slot_of.reshape(-1, 1), future.reshape(-1, 1), keys.reshape(-1, 1)
    evictions, num_victims, freed = (
        counts[5],
        counts[4],
        counts[6],
    )  # here: numbers in memory would be written every time
    for i in range(misses.shape[0]):
        if i + _AHEAD < misses.shape[0]:
            soon = cell_in[order[i + _AHEAD]]
            if soon >= 0:
                prefetch(places, soon, 0)
                prefetch(futures, soon, 0)
                prefetch(cell_keys, soon, 0)
        slot, key, cell = order[i], misses[i, 0], misses[i, 1]
        victim = cell_in[slot]
        if victim >= 0:
            evictions += 1
            if dirty[slot]:
                victim_keys[num_victims], victim_slots[num_victims] = keys[victim], slot
                num_victims += 1
            slot_of[victim] = _FREE
            if future[victim] == 0:
                keys[victim] = _EMPTY
                freed += 1
        cell_in[slot], slot_of[cell], last[slot], uses[slot], dirty[slot] = cell, slot, clock, _UNIT, train
        miss_keys[i], host_miss_keys[i], miss_slots[i] = key, key, slot
    counts[5], counts[4], counts[6] = evictions, num_victims, freed


def assign(
    table: Cells, slots: SlotState, misses: Tensor, order: Tensor, clock: int, train: bool, lists: Lists, counts: Tensor
) -> None:
    """Let misses (cells [M]) into slots, in the order of their keys; `lists` and `counts` say which came and which left."""
    spare = np.empty((2 * misses.shape[0], 2), dtype=np.int64)
    outputs: list[Any] = [part.numpy() for part in lists]
    arrays = (*table.arrays[:3], *slots.arrays)
    _assign(misses.numpy(), spare, order.numpy(), *arrays, clock, np.uint8(train), *outputs, counts.numpy())  # type: ignore[call-arg]


@njit(nogil=True, cache=True)
def _place(cells: Any, number_of: Any, slot_of: Any, uses: Any, slots: Any, counts: Any) -> None:
    """Slots of the distinct keys first; lookups find them by number."""
    places, all_uses = slot_of.reshape(-1, 1), uses.reshape(-1, 1)
    slot_of_number, is_new = np.empty(cells.size, dtype=np.int32), np.empty(cells.size, dtype=np.uint8)
    for n in range(cells.size):
        if n + 2 * _AHEAD < cells.size:
            prefetch(places, cells[n + 2 * _AHEAD], 0)
            prefetch(all_uses, max(slot_of[cells[n + _AHEAD]], 0), 0)
        slot = slot_of[cells[n]]
        slot_of_number[n], is_new[n] = slot, uses[slot] == _UNIT
    missed = 0
    for i in range(number_of.size):
        number = number_of[i]
        slots[i] = -1
        if number >= 0:
            slots[i] = slot_of_number[number]
            missed += is_new[number]
    counts[7] += missed


def place(
    table: Cells, state: SlotState, batch: ArrivalCells, keys: Tensor, order: Tensor | None, counts: Tensor
) -> Tensor:
    """The slot int64 [L] of every lookup, -1 for none; counts grow by the lookups of rows that just came in."""
    assert batch.cells is not None
    assert batch.number_of_lookup is not None
    slots = torch.empty(keys.shape[0], dtype=torch.int64, device="cpu")
    cells, number_of = batch.cells.numpy(), batch.number_of_lookup.numpy()
    _place(cells, number_of, table.arrays[1], state.arrays[2], slots.numpy(), counts.numpy())
    return slots


@njit(nogil=True, cache=True)
def _respill(keys: Any, spilled: Any) -> None:
    spilled[:] = 0
    for cell in range(keys.size):
        if keys[cell] != _EMPTY:
            bucket = _home(keys[cell], spilled.size)
            while bucket != cell // _WAYS:  # ends: it passes every bucket
                spilled[bucket] = 1
                bucket = bucket + 1 if bucket + 1 < spilled.size else 0


def tidy(table: Cells, slots: SlotState) -> None:
    """Work the marks out again: they are only ever set, and would in time be everywhere. Batches know cells: none moves."""
    _respill(table.arrays[0], table.arrays[3])
