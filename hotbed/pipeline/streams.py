"""The streams of the pipeline: planning, and rows coming in, beside the one that trains. On the CPU they are nothing at all."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Streams:
    """Two side streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"
        self.planning: Any = self._new()
        self.inward: Any = self._new()

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

    def after(self, mark: Any) -> None:
        """The current stream goes on when the mark is reached."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def planning_after(self, mark: Any) -> None:
        """Planning goes on when the mark is reached."""
        if mark is not None:
            self.planning.wait_event(mark)

    def after_planning(self) -> None:
        """The current stream goes on when what was planned so far is done."""
        if self.on_cuda:
            torch.cuda.current_stream(self.device).wait_stream(self.planning)

    def _new(self) -> Any:
        return torch.cuda.Stream(self.device) if self.on_cuda else None  # type: ignore[no-untyped-call]
