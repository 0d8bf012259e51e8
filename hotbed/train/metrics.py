"""Labels and logits in, the numbers a click model is judged by out.

    auc                 share of (positive, negative) pairs that the scores put in the right order; a tie counts half
    pr_auc              average precision: mean share of positives among the samples scored at least as high as a positive
    log_loss            mean of -log(probability given to what happened), in nats
    normalized_entropy  log loss / log loss of always predicting the base rate; below 1 the model knows something
    calibration         sum of predicted probabilities / number of positives; 1 is right, above 1 promises too much

AUC is exact: pairs are counted in integers and divided once, so the result is the float64 nearest to the true ratio,
whatever the order of the samples. There is no histogram and no sampling; the price is a sort of all scores (about one
second for ten million) and all scores in memory. The others are float64 sums straight from the logits, so they neither
overflow nor clip at any logit; an infinite logit on the wrong side costs infinitely much.

nan means "not defined for these samples": AUC and normalized entropy need both classes, calibration needs a positive,
log loss needs a sample. A nan among the scores is an error instead: it comes from a broken model, not from the data.

Of the scores of a whole split (`Breakdown`):

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

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotbed.data.dataset import Dataset
from hotbed.data.hash import MISSING_ID, short_text
from hotbed.data.schema import Schema, Task
from hotbed.errors import ConfigError, DataError, ShapeError
from hotbed.types import Batch

Array = npt.NDArray[Any]
NAN = float("nan")


class Metrics(NamedTuple):
    """What `measure` finds for one split."""

    auc: float
    log_loss: float
    normalized_entropy: float
    calibration: float
    samples: int
    positives: int
    pr_auc: float = NAN


class CalibrationBin(NamedTuple):
    """Samples of similar prediction: what was promised, and what happened."""

    mean_prediction: float
    mean_label: float
    samples: int


def auc(labels: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Area under the ROC curve; scores may be logits, probabilities or anything that rises with them."""
    return _auc(*_checked(labels, scores))


