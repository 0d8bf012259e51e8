"""The loop of the compiled transfer thread (compiled_transfer.py), and the words that it shares with its caller.

In: the lists of windows that the device writes, and words of 64 bits: addresses, counts, requests. Out: rows in pinned memory
and on the device, victims in the store. It calls the CUDA driver itself and never takes the GIL.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]

from hotbed.host.intrinsics import (
    as_pointer,
    bind,
    external,
    load8,
    load_acquire,
    pause,
    store64,
    store_release,
    usleep,
)
from hotbed.host.jit import njit
from hotbed.ops.move.copy import GATHER, SCATTER, copy_rows
from hotbed.ops.move.mapped import BYTES as MOVE_BYTES
from hotbed.ops.move.mapped import KEYS as MOVE_KEYS
from hotbed.ops.move.mapped import NUM_ROWS as MOVE_NUM_ROWS
from hotbed.ops.move.mapped import PACKED as MOVE_PACKED
from hotbed.ops.move.mapped import READS as MOVE_READS
from hotbed.ops.move.mapped import RECORDS as MOVE_RECORDS
from hotbed.ops.move.mapped import move_on_host
from hotbed.ops.move.states import EXPECTED, WRITTEN

SLOTS = 3
LISTS, MISSES, VICTIMS, TAG = 16, 3, 4, 8  # rows of counts: their length, and places in them
# words that the thread shares with its caller
STOP, NEED, NEED_SLOT, ERROR, NUM_WRITTEN, CONTEXT, IN, OUT = range(8)
RECORDS, BYTES, STATE, POOL, COPY, WINDOWS, FIRST = range(8, 15)
MAPPED, SHIFT, GPU_IN, GPU_OUT, SHARE_IN, SHARE_OUT = range(15, 21)
HELPS, TRYING, BEGAN, ALONE, HELPED, SECONDS, NANOSECONDS = range(21, 28)
SLOT_WORDS, SLOT0 = 32, 32
# words of a slot
CAP, ROWS, SOURCE, DEVICE_ROWS, DEVICE_SOURCE, OUT_ROWS, PACKED, KEYS = range(8)
STAGED, EXCHANGED, EVENT, FOUND, LATE, IN_EVENT, OUT_EVENT, FETCHING = range(8, 16)
HOST_FOUND, HOST_VICTIMS, GPU_IN_EVENT, GPU_OUT_EVENT = range(16, 20)
MOVE_IN, MOVE_IN_WORDS, MOVE_OUT, MOVE_OUT_WORDS = range(20, 24)
FETCHED, SCATTERED = 1, 2  # as FETCHING: rows are on their way to the host; those that came are in the store
_WHOLE = 1024  # of a share
FIRST_SHARE, _MOST_SHARE, _SHARE_STEP = 384, 640, 8
_LEAST_MOVED = 1024  # rows of a window below which the host moves all
_TRIED_EVERY, _SETTLED, _TRIED = 4096, 16, 8  # windows: between trials, before the first, of each of its four parts
_LONG = 1 << 62  # nanoseconds
_MONOTONIC = 1  # the clock
_LOOKS = 2000  # before a nap
_NAP_US, _NAPS = 30, 10_000  # microseconds at a time, and how often before its caller checks that the thread is alive
DIED = -1  # as an error: not the driver's, but an exception in the code of the thread

copy_in = external("hotbed_copy_in", types.int32, *(types.int64,) * 4)
copy_out = external("hotbed_copy_out", types.int32, *(types.int64,) * 4)
reached = external("hotbed_reached", types.int32, types.int64)
record = external("hotbed_record", types.int32, types.int64, types.int64)
go_after = external("hotbed_go_after", types.int32, types.int64, types.int64, types.int32)
use = external("hotbed_use", types.int32, types.int64)
replay = external("hotbed_replay", types.int32, types.int64, types.int64)
clock_gettime = external("hotbed_clock", types.int32, types.int32, types.int64)


@cache
def bind_symbols(on_cuda: bool) -> None:
    """Give the names above their meaning: the CUDA driver's, or the C library's for tests without a device."""
    if on_cuda:
        library = ctypes.CDLL("libcuda.so.1")
        names = [
            "cuMemcpyHtoDAsync_v2",
            "cuMemcpyDtoHAsync_v2",
            "cuEventQuery",
            "cuEventRecord",
            "cuStreamWaitEvent",
            "cuCtxSetCurrent",
            "cuGraphLaunch",
        ]
    else:
        library = ctypes.CDLL(None)
        nothing = "fflush"  # of 0 does nothing and returns 0
        names = ["hotbed_memcpy", "hotbed_memcpy", *[nothing] * 4, "hotbed_move"]
    ours = ("copy_in", "copy_out", "reached", "record", "go_after", "use", "replay")
    bind("hotbed_clock", ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value or 0)
    stands_in = {"hotbed_memcpy": _copies, "hotbed_move": _moves}
    for our, name in zip(ours, names):
        function = stands_in.get(name) or getattr(library, name)
        bind(f"hotbed_{our}", ctypes.cast(function, ctypes.c_void_p).value or 0)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
def _copies(to: int, source: int, num_bytes: int, stream: int) -> int:
    ctypes.memmove(to, source, num_bytes)
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
def _moves(move: int, stream: int) -> int:
    move_on_host(move)
    return 0


@njit(nogil=True, cache=True)
def _job(words: Any, op: Any, rows: Any, keys: Any, packed: Any, num_bytes: Any) -> None:
    if keys.size:
        copy_rows(words[POOL], 0, words[COPY], op, rows, keys.ctypes.data, packed, keys.size, num_bytes)


@njit(nogil=True, cache=True)
def _mark(words: Any, keys: Any, values: Any) -> Any:
    """Set the state of rows."""
    _job(words, SCATTER, words[STATE], keys, values.ctypes.data, 1)
    return values.size  # named once more: by its address alone Numba would free it before it is read


@njit(nogil=True, cache=True)
def _expect(words: Any, victims: Any) -> None:
    _mark(words, victims, np.full(victims.size, EXPECTED, np.uint8))


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
def _are_mapped(words: Any, keys: Any) -> Any:
    """Whether the GPU reaches all of these rows."""
    shift, mapped = words[SHIFT], words[MAPPED]
    num_mapped = 0
    for i in range(keys.size):
        num_mapped += load8(mapped + (keys[i] >> shift))
    return num_mapped == keys.size


@njit(nogil=True, cache=True)
def _part_of_gpu(words: Any, share: Any, num_rows: Any) -> Any:
    """How many of these rows the GPU should move."""
    if words[MAPPED] == 0 or words[HELPS] == 0 or num_rows < _LEAST_MOVED:
        return 0
    return num_rows * words[share] // _WHOLE


@njit(nogil=True, cache=True)
def _start_move(
    words: Any, slot: Any, move: Any, stream: Any, event: Any, num_rows: Any, keys: Any, packed: Any
) -> Any:
    """Let the GPU move rows, on a stream of its own; `move` is the place of the recording, its words are the next."""
    base = words[slot + move + 1]
    store64(base + 8 * MOVE_NUM_ROWS, num_rows)
    store64(base + 8 * MOVE_KEYS, keys)
    store64(base + 8 * MOVE_RECORDS, words[RECORDS])
    store64(base + 8 * MOVE_PACKED, packed)
    store64(base + 8 * MOVE_BYTES, words[BYTES])
    store64(base + 8 * MOVE_READS, 1 if move == MOVE_IN else 0)
    return replay(words[slot + move], words[stream]) | record(words[slot + event], words[stream])


@njit(nogil=True, cache=True)
def _follow(words: Any, share: Any, gpu_is_done: Any) -> None:
    """Who was done first gets more next time."""
    if gpu_is_done:
        words[share] = min(words[share] + _SHARE_STEP, _MOST_SHARE)
    else:
        words[share] = max(words[share] - _SHARE_STEP, 0)


@njit(nogil=True, cache=True)
def _try_help(words: Any, num_read: Any) -> None:
    """After a window was read, their number so far: begin or end a part of a trial, in turn without the GPU and with it."""
    phase = num_read % _TRIED_EVERY - _SETTLED
    if words[TRYING] == 0 or phase < 0 or phase > 4 * _TRIED:
        return
    clock_gettime(np.int32(_MONOTONIC), words.ctypes.data + 8 * SECONDS)
    now = words[SECONDS] * 1_000_000_000 + words[NANOSECONDS]
    if phase == 0:
        words[ALONE] = words[HELPED] = _LONG
    elif phase % _TRIED == 0:
        place = HELPED if words[HELPS] else ALONE
        words[place] = min(words[place], now - words[BEGAN])
    if phase % _TRIED == 0:
        words[BEGAN] = now
    if phase == 4 * _TRIED:  # help that gains nothing is not asked for
        words[HELPS] = words[HELPED] < words[ALONE] - words[ALONE] // 32
    elif phase % _TRIED == 0:
        words[HELPS] = phase // _TRIED % 2


@njit(nogil=True, cache=True)
def _sort_out(words: Any, slot: Any, misses: Any, seen: Any, late_keys: Any, most_by_gpu: Any) -> Any:
    """(rows for the host, for the GPU, late ones): `source` gets their places, `keys` the first two, the GPU's from behind."""
    count, cap = misses.size, words[slot + CAP]
    source = carray(as_pointer(words[slot + SOURCE]), (count,), np.int32)
    keys = carray(as_pointer(words[slot + KEYS]), (cap,), np.int64)
    shift, mapped = words[SHIFT], words[MAPPED]
    by_host = by_gpu = num_late = 0
    for i in range(count):
        place = -1
        if seen[i] & 1:
            if by_gpu < most_by_gpu and load8(mapped + (misses[i] >> shift)) != 0:
                by_gpu += 1
                place = cap - by_gpu
            else:
                place = by_host
                by_host += 1
            keys[place] = misses[i]
        source[i] = place
    for i in range(count):
        if seen[i] == EXPECTED:
            source[i] = by_host + num_late
            late_keys[num_late] = misses[i]
            num_late += 1
    return by_host, by_gpu, num_late


