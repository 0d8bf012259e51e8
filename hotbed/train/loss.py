"""Logits and labels of all tasks in, one loss out: log loss or squared error per task, weighted by task and by sample.

loss = sum over tasks of weight_t * mean over samples of weight_b * loss_t(logit, label). The mean divides by the number of
samples, not by the sum of their weights, so a batch divided among ranks has the same loss.

A positive that counts w times multiplies the odds that are learned by w. log(w) is added to the logits in the loss alone, so
its logits, which are returned, are those of the log as it is: p = q / (q + (1 - q) w) of the weighted probability q.

A log of which a share s of the negatives was kept has its odds multiplied by 1 / s. -log(s) is added to the logits of the label
in the loss alone, so the model learns the logits of the whole log. Of several tasks only the label is sampled by, so the others
learn the sampled log. It is the loss that adds it, whatever mode the model is in: a batch of one sample is learned too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.data.schema import Task
from hotbed.train.step_recording import Loss, Vectors


def task_loss(
    kinds: Sequence[str] = ("binary",),
    weights: Sequence[float] = (),
    *,
    weighted: bool = False,
    positives: Sequence[float] = (),
    kept: float = 1.0,
) -> Loss:
    """A loss for `compile_step`: called with (model, vectors, *inputs, labels), and sample weights last if `weighted`.

    `labels` is [B], or [B, T] for T tasks of these `kinds`. A model that returns one logit per sample learns the first task.
    `positives`: by task, how many times a sample with the label 1 counts. `kept`: the share of the negatives of the first task
    that are in the log.
    """
    kinds, factors = tuple(kinds), tuple(weights) or (1.0,) * len(kinds)
    times = tuple(positives) or (1.0,) * len(kinds)
    shifts = (sampled_shift(kept), *(0.0 for _ in kinds[1:]))

    def loss(model: nn.Module, vectors: Vectors, *inputs: Any) -> tuple[Tensor, Tensor]:
        *others, labels = inputs[:-1] if weighted else inputs
        logits: Tensor = model(vectors, *others)
        of_sample = inputs[-1] if weighted else None
        if logits.dim() == 1:
            first = labels if labels.dim() == 1 else labels[:, 0]
            return _one(_moved(logits, shifts[0]), first, kinds[0], of_sample, times[0]), logits
        found = [
            factor * _one(_moved(logits[:, number], shift), labels[:, number], kind, of_sample, positive)
            for number, (kind, factor, positive, shift) in enumerate(zip(kinds, factors, times, shifts))
        ]
        return torch.stack(found).sum(), logits

    return loss


def sampled_shift(kept: float) -> float:
    """What the log odds of a positive gain where a share `kept` of the negatives is left."""
    return -math.log(kept) if kept != 1 else 0.0


def positive_weights(given: float | Mapping[str, Any], labels: Sequence[Task]) -> dict[str, float]:
    """By label, how many times a positive counts; a number is that of the first label."""
    named = given if isinstance(given, Mapping) else {labels[0].name: given}
    return {task.name: named.get(task.name, 1.0) for task in labels}


def positive_problems(given: float | Mapping[str, Any], labels: Sequence[Task], data: str) -> list[str]:
    """What is wrong with the setting train.positive_weight."""
    kind_of, problems = {task.name: task.kind for task in labels}, []
    for name, weight in (given if isinstance(given, Mapping) else {labels[0].name: given}).items():
        if name not in kind_of:
            problems.append(f"{data} has no label {name!r}; there are {', '.join(kind_of)}")
        elif kind_of[name] != "binary":
            problems.append(f"{name} is a number to predict and has no positives")
        elif isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            problems.append(f"the weight of {name} must be a number above 0, not {weight!r}")
    return [f"train.positive_weight: {one}" for one in problems]


def _moved(logits: Tensor, shift: float) -> Tensor:
    return logits + shift if shift else logits


def _one(logits: Tensor, labels: Tensor, kind: str, weights: Tensor | None, positive: float) -> Tensor:
    """The mean loss of one task."""
    if positive != 1:
        counted = 1 + (positive - 1) * labels
        weights = counted if weights is None else counted * weights
        logits = logits + math.log(positive)
    one = F.binary_cross_entropy_with_logits if kind == "binary" else F.mse_loss
    return one(logits, labels) if weights is None else (one(logits, labels, reduction="none") * weights).mean()


def first_task(logits: Tensor) -> Tensor:
    """Logits [B] of the label, of a model that returns [B] or [B, T]."""
    return logits if logits.dim() == 1 else logits[:, 0]
