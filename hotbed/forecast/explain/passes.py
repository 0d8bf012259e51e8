"""Settings and data in, the batches of the run up to its checkpoint out: epochs, and the evaluations between them.

Every pass is read from the data files in the order in which it was trained, ids alone. One pass is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hotbed.forecast.explain.run import Opened
from hotbed.forecast.trace import Trace, read_trace


class Pass(NamedTuple):
    """Batches that were read in one go."""

    trace: Trace
    learns: bool  # an epoch of training; else an evaluation
    first_step: int  # of its first batch; of an evaluation, the step before it
    stop: int | None = None  # batches that were trained; None: all

    @property
    def num_trained(self) -> int:
        return self.trace.num_batches if self.stop is None else self.stop


def passes_of(opened: Opened) -> Iterator[Pass]:
    """In the order of the run, up to its checkpoint."""
    every, num_batches = opened.config.train.eval_every, opened.num_batches
    held_out = opened.dataset.schema.splits.get("valid")
    evaluates = held_out is not None and held_out.rows > 0
    for epoch in range(opened.epoch):
        yield Pass(opened.trace(epoch), True, 1 + epoch * num_batches)
        step = (epoch + 1) * num_batches
        due = step % every == 0 if every else True
        if evaluates and due and step <= opened.evaluated_step:
            yield Pass(_evaluation(opened), False, step)
    if opened.batch:
        first = 1 + opened.epoch * num_batches
        yield Pass(opened.trace(opened.epoch, opened.batch), True, first, opened.batch)


def doubts(opened: Opened) -> list[str]:
    """What the passes leave out, and may have changed the cache."""
    found = []
    if opened.config.train.eval_every and opened.dataset.schema.splits.get("valid"):
        found.append("evaluations within an epoch (train.eval_every) are left out")
    if opened.config.train.checkpoint_every:
        found.append("batches that were ready when a checkpoint was taken (train.checkpoint_every) were planned twice")
    return found


def _evaluation(opened: Opened) -> Trace:
    return read_trace(opened.dataset, batch_size=opened.config.data.eval_batch_size, split="valid")
