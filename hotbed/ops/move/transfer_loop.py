"""The loop of the compiled transfer thread (compiled_transfer.py), and the words that it shares with its caller.

In: the lists of windows that the device writes, and words of 64 bits: addresses, counts, requests. Out: rows in pinned memory
and on the device, victims in the store. It calls the CUDA driver itself and never takes the GIL.

It never asks the driver whether something has happened: the driver has one lock, and launches of the training thread would
wait for it. What the device has done is seen in memory that the device writes: tags behind the lists and behind victims.

A window begins with one job of the pool's threads: the states of its misses are looked up while its victims are marked as
expected (_look_chunk). Its rows then travel in pieces of some MiB through two small rings of pinned memory. Inward, the threads
gather a piece of those that exist (_read_chunk), and it is sent while the next is gathered. Outward, pieces of victims arrive
while earlier ones are scattered and marked as written (_write_chunk). So a copy hides behind the other, and what is on
its way stays in the host's caches: a window may have 100 MB each way. Victims come first: rows that are late wait for them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numba import types

from hotbed.host.intrinsics import (
    bind,
    copy_bytes,
    external,
    load8,
    load64,
    load_acquire,
    pause,
    prefetch_far,
    prefetch_line,
    store8,
    store32,
    store64,
    store_release,
    usleep,
)
from hotbed.host.jit import njit
from hotbed.host.jobs import begin, kernel_address, run
from hotbed.ops.move.copy import GATHER, LINES_AHEAD, copy_kernel, copy_rows
from hotbed.ops.move.states import EXPECTED, WRITTEN

SLOTS = 3
LISTS, MISSES, VICTIMS, TAG = 16, 3, 4, 8  # rows of counts: their length, and places in them
# words that the thread shares with its caller
STOP, NEED, NEED_SLOT, ERROR, NUM_WRITTEN, CONTEXT, IN, OUT = range(8)
RECORDS, BYTES, STATE, POOL, COPY, WINDOWS, FIRST, TAGS, LOOK, READ, WRITE, SEEN, STARTS = range(8, 21)
PIECE, IN_RING, OUT_RING, IN_TAGS, OUT_TAGS, NUM_SENT, NUM_FETCHED, NUM_TAKEN = range(
    21, 29
)  # chunks; addresses; pieces
SLOT_WORDS, SLOT0 = 16, 32
# words of a slot
CAP, SOURCE, DEVICE_ROWS, DEVICE_SOURCE, PACKED = range(5)
STAGED, EXCHANGED, EVENT, FOUND, LATE, IN_EVENT = range(5, 11)
RING = 4  # pieces of each ring
LINE = 64  # bytes from one tag of a ring to the next
NUM_TAGS = 1024  # on the device, tags[i] = i + 1: copied behind every piece
KEYS_OF_CHUNK = 256  # that one thread takes at a time
_CHUNK_BYTES = 1 << 17  # of rows
_STATES_AHEAD = 24
_LOOKS = 2000  # before a nap
_NAP_US, _NAPS = 30, 10_000  # microseconds at a time, and how often before its caller checks that the thread is alive
DIED = -1  # as an error: not the driver's, but an exception in the code of the thread

copy_in = external("hotbed_copy_in", types.int32, *(types.int64,) * 4)
copy_out = external("hotbed_copy_out", types.int32, *(types.int64,) * 4)
record = external("hotbed_record", types.int32, types.int64, types.int64)
go_after = external("hotbed_go_after", types.int32, types.int64, types.int64, types.int32)
use = external("hotbed_use", types.int32, types.int64)


@cache
def bind_symbols(on_cuda: bool) -> None:
    """Give the names above their meaning: the CUDA driver's, or the C library's for tests without a device."""
    if on_cuda:
        library = ctypes.CDLL("libcuda.so.1")
        names = [
            "cuMemcpyHtoDAsync_v2",
            "cuMemcpyDtoHAsync_v2",
            "cuEventRecord",
            "cuStreamWaitEvent",
            "cuCtxSetCurrent",
        ]
        functions = [getattr(library, name) for name in names]
    else:
        nothing = ctypes.CDLL(None).fflush  # of 0 does nothing and returns 0
        functions = [_copies, _copies, nothing, nothing, nothing]
    for name, function in zip(("copy_in", "copy_out", "record", "go_after", "use"), functions):
        bind(f"hotbed_{name}", ctypes.cast(function, ctypes.c_void_p).value or 0)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
def _copies(to: int, source: int, num_bytes: int, stream: int) -> int:
    return _copy_on_host(to, source, num_bytes)


def _copy_on_host(to: int, source: int, num_bytes: int) -> int:
    """A driver's copy without a device; tests replace it to let copies fail."""
    ctypes.memmove(to, source, num_bytes)
    return 0


