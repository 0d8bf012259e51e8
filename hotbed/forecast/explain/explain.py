"""Explains one row of a run; and lists the rows of a table that were used or evicted most.

`meanings`: a feature and ids of its table -> what they stand for in the raw log, if the dataset knows. A vocabulary lists
64-bit ids. For integers they are the values themselves, for log buckets they name a range; for texts they are hashes, from
which the text cannot be recovered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hotbed.cache import look_ahead_for
from hotbed.data.dataset import Dataset
from hotbed.data.hash import MISSING_ID
from hotbed.data.schema import IdFeature, clock_of
from hotbed.data.values import BUCKET_STARTS
from hotbed.errors import ConfigError
from hotbed.forecast.explain.history import (
    History,
    NextUse,
    UseCounts,
    census_of,
    doubts,
    history_of,
    next_use_of,
    uses_of,
)
from hotbed.forecast.explain.place import CACHE, Norms, RowPlace, RowScore, key_of, norms_of, place_of, score_of
from hotbed.forecast.explain.run import OpenRun, RowRequest, feature_of, find_row, open_run
from hotbed.forecast.trace import Trace
from hotbed.train.row_watch import FILE, read_lines

_STARTS = (0, 1, 2, *(int(one) for one in BUCKET_STARTS))
BY = ("uses", "evictions")


class Gradient(NamedTuple):
    """The last gradient of a row, as `hotbed train --watch-rows` recorded it."""

    step: int
    norm: float
    updates: int  # that were recorded


@dataclass(frozen=True)
class Explanation:
    """Everything about one row."""

    run: str
    step: int  # of the checkpoint
    finished: bool
    request: RowRequest
    place: RowPlace
    norms: Norms | None
    uses: UseCounts
    history: History | None  # None: not known for this run, see notes
    score: RowScore | None
    next_use: NextUse
    gradient: Gradient | None  # None: the row was not watched
    notes: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        history = self.history
        return {
            "run": self.run,
            "step": self.step,
            "finished": self.finished,
            **self.request._asdict(),
            "place": self.place._asdict(),
            "norms": None if self.norms is None else self.norms._asdict(),
            "uses": dataclasses.asdict(self.uses),
            "history": None
            if history is None
            else {
                "admissions": history.admissions,
                "evictions": history.evictions,
                "moves": [move._asdict() for move in history.moves],
                "agreement": history.agreement,
            },
            "score": None if self.score is None else dataclasses.asdict(self.score),
            "next_use": self.next_use._asdict(),
            "gradient": None if self.gradient is None else self.gradient._asdict(),
            "notes": self.notes,
        }


class TopRow(NamedTuple):
    """A row among those used or evicted most."""

    id: int
    lookups: int
    admissions: int
    evictions: int
    meaning: str = ""  # of the id in the raw log, in words, if the dataset knows


def explain(run: Path, table: str, *, id: int | None = None, value: str | None = None) -> Explanation:
    """One row of a run, as of its newest checkpoint; either `id` or `value` is given."""
    opened = open_run(run)
    request = find_row(opened, table, id, value)
    request = request._replace(meaning=meanings(opened.dataset, feature_of(opened, table), [request.id])[0])
    norms = norms_of(opened, request)
    key = key_of(opened, request, norms)
    place = place_of(opened, request, key, norms)
    notes = [request.note] if request.note else []
    why = _no_history(opened)
    history = score = None
    if why or key is None:
        uses = uses_of(opened, request)
        notes += [why] if why else []
    else:
        history = history_of(opened, key)
        uses = history.uses
        notes += _doubts(opened, history)
        if place.where == CACHE:
            upcoming, stride = _upcoming(opened, history)
            score = score_of(opened, request, key, upcoming, history.evictions_per_window, stride)
    finished = opened.step >= opened.last_step
    if not finished:
        notes.append(
            f"the run is at step {opened.step:,} of {opened.last_step:,}: this is the state of its last checkpoint"
        )
    if request.row is None and opened.config.tables.expire:
        notes.append(f"ids of this table lose their row by tables.expire: {opened.config.tables.expire}")
    next_use, gradient = next_use_of(opened, request, uses), _gradient(opened, request)
    return Explanation(
        str(run), opened.step, finished, request, place, norms, uses, history, score, next_use, gradient, notes
    )


def top_rows(run: Path, table: str, count: int, by: str = "uses") -> tuple[list[TopRow], list[str]]:
    """The rows of a table that were looked up most, or evicted most often; and notes on what is uncertain."""
    if by not in BY:
        raise ConfigError(f"--by {by}: rows are listed by {' or '.join(BY)}.")
    if count < 1:
        raise ConfigError(f"--top {count}: at least 1 row is listed.")
    opened = open_run(run)
    feature = feature_of(opened, table)
    table = feature.table
    why = _no_history(opened)
    if why:
        raise ConfigError(f"--top needs the history of a table, and {why}")
    if by == "evictions" and opened.cache_of(table) is None:
        raise ConfigError(f"--by evictions: {run} has no cache, so no row was ever evicted. List them by uses.")
    census = census_of(opened)
    base, rows = opened.base_of(table), opened.tables[table].rows or 0
    part = slice(base, base + rows)
    ranked = census.lookups[part] if by == "uses" else census.evictions[part]
    order = np.argsort(-ranked, kind="stable")[:count]
    listed = [int(row) for row in order if ranked[row] > 0]
    found = [
        TopRow(
            row,
            int(census.lookups[base + row]),
            int(census.admissions[base + row]),
            int(census.evictions[base + row]),
            meaning,
        )
        for row, meaning in zip(listed, meanings(opened.dataset, feature, listed))
    ]
    return found, _agreement_notes(opened, census.agreement)


def _gradient(opened: OpenRun, request: RowRequest) -> Gradient | None:
    lines = [
        line
        for line in read_lines(opened.run / FILE)
        if (line["table"], line["id"]) == (request.table, request.id) and line["step"] <= opened.step
    ]
    return Gradient(lines[-1]["step"], lines[-1]["gradient_norm"], len(lines)) if lines else None


def _no_history(opened: OpenRun) -> str:
    """Why the run cannot be replayed; "" if it can."""
    if opened.world > 1:
        return f"the run was trained by {opened.world} ranks; cache moves are known for runs of one process only"
    if any(shape.rows is None for shape in opened.tables.values()):
        return "the run has dynamic ids, whose rows depend on what was admitted; cache moves are known for preset tables only"
    return ""


def _doubts(opened: OpenRun, history: History) -> list[str]:
    if history.agreement is None:
        return ["the run has no cache: every row is on the device, and none moves"]
    return _agreement_notes(opened, history.agreement)


def _agreement_notes(opened: OpenRun, agreement: float | None) -> list[str]:
    if agreement is None or agreement == 1.0:
        return []
    why = "; ".join(doubts(opened)) or "a run that was stopped and resumed plans some windows differently"
    return [
        f"the history is near, not exact: {100 * agreement:.1f} % of the rows in the replayed cache are the checkpoint's "
        f"({why})"
    ]


def _upcoming(opened: OpenRun, history: History) -> tuple[Trace | None, int]:
    """The batches that would be planned next, up to the look-ahead of the cache; and how many batches share a step."""
    held = opened.cache_of(next(iter(opened.tables)))
    if held is None or opened.step >= opened.last_step:
        return None, 1
    planned = max(history.planned, opened.batch) if opened.batch else 0
    trace = opened.trace(opened.epoch, planned)
    if planned >= trace.num_batches:
        return None, 1
    num_keys = int(trace.offsets[planned + 1] - trace.offsets[planned])
    ahead = opened.ahead
    stride, known = look_ahead_for(num_keys, int(held["device"][0]), ahead.look_ahead, ahead.bounded)
    end = min(planned + known, trace.num_batches)
    offsets = trace.offsets[planned : end + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    return Trace(trace.keys[first:last], trace.counts[first:last], offsets - first, trace.num_rows), stride


def meanings(dataset: Dataset, feature: IdFeature, ids: Sequence[int]) -> list[str]:
    """In words; "" if nothing is known."""
    if feature.mode == "hash":
        return [""] * len(ids)  # many values share a row
    if feature.mode != "vocabulary":
        return [_of_id(feature, one) for one in ids]
    listed = dataset.counts(feature.name).ids
    known = {0: "values that train does not have"}
    known |= {one: _of_id(feature, int(listed[one - 1])) for one in ids if 0 < one <= len(listed)}
    return [known.get(one, "") for one in ids]


def _of_id(feature: IdFeature, raw: int) -> str:
    if raw == MISSING_ID:
        return "missing values"
    if feature.source == "integer":
        return f"value {raw}"
    if clock := clock_of(feature.source):
        return f"{clock.part} {raw}"
    return _range(raw) if feature.source == "bucket" else ""


def _range(bucket: int) -> str:
    size = abs(bucket)
    if not size:
        return "values between -1 and 1"
    if size + 1 >= len(_STARTS):
        return ""
    low, high = _STARTS[size : size + 2]
    return f"values from {low:,} to below {high:,}" if bucket > 0 else f"values from -{low:,} to above -{high:,}"
