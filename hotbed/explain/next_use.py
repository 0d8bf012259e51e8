"""The reader's order in, the next use of a row out: exact for the epochs that are left, by rate after them."""

from __future__ import annotations

from contextlib import closing
from typing import NamedTuple

import numpy as np

from hotbed.data.loader import Loader
from hotbed.explain.asked import Asked
from hotbed.explain.history import Uses
from hotbed.explain.opened import Opened


class NextUse(NamedTuple):
    """When a row is looked up next."""

    step: int | None  # exact; None: in no batch that is left
    every: float | None  # steps between two uses so far; None: it was never used


def next_use_of(opened: Opened, asked: Asked, uses: Uses) -> NextUse:
    """Reads the batches that are left until the row comes."""
    every = opened.step / uses.batches if uses.batches else None
    left, epoch, batch = opened.last_step - opened.step, opened.epoch, opened.batch
    data = opened.config.data
    loader = Loader(
        opened.dataset, "train", batch_size=data.batch_size, shuffle=data.shuffle, seed=opened.config.train.seed
    )
    feature = next(one for one in opened.dataset.schema.features if one.name == asked.table)
    singles = [one.name for one in opened.dataset.schema.features if not one.multi]
    step = opened.step
    while left > 0:
        with closing(loader.id_batches(epoch, batch)) as batches:
            for one in batches:
                step, left = step + 1, left - 1
                values = one.bags[asked.table].values if feature.multi else one.ids[:, singles.index(asked.table)]
                ids = values.numpy() % feature.rows if feature.mode == "hash" else values.numpy()
                if bool(np.any(ids == asked.id)):
                    return NextUse(step, every)
                if not left:
                    break
        epoch, batch = epoch + 1, 0
    return NextUse(None, every)
