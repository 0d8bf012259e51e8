"""A line of metrics.jsonl -> its numbers by name, the same for TensorBoard, Prometheus and `hotbed top`.

train/loss, train/auc, train/lr, train/samples_per_s        <split>/auc, <split>/log_loss, ... over steps
times/model, times/plan, ..., times/ready                   seconds of a mean step by part; batches read ahead
device_times/model, ...                                     the same of a CUDA stream
memory/resident_bytes, memory/device_bytes, ...
cache/hit_rate, cache/bytes_in, cache/stall_share, ...      where rows are cached
tiers/memory_hit_rate, tiers/bytes_read, tiers/wear, ...    where rows are on an ssd
ids/<table>/seen, ids/<table>/rows, ...                     where ids are dynamic
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hotbed.telemetry.log import Record

POSITION = {"kind", "split", "epoch", "step", "samples", "seconds"}
PARTS = ("times", "memory", "cache", "tiers")


class Number(NamedTuple):
    """One value: its group, its name in it, and of which split or table it is, if of one."""

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
    """All that are known; what is null in the log is left out."""
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
