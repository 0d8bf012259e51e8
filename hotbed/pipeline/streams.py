"""The streams of the pipeline: planning, rows coming in, rows going out. On the CPU they are nothing at all."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Streams:
    """Three side streams beside the one that trains."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"
        self.planning: Any = self._new()
        self.inward: Any = self._new()
        self.outward: Any = self._new()

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Work under it goes to `stream`."""
        return torch.cuda.stream(stream) if self.on_cuda else nullcontext()

    def mark(self, *, timed: bool = False) -> Any:
        """A point on the current stream."""
        if not self.on_cuda:
            return None
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def after(self, *marks: Any) -> None:
        """The current stream goes on when all marks are reached."""
        for mark in marks:
            if mark is not None:
                torch.cuda.current_stream(self.device).wait_event(mark)

    def all_after(self, mark: Any) -> None:
        """The side streams go on when the mark is reached."""
        for stream in (self.planning, self.inward, self.outward):
            if mark is not None:
                stream.wait_event(mark)

    def main_after_all(self) -> None:
        """The current stream goes on when the side streams have done what they were given."""
        if self.on_cuda:
            for stream in (self.planning, self.inward, self.outward):
                torch.cuda.current_stream(self.device).wait_stream(stream)

    def _new(self) -> Any:
        return torch.cuda.Stream(self.device) if self.on_cuda else None  # type: ignore[no-untyped-call]
