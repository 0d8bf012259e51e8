"""Does the largest batch of every split fit: into the cache, and with several ranks into the replicas of a rank?

The first batches are counted, and as many as are quickly read where there is room for less than twice what they need. So most
runs that would stop at some batch stop before training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import NamedTuple

from hotbed.parallel.sharded import ShardedTables
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.sizing.fit import BatchSample, amounts_of, rows_of_batch, too_small
from hotbed.train.run import cache_sizes
from hotbed.train.settings import Loaders, TrainLoader
from hotbed.train.step import Learner

_BATCHES_TRIED = 8  # of each split
_LOOKUPS_TRIED = 2_000_000  # of each split, where the cache holds little more than a batch


class TooLarge(NamedTuple):
    """A batch that needs more rows of a group than there is room for."""

    group: int
    needed: int
    sample: BatchSample


def check_batches_fit(learner: Learner, loaders: Loaders) -> None:
    """A BudgetError when a batch of some split needs more rows at once than the cache has slots."""
    rows = learner.tables
    if cache_sizes(rows) is None or learner.world.size > 1:  # what ranks ask of one is known when they train
        return
    for found in _too_large(rows, loaders, {number: group.num_slots for number, group in enumerate(rows.groups)}):
        group, cache = rows.groups[found.group], rows.caches[found.group]
        amounts = amounts_of(rows.tables, rows.optimizer, group.layout.precision)
        is_over_ssd, part = cache.is_over_ssd, cache.part_of_budget
        raise too_small(found.sample, found.needed, group.num_slots, amounts, on_ssd=is_over_ssd, part=part)


def check_unions_fit(learner: Learner, loaders_of_all: Callable[[], Loaders]) -> None:
    """A BudgetError when a batch of some split, of all ranks together, needs more rows than a rank has replicas.

    Every rank counts the same batches and comes to the same result.
    """
    rows = learner.tables
    if not isinstance(rows, ShardedTables) or rows.ranks is None:
        return
    fronts = {n: front for n, front in rows.ranks.replicated.items() if front.most_replicas is not None}
    if not fronts:
        return
    for found in _too_large(rows, loaders_of_all(), {n: front.most_replicas or 0 for n, front in fronts.items()}):
        raise fronts[found.group].refusal(found.needed, f"{found.sample}, of all ranks,")


def _too_large(rows: EmbeddingTables, loaders: Loaders, limits: Mapping[int, int]) -> Iterator[TooLarge]:
    """The largest batch of each split and group that is above a limit, the largest first."""
    splits: dict[str, TrainLoader] = {"train": loaders.train, **loaders.held_out}
    worst = Counter[tuple[str, int]]()  # rows that a batch of a split needs of a group
    num_read = {split: _count_rows(rows, split, loader, limits, worst) for split, loader in splits.items()}
    for (split, number), needed in worst.most_common():
        if needed > limits[number]:
            sample = BatchSample(split, splits[split].batch_size, num_read[split], len(splits[split]))
            yield TooLarge(number, needed, sample)


def _count_rows(
    rows: EmbeddingTables,
    split: str,
    loader: TrainLoader,
    limits: Mapping[int, int],
    worst: Counter[tuple[str, int]],
) -> int:
    """Note the most rows that a batch of a split needs of each group with a limit; the number of batches read."""
    num_read = num_lookups = 0
    with closing(loader.epoch(0)) as batches:
        for batch in batches:
            by_table = rows_of_batch(rows.tables, batch)
            num_read += 1
            num_lookups += batch.ids.numel() + sum(bag.values.numel() for bag in batch.bags.values())
            is_tight = False
            for number, limit in limits.items():
                needed = sum(by_table[name] for name in rows.groups[number].members)
                worst[split, number] = max(worst[split, number], needed)
                is_tight |= limit < 2 * worst[split, number]
            if num_read >= _BATCHES_TRIED and (num_lookups >= _LOOKUPS_TRIED or not is_tight):
                break
    return num_read
