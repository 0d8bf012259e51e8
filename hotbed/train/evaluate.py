"""A learner and a loader in, exact metrics out. All scores are kept (8 bytes a sample): AUC is a rank, not a sum."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import numpy.typing as npt
import torch

from hotbed.data.loader import Loader
from hotbed.errors import RunError
from hotbed.train.metrics import Metrics, measure
from hotbed.train.step import Learner


class Evaluation(NamedTuple):
    """Metrics, and the scores they come from."""

    metrics: Metrics
    labels: npt.NDArray[Any]  # [samples]
    logits: npt.NDArray[Any]  # [samples]


def evaluate(learner: Learner, loader: Loader, stop: Callable[[], bool] = lambda: False) -> Evaluation | None:
    """Score every sample of the loader's split; None when `stop` asked to end before it was done."""
    labels, logits = [], []
    with torch.no_grad(), closing(loader.epoch(0)) as read, closing(learner.ahead(read)) as batches:
        for batch in batches:
            if stop():
                return None
            labels.append(batch.labels)
            logits.append(learner.score(batch))
    if not labels:
        raise RunError("there is nothing to evaluate: the split has no rows.")
    label_array, logit_array = torch.cat(labels).cpu().numpy(), torch.cat(logits).float().cpu().numpy()
    return Evaluation(measure(label_array, logit_array), label_array, logit_array)