@njit(nogil=True, cache=True)
def _read_rows(words: Any, slot: Any, misses: Any, victims: Any, late_keys: Any) -> Any:
    """An error of the driver, or 0: rows that are found are on their way, late ones have their places in `source`."""
    count, num_bytes, cap = misses.size, words[BYTES], words[slot + CAP]
    seen = np.empty(count, np.uint8)
    _expect(words, victims)
    _job(words, GATHER, words[STATE], misses, seen.ctypes.data, 1)
    by_host, by_gpu, num_late = _sort_out(words, slot, misses, seen, late_keys, _part_of_gpu(words, SHARE_IN, count))
    rows, device_rows, keys = words[slot + ROWS], words[slot + DEVICE_ROWS], words[slot + KEYS]
    error = 0
    if by_gpu:
        place = cap - by_gpu
        error = _start_move(
            words, slot, MOVE_IN, GPU_IN, GPU_IN_EVENT, by_gpu, keys + 8 * place, device_rows + place * num_bytes
        )
    found = carray(as_pointer(keys), (by_host,), np.int64)
    _job(words, GATHER, words[RECORDS], found, rows, num_bytes)
    error |= copy_in(words[slot + DEVICE_SOURCE], words[slot + SOURCE], count * 4, words[IN])
    if by_host:
        error |= copy_in(device_rows, rows, by_host * num_bytes, words[IN])
    if by_gpu:
        _follow(words, SHARE_IN, reached(words[slot + GPU_IN_EVENT]) == 0)
        error |= go_after(words[IN], words[slot + GPU_IN_EVENT], 0)
    words[slot + FOUND], words[slot + HOST_FOUND], words[slot + LATE] = by_host + by_gpu, by_host, num_late
    return error | record(words[slot + IN_EVENT], words[IN])


