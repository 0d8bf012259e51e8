"""The compiled transfer thread: moves the rows of window after window and never takes the GIL.

For every window it waits for the lists that the device writes, reads the rows that exist from the store into pinned memory
and sends them to the device; and when the training thread says that a window's victims are packed, brings them to the host
and writes them to the store. It calls the CUDA driver itself. A thread in Python did the same in 0.7 ms a window and held the
training thread up for as long.

    device   lists of window n            -> thread: rows of n read, sent          -> `staged`
    training exchange of window n, packed -> thread: victims of n fetched, written -> `written`

A row that leaves with one window and is needed by the next is read late: after it was written. At most SLOTS windows are
between `staged` and `written`; each has its own buffers on the device, which the training thread makes larger when asked to.
The pinned memory they travel through is small and does not grow.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotbed.errors import HotbedError
from hotbed.host.devices import pinned_empty, with_spare
from hotbed.host.handover import Runner
from hotbed.host.pool import Pool, num_threads
from hotbed.ops.move.copy import copy_pool
from hotbed.ops.move.transfer_loop import (
    BYTES,
    CAP,
    CONTEXT,
    COPY,
    DIED,
    ERROR,
    EVENT,
    EXCHANGED,
    FIRST,
    FOUND,
    IN,
    IN_EVENT,
    IN_RING,
    IN_TAGS,
    KEYS_OF_CHUNK,
    LATE,
    LINE,
    LOOK,
    NEED,
    NEED_SLOT,
    NUM_TAGS,
    NUM_WRITTEN,
    OUT,
    OUT_RING,
    OUT_TAGS,
    PACKED,
    PIECE,
    POOL,
    READ,
    RECORDS,
    RING,
    SEEN,
    SLOT0,
    SLOT_WORDS,
    SLOTS,
    SOURCE,
    STAGED,
    STARTS,
    STATE,
    STOP,
    TAGS,
    WINDOWS,
    WRITE,
    bind_symbols,
    kernels,
    most_chunks,
    serve,
    watch,
)
from hotbed.ops.streams import after, check_device, give_stream, mark, take_stream

# Of rows that travel at once. One H200, 1.5 % of Kaggle's rows cached, ms a step, in one call:
#                                   whole windows, not overlapped    pieces of 2 MiB    6 MiB         16 MiB
#   dim 128, batch 16,384           0.93 to 1.00                     1.06 to 1.11       0.73 to 0.80  0.64 to 0.72
#   batch 32,768, Zipf 0.9, 3 %     3.03 to 3.05                     3.45 to 3.50       2.59 to 2.63  1.86 to 1.89
PIECE_BYTES = 16 << 20
_MOST_WORKERS = 11


def rows_of_piece(record: int, room: int, most: int | None, piece_bytes: int = PIECE_BYTES) -> int:
    """Rows of `record` bytes that travel at once, where a window has up to `room`, and `most` may be on their way, if given.

    A ring then takes half of their bytes; the other half is for windows that another thread moves (tables/group/staging.py).
    """
    rows = min(piece_bytes // record, room if most is None else min(room, most // 2))
    return max(1, rows // KEYS_OF_CHUNK) * KEYS_OF_CHUNK


class WindowBuffers(NamedTuple):
    """The buffers of one window, each of `cap` rows."""

    source: Tensor  # pinned int32 [cap]
    device_rows: Tensor  # [cap, W]
    device_source: Tensor  # int32 [cap]
    packed: Tensor  # [cap, W]


class CompiledTransfer:
    """Moves rows between a store (records [R, W], state uint8 [R]) and the slots of one group; `most` of one window."""

    def __init__(
        self,
        records: Tensor,
        state: Any,
        lists: tuple[Tensor, Tensor, Tensor],
        device: torch.device,
        most: int | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._device, self._most = device, most
        self._records = records
        self._width = records.shape[1]
        self._arrays = [part.numpy() for part in lists]  # counts, keys of misses, keys of victims, by window
        self._state = state  # uint8 [R]
        self._words = np.zeros(SLOT0 + SLOTS * SLOT_WORDS, dtype=np.int64)
        room = lists[1].shape[1]
        self._late = np.empty((SLOTS, room), dtype=np.int64)
        self._seen, self._starts = np.empty(room, dtype=np.uint8), np.empty(most_chunks(room), dtype=np.int64)
        self._tags = torch.arange(1, NUM_TAGS + 1, dtype=torch.int64, device=device)
        self._piece = rows_of_piece(self._width * 4, room, most, piece_bytes)
        self._ring_tags = pinned_empty((2, RING, LINE // 8), torch.int64, pins=device.type == "cuda")
        self._rings, self._slots = self._new_rings(0), self._new_slots()
        self._pool: Pool | None = None
        self._kept: list[Any] = []  # events that may still be waited for
        self._events: list[Any] = []  # by slot: its rows are on the device
        self._streams: list[Any] = []  # inward and outward, on CUDA
        self._thread: Runner | None = None
        self._exception: BaseException | None = None  # which ended the thread
        self._num_exchanged = 0
        bind_symbols(device.type == "cuda")

    def start(self, first: int) -> None:
        """From window `first` on."""
        words = self._words
        self._num_exchanged = 0  # wherever this is left, there is nothing to drain
        words[:] = 0
        words[FIRST] = words[NUM_WRITTEN] = self._num_exchanged = first
        words[RECORDS], words[BYTES], words[STATE] = (
            self._records.data_ptr(),
            self._width * 4,
            self._state.ctypes.data,
        )
        self._pool = copy_pool(max(1, min(_MOST_WORKERS, num_threads() * 3 // 4 - 1)))
        words[POOL], words[WINDOWS] = self._pool.ready(), self._arrays[0].shape[0]
        words[[COPY, LOOK, READ, WRITE]] = kernels()
        words[SEEN], words[STARTS], words[TAGS] = (
            self._seen.ctypes.data,
            self._starts.ctypes.data,
            self._tags.data_ptr(),
        )
        self._ring_tags.zero_()
        if not self._rings[0].shape[0]:
            self._rings = self._new_rings(RING * self._piece)
        words[PIECE] = self._piece // KEYS_OF_CHUNK
        words[[IN_RING, OUT_RING]] = [ring.data_ptr() for ring in self._rings]
        words[[IN_TAGS, OUT_TAGS]] = [tags.data_ptr() for tags in self._ring_tags]
        if self._device.type == "cuda":
            self._streams = [take_stream(self._device) for _ in range(2)]
            words[[IN, OUT]] = [stream.cuda_stream for stream in self._streams]
            ready = mark(self._device)  # tags are made on the current stream, and a piece with a wrong one never passes
            for stream in self._streams:
                stream.wait_event(ready)
            context = ctypes.c_void_p()
            ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
            words[CONTEXT] = context.value or 0
            self._events = [mark(self._device) for _ in range(SLOTS)]
            for s, event in enumerate(self._events):
                words[SLOT0 + s * SLOT_WORDS + IN_EVENT] = event.cuda_event
        for s in range(SLOTS):
            self._publish(s)
        self._exception = None
        self._thread = Runner(self._run, "hotbed-compiled-transfer")
        self._thread.start()

    def _run(self) -> None:
        try:
            serve(self._words, *self._arrays, self._late)  # type: ignore[call-arg]
        except BaseException as error:  # raised by whoever waits
            self._exception = error
            self._words[ERROR] = DIED

    def stop(self) -> None:
        """After `drain`, or when it has failed; also where `start` was left early."""
        self._words[STOP] = 1
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        while self._streams:
            give_stream(self._device, self._streams.pop())
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def release(self) -> None:
        """Give the memory of rows on their way back, of which there are none; between `stop` and `start`."""
        self._rings, self._slots = self._new_rings(0), self._new_slots()

    def staged(self, number: int) -> tuple[WindowBuffers, int]:
        """(buffers, rows that came from the store) of a window; the current stream waits for them."""
        s = number % SLOTS
        self._wait(SLOT0 + s * SLOT_WORDS + STAGED, number + 1)
        if self._device.type == "cuda":
            after(self._device, self._events[s])
        words = self._words[SLOT0 + s * SLOT_WORDS :]
        return self._slots[s], int(words[FOUND] + words[LATE])

    def is_staged(self, number: int) -> bool:
        """Whether `staged` would not wait, nor the current stream."""
        s = number % SLOTS
        if self._words[SLOT0 + s * SLOT_WORDS + STAGED] < number + 1:
            return False
        return self._device.type != "cuda" or bool(self._events[s].query())

    def exchanged(self, number: int, event: Any) -> None:
        """The victims of a window are packed when `event` is reached."""
        place = SLOT0 + (number % SLOTS) * SLOT_WORDS
        self._kept.append(event)
        del self._kept[: -4 * SLOTS]
        self._words[place + EVENT] = 0 if event is None else event.cuda_event
        self._words[place + EXCHANGED] = number + 1
        self._num_exchanged = number + 1

    @property
    def num_written(self) -> Any:
        """int64 [1], which the thread changes: the windows whose victims are in the store."""
        return self._words[NUM_WRITTEN : NUM_WRITTEN + 1]

    def drain(self) -> None:
        """Wait until all victims are in the store."""
        self._wait(NUM_WRITTEN, self._num_exchanged)

    def _wait(self, place: int, value: int) -> None:
        while status := watch(self._words, place, value):
            if status == 1:
                self._make_room()
            elif status == 2 or self._thread is None or not self._thread.is_alive():
                reason = f"the CUDA driver says error {self._words[ERROR]}"
                if self._words[ERROR] in (0, DIED):
                    reason = "the thread that moves them has ended"
                raise HotbedError(
                    f"rows could not be moved between host and device: {reason}. "
                    "Rows may be lost; load the last checkpoint."
                ) from self._exception
            else:
                check_device(self._device)  # a broken one never writes what the thread waits for

    def _make_room(self) -> None:
        """Larger buffers, on request. Called again after an interrupt, it must not replace those the thread knows."""
        need, s = int(self._words[NEED]), int(self._words[NEED_SLOT])
        if self._words[SLOT0 + s * SLOT_WORDS + CAP] < need:
            # nothing is under way in it: its last window is written
            self._slots[s] = self._new_buffers(with_spare(need, self._most))
            free = mark(self._device)  # the memory is new to the host, and the device may have to use it still
            for stream in self._streams:
                stream.wait_event(free)
            self._publish(s)
        self._words[NEED] = 0

    def _new_rings(self, num_rows: int) -> list[Tensor]:
        """In, out."""
        pins = self._device.type == "cuda"
        return [pinned_empty((num_rows, self._width), torch.float32, pins=pins) for _ in range(2)]

    def _new_slots(self) -> list[WindowBuffers]:
        return [self._new_buffers(0) for _ in range(SLOTS)]

    def _new_buffers(self, cap: int) -> WindowBuffers:
        width, device, pins = self._width, self._device, self._device.type == "cuda"
        return WindowBuffers(
            pinned_empty((cap,), torch.int32, pins=pins),
            torch.empty(cap, width, device=device, dtype=torch.float32),
            torch.empty(cap, dtype=torch.int32, device=device),
            torch.empty(cap, width, device=device, dtype=torch.float32),
        )

    def _publish(self, s: int) -> None:
        place, slot = SLOT0 + s * SLOT_WORDS, self._slots[s]
        self._words[place + SOURCE : place + PACKED + 1] = [tensor.data_ptr() for tensor in slot]
        self._words[place + CAP] = slot.source.shape[0]
