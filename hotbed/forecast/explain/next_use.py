"""The reader's order in; the uses of an id so far, and its next use, out: exact up to the last epoch, by rate after it.

Batches are read again with their ids alone. Those of all ranks together are what one process would read.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import NamedTuple

from hotbed.data.loader.loader import Loader
from hotbed.forecast.explain.history import Uses
from hotbed.forecast.explain.request import Asked, feature_of
from hotbed.forecast.explain.run import Opened
from hotbed.types import Batch


class NextUse(NamedTuple):
    """When a row is looked up next."""

    step: int | None  # exact; None: in no batch that is left
    every: float | None  # steps between two uses so far; None: it was never used


def uses_of(opened: Opened, asked: Asked) -> Uses:
    """Up to the checkpoint."""
    uses = Uses()
    for step, lookups in _lookups(opened, asked, 0, opened.step):
        if lookups:
            uses.lookups += lookups
            uses.batches += 1
            uses.first_step = step if uses.first_step is None else uses.first_step
            uses.last_step = step
    return uses


def next_use_of(opened: Opened, asked: Asked, uses: Uses) -> NextUse:
    """Reads the batches that are left until the row comes."""
    every = opened.step / uses.batches if uses.batches else None
    coming = _lookups(opened, asked, opened.step, opened.last_step)
    with closing(coming):
        return NextUse(next((step for step, lookups in coming if lookups), None), every)


def _lookups(opened: Opened, asked: Asked, done: int, end: int) -> Generator[tuple[int, int], None, None]:
    """(step, look-ups of the row) for the steps after `done`, up to `end`."""
    data, feature = opened.config.data, feature_of(opened, asked.table)
    loader = Loader(
        opened.dataset, "train", batch_size=data.batch_size, shuffle=data.shuffle, seed=opened.config.train.seed
    )
    singles = [one.name for one in opened.dataset.schema.features if not one.multi]

    def count(batch: Batch) -> int:
        values = batch.bags[asked.table].values if feature.multi else batch.ids[:, singles.index(asked.table)]
        hashed = feature.mode == "hash" and asked.row is not None
        return int(((values.remainder(feature.rows) if hashed else values) == asked.id).sum())

    step = done
    while step < end:
        epoch, first = divmod(step, opened.num_batches)
        with closing(loader.id_batches(epoch, first)) as batches:
            for batch in batches:
                step += 1
                yield step, count(batch)
                if step == end:
                    return
