"""The compiled transfer thread: moves the rows of window after window and never takes the GIL.

For every window it waits for the lists that the device writes, reads the rows that exist from the store into pinned memory
and sends them to the device; and when the training thread says that a window's victims are packed, brings them to the host
and writes them to the store. It calls the CUDA driver itself. A thread in Python did the same in 0.7 ms a window and held the
training thread up for as long.

    device   lists of window n            -> thread: rows of n read, sent          -> `staged`
    training exchange of window n, packed -> thread: victims of n fetched, written -> `written`

A row that leaves with one window and is needed by the next is read late: after it was written. At most three windows are
between `staged` and `written`; each has its own buffers, which the training thread makes larger when asked to.

Where the GPU reaches the rows (mapped.py), it may move a share of each window itself while host threads move the others.
Whether it does is tried: some windows with its help and some without, twice each, and again from time to time. Its share grows
where it was done first, and shrinks where the host was.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, types  # type: ignore[attr-defined]
from torch import Tensor

from hotbed.errors import HotbedError
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
from hotbed.host.pool import Pool, num_threads
from hotbed.ops.move.copy import GATHER, SCATTER, copy_kernel, copy_pool, copy_rows
from hotbed.ops.move.mapped import BYTES, KEYS, NUM_ROWS, PACKED, READS, RECORDS, MappedRows, Moves, move_on_host
from hotbed.ops.move.states import EXPECTED, WRITTEN
from hotbed.ops.streams import after, give_stream, mark, take_stream

SLOTS = 3
_LISTS, _MISSES, _VICTIMS, _TAG = 16, 3, 4, 8  # rows of counts: their length, and places in them
# words that the thread shares with its caller
_STOP, _NEED, _NEED_SLOT, _ERROR, _NUM_WRITTEN, _CONTEXT, _IN, _OUT = range(8)
_RECORDS, _BYTES, _STATE, _POOL, _COPY, _WINDOWS, _FIRST = range(8, 15)
_MAPPED, _SHIFT, _GPU_IN, _GPU_OUT, _SHARE_IN, _SHARE_OUT = range(15, 21)
_HELPS, _TRIES, _BEGAN, _ALONE, _HELPED, _SECONDS, _NANOSECONDS = range(21, 28)
_SLOT_WORDS, _SLOT0 = 32, 32
# words of a slot
_CAP, _ROWS, _SOURCE, _DEVICE_ROWS, _DEVICE_SOURCE, _OUT_ROWS, _PACKED, _KEYS = range(8)
_STAGED, _EXCHANGED, _EVENT, _FOUND, _LATE, _IN_EVENT, _OUT_EVENT, _FETCHING = range(8, 16)
_HOST_FOUND, _HOST_VICTIMS, _GPU_IN_EVENT, _GPU_OUT_EVENT = range(16, 20)
_MOVE_IN, _MOVE_IN_WORDS, _MOVE_OUT, _MOVE_OUT_WORDS = range(20, 24)
_FETCHED, _SCATTERED = 1, 2  # as _FETCHING: rows are on their way to the host; those that came are in the store
_WHOLE = 1024  # of a share
_FIRST_SHARE, _MOST_SHARE, _SHARE_STEP = 384, 640, 8
_LEAST_MOVED = 1024  # rows of a window below which the host moves all
TRIES = True  # else the GPU helps in every window
_TRIED_EVERY, _SETTLED, _TRIED = 4096, 16, 8  # windows: between trials, before the first, of each of its four parts
_LONG = 1 << 62  # nanoseconds
_MONOTONIC = 1  # the clock
_EXTENDED_EVERY, _LOOKED_AT = 512, 32  # windows, and chunks of rows that the GPU may reach from then on
_LOOKS = 2000  # before a nap
_MOST_WORKERS = 9
_NAP_US, _NAPS = 30, 10_000  # microseconds at a time, and how often before its caller checks that the thread is alive
_DIED = -1  # as an error: not the driver's, but an exception in the code of the thread

copy_in = external("hotbed_copy_in", types.int32, *(types.int64,) * 4)
copy_out = external("hotbed_copy_out", types.int32, *(types.int64,) * 4)
reached = external("hotbed_reached", types.int32, types.int64)
record = external("hotbed_record", types.int32, types.int64, types.int64)
go_after = external("hotbed_go_after", types.int32, types.int64, types.int64, types.int32)
use = external("hotbed_use", types.int32, types.int64)
replay = external("hotbed_replay", types.int32, types.int64, types.int64)
clock_gettime = external("hotbed_clock", types.int32, types.int32, types.int64)


@cache
def _symbols(on_cuda: bool) -> None:
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
        copy_rows(words[_POOL], 0, words[_COPY], op, rows, keys.ctypes.data, packed, keys.size, num_bytes)


@njit(nogil=True, cache=True)
def _mark(words: Any, keys: Any, values: Any) -> Any:
    """Set the state of rows."""
    _job(words, SCATTER, words[_STATE], keys, values.ctypes.data, 1)
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
    asked = load_acquire(base + 8 * _NEED)
    if num_rows <= load_acquire(base + 8 * (_SLOT0 + s * _SLOT_WORDS + _CAP)):
        return True
    if asked == 0:
        store_release(base + 8 * _NEED_SLOT, s)
        store_release(base + 8 * _NEED, num_rows)
    return False


@njit(nogil=True, cache=True)
def _are_mapped(words: Any, keys: Any) -> Any:
    """Whether the GPU reaches all of these rows."""
    shift, mapped = words[_SHIFT], words[_MAPPED]
    num_mapped = 0
    for i in range(keys.size):
        num_mapped += load8(mapped + (keys[i] >> shift))
    return num_mapped == keys.size


@njit(nogil=True, cache=True)
def _part_of_gpu(words: Any, share: Any, num_rows: Any) -> Any:
    """How many of these rows the GPU should move."""
    if words[_MAPPED] == 0 or words[_HELPS] == 0 or num_rows < _LEAST_MOVED:
        return 0
    return num_rows * words[share] // _WHOLE


@njit(nogil=True, cache=True)
def _start_move(
    words: Any, slot: Any, move: Any, stream: Any, event: Any, num_rows: Any, keys: Any, packed: Any
) -> Any:
    """Let the GPU move rows, on a stream of its own; `move` is the place of the recording, its words are the next."""
    base = words[slot + move + 1]
    store64(base + 8 * NUM_ROWS, num_rows)
    store64(base + 8 * KEYS, keys)
    store64(base + 8 * RECORDS, words[_RECORDS])
    store64(base + 8 * PACKED, packed)
    store64(base + 8 * BYTES, words[_BYTES])
    store64(base + 8 * READS, 1 if move == _MOVE_IN else 0)
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
    if words[_TRIES] == 0 or phase < 0 or phase > 4 * _TRIED:
        return
    clock_gettime(np.int32(_MONOTONIC), words.ctypes.data + 8 * _SECONDS)
    now = words[_SECONDS] * 1_000_000_000 + words[_NANOSECONDS]
    if phase == 0:
        words[_ALONE] = words[_HELPED] = _LONG
    elif phase % _TRIED == 0:
        place = _HELPED if words[_HELPS] else _ALONE
        words[place] = min(words[place], now - words[_BEGAN])
    if phase % _TRIED == 0:
        words[_BEGAN] = now
    if phase == 4 * _TRIED:  # help that gains nothing is not asked for
        words[_HELPS] = words[_HELPED] < words[_ALONE] - words[_ALONE] // 32
    elif phase % _TRIED == 0:
        words[_HELPS] = phase // _TRIED % 2


@njit(nogil=True, cache=True)
def _sort_out(words: Any, slot: Any, misses: Any, seen: Any, late_keys: Any, most_by_gpu: Any) -> Any:
    """(rows for the host, for the GPU, late ones): `source` gets their places, `keys` the first two, the GPU's from behind."""
    count, cap = misses.size, words[slot + _CAP]
    source = carray(as_pointer(words[slot + _SOURCE]), (count,), np.int32)
    keys = carray(as_pointer(words[slot + _KEYS]), (cap,), np.int64)
    shift, mapped = words[_SHIFT], words[_MAPPED]
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
    count, num_bytes, cap = misses.size, words[_BYTES], words[slot + _CAP]
    seen = np.empty(count, np.uint8)
    _expect(words, victims)
    _job(words, GATHER, words[_STATE], misses, seen.ctypes.data, 1)
    by_host, by_gpu, num_late = _sort_out(words, slot, misses, seen, late_keys, _part_of_gpu(words, _SHARE_IN, count))
    rows, device_rows, keys = words[slot + _ROWS], words[slot + _DEVICE_ROWS], words[slot + _KEYS]
    error = 0
    if by_gpu:
        place = cap - by_gpu
        error = _start_move(
            words, slot, _MOVE_IN, _GPU_IN, _GPU_IN_EVENT, by_gpu, keys + 8 * place, device_rows + place * num_bytes
        )
    found = carray(as_pointer(keys), (by_host,), np.int64)
    _job(words, GATHER, words[_RECORDS], found, rows, num_bytes)
    error |= copy_in(words[slot + _DEVICE_SOURCE], words[slot + _SOURCE], count * 4, words[_IN])
    if by_host:
        error |= copy_in(device_rows, rows, by_host * num_bytes, words[_IN])
    if by_gpu:
        _follow(words, _SHARE_IN, reached(words[slot + _GPU_IN_EVENT]) == 0)
        error |= go_after(words[_IN], words[slot + _GPU_IN_EVENT], 0)
    words[slot + _FOUND], words[slot + _HOST_FOUND], words[slot + _LATE] = by_host + by_gpu, by_host, num_late
    return error | record(words[slot + _IN_EVENT], words[_IN])


