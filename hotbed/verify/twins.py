"""Trains two twins on the same batches, one plain and one with another storage, and gives a verdict.

Both are made by the same function and take steps alternately, each with its own state of torch's random numbers, so that
dropout is the same too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed.pipeline import prefetch
from hotbed.pipeline.batches import to_device
from hotbed.tables.module import EmbeddingTables
from hotbed.verify.compare import Difference, UseHistory, first_difference, last_difference
from hotbed.verify.watch import TableWatch

Step = Callable[[Any], Tensor]  # a batch -> its loss, after backward and the optimizer's step
Make = Callable[..., tuple[EmbeddingTables, Step]]  # keyword arguments of EmbeddingTables -> a twin; deterministic


@dataclass(frozen=True)
class TwinStorage:
    """How the other twin keeps its rows."""

    name: str
    where: dict[str, Any] = field(default_factory=dict)  # cache=, hbm=, memory=, ssd=, policy= ... of EmbeddingTables
    ahead: bool = True  # batches come through hotbed.prefetch
    window: int | None = None
    look_ahead: int | None = None


class Verdict(NamedTuple):
    """The result for one storage."""

    way: TwinStorage
    steps: int  # that were compared
    lookups: int
    rows: int  # distinct rows that were compared, each with its optimizer state
    evictions: int  # rows that left the device; with none, little is proved
    difference: Difference | None

    @property
    def same(self) -> bool:
        """Whether every bit was the same."""
        return self.difference is None


def verify(
    make: Make,
    batches: Sequence[Any],
    way: TwinStorage,
    progress: Callable[[int], None] = lambda step: None,
    injected: Callable[[EmbeddingTables], None] | None = None,
    agree: Callable[[bool], bool] = lambda ends: ends,
) -> Verdict:
    """Train a plain twin and one of `way` on the batches, and compare every bit until one differs.

    `progress` is called with the number of steps done; `injected` may damage the other twin's tables before it starts;
    `agree` says whether some rank has found a difference.
    """
    plain, other = _Twin(make, {}, None), _Twin(make, way.where, injected)
    history = UseHistory()
    lookups = step = 0
    difference, ended = None, False
    try:
        with closing(_ahead(batches, other.tables, way)) as theirs:
            for step, (mine, their) in enumerate(zip(batches, theirs, strict=True), start=1):
                loss, other_loss = plain.step(to_device(mine, plain.tables.device)), other.step(their)
                seen, other_seen = plain.watch.take(), other.watch.take()
                came = other.watch.take_came()
                difference = first_difference(step, seen, other_seen, (loss, other_loss), history, came)
                ended = agree(difference is not None)
                if ended:
                    break
                history.note(other_seen, came)
                lookups += sum(int((one.keys >= 0).sum()) for one in other_seen)
                progress(step)
        evictions = other.tables.counters().evictions
        rows = 0
        for number, groups in enumerate(zip(plain.tables.groups, other.tables.groups, strict=True)):
            used = history.used(number)
            rows += used.shape[0]
            if difference is None and not ended:
                difference = last_difference(step, *groups, used)
        return Verdict(way, step, lookups, rows, evictions, difference)
    finally:
        plain.watch.close()
        other.watch.close()


def _ahead(batches: Sequence[Any], tables: EmbeddingTables, way: TwinStorage) -> Generator[Any, None, None]:
    if way.ahead:
        yield from prefetch(batches, tables, window=way.window, look_ahead=way.look_ahead)
    else:
        yield from (to_device(batch, tables.device) for batch in batches)


class _Twin:
    """Watched tables, and their step with its own state of random numbers."""

    def __init__(self, make: Make, where: dict[str, Any], injected: Callable[[EmbeddingTables], None] | None) -> None:
        with _keep_random_states():
            self.tables, self._step = make(**where)
            self._states = _random_states()
        if injected is not None:
            injected(self.tables)
        self.watch = TableWatch(self.tables)

    def step(self, batch: Any) -> Tensor:
        with _keep_random_states():
            _set_random_states(self._states)
            loss = self._step(batch)
            self._states = _random_states()
        return loss.detach()


@contextmanager
def _keep_random_states() -> Iterator[None]:
    """Leave torch's random numbers as they were."""
    before = _random_states()
    try:
        yield
    finally:
        _set_random_states(before)


def _random_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states + (torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])


def _set_random_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])
