"""A line of metrics.jsonl -> its numbers by name, for TensorBoard, Prometheus and `hotbed top`.

train/loss, train/auc, train/lr, train/samples_per_s        <split>/auc, <split>/log_loss, ... over steps
times/model, times/plan, ..., times/ready                   seconds of a mean step by part; batches read ahead
device_times/model, ...                                     the same of a CUDA stream
memory/resident_bytes, memory/device_bytes, ...
cache/hit_rate, cache/bytes_in, cache/stall_share, ...      where rows are cached
tiers/memory_hit_rate, tiers/bytes_read, tiers/wear, ...    where rows are on an ssd
ids/<table>/seen, ids/<table>/rows, ...                     where ids are dynamic

`TensorBoardWriter`: the same numbers as scalars in RUN/tensorboard, if TensorBoard is installed. Importing TensorBoard takes a
third of a second, so that happens when training begins. It changes nothing in the run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hotbed.telemetry.log import Record
from hotbed.telemetry.observer import Progress

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

POSITION = {"kind", "split", "epoch", "step", "samples", "seconds"}
PARTS = ("times", "memory", "cache", "tiers", "drift", "new_ids")


class Number(NamedTuple):
    """One value: its group, its name in it, and its split or table, if it has one."""

    group: str  # train, eval, times, device_times, memory, cache, tiers, ids
    name: str
    value: float
    of: str = ""

    @property
    def path(self) -> str:
        """As TensorBoard shows it."""
        if self.group == "eval":
            return f"{self.of}/{self.name}"
        return "/".join(part for part in (self.group, self.of, self.name) if part)


def numbers_of(record: Record) -> list[Number]:
    """All numbers, without those that are null in the log."""
    split = str(record["split"]) if record["kind"] == "eval" else ""
    found = _plain(str(record["kind"]), record, split)
    for part in PARTS:
        found += _plain(part, record.get(part))
    times = record.get("times")
    found += _plain("device_times", times.get("device") if isinstance(times, Mapping) else None)
    for table, counts in (record.get("ids") or {}).items():
        found += _plain("ids", counts, table)
    return found


def _plain(group: str, values: Mapping[str, Any] | None, of: str = "") -> list[Number]:
    return [
        Number(group, name, float(value), of)
        for name, value in (values or {}).items()
        if name not in POSITION and isinstance(value, int | float) and math.isfinite(value)
    ]


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
        except Exception as error:  # incompatible versions fail in many ways; none may end a run
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
