"""FBGEMM's table-batched embedding in its five GPU modes and on the CPU, set up as its authors recommend.

hbm                    every row in device memory
lru_managed            a cache under LRU, the other rows in managed memory
lru_mapped             the same, the other rows in host memory that the device reads directly
lfu_mapped             the same under LFU
lru_managed_prefetch   lru_managed with the next batch's rows fetched on a side stream while this one trains
cpu                    every row in host memory, on the CPU; no Adam there
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hotbed.bench.setting import EPS, LR, Setting
from hotbed.bench.workload import FlatIds, Workload
from hotbed.errors import ConfigError


class Peer:
    """A system that counts nothing and has no files."""

    def counts(self) -> None:
        return None

    def tier_counts(self) -> None:
        return None

    def close(self) -> None:
        pass


class FbgemmSystem(Peer):
    """One SplitTableBatchedEmbeddingBagsCodegen."""

    def __init__(self, setting: Setting, way: str) -> None:
        self.rule = "adam_by_table" if setting.optimizer == "adam" else setting.optimizer
        self._prefetch = "prefetch" in way
        logging.disable(logging.ERROR)  # it logs every table
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._module = _module(setting, way)
        finally:
            logging.disable(logging.NOTSET)
        self._module.init_embedding_weights_uniform(-0.01, 0.01)

    def vectors(self, workload: Workload) -> Iterator[Tensor]:
        if self._prefetch:
            yield from self._prefetched(workload.flat)
        else:
            for ids in workload.flat:
                yield self._module(ids.values, ids.offsets)

    def weights(self) -> list[Tensor]:
        self._module.flush()
        return [weight.detach().clone().cpu() for weight in self._module.split_embedding_weights()]

    def _prefetched(self, flat: list[FlatIds]) -> Iterator[Tensor]:
        main: torch.cuda.Stream = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

        def fetch(ids: FlatIds) -> None:
            with torch.cuda.stream(side):
                self._module.prefetch(ids.values, ids.offsets, main)

        fetch(flat[0])
        for i, ids in enumerate(flat):
            main.wait_stream(side)
            out = self._module(ids.values, ids.offsets)
            if i + 1 < len(flat):
                fetch(flat[i + 1])
            yield out
            del out


def _module(setting: Setting, way: str) -> Any:
    kinds = import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType
    common = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    training = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    optimizers = {
        "rowwise_adagrad": kinds.EXACT_ROWWISE_ADAGRAD,
        "adam": kinds.ADAM,
        "adagrad": kinds.EXACT_ADAGRAD,
        "sgd": kinds.EXACT_SGD,
    }
    on_cpu = way == "cpu"
    if on_cpu and setting.optimizer == "adam":
        raise ConfigError("FBGEMM has no Adam on the CPU")
    places = common.EmbeddingLocation
    if on_cpu:
        place = places.HOST
    else:
        place = places.DEVICE if way == "hbm" else places.MANAGED_CACHING
    device = training.ComputeDevice.CPU if on_cpu else training.ComputeDevice.CUDA
    return training.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, setting.dim, place, device) for rows in setting.rows],
        optimizer=optimizers[setting.optimizer],
        learning_rate=LR,
        eps=EPS,
        cache_load_factor=setting.cache,
        cache_algorithm=common.CacheAlgorithm.LFU if "lfu" in way else common.CacheAlgorithm.LRU,
        prefetch_pipeline="prefetch" in way,
        uvm_host_mapped="mapped" in way,
    )
