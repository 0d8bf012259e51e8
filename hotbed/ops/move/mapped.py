"""Rows of a store in host memory that the GPU reads and writes by itself, while host threads move the others.

    store (host) --_move--> staging (device)        store (host) <--_move-- packed victims (device)

Host threads and copy engines move 40,000 records of 528 bytes each way in 1.12 ms, the GPU alone in 1.15, both together in 0.83
(one H200, 10 of 16 host cores). For the GPU the memory must be page-locked. It is registered in chunks, each when nearly all of
its rows have been written: so what is locked is memory that is in use anyway. Rows elsewhere are moved by host threads alone.
Processes that are forked later do not have these rows.

The transfer thread is compiled code and cannot launch kernels. So a launch of fixed size is recorded as a CUDA graph, which the
driver replays in one call; what differs from window to window (how many rows, which, from where) is read from host memory.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.host.pages import keep_from_children
from hotbed.host.pinned import RECORDING

NUM_ROWS, KEYS, RECORDS, PACKED, BYTES, READS = range(6)  # words that describe a move
WORDS = 8
_log = logging.getLogger("hotbed.ops")
_CHUNK_BYTES = 1 << 26  # about
_LEAST_ROWS = 256  # of a chunk: whole pages, since a record has a multiple of 16 bytes
_FILLED = 7 / 8  # of the rows of a chunk must have been written
_PORTABLE, _MAPPED = 1, 2  # flags of the driver


class MappedRows:
    """Which rows of a store's records [R, W] the GPU can reach, by chunks of 2**shift rows."""

    def __init__(self, records: Tensor, state: NDArray[np.uint8], device: torch.device) -> None:
        self._records, self._state, self._device = records, state, device
        row = records.shape[1] * records.itemsize
        self.shift = max(_LEAST_ROWS, _CHUNK_BYTES // row).bit_length() - 1
        self.is_mapped = np.zeros(-(-records.shape[0] // (1 << self.shift)), dtype=np.uint8)
        self.end = records.shape[0]  # rows from here on were never written; a store that grows says how far it has come
        self._next = 0  # chunk to look at
        self._registered: list[int] = []  # addresses of chunks
        weakref.finalize(self, _unregister, self._registered, records)
        self._refused = device.type != "cuda" or row % 16 != 0 or records.data_ptr() % 4096 != 0

    def extend(self, most: int | None = None) -> None:
        """Register the chunks that are filled by now; look at `most` of them only, the next ones at every call."""
        if self._refused:
            return
        rows, chunks = 1 << self.shift, np.flatnonzero(self.is_mapped == 0)
        chunks = chunks[chunks * rows < self.end]
        if most is not None and len(chunks):
            chunks = np.roll(chunks, -np.searchsorted(chunks, self._next))[:most]
            self._next = int(chunks[-1]) + 1
        for chunk in chunks:
            part = self._state[chunk * rows : (chunk + 1) * rows]
            if np.count_nonzero(part) >= _FILLED * part.size and not self._register(int(chunk)):
                return

    def _register(self, chunk: int) -> bool:
        start, size = self._span(chunk)
        with RECORDING, torch.cuda.device(self._device):
            error = _driver().cuMemHostRegister_v2(start, size, ctypes.c_uint(_PORTABLE | _MAPPED))
            seen = ctypes.c_void_p()
            error = error or _driver().cuMemHostGetDevicePointer_v2(ctypes.byref(seen), start, 0)
        if error or seen.value != start.value:
            self._refused = True
            _log.info("the GPU cannot reach all rows in host memory, and host threads move the others: error %d", error)
            return False
        keep_from_children(start.value or 0, size.value)
        self._registered.append(start.value or 0)
        self.is_mapped[chunk] = 1
        return True

    def _span(self, chunk: int) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
        row, rows = self._records.shape[1] * self._records.itemsize, 1 << self.shift
        first, last = chunk * rows, min((chunk + 1) * rows, self._records.shape[0])
        size = (last - first) * row
        return ctypes.c_void_p(self._records.data_ptr() + first * row), ctypes.c_size_t(-(-size // 4096) * 4096)


def _unregister(addresses: list[int], records: Tensor) -> None:
    """Before the memory of `records` goes."""
    while addresses:
        _driver().cuMemHostUnregister(ctypes.c_void_p(addresses.pop()))


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


class Moves:
    """Recorded moves, one for each staging buffer and direction; on a CPU they are functions of the host."""

    def __init__(self, count: int, width: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self.words = torch.zeros(count, WORDS, dtype=torch.int64, pin_memory=on_cuda, device="cpu")
        self._graphs: list[Any] = []
        if not on_cuda:
            self.handles = [row.data_ptr() for row in self.words]
            return
        from hotbed.ops.move.triton import move_mapped
        from hotbed.ops.recording import recording

        for number, row in enumerate(self.words):
            reads = number % 2 == 0
            move_mapped(row, width, reads)  # of no rows: compiles the kernel
            with recording() as graph:
                move_mapped(row, width, reads)
            self._graphs.append(graph)
        self.handles = [graph.raw_cuda_graph_exec() for graph in self._graphs]


def move_on_host(address: int) -> None:
    """What a recorded move does, from its words."""
    words = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_int64)), (WORDS,)).tolist()
    count, size = words[NUM_ROWS], words[BYTES]
    keys = (ctypes.c_int64 * count).from_address(words[KEYS])
    for i, key in enumerate(keys):
        here, there = words[PACKED] + i * size, words[RECORDS] + key * size
        ctypes.memmove(*((here, there) if words[READS] else (there, here)), size)
