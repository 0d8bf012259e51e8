"""Reading ahead: a thread takes batches from the loader and brings them to the device.

It fills a small buffer, sleeps until half of it is used, and fills it again: waking it for every batch would make the
training thread share Python's lock at every step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from hotbed.ops.streams import after, mark, side_stream
from hotbed.pipeline.batches import to_device

_FULL = 8  # batches read and not yet asked for
_LOW = 4
_PATIENCE = 2.0  # seconds


class Reader:
    """Batches of a loader, in order, each with the mark at which its copy is done."""

    def __init__(self, loader: Iterable[Any], device: torch.device) -> None:
        self._loader = loader
        self._device = device
        self._began: Any = None
        self._found: deque[tuple[Any, Any]] = deque()
        self._arrived, self._room = threading.Event(), threading.Event()
        self._stopped = threading.Event()
        self._finished = False
        self._error: BaseException | None = None
        self.ended = False
        self.moves = False  # batches are copied to the device
        self._thread = threading.Thread(target=self._read_all, name="hotbed-reader", daemon=True)

    def start(self) -> None:
        self._began = mark(self._device)
        self._thread.start()

    def get(self, *, wait: bool) -> tuple[Any, Any] | None:
        """(batch, mark), or None at the end, or when there is none yet and `wait` is not asked for."""
        while not self._found:
            self._room.set()
            if self._finished and not self._found:
                self.ended = True
                if self._error is not None:
                    raise self._error
                return None
            if not wait:
                return None
            self._arrived.clear()
            if not self._found and not self._finished:
                self._arrived.wait()
        found = self._found.popleft()
        if len(self._found) == _LOW:
            self._room.set()
        return found

    def stop(self) -> None:
        """Read no further than the batch that is being read."""
        self._stopped.set()
        self._room.set()

    def close(self) -> None:
        """Stop, and wait for the batch that is being read."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()

    def abandon(self) -> None:
        """The process ends: read no further, and do not wait long for a loader that hangs."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(_PATIENCE)

    def _read_all(self) -> None:
        try:
            side_stream(self._device)
            after(self._device, self._began)
            for batch in self._loader:
                if self._stopped.is_set():
                    return
                moved = to_device(batch, self._device)
                self.moves |= moved is not batch
                self._found.append((moved, None if moved is batch else mark(self._device)))
                self._arrived.set()
                if len(self._found) >= _FULL:
                    self._room.clear()
                    if len(self._found) >= _FULL and not self._stopped.is_set():
                        self._room.wait()
                if self._stopped.is_set():
                    return
        except BaseException as error:  # handed to the training thread
            self._error = error
        finally:
            self._finished = True
            self._arrived.set()