@njit(nogil=True, cache=True)
def _read_late(words: Any, slot: Any, keys: Any) -> Any:
    num_bytes, place = words[BYTES], words[slot + HOST_FOUND]
    rows = words[slot + ROWS] + place * num_bytes
    _job(words, GATHER, words[RECORDS], keys, rows, num_bytes)
    error = copy_in(words[slot + DEVICE_ROWS] + place * num_bytes, rows, keys.size * num_bytes, words[IN])
    return error | record(words[slot + IN_EVENT], words[IN])


@njit(nogil=True, cache=True)
def _fetch_victims(words: Any, slot: Any, victims: Any) -> Any:
    """The first of them come to the host; the GPU writes the others to the store, if it reaches them all."""
    num_bytes, by_gpu = words[BYTES], _part_of_gpu(words, SHARE_OUT, victims.size)
    by_host = victims.size - by_gpu
    if by_gpu and not _are_mapped(words, victims[by_host:]):
        by_host, by_gpu = victims.size, 0
    words[slot + HOST_VICTIMS] = by_host
    error = go_after(words[OUT], words[slot + EVENT], 0)
    if by_gpu:
        error |= go_after(words[GPU_OUT], words[slot + EVENT], 0)
        keys, packed = victims.ctypes.data + 8 * by_host, words[slot + PACKED] + by_host * num_bytes
        error |= _start_move(words, slot, MOVE_OUT, GPU_OUT, GPU_OUT_EVENT, by_gpu, keys, packed)
    if by_host:
        error |= copy_out(words[slot + OUT_ROWS], words[slot + PACKED], by_host * num_bytes, words[OUT])
    words[slot + FETCHING] = FETCHED
    return error | record(words[slot + OUT_EVENT], words[OUT])


