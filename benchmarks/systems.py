"""The systems compared on the CPU: each looks up a batch, takes the gradient of the vectors and updates its rows.

A system is built from (rows per table, dim, optimizer) and has `step(ids [B, F], grad [B, F, D])` and `weight(table)`.
All start from hotbed's first values, so that their results can be compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

import hotbed

LR, EPS = 0.01, 1e-12  # torch adds eps before the bias correction of SparseAdam, hotbed after: keep it out of sight
OPTIMIZERS: dict[str, Callable[[], hotbed.optim.RowOptimizer]] = {
    "rowwise_adagrad": lambda: hotbed.optim.RowwiseAdagrad(lr=LR, eps=EPS),
    "adagrad": lambda: hotbed.optim.Adagrad(lr=LR, eps=EPS),
    "adam": lambda: hotbed.optim.Adam(lr=LR, eps=EPS),
    "sgd": lambda: hotbed.optim.SGD(lr=LR),
}


class System(Protocol):
    """One way to do the embedding step."""

    def step(self, ids: Tensor, grad: Tensor) -> None: ...

    def weight(self, table: int) -> Tensor: ...


class Hotbed:
    """EmbeddingTables on the CPU."""

    def __init__(self, rows: tuple[int, ...], dim: int, optimizer: str) -> None:
        tables = {f"C{i}": hotbed.Table(n, dim, init=hotbed.Normal(0.01)) for i, n in enumerate(rows)}
        self._tables = hotbed.EmbeddingTables(tables, OPTIMIZERS[optimizer]())

    def step(self, ids: Tensor, grad: Tensor) -> None:
        self._tables(ids).backward(grad)

    def weight(self, table: int) -> Tensor:
        return self._tables.weight(f"C{table}")


def _first_values(module: torch.nn.ModuleList, rows: tuple[int, ...]) -> None:
    from hotbed.ops.init_rows import init_rows, stream_of

    for i, n in enumerate(rows):
        weight = module[i].weight.data
        init_rows(weight, torch.arange(n), stream_of(0, f"C{i}"), hotbed.Normal(0.01))


class Torch:
    """One nn.EmbeddingBag per table with sparse gradients and torch.optim."""

    def __init__(self, rows: tuple[int, ...], dim: int, optimizer: str) -> None:
        self._bags = torch.nn.ModuleList(
            [
                torch.nn.EmbeddingBag(
                    n, dim, mode="sum", sparse=True, include_last_offset=True, _weight=torch.empty(n, dim)
                )
                for n in rows
            ]
        )
        _first_values(self._bags, rows)
        parameters = list(self._bags.parameters())
        self._optimizer: torch.optim.Optimizer
        if optimizer == "adagrad":
            self._optimizer = torch.optim.Adagrad(parameters, lr=LR, eps=EPS)
        elif optimizer == "adam":
            self._optimizer = torch.optim.SparseAdam(parameters, lr=LR, eps=EPS)
        else:
            self._optimizer = torch.optim.SGD(parameters, lr=LR)

    def step(self, ids: Tensor, grad: Tensor) -> None:
        offsets = torch.arange(ids.shape[0] + 1)
        columns = ids.t().contiguous()
        out = torch.stack([bag(column, offsets) for bag, column in zip(self._bags, columns)], dim=1)
        self._optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own sparse tensors
            out.backward(grad)
            self._optimizer.step()

    def weight(self, table: int) -> Tensor:
        return self._bags[table].weight.data


class Fbgemm:
    """FBGEMM's table-batched embedding on the CPU (`pip install --no-deps fbgemm-gpu-cpu`)."""

    def __init__(self, rows: tuple[int, ...], dim: int, optimizer: str) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        from hotbed.ops.init_rows import init_rows, stream_of

        kinds = {"rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "sgd": EmbOptimType.EXACT_SGD}
        self._module = SplitTableBatchedEmbeddingBagsCodegen(
            [(n, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for n in rows],
            optimizer=kinds[optimizer],
            learning_rate=LR,
            eps=EPS,
        )
        self._weights = self._module.split_embedding_weights()
        for i, n in enumerate(rows):
            init_rows(self._weights[i], torch.arange(n), stream_of(0, f"C{i}"), hotbed.Normal(0.01))

    def step(self, ids: Tensor, grad: Tensor) -> None:
        size, features = ids.shape
        values = ids.t().reshape(-1)
        out = self._module(values, torch.arange(size * features + 1))
        out.backward(grad.view(size, -1))

    def weight(self, table: int) -> Tensor:
        return self._weights[table]
