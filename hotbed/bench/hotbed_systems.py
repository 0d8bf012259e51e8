"""hotbed as it is used: every row on the device; a cache with `hotbed.prefetch`; the same cache in a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

from torch import Tensor

import hotbed
from hotbed.bench.setting import EPS, LR, Setting
from hotbed.bench.workload import Workload
from hotbed.cache import CacheCounts
from hotbed.optim import RowOptimizer, row_optimizer
from hotbed.store import MemoryStore
from hotbed.tables.group.cached import CachedGroup


class HotbedSystem:
    """EmbeddingTables without a cache."""

    def __init__(self, setting: Setting, **cache: Any) -> None:
        self.rule = setting.optimizer
        tables = {f"C{i}": hotbed.Table(n, setting.dim) for i, n in enumerate(setting.rows)}
        self.tables = hotbed.EmbeddingTables(tables, _optimizer(setting), device=setting.device, **cache)

    def vectors(self, workload: Workload) -> Iterator[Tensor]:
        for ids in workload.matrices:
            yield self.tables(ids)

    def weights(self) -> list[Tensor]:
        return [self.tables.weight(name).detach().clone().cpu() for name in self.tables.tables]

    def counts(self) -> CacheCounts | None:
        return None


class CachedSystem(HotbedSystem):
    """A share of the rows on the device, every batch waiting for its own copies."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, cache=setting.cache, **({"policy": setting.policy} if setting.policy else {}))
        self._ahead = {"window": setting.window, "look_ahead": setting.look_ahead}
        if setting.warm_store:
            for group in self.tables.groups:
                cast(MemoryStore, cast(CachedGroup, group).store).write_first_values()

    def counts(self) -> CacheCounts:
        return self.tables.counters()


class PrefetchedSystem(CachedSystem):
    """The same with copies under way while earlier batches train."""

    def vectors(self, workload: Workload) -> Iterator[Tensor]:
        ahead: Any = hotbed.prefetch(workload.matrices, self.tables, **self._ahead)
        with closing(ahead) as batches:
            for ids in batches:
                yield self.tables(ids)


def _optimizer(setting: Setting) -> RowOptimizer:
    eps = {} if setting.optimizer == "sgd" else {"eps": EPS}
    return row_optimizer(setting.optimizer, lr=LR, **eps)
