"""Scores of a followed log before they are learned from, in; one record an hour of event time, out.

Every batch is scored by the step that trains it, before its rows and weights are updated: test, then train. An hour is closed
when an event of more than ten minutes after its end was trained; rows that come later count in the oldest open hour, and as
`late_rows`. Memory does not depend on the number of rows: scores are counted in 65,536 bins of logits from -16 to 16, and pairs
inside one bin count half, which moves AUC by less than 0.0001 for any model that spreads its scores over a hundred bins. All
sums are of integers, or in the order of the batches, so a resumed run writes the same records.

    auc, log_loss, calibration   of the rows of the hour
    drift.score                  population stability index of the scores against the hour before, in bins of one logit
    drift.ids                    Jensen-Shannon divergence (base 2, 0 to 1) of the ids of a feature against the hour before,
                                 over 256 buckets, averaged over features; `drift_most` has the three largest
    new_ids                      share of lookups: of a vocabulary those of the unknown row; of dynamic ids those that got a
                                 row or were not admitted
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotbed.data.follow.loader import BUCKETS, HOUR, BatchFacts, HourPart
from hotbed.data.times import SECOND, show_time
from hotbed.ids import IdCounts
from hotbed.telemetry.observer import Record

GRACE = 600  # seconds
_BINS, _LIMIT, _COARSE = 1 << 16, 16.0, 32
_NAN = float("nan")


@dataclass
class OpenHour:
    """Sums over the rows of an hour so far."""

    scores: np.ndarray  # int64 [2, _BINS]: negatives, positives
    loss: float
    predicted: float
    unknown: np.ndarray  # int64 [F]
    buckets: np.ndarray  # int64 [F, BUCKETS]
    late_rows: int = 0
    bad_rows: int = 0

    @classmethod
    def new(cls, num_features: int) -> OpenHour:
        sizes = np.zeros(num_features, np.int64), np.zeros((num_features, BUCKETS), np.int64)
        return cls(np.zeros((2, _BINS), np.int64), 0.0, 0.0, *sizes)

    @property
    def samples(self) -> int:
        return int(self.scores.sum())

    def add(self, part: HourPart, logits: np.ndarray, labels: np.ndarray) -> None:
        """The rows of one hour in a batch."""
        wide = logits.astype(np.float64)
        bins = np.clip(((wide + _LIMIT) * (_BINS / (2 * _LIMIT))).astype(np.int64), 0, _BINS - 1)
        positive = labels == 1
        self.scores[0] += np.bincount(bins[~positive], minlength=_BINS)
        self.scores[1] += np.bincount(bins[positive], minlength=_BINS)
        self.loss += float(np.logaddexp(0.0, np.where(positive, -wide, wide)).sum())
        self.predicted += float((1.0 / (1.0 + np.exp(-np.clip(wide, -500, 500)))).sum())
        self.unknown += part.unknown
        self.buckets += part.buckets

    def metrics(self) -> Record:
        negatives, positives = self.scores
        losers, winners = int(negatives.sum()), int(positives.sum())
        below = np.cumsum(negatives) - negatives
        ordered = int((positives * (2 * below + negatives)).sum())
        samples = losers + winners
        return {
            "hour_samples": samples,
            "positives": winners,
            "auc": ordered / (2 * losers * winners) if losers and winners else _NAN,
            "log_loss": self.loss / samples if samples else _NAN,
            "calibration": self.predicted / winners if winners else _NAN,
            "late_rows": self.late_rows,
            "bad_rows": self.bad_rows,
        }


class Hours:
    """The open hours of a run, and the last closed one, to compare with."""

    def __init__(self, features: Sequence[str], vocabularies: Sequence[str]) -> None:
        self._features, self._vocabularies = tuple(features), frozenset(vocabularies)
        self._open: dict[int, OpenHour] = {}
        self._closed = -1  # the newest hour that is closed
        self._before: tuple[np.ndarray, np.ndarray] | None = None  # scores [_COARSE], buckets [F, BUCKETS]
        self._counts: dict[str, IdCounts] = {}  # of dynamic ids, when the last hour was closed
        self._pending: list[tuple[BatchFacts, Tensor, Tensor]] = []  # still on the device

    def add(self, facts: BatchFacts, logits: Tensor, labels: Tensor) -> bool:
        """A batch was trained; whether an hour can be closed. Waits for no device."""
        self._pending.append((facts, logits.detach(), labels))
        watermark = facts.after.watermark
        oldest = min((part.hour for one, _, _ in self._pending for part in one.parts), default=0)
        oldest = min([*self._open, oldest])
        return watermark >= (max(oldest, self._closed + 1) + 1) * HOUR + GRACE

    def drain(self) -> None:
        """Count what was pending."""
        for facts, logits, labels in self._pending:
            scores, clicks = logits.float().cpu().numpy(), labels.cpu().numpy()
            for part in facts.parts:
                rows = slice(None) if part.rows is None else part.rows
                hour = self._hour_of(part.hour)
                hour.add(part, scores[rows], clicks[rows])
                if part.hour <= self._closed:
                    hour.late_rows += len(scores[rows])
            if facts.bad_rows and facts.parts:
                self._hour_of(facts.parts[-1].hour).bad_rows += facts.bad_rows
        self._pending = []

    def close(self, watermark: int, counts: Mapping[str, IdCounts], at_end: bool = False) -> list[Record]:
        """The records of the hours that are over, oldest first; at the end of a run, of all."""
        self.drain()
        found = []
        for number in sorted(self._open):
            if at_end or watermark >= (number + 1) * HOUR + GRACE:
                found.append(self._record(number, self._open.pop(number), counts))
                self._closed = max(self._closed, number)
        return found

    def _hour_of(self, number: int) -> OpenHour:
        """The sums of an hour; of one that is closed, those of the oldest open one."""
        if number <= self._closed:
            number = min(self._open, default=self._closed + 1)
        return self._open.setdefault(number, OpenHour.new(len(self._features)))

    def _record(self, number: int, hour: OpenHour, counts: Mapping[str, IdCounts]) -> Record:
        scores = hour.scores.sum(0).reshape(_COARSE, -1).sum(1)
        record: Record = {"hour": show_time(number * HOUR * SECOND)[:16], **hour.metrics()}
        drift = {} if self._before is None else self._drift(scores, hour.buckets)
        record["drift"] = {name: drift[name] for name in ("score", "ids") if name in drift}
        record["drift_most"] = drift.get("most", {})
        lookups = hour.buckets.sum(1)
        new: dict[str, float] = {}
        for feature, unknown, total in zip(self._features, hour.unknown, lookups):
            if feature in self._vocabularies and total:
                new[feature] = float(unknown / total)
        for table, now in counts.items():
            then = self._counts.get(table, IdCounts(0, 0, 0, 0))
            if now.seen > then.seen:
                new[table] = (now.admitted - then.admitted + now.rejected - then.rejected) / (now.seen - then.seen)
        record["new_ids"] = new
        self._before, self._counts = (scores, hour.buckets), dict(counts)
        return record

    def _drift(self, scores: np.ndarray, buckets: np.ndarray) -> dict[str, Any]:
        assert self._before is not None
        by_feature = [divergence(*pair) for pair in zip(self._before[1], buckets)]
        known = {name: value for name, value in zip(self._features, by_feature) if not math.isnan(value)}
        most = sorted(known, key=lambda name: -known[name])[:3]
        return {
            "score": stability_index(self._before[0], scores),
            "ids": sum(known.values()) / len(known) if known else _NAN,
            "most": {name: known[name] for name in most},
        }

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """For a checkpoint: numbers, and arrays."""
        self.drain()
        arrays: dict[str, np.ndarray] = {}
        document: dict[str, Any] = {"closed": self._closed, "counts": {n: list(c) for n, c in self._counts.items()}}
        document["open"] = {}
        for number, hour in sorted(self._open.items()):
            document["open"][str(number)] = [hour.loss.hex(), hour.predicted.hex(), hour.late_rows, hour.bad_rows]
            for name in ("scores", "unknown", "buckets"):
                arrays[f"{number}.{name}"] = getattr(hour, name)
        if self._before is not None:
            arrays |= {"before.scores": self._before[0], "before.buckets": self._before[1]}
        return document, {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    def load_state(self, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """As `state` gave it."""
        arrays = {name: tensor.clone().numpy() for name, tensor in tensors.items()}
        self._closed, self._pending = int(document["closed"]), []
        self._counts = {name: IdCounts(*counts) for name, counts in document["counts"].items()}
        self._open = {}
        for number, (loss, predicted, late, bad) in document["open"].items():
            scores, unknown, buckets = (arrays[f"{number}.{name}"] for name in ("scores", "unknown", "buckets"))
            numbers = float.fromhex(loss), float.fromhex(predicted)
            self._open[int(number)] = OpenHour(scores, *numbers, unknown, buckets, int(late), int(bad))
        has_before = "before.scores" in arrays
        self._before = (arrays["before.scores"], arrays["before.buckets"]) if has_before else None


def stability_index(before: np.ndarray, now: np.ndarray) -> float:
    """PSI of two histograms; half a count is added to every bin, so that empty ones have a logarithm."""
    one, other = before + 0.5, now + 0.5
    one, other = one / one.sum(), other / other.sum()
    return float(((other - one) * np.log(other / one)).sum())


def divergence(before: np.ndarray, now: np.ndarray) -> float:
    """Jensen-Shannon divergence of two histograms, in bits; nan if one is empty."""
    if not before.sum() or not now.sum():
        return _NAN
    one, other = before / before.sum(), now / now.sum()
    middle = (one + other) / 2
    parts = [
        (side * np.log2(np.where(side > 0, side / np.where(middle > 0, middle, 1), 1.0))).sum() for side in (one, other)
    ]
    return float(sum(parts) / 2)