@njit(nogil=True, cache=True)
def _read_late(words: Any, slot: Any, keys: Any) -> Any:
    num_bytes, place = words[_BYTES], words[slot + _HOST_FOUND]
    rows = words[slot + _ROWS] + place * num_bytes
    _job(words, GATHER, words[_RECORDS], keys, rows, num_bytes)
    error = copy_in(words[slot + _DEVICE_ROWS] + place * num_bytes, rows, keys.size * num_bytes, words[_IN])
    return error | record(words[slot + _IN_EVENT], words[_IN])


@njit(nogil=True, cache=True)
def _fetch_victims(words: Any, slot: Any, victims: Any) -> Any:
    """The first of them come to the host; the GPU writes the others to the store, if it reaches them all."""
    num_bytes, by_gpu = words[_BYTES], _part_of_gpu(words, _SHARE_OUT, victims.size)
    by_host = victims.size - by_gpu
    if by_gpu and not _are_mapped(words, victims[by_host:]):
        by_host, by_gpu = victims.size, 0
    words[slot + _HOST_VICTIMS] = by_host
    error = go_after(words[_OUT], words[slot + _EVENT], 0)
    if by_gpu:
        error |= go_after(words[_GPU_OUT], words[slot + _EVENT], 0)
        keys, packed = victims.ctypes.data + 8 * by_host, words[slot + _PACKED] + by_host * num_bytes
        error |= _start_move(words, slot, _MOVE_OUT, _GPU_OUT, _GPU_OUT_EVENT, by_gpu, keys, packed)
    if by_host:
        error |= copy_out(words[slot + _OUT_ROWS], words[slot + _PACKED], by_host * num_bytes, words[_OUT])
    words[slot + _FETCHING] = _FETCHED
    return error | record(words[slot + _OUT_EVENT], words[_OUT])


