"""After training: the output is shifted so that predicted probabilities have the right mean.

Adaptive optimizers move as far for a small gradient as for a large one, so a rare label is predicted too seldom. The first
shift makes the mean over the train split the share of positives there. The second is by the valid split, if there is one,
because the model has not memorized its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from hotbed.data.loader.loader import Loader
from hotbed.models.base_rate import Positives, held_out_shift, mean_shift, output_bias
from hotbed.parallel.world import World
from hotbed.train.evaluation import evaluate
from hotbed.train.settings import Loaders
from hotbed.train.step import Learner


def recalibrate(learner: Learner, loaders: Loaders, stop: Callable[[], bool]) -> bool:
    """Shift the output; whether it was: a model may have no output bias, and `stop` may ask to end."""
    train, valid, world = loaders.train, loaders.held_out.get("valid"), learner.world
    bias = output_bias(learner.model)
    if bias is None or not isinstance(train, Loader):  # a topic that is followed is read once
        return False
    world.stage("calibrating")
    learner.merge()
    learned = evaluate(learner, train, stop, world)
    if learned is None:
        return False
    sampled = learned.metrics.positives / learned.metrics.samples
    kept = learner.sampled_shift
    _shift(bias, mean_shift(learned.logits + kept, sampled) if world.is_first else None, world)
    found = None if valid is None else evaluate(learner, valid, stop, world)
    if found is not None and 0 < sampled < 1:
        odds = sampled / (1 - sampled) * math.exp(-kept)
        log = Positives(learned.metrics.positives, learned.metrics.positives * (1 + 1 / odds))
        here = Positives(found.metrics.positives, found.metrics.samples)
        at_random = train.dataset.schema.notes.get("split") == "random"
        shift = held_out_shift(found.logits, here, log, at_random=at_random)
        _shift(bias, shift if world.is_first else None, world)
    return True


def _shift(bias: nn.Parameter, shift: float | None, world: World) -> None:
    """By a number that rank 0 has."""
    with torch.no_grad():
        bias.add_(world.from_first(shift))
