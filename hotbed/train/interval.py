"""What happened since the last line of metrics.jsonl: losses, logits and labels stay on the device until the line is written.

One synchronisation per line instead of one per step. A checkpoint carries the open interval, so that a resumed run writes
the same line.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotbed.train.metrics import auc, auc_of_tensors


class IntervalSummary(NamedTuple):
    """Means over the samples of an interval."""

    loss: float
    auc: float  # nan when the interval has one class only
    samples: int


class Interval:
    """Grows by one entry per step."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []  # [] each
        self._logits: list[Tensor] = []  # [B] each
        self._labels: list[Tensor] = []  # [B] each

    def __len__(self) -> int:
        return len(self._losses)

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """One step."""
        self._losses.append(loss.detach())
        self._logits.append(logits.detach())
        self._labels.append(labels)

    def first_bad(self) -> int | None:
        """Wait for the device; the offset of the first step whose loss is no finite number."""
        if not self._losses:
            return None
        bad = torch.nonzero(~torch.isfinite(torch.stack(self._losses).cpu()))
        return int(bad[0]) if len(bad) else None

    def summary(self) -> IntervalSummary:
        """Wait for the device and sum up; the losses must be numbers."""
        losses = torch.stack(self._losses).cpu().double().numpy()
        sizes = np.array([len(one) for one in self._labels])
        labels, logits = torch.cat(self._labels), torch.cat(self._logits).float()
        on_cpu = labels.device.type == "cpu"
        score = auc(labels.numpy(), logits.numpy()) if on_cpu else auc_of_tensors(labels, logits)
        return IntervalSummary(float((losses * sizes).sum() / sizes.sum()), score, int(sizes.sum()))

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        if not self._losses:
            return {}
        return {
            "interval.losses": torch.stack(self._losses).cpu(),
            "interval.sizes": torch.tensor([len(one) for one in self._labels], device="cpu"),
            "interval.logits": torch.cat(self._logits).cpu(),
            "interval.labels": torch.cat(self._labels).cpu(),
        }

    def emptied(self) -> Interval:
        """As many steps, with no samples."""
        interval = Interval()
        for loss, logits, labels in zip(self._losses, self._logits, self._labels):
            interval.add(torch.zeros_like(loss), logits[:0], labels[:0])
        return interval

    @classmethod
    def from_state(cls, state: dict[str, Tensor], device: torch.device) -> Interval:
        """The interval a checkpoint was taken in."""
        interval = cls()
        if "interval.losses" in state:
            sizes = state["interval.sizes"].tolist()
            losses, logits, labels = (
                state[f"interval.{name}"].clone().to(device) for name in ("losses", "logits", "labels")
            )
            interval._losses = list(losses)
            interval._logits = list(torch.split(logits, sizes))
            interval._labels = list(torch.split(labels, sizes))
        return interval
