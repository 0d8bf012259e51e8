"""The lines of metrics.jsonl as TensorBoard scalars in RUN/tensorboard, when TensorBoard is installed; scalars.py names them.

TensorBoard takes a third of a second to import, so it is imported when training begins. It changes nothing in the run.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hotbed.telemetry.log import Record
from hotbed.telemetry.observer import Progress
from hotbed.telemetry.scalars import numbers_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardWriter:
    """An Observer that turns each line into scalars."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def begin(self, progress: Progress, total_steps: int) -> None:
        """Open the event file; on resume TensorBoard drops what came after the checkpoint."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # its dependencies warn about each other at import
                from torch.utils.tensorboard import SummaryWriter
        except Exception as error:  # versions that do not fit each other fail in many ways; none is worth a lost run
            warnings.warn(f"TensorBoard cannot be imported ({error}); RUN/tensorboard stays empty.", stacklevel=2)
            return
        self._writer = SummaryWriter(str(self._folder), purge_step=progress.step + 1 if progress.step else None)

    def step(self, progress: Progress) -> None:
        """Scalars come with lines, not with steps."""

    def record(self, record: Record) -> None:
        if self._writer is None:
            return
        for one in numbers_of(record):
            self._writer.add_scalar(one.path, one.value, global_step=record["step"])

    def say(self, text: str) -> None:
        """Nothing to draw."""

    def end(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def open_writer(run_dir: Path) -> TensorBoardWriter | None:
    """The observer for a run, or None where TensorBoard is not installed."""
    return TensorBoardWriter(run_dir / "tensorboard") if find_spec("tensorboard") else None
