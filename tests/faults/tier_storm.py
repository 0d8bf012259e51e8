"""Random training over tiny memory tiers on an ssd, compared with whole tables. `python -m tests.faults.tier_storm`.

Every seed draws tables (preset or dynamic ids, two widths), sizes, an optimizer, and what comes between two batches of a loop
with look-ahead: an evaluation, a flush, reading all rows, a checkpoint that is loaded again in place or into new tables of
other sizes, gradients that accumulate, tables that are frozen, a loop that is left early. Losses, vectors and rows are those of
tables without a cache, to the bit.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import hotbed
from hotbed import Table, optim
from hotbed.tables import module as tables_module
from hotbed.tables.sizing.budget import rooms_of
from tests.faults.walk import check_integrity, close, difference, rows_of

_ROWS = {"a": (120, 3), "b": (90, 3), "c": (70, 5)}
_SPREAD = 10**9 + 7  # of dynamic ids
_OPTIMIZERS = (partial(optim.Adagrad, lr=0.1), partial(optim.Adam, lr=0.01), partial(optim.SGD, lr=0.1))
_DEVICE_SLOTS, _MEMORY_SLOTS = (44, 50, 64), (1, 2, 3, 5, 9, 20, 60, 130)


class _Pair:
    """Tables over an ssd, and whole ones that go the same way."""

    def __init__(self, draw: random.Random, folder: Path, device_slots: int | None) -> None:
        self.draw, self.folder, self._device_slots = draw, folder, device_slots
        self.is_dynamic = draw.random() < 0.4
        self._optimizer = draw.choice(_OPTIMIZERS)
        self._num_made = self.num_saves = 0
        self.whole, self.tiered = self._new(None), self._new_tiered()

    @property
    def both(self) -> tuple[Any, Any]:
        return self.whole, self.tiered

    def close(self) -> None:
        close(self.tiered)

    def _new(self, ssd: str | None) -> hotbed.EmbeddingTables:
        tables = {name: Table(None if self.is_dynamic else rows, dim) for name, (rows, dim) in _ROWS.items()}
        budgets = {"hbm": "4MiB", "memory": "64MiB"} if ssd or self.is_dynamic else {}
        if ssd:
            budgets["ssd"] = ssd
        return hotbed.EmbeddingTables(tables, self._optimizer(), output="dict", **budgets)

    def _new_tiered(self) -> hotbed.EmbeddingTables:
        slots, memory = self._device_slots or self.draw.choice(_DEVICE_SLOTS), self.draw.choice(_MEMORY_SLOTS)

        def small(*arguments: Any) -> list[Any]:
            return [
                room._replace(num_slots=slots, place=room.place._replace(memory_slots=memory))
                for room in rooms_of(*arguments)
            ]

        self._num_made += 1
        with mock.patch.object(tables_module, "rooms_of", small):
            return self._new(f"{self.folder}/ssd-{self._num_made}:64MiB")

    def save(self) -> None:
        self.num_saves += 1
        hotbed.checkpoint.save(self.folder / "saved", self.tiered, step=self.num_saves)

    def reload(self) -> None:
        """The same rows in new tables, whose tiers have other sizes."""
        self.save()
        close(self.tiered)
        self.tiered = self._new_tiered()
        hotbed.checkpoint.load(self.folder / "saved", self.tiered)

    def check(self) -> None:
        found = difference(rows_of(self.tiered), rows_of(self.whole))
        assert not found, found
        check_integrity(self.tiered)
        for cache in self.tiered.caches:
            cache.store.check_integrity()
            cache.store.ssd.check_integrity()


def _loss(tables: hotbed.EmbeddingTables, ids: Any, weight: int = 1) -> torch.Tensor:
    return sum(((v * v).sum() * weight for v in tables(ids).values()), torch.zeros(()))


def _train(pair: _Pair, ids: Any, weight: int) -> None:
    losses = [_loss(tables, ids, weight) for tables in pair.both]
    assert torch.equal(*losses), f"losses {[loss.item() for loss in losses]}"
    if losses[0].requires_grad:
        for loss in losses:
            loss.backward()


def _evaluate(pair: _Pair, batches: list[Any]) -> None:
    ids, mode = pair.draw.choice(batches), pair.draw.random() < 0.5
    for tables in pair.both:
        tables.train(mode)
    with torch.no_grad():
        expected, found = (tables(ids) for tables in pair.both)
    for tables in pair.both:
        tables.train()
    assert all(torch.equal(expected[name], found[name]) for name in expected), "vectors of an evaluation"


def _accumulate(pair: _Pair, batches: list[Any]) -> None:
    chosen, steps = pair.draw.choices(batches, k=2), pair.draw.random() < 0.7
    for tables in pair.both:
        tables.accumulate()
        for ids in chosen:
            loss = _loss(tables, ids)
            if loss.requires_grad:
                loss.backward()
        if steps:
            tables.step()
        else:
            tables.zero_grad()
        tables.accumulate(False)


def _freeze(pair: _Pair, batches: list[Any]) -> None:
    ids, weight = pair.draw.choice(batches), 3
    for tables in pair.both:
        tables.requires_grad_(False)
    _train(pair, ids, weight)
    for tables in pair.both:
        tables.requires_grad_(True)


def _load_in_place(pair: _Pair, batches: list[Any]) -> None:
    pair.save()
    hotbed.checkpoint.load(pair.folder / "saved", pair.tiered)


_BETWEEN: tuple[Callable[[_Pair, list[Any]], None], ...] = (
    _evaluate,
    _accumulate,
    _freeze,
    _load_in_place,
    lambda pair, batches: pair.save(),
    lambda pair, batches: pair.tiered.flush(),
    lambda pair, batches: pair.check(),
)


def tier_storm(seed: int, num_batches: int = 30, device_slots: int | None = None, size: int | None = None) -> None:
    """Train as the seed says; raises where anything differs."""
    draw, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder, closing(_Pair(draw, Path(folder), device_slots)) as pair:
        size, skew, spread = size or draw.choice((3, 9, 11)), draw.choice((1, 3)), _SPREAD if pair.is_dynamic else 1
        batches = [
            {
                name: (torch.rand(size, generator=numbers) ** skew * rows).long() * spread
                for name, (rows, _) in _ROWS.items()
            }
            for _ in range(num_batches)
        ]
        done = 0
        while done < num_batches:
            part = batches[done : done + draw.choice((5, 10, 40))]
            ahead = {"window": draw.choice((None, 1, 2)), "look_ahead": draw.choice((None, 1, 3, 8))}
            last = draw.randrange(len(part)) if draw.random() < 0.3 else len(part) - 1
            with closing(hotbed.prefetch(part, pair.tiered, **ahead)) as feed:  # type: ignore[arg-type]
                for n, ids in enumerate(feed):
                    _train(pair, ids, done + 1)
                    done += 1
                    if draw.random() < 0.25:
                        draw.choice(_BETWEEN)(pair, batches)
                    if n == last:
                        break
            if draw.random() < 0.3:
                pair.reload()
        pair.check()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    wrong = 0
    for seed in range(given.seed, given.seed + given.count):
        try:
            tier_storm(seed)
        except Exception as error:
            wrong += 1
            sys.stdout.write(f"seed {seed}: {type(error).__name__}: {error}\n")
    sys.stdout.write(f"{given.count} seeds, {wrong} wrong\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