_A_STATE, _A_KEYS, _A_NUM, _A_SEEN, _A_STARTS, _A_OTHERS, _A_NUM_OTHERS = range(7)  # arguments of _look_chunk


def _look_chunk(arguments: Any, chunk: Any, scratch: Any) -> None:
    """seen[i] = state[keys[i]], and starts[chunk] = how many can be read; in chunks beyond, state[others[i]] = EXPECTED."""
    state, num = load64(arguments + 8 * _A_STATE), load64(arguments + 8 * _A_NUM)
    num_chunks = (num + KEYS_OF_CHUNK - 1) // KEYS_OF_CHUNK
    looks = chunk < num_chunks
    keys = load64(arguments + 8 * (_A_KEYS if looks else _A_OTHERS))
    first = (chunk if looks else chunk - num_chunks) * KEYS_OF_CHUNK
    stop = min(first + KEYS_OF_CHUNK, num if looks else load64(arguments + 8 * _A_NUM_OTHERS))
    seen, found = load64(arguments + 8 * _A_SEEN), 0
    for i in range(first, min(first + _STATES_AHEAD, stop)):
        prefetch_line(state + load64(keys + 8 * i))
    for i in range(first, stop):
        if i + _STATES_AHEAD < stop:
            prefetch_line(state + load64(keys + 8 * (i + _STATES_AHEAD)))
        place = state + load64(keys + 8 * i)
        if looks:
            value = load8(place)
            store8(seen + i, value)
            found += value & 1
        else:
            store8(place, EXPECTED)
    if looks:
        store64(load64(arguments + 8 * _A_STARTS) + 8 * chunk, found)


# arguments of _read_chunk
_B_RECORDS, _B_KEYS, _B_NUM, _B_SEEN, _B_STARTS, _B_ROWS, _B_SOURCE, _B_BYTES, _B_FIRST = range(9)


def _read_chunk(arguments: Any, chunk: Any, scratch: Any) -> None:
    """The rows of one chunk that can be read, side by side from starts[chunk] on; source[i] is the place of each.

    It is -1 for a row that was never written. Those on their way have a place already.
    """
    records, keys = load64(arguments + 8 * _B_RECORDS), load64(arguments + 8 * _B_KEYS)
    seen, source = load64(arguments + 8 * _B_SEEN), load64(arguments + 8 * _B_SOURCE)
    rows, num_bytes = load64(arguments + 8 * _B_ROWS), load64(arguments + 8 * _B_BYTES)
    chunk += load64(arguments + 8 * _B_FIRST)
    first = chunk * KEYS_OF_CHUNK
    stop = min(first + KEYS_OF_CHUNK, load64(arguments + 8 * _B_NUM))
    place = load64(load64(arguments + 8 * _B_STARTS) + 8 * chunk)
    ahead, asked = 1 + LINES_AHEAD // (1 + num_bytes // 64), first
    for i in range(first, stop):
        while asked < min(i + ahead + 1, stop):  # ends: asked grows
            if load8(seen + asked) & 1:
                there = records + load64(keys + 8 * asked) * num_bytes
                for line in range(0, num_bytes, 64):
                    prefetch_far(there + line)
            asked += 1
        if load8(seen + i) & 1:
            copy_bytes(rows + place * num_bytes, records + load64(keys + 8 * i) * num_bytes, num_bytes)
            store32(source + 4 * i, place)
            place += 1
        elif load8(seen + i) != EXPECTED:
            store32(source + 4 * i, -1)


