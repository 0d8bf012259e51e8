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
from hotbed.spans import next_step, reads

_FULL = 8  # batches read and not yet asked for
_LOW = 4
MOST_SHARED = (
    24  # batches a rank may want to know ahead; every rank reads at least so many, or others would wait for it
)
_PATIENCE = 2.0  # seconds
_PATIENCE_WITH_RANKS = 20.0  # others may never answer


class Reader:
    """Batches of a loader, in order, each with the mark at which its copy is done."""

    def __init__(self, loader: Iterable[Any], device: torch.device, *, shared: bool = False) -> None:
        """`shared`: what reads a batch speaks with other ranks."""
        self._loader = loader
        self._full, self._low = (2 * MOST_SHARED, MOST_SHARED + 4) if shared else (_FULL, _LOW)
        self._shared = shared
        self._device = device
        self._began: Any = None
        self._first_step: int | None = None  # that trains what is read, for a trace
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
        self._first_step = next_step()
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
        if len(self._found) == self._low:
            self._room.set()
        return found

    def wait(self) -> None:
        """Until `get` has an answer."""
        while not self._found and not self._finished:
            self._room.set()
            self._arrived.clear()
            if not self._found and not self._finished:
                self._arrived.wait()

    @property
    def num_ready(self) -> int:
        """Batches that are read and nobody has asked for."""
        return len(self._found)

    def stop(self) -> None:
        """Read no further than the batch that is being read."""
        self._stopped.set()
        self._room.set()

    def close(self) -> None:
        """Stop, and wait for the batch that is being read."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(_PATIENCE_WITH_RANKS if self._shared else None)

    @property
    def has_ended(self) -> bool:
        """Whether nothing is read any more."""
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """The process ends: read no further, and do not wait long for a loader that hangs."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(_PATIENCE)

    def _read_all(self) -> None:
        try:
            side_stream(self._device)
            after(self._device, self._began)
            batches = iter(self._loader)
            for batch in batches if self._first_step is None else reads(batches, self._first_step):
                if self._stopped.is_set():
                    break
                moved = to_device(batch, self._device)
                self.moves |= moved is not batch or self._shared
                self._found.append((moved, mark(self._device) if self._shared or moved is not batch else None))
                self._arrived.set()
                if len(self._found) >= self._full:
                    self._room.clear()
                    if len(self._found) >= self._full and not self._stopped.is_set():
                        self._room.wait()
                if self._stopped.is_set():
                    break
            if self._shared and hasattr(batches, "close"):
                batches.close()  # the other ranks are told
        except BaseException as error:  # handed to the training thread
            self._error = error
        finally:
            self._finished = True
            self._arrived.set()
