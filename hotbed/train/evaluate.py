"""A learner and a loader in, exact metrics out. All scores are kept (8 bytes a sample): AUC is a rank, not a sum.

Of several ranks each scores its part; the scores of all go to rank 0, in the order of the split, and its metrics to all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotbed.data.loader.loader import Loader
from hotbed.errors import RunError
from hotbed.parallel.world import ALONE, World
from hotbed.run.predictions import Scores
from hotbed.train.metrics import Metrics, measure


class Evaluation(NamedTuple):
    """Metrics, and the scores they come from; the latter on rank 0."""

    metrics: Metrics
    labels: npt.NDArray[Any]  # [samples]
    logits: npt.NDArray[Any]  # [samples]


def evaluate(
    learner: Scores, loader: Loader, stop: Callable[[], bool] = lambda: False, world: World = ALONE
) -> Evaluation | None:
    """Score every sample of the loader's split; None when `stop` asked to end before it was done."""
    labels: list[Tensor] = []
    logits: list[Tensor] = []
    with torch.no_grad(), closing(loader.epoch(0)) as read, closing(learner.ahead(world.counted(read))) as batches:
        for batch in batches:
            if stop():
                return None
            world.stage(f"evaluating, batch {len(labels) + 1} of {len(loader)}")
            labels.append(batch.labels)
            logits.append(learner.score(batch))
    if not labels:
        raise RunError("there is nothing to evaluate: the split has no rows.")
    scored = torch.cat(labels).cpu().numpy(), torch.cat(logits).float().cpu().numpy()
    if world.size == 1:
        return Evaluation(measure(*scored), *scored)
    world.stage("gathering scores")
    label_parts, logit_parts = (world.collect(part) for part in scored)
    whole = [np.concatenate(parts) if parts else scored[0][:0] for parts in (label_parts, logit_parts)]
    metrics = world.from_first(measure(*whole) if world.is_first else None)
    return Evaluation(metrics, *whole)