_C_RECORDS, _C_KEYS, _C_NUM, _C_ROWS, _C_STATE, _C_BYTES, _C_CHUNK = range(7)  # arguments of _write_chunk


def _write_chunk(arguments: Any, chunk: Any, scratch: Any) -> None:
    """records[keys[i]] = rows[i] for the rows of one chunk, which are marked as written."""
    records, keys = load64(arguments + 8 * _C_RECORDS), load64(arguments + 8 * _C_KEYS)
    rows, state = load64(arguments + 8 * _C_ROWS), load64(arguments + 8 * _C_STATE)
    num_bytes, size = load64(arguments + 8 * _C_BYTES), load64(arguments + 8 * _C_CHUNK)
    first = chunk * size
    stop = min(first + size, load64(arguments + 8 * _C_NUM))
    ahead, asked = 1 + LINES_AHEAD // (1 + num_bytes // 64), first
    for i in range(first, stop):
        while asked < min(i + ahead + 1, stop):  # ends: asked grows
            key = load64(keys + 8 * asked)
            prefetch_line(state + key)
            for line in range(0, num_bytes, 64):
                prefetch_far(records + key * num_bytes + line)
            asked += 1
        key = load64(keys + 8 * i)
        copy_bytes(records + key * num_bytes, rows + i * num_bytes, num_bytes)
        store8(state + key, WRITTEN)


@cache
def kernels() -> tuple[int, ...]:
    """For words COPY, LOOK, READ and WRITE; compiled at the first call and then kept on disk."""
    return copy_kernel(), *(kernel_address(function) for function in (_look_chunk, _read_chunk, _write_chunk))


