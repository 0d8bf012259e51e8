"""hotbed as it is used: every row on the device; a cache with `hotbed.prefetch`; the same cache in a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

import hotbed
from hotbed.bench.setting import EPS, LR, Setting
from hotbed.bench.workload import Workload
from hotbed.optim import RowOptimizer, row_optimizer

_CHUNK = 1 << 20


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

    def counts(self) -> Any:
        return cast(Any, self.tables).counters()


class CachedSystem(HotbedSystem):
    """A share of the rows on the device, every batch waiting for its own copies."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, cache=setting.cache, **({"policy": setting.policy} if setting.policy else {}))
        self._ahead = {"window": setting.window, "look_ahead": setting.look_ahead}
        if setting.warm_store:
            for group in self.tables.groups:
                _write_all(group)


class PrefetchedSystem(CachedSystem):
    """The same with copies under way while earlier batches train."""

    def vectors(self, workload: Workload) -> Iterator[Tensor]:
        for ids in hotbed.prefetch(workload.matrices, self.tables, **self._ahead):
            yield self.tables(ids)


def _optimizer(setting: Setting) -> RowOptimizer:
    eps = {} if setting.optimizer == "sgd" else {"eps": EPS}
    return row_optimizer(setting.optimizer, lr=LR, **eps)


def _write_all(group: Any) -> None:
    """Put every row's first value into the store, as if all had been trained and evicted before.

    The values are really written. Rows that were only marked would lie on pages the system has not yet given out, and those
    read as one cached page of zeros: faster than any long run.
    """
    device = group.records.device
    for start in range(0, group.num_rows, _CHUNK):
        keys = torch.arange(start, min(start + _CHUNK, group.num_rows))
        group.store.write(keys, group.first_records(keys.to(device)).cpu())
