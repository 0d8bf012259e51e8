"""A model of hotbed over plain torch tables: ids and dense features in, logits out.

One nn.Embedding per feature, one more of width 1 where the model reads a first-order weight, and the very class that
hotbed trains on top: so only the tables and their optimizer differ. `sparse` is torch's own choice between a gradient
as large as the table (and exact Adam) and one of the touched rows (and SparseAdam, Adagrad or SGD on those).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.models import MODELS, build_model


class PlainTwin(nn.Module):
    """ids [B, F], dense [B, N] -> logits [B]."""

    def __init__(
        self,
        model_name: str,
        rows_per_feature: Sequence[int],
        dim: int,
        num_dense: int,
        options: Mapping[str, Any],
        *,
        sparse: bool = False,
        init_std: float = 0.01,
    ) -> None:
        super().__init__()
        num_features = len(rows_per_feature)
        self.model = build_model(model_name, num_features=num_features, dim=dim, num_dense=num_dense, options=options)
        self.sparse = sparse
        self.width = MODELS[model_name].vector_width(dim)
        # a table of vectors, a table of first-order weights, or both, per feature
        widths = {1: [1], dim: [dim], dim + 1: [dim, 1]}[self.width]
        self.tables = nn.ModuleList(
            nn.Embedding(rows, width, sparse=sparse) for rows in rows_per_feature for width in widths
        )
        self.tables_per_feature = len(widths)
        for table in self.tables:
            nn.init.normal_(table.weight, std=init_std)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        columns = ids.t().contiguous()
        pieces = [table(columns[i // self.tables_per_feature]) for i, table in enumerate(self.tables)]
        vectors = torch.cat(pieces, dim=1).view(ids.shape[0], ids.shape[1], self.width)
        return self.model(vectors, dense)

    def l2_loss(self, l2: float) -> Tensor:
        """l2 / 2 * ||W||^2 over every row of every table."""
        return 0.5 * l2 * torch.stack([table.weight.square().sum() for table in self.tables]).sum()

    def optimizers(self, name: str, *, lr: float, dense_lr: float) -> list[torch.optim.Optimizer]:
        """One for the tables ("adam", "adagrad" or "sgd"), and Adam for the dense weights."""
        rows = list(self.tables.parameters())
        for_tables: torch.optim.Optimizer
        if name == "adam":
            for_tables = torch.optim.SparseAdam(rows, lr=lr) if self.sparse else torch.optim.Adam(rows, lr=lr)
        elif name == "adagrad":
            torch.sparse.check_sparse_tensor_invariants.disable()  # the default, said aloud: else torch warns
            for_tables = torch.optim.Adagrad(rows, lr=lr)
        elif name == "sgd":
            for_tables = torch.optim.SGD(rows, lr=lr)
        else:
            raise ValueError(f"no optimizer {name!r}; there are adam, adagrad, sgd")
        return [for_tables, torch.optim.Adam(self.model.parameters(), lr=dense_lr)]