@njit(nogil=True, cache=True)
def _scatter_victims(words: Any, slot: Any, victims: Any) -> None:
    """Those that came to the host."""
    by_host = words[slot + _HOST_VICTIMS]
    _job(words, SCATTER, words[_RECORDS], victims[:by_host], words[slot + _OUT_ROWS], words[_BYTES])
    words[slot + _FETCHING] = _SCATTERED
    if by_host < victims.size:
        _follow(words, _SHARE_OUT, reached(words[slot + _GPU_OUT_EVENT]) == 0)


@njit(nogil=True, cache=True)
def _are_written(words: Any, slot: Any, victims: Any) -> Any:
    """Whether all victims are in the store, the GPU's too."""
    if words[slot + _FETCHING] != _SCATTERED:
        return False
    return words[slot + _HOST_VICTIMS] == victims.size or reached(words[slot + _GPU_OUT_EVENT]) == 0


@njit(nogil=True, cache=True)
def _mark_written(words: Any, victims: Any) -> None:
    _mark(words, victims, np.full(victims.size, WRITTEN, np.uint8))


@njit(nogil=True, cache=True)
def _serve(words: Any, counts: Any, miss_keys: Any, victim_keys: Any, late_keys: Any) -> None:
    """The loop of the thread. Words that others write are read as memory, not as registers."""
    base = words.ctypes.data
    error = use(words[_CONTEXT])
    reading = writing = words[_FIRST]
    looks = 0
    while load_acquire(base + 8 * _STOP) == 0 and error == 0:  # ends: when the thread is stopped, or a call fails
        idle = True
        row = reading % words[_WINDOWS]
        if reading - writing < SLOTS and load_acquire(counts.ctypes.data + 8 * (row * _LISTS + _TAG)) == reading + 1:
            slot = _SLOT0 + (reading % SLOTS) * _SLOT_WORDS
            num_misses, num_victims = counts[row, _MISSES], counts[row, _VICTIMS]
            if _has_room(words, reading % SLOTS, max(num_misses, num_victims)):
                error = _read_rows(
                    words, slot, miss_keys[row, :num_misses], victim_keys[row, :num_victims], late_keys[reading % SLOTS]
                )
                reading += 1
                _try_help(words, reading - words[_FIRST])
                if words[slot + _LATE] == 0:
                    store_release(base + 8 * (slot + _STAGED), reading)
                idle = False
        slot = _SLOT0 + (writing % SLOTS) * _SLOT_WORDS
        row = writing % words[_WINDOWS]
        victims = victim_keys[row, : counts[row, _VICTIMS]]
        if writing < reading and words[slot + _FETCHING] == 0:
            if load_acquire(base + 8 * (slot + _EXCHANGED)) == writing + 1:
                error |= _fetch_victims(words, slot, victims)
                idle = False
        elif writing < reading and words[slot + _FETCHING] == _FETCHED and reached(words[slot + _OUT_EVENT]) == 0:
            _scatter_victims(words, slot, victims)
            idle = False
        if writing < reading and _are_written(words, slot, victims):
            _mark_written(words, victims)
            if reading > writing + 2:  # rows that came back in between, and leave again with a window that is read
                again = (writing + 2) % words[_WINDOWS]
                _expect(words, victim_keys[again, : counts[again, _VICTIMS]])
            words[slot + _FETCHING] = 0
            writing += 1
            store_release(base + 8 * _NUM_WRITTEN, writing)
            slot = _SLOT0 + (writing % SLOTS) * _SLOT_WORDS
            if writing < reading and words[slot + _LATE] > 0:  # all that the next window waited for is written
                error |= _read_late(words, slot, late_keys[writing % SLOTS, : words[slot + _LATE]])
                store_release(base + 8 * (slot + _STAGED), writing + 1)
            idle = False
        looks = looks + 1 if idle else 0
        pause()
        if looks > _LOOKS:
            usleep(np.uint32(_NAP_US))
    store_release(base + 8 * _ERROR, error)


