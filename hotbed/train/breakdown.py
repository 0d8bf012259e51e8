"""Scores of a split in; grouped AUC, metrics by slice and metrics of further tasks out.

grouped AUC   the AUC among the samples of one group (a user), averaged over groups by their number of samples; a group in which
              all labels are the same says nothing about order and is left out. It does not rise when a model merely knows
              which users click often.
by slice      all metrics among the samples with one value of a feature; the most frequent values are listed, the rest together
tasks         AUC, log loss and calibration of a task of 0 and 1; root mean square error, mean absolute error and the share of
              the variance that is explained (r2) of a number

Strings are not kept in a dataset, only their 64-bit ids. Those of up to 8 bytes can be read back from their id; a longer value
is shown as its id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotbed.data.dataset import Dataset
from hotbed.data.hash import MISSING_ID, short_text
from hotbed.data.schema import Schema, Task
from hotbed.errors import ConfigError
from hotbed.train.metrics import NAN, measure
from hotbed.types import Batch

Array = npt.NDArray[Any]
MOST_SLICES = 20  # listed; the others are one slice


class Breakdown(NamedTuple):
    """By which features metrics are given, too: one id per sample each."""

    group: str = ""
    by: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*([self.group] if self.group else []), *self.by]))

    def problems(self, schema: Schema) -> list[str]:
        """What the dataset does not have."""
        single = [one.name for one in schema.features if not one.multi]
        return [
            f"{'group' if name == self.group else 'slice'}: {name!r} is not an id feature with one id per sample; there are "
            f"{', '.join(single) or 'none'}"
            for name in self.features
            if name not in single
        ]


class SampleIds:
    """Collects, batch by batch, the ids of the features of a breakdown."""

    def __init__(self, breakdown: Breakdown, dataset: Dataset) -> None:
        self.breakdown, self._dataset = breakdown, dataset
        if problems := breakdown.problems(dataset.schema):
            raise ConfigError("; ".join(problems) + ".")
        single = [one.name for one in dataset.schema.features if not one.multi]
        self._columns = [single.index(name) for name in breakdown.features]
        self._parts: list[Tensor] = []

    def add(self, batch: Batch) -> None:
        if self._columns:
            self._parts.append(batch.ids[:, self._columns])

    def whole(self) -> Array:
        """[samples, features]."""
        none = torch.zeros(0, len(self._columns), dtype=torch.int64, device="cpu")
        return torch.cat(self._parts).cpu().numpy() if self._parts else none.numpy()

    def measure(self, labels: Array, logits: Array, ids: Array) -> dict[str, Any]:
        """For JSON: `grouped_auc` and `by`, as far as they were asked for."""
        columns = dict(zip(self.breakdown.features, ids.T))
        found: dict[str, Any] = {}
        if self.breakdown.group:
            of_groups = grouped_auc(labels, logits, columns[self.breakdown.group])
            found["grouped_auc"] = {"feature": self.breakdown.group, **of_groups._asdict()}
        if self.breakdown.by:
            found["by"] = {name: self._slices(name, columns[name], labels, logits) for name in self.breakdown.by}
        return found

    def _slices(self, name: str, ids: Array, labels: Array, logits: Array) -> list[dict[str, Any]]:
        values, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        shown = order[:MOST_SLICES] if len(order) > MOST_SLICES + 1 else order
        names = self._names(name, values[shown])
        rows = [(one, inverse == number) for one, number in zip(names, shown)]
        if len(shown) < len(order):
            rest = ~np.isin(inverse, shown)
            rows.append((f"{len(order) - len(shown):,} others", rest))
        return [{"value": one, **measure(labels[mine], logits[mine])._asdict()} for one, mine in rows]

    def _names(self, name: str, values: Array) -> list[str]:
        feature = self._dataset.feature(name)
        raw, unknown = values.astype(np.int64), np.zeros(len(values), dtype=np.bool_)
        if feature.mode == "vocabulary":
            listed, unknown = self._dataset.counts(name).ids, values == 0
            raw = np.where(unknown, 0, listed[np.maximum(values, 1) - 1] if len(listed) else 0)
        return ["unknown" if is_unknown else _shown(int(one), feature.source) for one, is_unknown in zip(raw, unknown)]


def _shown(raw: int, source: str) -> str:
    if raw == MISSING_ID:
        return "missing"
    text = short_text(raw) if source == "string" else None
    return str(raw) if text is None else text


class GroupedAuc(NamedTuple):
    """Of all groups together."""

    auc: float  # nan where no group has both classes
    groups: int  # that have both
    samples: int  # in those


def grouped_auc(labels: npt.ArrayLike, scores: npt.ArrayLike, groups: npt.ArrayLike) -> GroupedAuc:
    """The mean AUC within groups, weighted by their samples; ties count half."""
    positive, score_array, group_array = np.asarray(labels) == 1, np.asarray(scores), np.asarray(groups)
    order = np.lexsort((score_array, group_array))
    positive, score_array, group_array = positive[order], score_array[order], group_array[order]
    size = len(positive)
    if not size:
        return GroupedAuc(NAN, 0, 0)
    new_group = np.append(True, group_array[1:] != group_array[:-1])
    new_score = new_group | np.append(True, score_array[1:] != score_array[:-1])
    starts = np.flatnonzero(new_group)
    group_of = np.cumsum(new_group) - 1
    ties = np.flatnonzero(new_score)  # equal scores of one group share their mean rank
    ends = np.append(ties[1:], size)
    double_rank = np.repeat(ties + ends + 1, ends - ties) - 2 * starts[group_of]  # twice the rank, from 1 in its group
    counts = np.diff(np.append(starts, size))
    positives = np.bincount(group_of, positive, len(counts)).astype(np.int64)
    double_sums = np.bincount(group_of, np.where(positive, double_rank, 0), len(counts))
    both = (positives > 0) & (positives < counts)
    if not both.any():
        return GroupedAuc(NAN, 0, 0)
    pos, num = positives[both], counts[both]
    within = (double_sums[both] - pos * (pos + 1)) / (2.0 * pos * (num - pos))
    return GroupedAuc(float((within * num).sum() / num.sum()), int(both.sum()), int(num.sum()))


def measure_tasks(tasks: Sequence[Task], targets: Array, outputs: Array) -> dict[str, Mapping[str, Any]]:
    """Metrics of every further task; targets and outputs are [samples, tasks]. Samples without a target (NaN) are left out."""
    found: dict[str, Mapping[str, Any]] = {}
    for number, task in enumerate(tasks):
        known = ~np.isnan(targets[:, number])
        truth, guess = targets[known, number], outputs[known, number]
        if task.kind == "binary":
            found[task.name] = {"kind": task.kind, **measure(truth, guess)._asdict()}
            continue
        error = guess.astype(np.float64) - truth
        spread = float(np.var(truth, dtype=np.float64)) if len(truth) else 0.0
        found[task.name] = {
            "kind": task.kind,
            "rmse": float(np.sqrt(np.mean(error**2))) if len(truth) else NAN,
            "mae": float(np.mean(np.abs(error))) if len(truth) else NAN,
            "r2": 1.0 - float(np.mean(error**2)) / spread if spread else NAN,
            "samples": len(truth),
        }
    return found
