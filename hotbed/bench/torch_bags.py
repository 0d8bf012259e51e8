"""torch's own way: one nn.EmbeddingBag per table with sparse gradients, and a torch.optim optimizer over all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hotbed.bench.setting import EPS, LR, Setting
from hotbed.bench.workload import Workload


class TorchSystem:
    """Every row on the device. torch has no row-wise Adagrad; its sparse SGD, which does less, stands in."""

    def __init__(self, setting: Setting) -> None:
        # as is the default; said aloud, torch does not warn of it
        torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
        self._bags = nn.ModuleList(_bag(n, setting) for n in setting.rows)
        self._offsets = torch.arange(setting.batch, device=setting.device)
        parameters = list(self._bags.parameters())
        self._optimizer: torch.optim.Optimizer
        if setting.optimizer == "adam":
            self.rule = "adam_by_table"
            self._optimizer = torch.optim.SparseAdam(parameters, lr=LR, eps=EPS)
        elif setting.optimizer == "adagrad":
            self.rule = "adagrad"
            self._optimizer = torch.optim.Adagrad(parameters, lr=LR, eps=EPS)
        else:
            self.rule = "sgd"
            self._optimizer = torch.optim.SGD(parameters, lr=LR)

    def vectors(self, workload: Workload) -> Iterator[Tensor]:
        for flat in workload.flat:
            columns = flat.view(len(self._bags), -1)
            out = torch.cat([bag(ids, self._offsets) for bag, ids in zip(self._bags, columns)], dim=1)
            self._optimizer.zero_grad(set_to_none=True)
            yield out
            del out
            self._optimizer.step()

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone().cpu() for parameter in self._bags.parameters()]

    def counts(self) -> None:
        return None


def _bag(rows: int, setting: Setting) -> nn.EmbeddingBag:
    first = torch.empty(rows, setting.dim, device=setting.device).uniform_(-0.01, 0.01)
    return nn.EmbeddingBag(rows, setting.dim, mode="sum", sparse=True, _weight=first)
