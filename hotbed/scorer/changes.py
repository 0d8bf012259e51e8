"""A newer checkpoint in: what it changes becomes the next version of a model while others score with the current one.

    incremental   every rank's checkpoint adds to the one in use: the rows and ids that they have changed since
    full          else: all its rows, of which those that differ from the current ones are written
    (anew)        other tables, another dataset, another number of ranks, ...: the caller reads the whole model

The rows of the next version go where the current one reads nothing (rows.py), and dense weights, ids and rows are published in
one step. So every batch sees all of an update or none of it, and an update that fails has changed nothing.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from hotbed.ops.shard import Shard
from hotbed.scorer.budget import Budget
from hotbed.scorer.intake import ReadAnewError, RowIntake
from hotbed.scorer.live import LiveModel, build_dense
from hotbed.scorer.owners import RowOwners
from hotbed.scorer.source import ModelSource
from hotbed.scorer.versions import RowDraft

_log = logging.getLogger("hotbed.scorer")


class Outcome(NamedTuple):
    """The outcome of an update by changes."""

    how: str | None  # "same", "incremental" or "full"; None: it must be read anew
    why: str = ""  # anew


def try_changes(live: LiveModel, source: ModelSource, budget: Budget) -> Outcome:
    """Switch to a newer checkpoint by what it changes, if that is possible."""
    if reason := _why_anew(live, source, budget):
        return Outcome(None, reason)
    if [chain[-1].manifest.crc32 for chain in live.source.chains] == [
        chain[-1].manifest.crc32 for chain in source.chains
    ]:
        return Outcome("same")
    live.rows.settle()
    since = _since(live.source, source)
    if since is None:
        _log.info(
            "all rows of %s are compared: it does not add to %s, which is in use", source.version, live.source.version
        )
    owners, live.owners = live.owners, None  # unless all goes well, the next update cannot rely on it
    try:
        intake = _all_rows(live, source, budget) if since is None else _changes(live, source, since, owners)
        live.check_growth(intake.draft)
        model = build_dense(source, budget.device)
    except ReadAnewError as reason:
        return Outcome(None, str(reason))
    shared = intake.shared
    if since is not None:
        shared = live.shared | {of: one for of, one in shared.items() if one is not None or of not in live.shared}
    live.rows.publish(intake.draft, live.version_of(source, model, shared))
    live.source, live.shared, live.owners = source, shared, intake.owners
    return Outcome("full" if since is None else "incremental")


def _why_anew(live: LiveModel, source: ModelSource, budget: Budget) -> str:
    """Why changes cannot be applied; nothing if they can.

    A run that was trained again on new data has equal tables too, but its ids and numbers are encoded differently.
    """
    here = live.source
    if not budget.updated or not here.chains or not source.chains:
        return "only checkpoints add to each other"
    if len(here.chains) != len(source.chains):
        return f"{len(source.chains)} ranks have written it, and {len(here.chains)} the one in use"
    if here.tables != source.tables or here.model != source.model:
        return "it has other tables, or another model"
    data = [one.chains[0][-1].manifest.document.get("progress", {}).get("data", "") for one in (here, source)]
    if here.columns != source.columns or not data[0] or data[0] != data[1]:
        return "it was trained on another dataset"
    return "" if live.owners is not None or not live.id_maps else "an earlier update has failed"


def _since(here: ModelSource, there: ModelSource) -> list[int] | None:
    """For each rank, the place of its first new checkpoint in its chain; None if one does not add to the one in use."""
    found = []
    for old, new in zip(here.chains, there.chains):
        marks = [entry.manifest.crc32 for entry in new]
        if old[-1].manifest.crc32 not in marks:
            return None
        found.append(marks.index(old[-1].manifest.crc32) + 1)
    return found


def _changes(live: LiveModel, source: ModelSource, since: list[int], owners: RowOwners | None) -> RowIntake:
    intake = RowIntake(source.tables, live.rows, RowDraft(live.rows, empty=False), live.id_maps, owners)
    for rank, (chain, first) in enumerate(zip(source.chains, since)):
        intake.add_since(chain[first:], chain[first - 1], Shard(rank, len(source.chains)))
        live.check_growth(intake.draft)
    intake.check_complete()
    return intake


def _all_rows(live: LiveModel, source: ModelSource, budget: Budget) -> RowIntake:
    owners = RowOwners(budget.scratch, live.rows.files.starts) if live.id_maps else None
    intake = RowIntake(source.tables, live.rows, RowDraft(live.rows, empty=True), live.id_maps, owners)
    for part in source.parts() if source.parts is not None else ():
        intake.add(part, compare=True)
    return intake