@njit(nogil=True, cache=True)
def _scatter_victims(words: Any, slot: Any, victims: Any) -> None:
    """Those that came to the host."""
    by_host = words[slot + HOST_VICTIMS]
    _job(words, SCATTER, words[RECORDS], victims[:by_host], words[slot + OUT_ROWS], words[BYTES])
    words[slot + FETCHING] = SCATTERED
    if by_host < victims.size:
        _follow(words, SHARE_OUT, reached(words[slot + GPU_OUT_EVENT]) == 0)


@njit(nogil=True, cache=True)
def _are_written(words: Any, slot: Any, victims: Any) -> Any:
    """Whether all victims are in the store, the GPU's too."""
    if words[slot + FETCHING] != SCATTERED:
        return False
    return words[slot + HOST_VICTIMS] == victims.size or reached(words[slot + GPU_OUT_EVENT]) == 0


@njit(nogil=True, cache=True)
def _mark_written(words: Any, victims: Any) -> None:
    _mark(words, victims, np.full(victims.size, WRITTEN, np.uint8))


@njit(nogil=True, cache=True)
def serve(words: Any, counts: Any, miss_keys: Any, victim_keys: Any, late_keys: Any) -> None:
    """The loop of the thread. Words that others write are read as memory, not as registers."""
    base = words.ctypes.data
    error = use(words[CONTEXT])
    reading = writing = words[FIRST]
    looks = 0
    while load_acquire(base + 8 * STOP) == 0 and error == 0:  # ends: when the thread is stopped, or a call fails
        idle = True
        row = reading % words[WINDOWS]
        if reading - writing < SLOTS and load_acquire(counts.ctypes.data + 8 * (row * LISTS + TAG)) == reading + 1:
            slot = SLOT0 + (reading % SLOTS) * SLOT_WORDS
            num_misses, num_victims = counts[row, MISSES], counts[row, VICTIMS]
            if _has_room(words, reading % SLOTS, max(num_misses, num_victims)):
                error = _read_rows(
                    words, slot, miss_keys[row, :num_misses], victim_keys[row, :num_victims], late_keys[reading % SLOTS]
                )
                reading += 1
                _try_help(words, reading - words[FIRST])
                if words[slot + LATE] == 0:
                    store_release(base + 8 * (slot + STAGED), reading)
                idle = False
        slot = SLOT0 + (writing % SLOTS) * SLOT_WORDS
        row = writing % words[WINDOWS]
        victims = victim_keys[row, : counts[row, VICTIMS]]
        if writing < reading and words[slot + FETCHING] == 0:
            if load_acquire(base + 8 * (slot + EXCHANGED)) == writing + 1:
                error |= _fetch_victims(words, slot, victims)
                idle = False
        elif writing < reading and words[slot + FETCHING] == FETCHED and reached(words[slot + OUT_EVENT]) == 0:
            _scatter_victims(words, slot, victims)
            idle = False
        if writing < reading and _are_written(words, slot, victims):
            _mark_written(words, victims)
            if reading > writing + 2:  # rows that came back in between, and leave again with a window that is read
                again = (writing + 2) % words[WINDOWS]
                _expect(words, victim_keys[again, : counts[again, VICTIMS]])
            words[slot + FETCHING] = 0
            writing += 1
            store_release(base + 8 * NUM_WRITTEN, writing)
            slot = SLOT0 + (writing % SLOTS) * SLOT_WORDS
            if writing < reading and words[slot + LATE] > 0:  # all that the next window waited for is written
                error |= _read_late(words, slot, late_keys[writing % SLOTS, : words[slot + LATE]])
                store_release(base + 8 * (slot + STAGED), writing + 1)
            idle = False
        looks = looks + 1 if idle else 0
        pause()
        if looks > _LOOKS:
            usleep(np.uint32(_NAP_US))
    store_release(base + 8 * ERROR, error)


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