def pr_auc(labels: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Area under the curve of precision over recall, as average precision; nan without a positive."""
    return _pr_auc(*_checked(labels, scores))


def log_loss(labels: npt.ArrayLike, logits: npt.ArrayLike) -> float:
    """Mean cross-entropy in nats."""
    return _log_loss(*_checked(labels, logits))


def normalized_entropy(labels: npt.ArrayLike, logits: npt.ArrayLike) -> float:
    """Log loss over the entropy of the share of positives."""
    positive, checked_logits = _checked(labels, logits)
    return _log_loss(positive, checked_logits) / _base_entropy(int(positive.sum()), positive.size)


def calibration(labels: npt.ArrayLike, logits: npt.ArrayLike) -> float:
    """Predicted number of positives over the true number."""
    return _calibration(*_checked(labels, logits))


def measure(labels: npt.ArrayLike, logits: npt.ArrayLike) -> Metrics:
    """All metrics of one split, in one pass over checked inputs."""
    positive, checked_logits = _checked(labels, logits)
    samples, positives = positive.size, int(positive.sum())
    loss = _log_loss(positive, checked_logits)
    return Metrics(
        auc=_auc(positive, checked_logits),
        log_loss=loss,
        normalized_entropy=loss / _base_entropy(positives, samples),
        calibration=_calibration(positive, checked_logits),
        samples=samples,
        positives=positives,
        pr_auc=_pr_auc(positive, checked_logits),
    )


def calibration_curve(labels: npt.ArrayLike, logits: npt.ArrayLike, bins: int = 20) -> list[CalibrationBin]:
    """Mean prediction against mean label in at most `bins` groups of about equal size, least likely first.

    Equal logits never part, so the curve does not depend on the order of the samples; many ties give fewer bins.
    """
    if bins < 1:
        raise ConfigError(f"calibration_curve needs at least 1 bin, not {bins}.")
    positive, checked_logits = _checked(labels, logits)
    order = np.argsort(checked_logits, kind="stable")
    sorted_logits = checked_logits[order]
    starts = _bin_starts(sorted_logits, bins)
    if not starts.size:
        return []
    sizes = np.diff(starts, append=sorted_logits.size)
    predicted = np.add.reduceat(_probabilities(sorted_logits), starts)
    happened = np.add.reduceat(positive[order].astype(np.int64), starts)
    return [
        CalibrationBin(float(prediction / size), float(label / size), int(size))
        for prediction, label, size in zip(predicted, happened, sizes)
    ]


def _checked(labels: npt.ArrayLike, scores: npt.ArrayLike) -> tuple[npt.NDArray[np.bool_], Array]:
    """Labels as booleans and scores as they came, or an error that says what is wrong with them."""
    label_array, score_array = np.asarray(labels), np.asarray(scores)
    if label_array.ndim != 1 or label_array.shape != score_array.shape:
        raise ShapeError(
            f"metrics take labels and scores of one shape [samples]; got labels {list(label_array.shape)} "
            f"and scores {list(score_array.shape)}."
        )
    for name, array in (("labels", label_array), ("scores", score_array)):
        if array.dtype.kind not in "biuf":
            raise ShapeError(f"metrics take numbers; {name} have dtype {array.dtype}.")
    positive = label_array == 1
    wrong = np.flatnonzero(~positive & (label_array != 0))
    if wrong.size:
        raise DataError(
            f"{wrong.size} of {label_array.size} labels are neither 0 nor 1; "
            f"the first is {label_array[wrong[0]]} at position {wrong[0]}."
        )
    broken = np.flatnonzero(np.isnan(score_array))
    if broken.size:
        raise DataError(
            f"{broken.size} of {score_array.size} scores are nan, the first at position {broken[0]}: the model has "
            "diverged. Lower the learning rate, clip gradients, or look for nan in the dense features."
        )
    return positive, score_array


def _auc(positive: npt.NDArray[np.bool_], scores: Array) -> float:
    winners, losers = np.sort(scores[positive]), np.sort(scores[~positive])
    if not winners.size or not losers.size:
        return NAN
    below = np.searchsorted(losers, winners, side="left").sum(dtype=np.int64)
    not_above = np.searchsorted(losers, winners, side="right").sum(dtype=np.int64)
    # Each sum is at most positives * negatives: below 2**63 for six billion samples. Python's int / int rounds once.
    return (int(below) + int(not_above)) / (2 * winners.size * losers.size)


def _pr_auc(positive: npt.NDArray[np.bool_], scores: Array) -> float:
    """Equal scores are one threshold, so the order of samples does not matter."""
    found = int(positive.sum())
    if not found:
        return NAN
    order = np.argsort(scores, kind="stable")[::-1]  # not of -scores, which is another order for unsigned integers
    ranked = scores[order]
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # of each run of equal scores
    hits = np.cumsum(positive[order])[last]
    return float((np.diff(hits, prepend=0) / found * (hits / (last + 1))).sum())


def auc_of_tensors(labels: Tensor, scores: Tensor) -> float:
    """As `auc`, on the device of the tensors: 0.8 million samples take a CPU 80 ms, as long as some 30 steps of a GPU.

    It counts pairs, in integers: the result is that of `auc` to the bit.
    """
    positive = labels == 1
    is_fine = (positive | (labels == 0)).all() & ~scores.isnan().any()
    if not bool(is_fine):
        return auc(labels.cpu().numpy(), scores.cpu().numpy())  # says what is wrong
    winners, losers = scores[positive].sort().values, scores[~positive].sort().values
    if not winners.numel() or not losers.numel():
        return NAN
    sides = [torch.searchsorted(losers, winners, side=side).sum() for side in ("left", "right")]
    return int(sum(sides)) / (2 * winners.numel() * losers.numel())


def _log_loss(positive: npt.NDArray[np.bool_], logits: Array) -> float:
    if not logits.size:
        return NAN
    wide = logits.astype(np.float64)
    return float(np.logaddexp(0.0, np.where(positive, -wide, wide)).mean())


def _calibration(positive: npt.NDArray[np.bool_], logits: Array) -> float:
    positives = int(positive.sum())
    return float(_probabilities(logits).sum()) / positives if positives else NAN


def _bin_starts(sorted_logits: Array, bins: int) -> npt.NDArray[np.int64]:
    """Where each bin begins: even boundaries, each moved to the nearer end of the run of equal logits it falls into."""
    num = sorted_logits.size
    wanted = np.unique(np.arange(bins, dtype=np.int64) * num // bins)[:num]
    before = np.searchsorted(sorted_logits, sorted_logits[wanted], side="left")
    after = np.searchsorted(sorted_logits, sorted_logits[wanted], side="right")
    nearer = np.where((wanted == 0) | (wanted - before < after - wanted), before, after)
    return np.unique(nearer[nearer < num]).astype(np.int64)


def _base_entropy(positives: int, samples: int) -> float:
    """Entropy of the share of positives in nats; nan when there is one class or none."""
    if not 0 < positives < samples:
        return NAN
    return -sum(share * math.log(share) for share in (positives / samples, (samples - positives) / samples))


def _probabilities(logits: Array) -> npt.NDArray[np.float64]:
    """Sigmoid in float64; the exponent is never positive, so nothing overflows."""
    wide = logits.astype(np.float64)
    small = np.exp(-np.abs(wide))
    return np.where(wide >= 0, 1.0, small) / (1.0 + small)


MOST_SLICES = 20  # listed; the others are one slice


class Breakdown(NamedTuple):
    """The features by which metrics are also given: one id per sample each."""

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
        """For JSON: `grouped_auc` and `by`, those that were requested."""
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
    """The AUC within groups, of all groups together."""

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