def most_chunks(num_keys: int) -> int:
    """Numbers in STARTS for that many misses."""
    return -(-num_keys // KEYS_OF_CHUNK) + 1


@njit(nogil=True, cache=True)
def _look(words: Any, misses: Any, victims: Any) -> None:
    """The states of misses, into SEEN; victims are expected from now on. No row is both."""
    pool = words[POOL]
    arguments = begin(pool)
    store64(arguments + 8 * _A_STATE, words[STATE])
    store64(arguments + 8 * _A_KEYS, misses.ctypes.data)
    store64(arguments + 8 * _A_NUM, misses.size)
    store64(arguments + 8 * _A_SEEN, words[SEEN])
    store64(arguments + 8 * _A_STARTS, words[STARTS])
    store64(arguments + 8 * _A_OTHERS, victims.ctypes.data)
    store64(arguments + 8 * _A_NUM_OTHERS, victims.size)
    num_chunks = -(-misses.size // KEYS_OF_CHUNK) - (-victims.size // KEYS_OF_CHUNK)
    if num_chunks:
        run(pool, words[LOOK], num_chunks, 0)


@njit(nogil=True, cache=True)
def _begin_places(words: Any, num_misses: Any) -> Any:
    """STARTS from how many rows each chunk has to where they begin, and behind them the end; how many there are."""
    total, num_chunks = 0, -(-num_misses // KEYS_OF_CHUNK)
    for chunk in range(num_chunks):
        place = words[STARTS] + 8 * chunk
        found = load64(place)
        store64(place, total)
        total += found
    store64(words[STARTS] + 8 * num_chunks, total)
    return total


@njit(nogil=True, cache=True)
def _gather(words: Any, slot: Any, misses: Any, rows: Any, first: Any, stop: Any) -> None:
    """The rows of chunks first to stop; the one with place 0 would be at address `rows`."""
    pool = words[POOL]
    arguments = begin(pool)
    store64(arguments + 8 * _B_RECORDS, words[RECORDS])
    store64(arguments + 8 * _B_KEYS, misses.ctypes.data)
    store64(arguments + 8 * _B_NUM, misses.size)
    store64(arguments + 8 * _B_SEEN, words[SEEN])
    store64(arguments + 8 * _B_STARTS, words[STARTS])
    store64(arguments + 8 * _B_ROWS, rows)
    store64(arguments + 8 * _B_SOURCE, words[slot + SOURCE])
    store64(arguments + 8 * _B_BYTES, words[BYTES])
    store64(arguments + 8 * _B_FIRST, first)
    run(pool, words[READ], stop - first, 0)


@njit(nogil=True, cache=True)
def _scatter(words: Any, victims: Any, rows: Any) -> None:
    pool, num_bytes = words[POOL], words[BYTES]
    size = max(1, _CHUNK_BYTES // max(num_bytes, 32))
    arguments = begin(pool)
    store64(arguments + 8 * _C_RECORDS, words[RECORDS])
    store64(arguments + 8 * _C_KEYS, victims.ctypes.data)
    store64(arguments + 8 * _C_NUM, victims.size)
    store64(arguments + 8 * _C_ROWS, rows)
    store64(arguments + 8 * _C_STATE, words[STATE])
    store64(arguments + 8 * _C_BYTES, num_bytes)
    store64(arguments + 8 * _C_CHUNK, size)
    if victims.size:
        run(pool, words[WRITE], -(-victims.size // size), 0)


@njit(nogil=True, cache=True)
def _has_room(words: Any, s: Any, num_rows: Any) -> bool:
    """Whether the buffers of slot s hold that many rows; asks for larger ones if not, once.

    Who answers makes them known and then takes the question back: so the question is looked at first. A question that is
    asked again after it was answered would have the buffers replaced while rows are in them.
    """
    base = words.ctypes.data
    asked = load_acquire(base + 8 * NEED)
    if num_rows <= load_acquire(base + 8 * (SLOT0 + s * SLOT_WORDS + CAP)):
        return True
    if asked == 0:
        store_release(base + 8 * NEED_SLOT, s)
        store_release(base + 8 * NEED, num_rows)
    return False


@njit(nogil=True, cache=True)
def _list_late(words: Any, slot: Any, misses: Any, place: Any, late_keys: Any) -> Any:
    """How many misses are on their way to the store; they get places from `place` on."""
    num_late = 0
    for i in range(misses.size):
        if load8(words[SEEN] + i) == EXPECTED:
            store32(words[slot + SOURCE] + 4 * i, place + num_late)
            late_keys[num_late] = misses[i]
            num_late += 1
    return num_late


@njit(nogil=True, cache=True)
def _begin_window(words: Any, slot: Any, misses: Any, victims: Any, late_keys: Any) -> None:
    """Find out which misses exist and which are on their way; the latter have their places in `source`."""
    _look(words, misses, victims)
    found = _begin_places(words, misses.size)
    words[slot + FOUND] = found
    words[slot + LATE] = 0 if found == misses.size else _list_late(words, slot, misses, found, late_keys)


@njit(nogil=True, cache=True)
def _in_ring(words: Any, ring: Any, piece: Any) -> Any:
    """The address of a piece."""
    return words[ring] + piece % RING * words[PIECE] * KEYS_OF_CHUNK * words[BYTES]


@njit(nogil=True, cache=True)
def _has_passed(words: Any, tags: Any, piece: Any) -> bool:
    """Whether the device is past a piece, as its tag says; none was sent before the first."""
    return bool(piece < 0 or load_acquire(words[tags] + piece % RING * LINE) == piece % NUM_TAGS + 1)


@njit(nogil=True, cache=True)
def _tag(words: Any, tags: Any, piece: Any, stream: Any) -> Any:
    return copy_out(words[tags] + piece % RING * LINE, words[TAGS] + 8 * (piece % NUM_TAGS), 8, stream)


@njit(nogil=True, cache=True)
def _send(words: Any, slot: Any, place: Any, num_rows: Any) -> Any:
    """The next piece inward, to `place` on."""
    piece, num_bytes = words[NUM_SENT], words[BYTES]
    error = copy_in(
        words[slot + DEVICE_ROWS] + place * num_bytes, _in_ring(words, IN_RING, piece), num_rows * num_bytes, words[IN]
    )
    words[NUM_SENT] = piece + 1
    return error | _tag(words, IN_TAGS, piece, words[IN])


@njit(nogil=True, cache=True)
def _read_piece(words: Any, slot: Any, misses: Any, first: Any, stop: Any) -> Any:
    """Chunks first to stop of a window: gathered, and on their way; an error of the driver, or 0."""
    place = load64(words[STARTS] + 8 * first)
    num_rows = load64(words[STARTS] + 8 * stop) - place
    _gather(words, slot, misses, _in_ring(words, IN_RING, words[NUM_SENT]) - place * words[BYTES], first, stop)
    return _send(words, slot, place, num_rows) if num_rows else 0


@njit(nogil=True, cache=True)
def _read_late(words: Any, slot: Any, keys: Any) -> Any:
    """All rows that were on their way and are written now; waits for the device where the ring is full."""
    base, num_bytes, most = words.ctypes.data, words[BYTES], words[PIECE] * KEYS_OF_CHUNK
    error = 0
    for first in range(0, keys.size, most):
        # ends: when the copy is done, or the thread is stopped
        while not _has_passed(words, IN_TAGS, words[NUM_SENT] - RING):
            if load_acquire(base + 8 * STOP) != 0:
                return DIED  # the window is never handed out
            pause()
        some = keys[first : first + most]
        rows = _in_ring(words, IN_RING, words[NUM_SENT])
        copy_rows(words[POOL], 0, words[COPY], GATHER, words[RECORDS], some.ctypes.data, rows, some.size, num_bytes)
        error |= _send(words, slot, words[slot + FOUND] + first, some.size)
    return error | record(words[slot + IN_EVENT], words[IN])


@njit(nogil=True, cache=True)
def _fetch(words: Any, slot: Any, num_victims: Any, first_piece: Any) -> Any:
    """Let as many pieces of a window's victims come as the ring holds; `first_piece` is its first. One without rows has one."""
    most, num_bytes, error = words[PIECE] * KEYS_OF_CHUNK, words[BYTES], 0
    stop = min(first_piece + max(1, -(-num_victims // most)), words[NUM_TAKEN] + RING)
    for piece in range(words[NUM_FETCHED], stop):
        first = (piece - first_piece) * most
        num_rows = min(most, num_victims - first)
        if num_rows > 0:
            source = words[slot + PACKED] + first * num_bytes
            error |= copy_out(_in_ring(words, OUT_RING, piece), source, num_rows * num_bytes, words[OUT])
        error |= _tag(words, OUT_TAGS, piece, words[OUT])
    words[NUM_FETCHED] = max(words[NUM_FETCHED], stop)
    return error


@njit(nogil=True, cache=True)
def _has_late(words: Any, first: Any, stop: Any) -> bool:
    """Whether a window of these was read while rows of it were on their way to the store."""
    late = 0
    for number in range(first, stop):
        late += words[SLOT0 + (number % SLOTS) * SLOT_WORDS + LATE]
    return late > 0


@njit(nogil=True, cache=True)
def _expect_again(words: Any, first: Any, stop: Any, counts: Any, miss_keys: Any, victim_keys: Any) -> None:
    """Rows of the window before `first` that came back since, and leave again with a window that was begun."""
    if _has_late(words, first, stop):
        for later in range(first + 1, stop):
            row = later % words[WINDOWS]
            _look(words, miss_keys[row, :0], victim_keys[row, : counts[row, VICTIMS]])


@njit(nogil=True, cache=True)
def serve(words: Any, counts: Any, miss_keys: Any, victim_keys: Any, late_keys: Any) -> None:
    """The loop of the thread. Words that others write are read as memory, not as registers.

    Windows before `writing` are written, those before `begun` are begun; of the last of these, chunks from `chunk` on are to be
    read. Pieces from `first_piece` on are the victims of `writing`, if it is being fetched.
    """
    base = words.ctypes.data
    error = use(words[CONTEXT])
    begun = writing = words[FIRST]
    chunk = num_chunks = looks = 0
    first_piece = -1
    while load_acquire(base + 8 * STOP) == 0 and error == 0:  # ends: when the thread is stopped, or a call fails
        idle = False
        slot, row = SLOT0 + (writing % SLOTS) * SLOT_WORDS, writing % words[WINDOWS]
        is_read = chunk == num_chunks or writing < begun - 1
        if writing < begun and first_piece < 0 and load_acquire(base + 8 * (slot + EXCHANGED)) == writing + 1:
            first_piece = words[NUM_FETCHED]
            error |= go_after(words[OUT], words[slot + EVENT], 0)
            error |= _fetch(words, slot, counts[row, VICTIMS], first_piece)
        elif first_piece >= 0 and _has_passed(words, OUT_TAGS, words[NUM_TAKEN]):
            piece, most, num_victims = words[NUM_TAKEN], words[PIECE] * KEYS_OF_CHUNK, counts[row, VICTIMS]
            first = (piece - first_piece) * most
            stop = min(first + most, num_victims)
            _scatter(words, victim_keys[row, first:stop], _in_ring(words, OUT_RING, piece))
            words[NUM_TAKEN] = piece + 1
            if stop < num_victims:
                error |= _fetch(words, slot, num_victims, first_piece)
            else:
                writing, first_piece = writing + 1, -1
                _expect_again(words, writing, begun, counts, miss_keys, victim_keys)
                store_release(base + 8 * NUM_WRITTEN, writing)
        elif writing < begun and is_read and words[slot + LATE] > 0 and words[slot + STAGED] != writing + 1:
            error |= _read_late(words, slot, late_keys[writing % SLOTS, : words[slot + LATE]])
            if error == 0:
                store_release(base + 8 * (slot + STAGED), writing + 1)
        elif chunk < num_chunks and _has_passed(words, IN_TAGS, words[NUM_SENT] - RING):
            number = begun - 1
            slot, row = SLOT0 + (number % SLOTS) * SLOT_WORDS, number % words[WINDOWS]
            stop = min(chunk + words[PIECE], num_chunks)
            error |= _read_piece(words, slot, miss_keys[row, : counts[row, MISSES]], chunk, stop)
            chunk = stop
            if chunk == num_chunks and error == 0:
                error |= _all_read(words, slot, counts[row, MISSES], number)
        elif chunk == num_chunks and begun - writing < SLOTS and _is_listed(words, counts, begun):
            slot, row = SLOT0 + (begun % SLOTS) * SLOT_WORDS, begun % words[WINDOWS]
            misses, victims = miss_keys[row, : counts[row, MISSES]], victim_keys[row, : counts[row, VICTIMS]]
            if _has_room(words, begun % SLOTS, max(misses.size, victims.size)):
                _begin_window(words, slot, misses, victims, late_keys[begun % SLOTS])
                chunk, num_chunks = 0, -(-misses.size // KEYS_OF_CHUNK)
                begun += 1
                if num_chunks == 0:
                    error |= _all_read(words, slot, 0, begun - 1)
            else:
                idle = True
        else:
            idle = True
        looks = looks + 1 if idle else 0
        pause()
        if looks > _LOOKS:
            usleep(np.uint32(_NAP_US))
    store_release(base + 8 * ERROR, error)


@njit(nogil=True, cache=True)
def _is_listed(words: Any, counts: Any, number: Any) -> bool:
    """Whether the device has written the lists of a window."""
    return bool(load_acquire(counts.ctypes.data + 8 * (number % words[WINDOWS] * LISTS + TAG)) == number + 1)


@njit(nogil=True, cache=True)
def _all_read(words: Any, slot: Any, num_misses: Any, number: Any) -> Any:
    """Every row that existed is on its way: send the places of all, and let the window be exchanged unless some are late."""
    error = copy_in(words[slot + DEVICE_SOURCE], words[slot + SOURCE], num_misses * 4, words[IN]) if num_misses else 0
    error |= record(words[slot + IN_EVENT], words[IN])
    if words[slot + LATE] == 0 and error == 0:
        store_release(words.ctypes.data + 8 * (slot + STAGED), number + 1)
    return error


@njit(nogil=True, cache=True)
def watch(words: Any, place: Any, value: Any) -> int:
    """0 when words[place] is `value` or more; 1 when the thread needs room; 2 when it has failed; 3 if none for a second."""
    base = words.ctypes.data
    looks = 0
    while load_acquire(base + 8 * place) < value:  # ends: looks are counted
        if load_acquire(base + 8 * NEED) > 0:
            return 1
        if load_acquire(base + 8 * ERROR) != 0:
            return 2
        looks += 1
        pause()
        if looks > _LOOKS:
            usleep(np.uint32(_NAP_US))
        if looks > _LOOKS + _NAPS:
            return 3
    return 0