@njit(nogil=True, cache=True)
def _watch(words: Any, place: Any, value: Any) -> int:
    """0 when words[place] is `value` or more; 1 when the thread needs room; 2 when it has failed; 3 if none for a second."""
    base = words.ctypes.data
    looks = 0
    while load_acquire(base + 8 * place) < value:  # ends: looks are counted
        if load_acquire(base + 8 * _NEED) > 0:
            return 1
        if load_acquire(base + 8 * _ERROR) != 0:
            return 2
        looks += 1
        pause()
        if looks > _LOOKS:
            usleep(np.uint32(_NAP_US))
        if looks > _LOOKS + _NAPS:
            return 3
    return 0


class WindowBuffers(NamedTuple):
    """The buffers of one window, each of `cap` rows."""

    rows: Tensor  # pinned [cap, W]
    source: Tensor  # pinned int32 [cap]
    device_rows: Tensor  # [cap, W]
    device_source: Tensor  # int32 [cap]
    out_rows: Tensor  # pinned [cap, W]
    packed: Tensor  # [cap, W]
    keys: Tensor  # pinned int64 [cap]: of the rows that are read, the host's first, the GPU's last


class CompiledTransfer:
    """Moves rows between a store (records [R, W], state uint8 [R]) and the slots of one group."""

    def __init__(
        self,
        records: Tensor,
        state: Any,
        lists: tuple[Tensor, Tensor, Tensor],
        device: torch.device,
        mapped: MappedRows | None = None,
    ) -> None:
        self._device = device
        self._mapped, self._moves = mapped, Moves(2 * SLOTS, records.shape[1], device) if mapped is not None else None
        self._records = records
        self._width = records.shape[1]
        self._arrays = [part.numpy() for part in lists]  # counts, keys of misses, keys of victims, by window
        self._state = state  # uint8 [R]
        self._words = np.zeros(_SLOT0 + SLOTS * _SLOT_WORDS, dtype=np.int64)
        self._late = np.empty((SLOTS, lists[1].shape[1]), dtype=np.int64)
        self._slots = [self._new_buffers(0) for _ in range(SLOTS)]
        self._pool: Pool | None = None
        self._kept: list[Any] = []  # events that may still be waited for
        self._events: list[list[Any]] = []
        self._streams: list[Any] = []  # inward and outward, on CUDA
        self._thread: threading.Thread | None = None
        self._exception: BaseException | None = None  # which ended the thread
        self._num_exchanged = 0
        self._helps = False  # whether the GPU moves rows
        _symbols(device.type == "cuda")

    def start(self, first: int) -> None:
        """From window `first` on."""
        words = self._words
        words[:] = 0
        self._num_exchanged = words[_FIRST] = words[_NUM_WRITTEN] = first
        words[_RECORDS], words[_BYTES], words[_STATE] = (
            self._records.data_ptr(),
            self._width * 4,
            self._state.ctypes.data,
        )
        self._pool = copy_pool(max(1, min(_MOST_WORKERS, num_threads() * 5 // 8 - 1)))
        words[_POOL], words[_COPY], words[_WINDOWS] = self._pool.ready(), copy_kernel(), self._arrays[0].shape[0]
        if self._mapped is not None:
            self._mapped.extend()
            words[_MAPPED], words[_SHIFT] = self._mapped.is_mapped.ctypes.data, self._mapped.shift
            words[_SHARE_IN] = words[_SHARE_OUT] = _FIRST_SHARE
            words[_TRIES], words[_HELPS] = TRIES, self._helps or not TRIES
        if self._device.type == "cuda":
            self._streams = [take_stream(self._device) for _ in range(4)]
            words[[_IN, _OUT, _GPU_IN, _GPU_OUT]] = [stream.cuda_stream for stream in self._streams]
            context = ctypes.c_void_p()
            ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
            words[_CONTEXT] = context.value or 0
            self._events = [[mark(self._device) for _ in range(4)] for _ in range(SLOTS)]
            for s, events in enumerate(self._events):
                places = _SLOT0 + s * _SLOT_WORDS + np.array([_IN_EVENT, _OUT_EVENT, _GPU_IN_EVENT, _GPU_OUT_EVENT])
                words[places] = [event.cuda_event for event in events]
        for s in range(SLOTS):
            self._publish(s)
        self._exception = None
        self._thread = threading.Thread(target=self._run, name="hotbed-compiled-transfer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            _serve(self._words, *self._arrays, self._late)  # type: ignore[call-arg]
        except BaseException as error:  # raised by whoever waits
            self._exception = error
            self._words[_ERROR] = _DIED

    def stop(self) -> None:
        """After `drain`, or when it has failed."""
        self._helps = bool(self._words[_HELPS])  # as the last trial found, for the next feed
        self._words[_STOP] = 1
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        while self._streams:
            give_stream(self._device, self._streams.pop())
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def staged(self, number: int) -> tuple[WindowBuffers, int]:
        """(buffers, rows that came from the store) of a window; the current stream waits for them."""
        s = number % SLOTS
        self._wait(_SLOT0 + s * _SLOT_WORDS + _STAGED, number + 1)
        if self._device.type == "cuda":
            after(self._device, self._events[s][0])
        words = self._words[_SLOT0 + s * _SLOT_WORDS :]
        return self._slots[s], int(words[_FOUND] + words[_LATE])

    def is_staged(self, number: int) -> bool:
        """Whether `staged` would not wait, nor the current stream."""
        s = number % SLOTS
        if self._words[_SLOT0 + s * _SLOT_WORDS + _STAGED] < number + 1:
            return False
        return self._device.type != "cuda" or bool(self._events[s][0].query())

    def exchanged(self, number: int, event: Any) -> None:
        """The victims of a window are packed when `event` is reached."""
        place = _SLOT0 + (number % SLOTS) * _SLOT_WORDS
        self._kept.append(event)
        del self._kept[: -4 * SLOTS]
        self._words[place + _EVENT] = 0 if event is None else event.cuda_event
        self._words[place + _EXCHANGED] = number + 1
        self._num_exchanged = number + 1
        if self._mapped is not None and self._num_exchanged % _EXTENDED_EVERY == 0:
            self._mapped.extend(most=_LOOKED_AT)

    def drain(self) -> None:
        """Wait until all victims are in the store."""
        self._wait(_NUM_WRITTEN, self._num_exchanged)

    def _wait(self, place: int, value: int) -> None:
        while status := _watch(self._words, place, value):
            if status == 1:
                self._make_room()
            elif status == 2 or self._thread is None or not self._thread.is_alive():
                reason = f"the CUDA driver says error {self._words[_ERROR]}"
                if self._words[_ERROR] in (0, _DIED):
                    reason = "the thread that moves them has ended"
                raise HotbedError(
                    f"rows could not be moved between host and device: {reason}. "
                    "Rows may be lost; load the last checkpoint."
                ) from self._exception

    def _make_room(self) -> None:
        """Larger buffers, on request. Called again after an interrupt, it must not replace those the thread knows."""
        need, s = int(self._words[_NEED]), int(self._words[_NEED_SLOT])
        if self._words[_SLOT0 + s * _SLOT_WORDS + _CAP] < need:
            self._slots[s] = self._new_buffers(
                need + need // 4
            )  # nothing is under way in it: its last window is written
            free = mark(self._device)  # the memory is new to the host, and the device may have to use it still
            for stream in self._streams:
                stream.wait_event(free)
            self._publish(s)
        self._words[_NEED] = 0

    def _new_buffers(self, cap: int) -> WindowBuffers:
        width, device, pinned = self._width, self._device, self._device.type == "cuda"
        return WindowBuffers(
            torch.empty(cap, width, pin_memory=pinned, dtype=torch.float32, device="cpu"),
            torch.empty(cap, dtype=torch.int32, pin_memory=pinned, device="cpu"),
            torch.empty(cap, width, device=device, dtype=torch.float32),
            torch.empty(cap, dtype=torch.int32, device=device),
            torch.empty(cap, width, pin_memory=pinned, dtype=torch.float32, device="cpu"),
            torch.empty(cap, width, device=device, dtype=torch.float32),
            torch.empty(cap, dtype=torch.int64, pin_memory=pinned, device="cpu"),
        )

    def _publish(self, s: int) -> None:
        place, slot = _SLOT0 + s * _SLOT_WORDS, self._slots[s]
        self._words[place + _ROWS : place + _KEYS + 1] = [tensor.data_ptr() for tensor in slot]
        if self._moves is not None:
            moves = zip(self._moves.handles[2 * s : 2 * s + 2], self._moves.words[2 * s : 2 * s + 2])
            self._words[place + _MOVE_IN : place + _MOVE_OUT_WORDS + 1] = [
                number for handle, row in moves for number in (handle, row.data_ptr())
            ]
        self._words[place + _CAP] = slot.source.shape[0]
