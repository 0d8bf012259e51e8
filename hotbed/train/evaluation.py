"""A learner and a loader in, exact metrics out; and what each feature contributes to the AUC, and the worst errors.

All scores are kept (8 bytes a sample): AUC is a rank, not a sum. Of several ranks each scores its part; the scores of all go to
rank 0, in the order of the split, and its metrics to all.

`analyze`: a contribution is the AUC that is lost when the values of one feature are exchanged between samples, at random and
with a fixed seed: the feature keeps its distribution and loses its relation to the label. It costs one evaluation for each
feature, so a part of a split is enough. Features that say the same share their contribution: each can replace the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.data.loader.loader import Loader
from hotbed.data.schema import Schema, Task
from hotbed.errors import RunError
from hotbed.parallel.world import ALONE, World
from hotbed.run.predictions import Scores
from hotbed.train.metrics import Breakdown, Metrics, SampleIds, auc, measure, measure_tasks
from hotbed.types import Batch, Jagged

MOST_SAMPLES = 100_000
MOST_ERRORS = 20
Array = npt.NDArray[Any]
NO_BREAKDOWN = Breakdown()


class WorstError(NamedTuple):
    """A sample whose label the model thought most unlikely."""

    row: int  # in the split
    label: int
    score: float  # predicted probability
    ids: dict[str, list[int]]
    dense: dict[str, float]


class Analysis(NamedTuple):
    """What analysis.json of a run holds."""

    split: str
    samples: int
    auc: float
    contributions: dict[str, float]  # AUC lost, most first
    worst: list[WorstError]

    def figures(self) -> dict[str, Any]:
        return {**self._asdict(), "worst": [one._asdict() for one in self.worst]}


def analyze(
    learner: Scores,
    loader: Loader,
    schema: Schema,
    split: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Analysis:
    """The contributions and the worst errors on the first samples of a split."""
    with closing(loader.epoch(0)) as read:
        batches = list(islice(read, max(1, MOST_SAMPLES // loader.batch_size)))
    if not batches:
        raise RunError(f"there is nothing to analyze: the split {split} has no rows.")
    labels = torch.cat([batch.labels for batch in batches]).numpy()
    changes = list(_changes(schema))
    logits = _logits(learner, batches)
    base = auc(labels, logits)
    lost = {}
    for done, (name, change) in enumerate(changes):
        progress(done, len(changes))
        chance = torch.Generator().manual_seed(0)  # every feature is exchanged between the same samples
        lost[name] = base - auc(labels, _logits(learner, [change(batch, chance) for batch in batches]))
    most_first = dict(sorted(lost.items(), key=lambda one: -one[1]))
    return Analysis(split, len(labels), base, most_first, _worst(batches, labels, logits, schema))


Change = Callable[[Batch, torch.Generator], Batch]


def _changes(schema: Schema) -> Iterator[tuple[str, Change]]:
    """(feature, what exchanges its values between the samples of a batch)."""
    for column, one in enumerate(schema.dense):
        yield one.name, partial(_with_column_moved, "dense", column)
    for column, name in enumerate(feature.name for feature in schema.features if not feature.multi):
        yield name, partial(_with_column_moved, "ids", column)
    for feature in schema.features:
        if feature.multi:
            yield feature.name, partial(_with_bags_moved, feature.name)


def _with_column_moved(field: str, column: int, batch: Batch, chance: torch.Generator) -> Batch:
    values: Tensor = getattr(batch, field)
    changed = values.clone()
    changed[:, column] = values[torch.randperm(batch.size, generator=chance, device="cpu", dtype=torch.int64), column]
    return replace(batch, dense=changed) if field == "dense" else replace(batch, ids=changed)


def _with_bags_moved(name: str, batch: Batch, chance: torch.Generator) -> Batch:
    bag = batch.bags[name]
    order = torch.randperm(batch.size, generator=chance, device="cpu", dtype=torch.int64)
    lengths = bag.offsets.diff()[order]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), lengths.cumsum(0)])
    inside = torch.arange(int(offsets[-1]), dtype=torch.int64, device="cpu") - torch.repeat_interleave(
        offsets[:-1], lengths
    )
    source = torch.repeat_interleave(bag.offsets[:-1][order], lengths) + inside
    weights = None if bag.weights is None else bag.weights[source]
    return replace(batch, bags={**batch.bags, name: Jagged(bag.values[source], offsets, weights)})


@torch.no_grad()
def _logits(learner: Scores, batches: Sequence[Batch]) -> NDArray[np.float32]:
    with closing(learner.ahead(iter(batches))) as moved:
        found = [learner.score(batch).float().cpu() for batch in moved]
    return np.asarray(torch.cat(found).numpy(), np.float32)


def _worst(
    batches: Sequence[Batch], labels: NDArray[np.float32], logits: NDArray[np.float32], schema: Schema
) -> list[WorstError]:
    single = [feature.name for feature in schema.features if not feature.multi]
    wrongness = np.where(labels == 1, -logits, logits)
    starts = np.cumsum([0, *(batch.size for batch in batches)])
    found = []
    for row in np.argsort(-wrongness, kind="stable")[:MOST_ERRORS]:
        number = int(np.searchsorted(starts, row, side="right")) - 1
        batch, place = batches[number], int(row - starts[number])
        ids = {name: [int(batch.ids[place, column])] for column, name in enumerate(single)}
        for name, bag in batch.bags.items():
            ids[name] = bag.values[int(bag.offsets[place]) : int(bag.offsets[place + 1])].tolist()
        dense = {one.name: float(batch.dense[place, column]) for column, one in enumerate(schema.dense)}
        score = float(1 / (1 + np.exp(-np.float64(logits[row]))))
        found.append(WorstError(int(row), int(labels[row]), score, ids, dense))
    return found


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
