"""Logits and labels of all tasks in, one loss out: log loss or squared error per task, weighted by task and by sample.

loss = sum over tasks of weight_t * mean over samples of weight_b * loss_t(logit, label). The mean divides by the number of
samples, not by the sum of their weights, so a batch divided among ranks has the same loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.train.step_recording import Loss, Vectors


def task_loss(kinds: Sequence[str] = ("binary",), weights: Sequence[float] = (), *, weighted: bool = False) -> Loss:
    """A loss for `compile_step`: called with (model, vectors, *inputs, labels), and sample weights last if `weighted`.

    `labels` is [B], or [B, T] for T tasks of these `kinds`. A model that returns one logit per sample learns the first task.
    """
    kinds, factors = tuple(kinds), tuple(weights) or (1.0,) * len(kinds)

    def loss(model: nn.Module, vectors: Vectors, *inputs: Any) -> tuple[Tensor, Tensor]:
        *others, labels = inputs[:-1] if weighted else inputs
        logits: Tensor = model(vectors, *others)
        of_sample = inputs[-1] if weighted else None
        if logits.dim() == 1:
            first = labels if labels.dim() == 1 else labels[:, 0]
            return _one(logits, first, kinds[0], of_sample), logits
        found = [
            factor * _one(logits[:, number], labels[:, number], kind, of_sample)
            for number, (kind, factor) in enumerate(zip(kinds, factors))
        ]
        return torch.stack(found).sum(), logits

    return loss


def _one(logits: Tensor, labels: Tensor, kind: str, weights: Tensor | None) -> Tensor:
    """The mean loss of one task."""
    one = F.binary_cross_entropy_with_logits if kind == "binary" else F.mse_loss
    return one(logits, labels) if weights is None else (one(logits, labels, reduction="none") * weights).mean()


def first_task(logits: Tensor) -> Tensor:
    """Logits [B] of the label, of a model that returns [B] or [B, T]."""
    return logits if logits.dim() == 1 else logits[:, 0]
