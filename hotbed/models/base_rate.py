"""A fresh model and the share of positives in; the model out, with its output moved to that share.

A model that starts at probability 1/2 spends its first steps on finding out how rare positives are: of one in five hundred, a
short training ends with predictions many times too high. Any model has an output bias that is simply added to the logit; it
is found by its gradient, which is 1 for every sample. A user's own model may have none.

After training, `mean_shift` and `held_out_shift` move it again. A model has memorized part of the rows of train, and is too
sure of other rows: with a label of 0.2 % and many rare ids, their mean was up to 1.5 times the share.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hotbed.models.base import Model

_FARTHEST, _HALVINGS = 20.0, 60
_CHANCE = 3.0  # standard deviations


def set_base_rate(model: nn.Module, vectors: Tensor, dense: Tensor, share: float) -> bool:
    """Shift the output by the log odds of `share`; False if the model has no output bias, or there is only one class.

    `vectors` [B, F, W] and `dense` [B, N] are any inputs of the right shape.
    """
    if not 0 < share < 1 or getattr(model, "sequences", None):
        return False
    bias = _output_bias(model, vectors, dense)
    if bias is None:
        return False
    with torch.no_grad():
        bias.add_(math.log(share / (1 - share)))
    return True


def output_bias(model: nn.Module) -> nn.Parameter | None:
    """The output bias of a model of hotbed; None if it has none."""
    device = next((one.device for one in model.parameters()), None)
    if not isinstance(model, Model) or device is None or getattr(model, "sequences", None):
        return None  # a model of sequences reads their lengths, too
    vectors = torch.zeros(2, model.num_features, model.vector_width(model.dim), device=device)
    return _output_bias(model, vectors, torch.zeros(2, model.num_dense, device=device))


def mean_shift(logits: NDArray[np.floating[Any]], share: float) -> float:
    """The number to add to logits so that the mean probability is `share`, by bisection; 0 if there is only one class."""
    if not 0 < share < 1 or not len(logits):
        return 0.0
    wide = logits.astype(np.float64)
    low, high = -_FARTHEST, _FARTHEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if float((1 / (1 + np.exp(-np.clip(wide + middle, -500, 500)))).mean()) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


class Positives(NamedTuple):
    """Positives among some rows of the log."""

    positives: float
    rows: float

    @property
    def share(self) -> float:
        return self.positives / self.rows


def held_out_shift(
    logits: NDArray[np.floating[Any]], held_out: Positives, train: Positives, *, at_random: bool = False
) -> float:
    """The number to add to logits of held-out rows so that their mean probability is the share of positives.

    That share is the one of all rows, as few rows have few positives; or theirs alone, where it differs by more than chance,
    unless the rows were held out `at_random`: then only chance can differ. What chance explains of the difference between mean
    and share is left.
    """
    every = Positives(train.positives + held_out.positives, train.rows + held_out.rows).share
    if not 0 < every < 1 or not len(logits):
        return 0.0
    expected = held_out.rows * train.share
    drifts = not at_random and abs(held_out.positives - expected) > _CHANCE * math.sqrt(expected * (1 - train.share))
    probabilities = 1 / (1 + np.exp(-np.clip(logits.astype(np.float64), -500, 500)))
    apart = float(probabilities.mean()) - (held_out.share if drifts else every)
    by_chance = float(probabilities.var()) / len(logits)
    kept = apart * by_chance / (apart**2 + by_chance) if by_chance else 0.0
    return mean_shift(logits, float(probabilities.mean()) - apart + kept)


def _output_bias(model: nn.Module, vectors: Tensor, dense: Tensor) -> nn.Parameter | None:
    """The first weight that is added to every logit."""
    was_training = model.training
    model.eval()
    single = [one for one in model.parameters() if one.numel() == 1 and one.requires_grad]
    try:
        with torch.enable_grad():
            logits: Tensor = model(vectors, dense)
            gradients = torch.autograd.grad(logits.sum(), single, allow_unused=True) if single else ()
    finally:
        model.train(was_training)
    found = (one for one, grad in zip(single, gradients) if grad is not None and float(grad.sum()) == len(logits))
    return next(found, None)
