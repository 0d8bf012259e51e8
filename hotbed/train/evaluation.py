"""A learner and a loader in, exact metrics out. All scores are kept (8 bytes a sample): AUC is a rank, not a sum.

Of several ranks each scores its part; the scores of all go to rank 0, in the order of the split, and its metrics to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotbed.data.loader.loader import Loader
from hotbed.data.schema import Task
from hotbed.errors import RunError
from hotbed.parallel.world import ALONE, World
from hotbed.run.predictions import Scores
from hotbed.train.breakdown import Breakdown, SampleIds, measure_tasks
from hotbed.train.metrics import Metrics, measure
from hotbed.types import Batch

Array = npt.NDArray[Any]
NO_BREAKDOWN = Breakdown()


class Evaluation(NamedTuple):
    """Metrics, and the scores they come from; the latter on rank 0."""

    metrics: Metrics
    labels: Array  # [samples]
    logits: Array  # [samples]
    more: dict[str, Any]  # `tasks`, `grouped_auc` and `by`, where there are such


def evaluate(
    learner: Scores,
    loader: Loader,
    stop: Callable[[], bool] = lambda: False,
    world: World = ALONE,
    breakdown: Breakdown = NO_BREAKDOWN,
) -> Evaluation | None:
    """Score every sample of the loader's split; None when `stop` asked to end before it was done."""
    ids = SampleIds(breakdown, loader.dataset)
    labels: list[Tensor] = []
    outputs: list[Tensor] = []
    targets: list[Tensor] = []
    with torch.no_grad(), closing(loader.epoch(0)) as read, closing(learner.ahead(world.counted(read))) as batches:
        for batch in batches:
            if stop():
                return None
            world.stage(f"evaluating, batch {len(labels) + 1} of {len(loader)}")
            found = learner.score(batch)
            labels.append(batch.labels)
            outputs.append(_columns(found))
            targets += [] if batch.targets is None else [batch.targets]
            ids.add(batch)
    if not labels:
        raise RunError("there is nothing to evaluate: the split has no rows.")
    scored = [torch.cat(labels).cpu().numpy(), _joined(outputs), ids.whole(), *([_joined(targets)] if targets else [])]
    if world.size > 1:
        world.stage("gathering scores")
        scored = [_whole(world.collect(part), part) for part in scored]
    measured = world.from_first(_measure(scored, loader, ids) if world.is_first else None)
    return Evaluation(measured[0], scored[0], scored[1][:, 0], measured[1])


@torch.no_grad()
def evaluate_batches(learner: Scores, batches: Iterable[Batch], tasks: Sequence[Task] = ()) -> Evaluation | None:
    """Score batches of which some samples have no label (NaN) and are left out; None if none of them has one.

    `tasks` are the further labels, of which samples may lack some, too.
    """
    labels: list[Tensor] = []
    outputs: list[Tensor] = []
    targets: list[Tensor] = []
    with closing(learner.ahead(batches)) as ready:
        for batch in ready:
            labels.append(batch.labels.cpu())
            outputs.append(_columns(learner.score(batch)))
            targets += [] if batch.targets is None else [batch.targets]
    if not labels:
        return None
    whole, found = torch.cat(labels).numpy(), _joined(outputs)
    known = ~np.isnan(whole)
    if not known.any():
        return None
    more = _of_tasks(tasks, [_joined(targets)] if targets else [], found)
    return Evaluation(measure(whole[known], found[known, 0]), whole[known], found[known, 0], more)


def _measure(scored: Sequence[Array], loader: Loader, ids: SampleIds) -> tuple[Metrics, dict[str, Any]]:
    labels, outputs, sample_ids, *targets = scored
    logits = outputs[:, 0]
    more = ids.measure(labels, logits, sample_ids) | _of_tasks(loader.dataset.schema.tasks, targets, outputs)
    return measure(labels, logits), more


def _of_tasks(tasks: Sequence[Task], targets: Sequence[Array], outputs: Array) -> dict[str, Any]:
    """The metrics of further tasks, where there are targets and the model learned them."""
    return {"tasks": measure_tasks(tasks, targets[0], outputs[:, 1:])} if targets and outputs.shape[1] > 1 else {}


def _columns(outputs: Tensor) -> Tensor:
    """[B, T], of a model that returns [B] or [B, T]."""
    return outputs if outputs.dim() > 1 else outputs.unsqueeze(1)


def _joined(parts: Sequence[Tensor]) -> Array:
    """[samples, columns]; a batch without samples may have another number of columns."""
    filled = [part for part in parts if part.shape[0]]
    return torch.cat(filled or [*parts[:1]]).float().cpu().numpy()


def _whole(parts: Sequence[Array], own: Array) -> Array:
    """The parts of all ranks on rank 0, nothing elsewhere."""
    filled = [part for part in parts if part.size]
    return np.concatenate(filled) if filled else own[:0]
