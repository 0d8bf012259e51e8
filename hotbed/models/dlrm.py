"""DLRM: dense features become one more vector, all pairs of vectors meet in dot products."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hotbed.models.base import Activation, Model, Rate, Widths
from hotbed.models.layers import MLP


class DLRM(Model):
    """Pairwise dot products between id vectors and a vector made of the dense features.

    z = MLP_bottom(dense) in R^D; logit = MLP_top([z, <a_i, a_j> for all i < j]) over a = (v_1, ..., v_F, z). Without
    dense features there is no z, and the top MLP sees the dot products alone. With interaction="cat" the top sees
    [a_1, a_2, ...] itself instead. `hidden` is the top MLP, `bottom` what stands before the D outputs of the bottom
    one; dropout acts in the top.

    Reference: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019,
        arXiv 1906.00091
    Parameters: (mlp(N, bottom, D) if N else 0)
        + mlp((F + (N > 0)) * D if interaction == "cat" else (D + (F + 1) * F // 2 if N else F * (F - 1) // 2), hidden, 1)
    """

    pairs: Tensor  # int64 [P], places of the pairs i > j in a flattened [F, F] (or [F + 1, F + 1]) matrix

    def __init__(
        self,
        num_features: int,
        dim: int,
        num_dense: int,
        *,
        hidden: Widths = (128, 64),
        bottom: Widths = (128,),
        interaction: Literal["dot", "cat"] = "dot",
        dropout: Rate = 0.0,
        batch_norm: bool = False,
        activation: Activation = "relu",
    ) -> None:
        super().__init__(num_features, dim, num_dense)
        num_vectors = num_features + (num_dense > 0)
        rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("pairs", rows * num_vectors + columns, persistent=False)
        if num_dense:
            self.bottom = MLP(num_dense, bottom, dim, batch_norm=batch_norm, activation=activation)
        self.dot = interaction == "dot"
        width = len(rows) + (dim if num_dense else 0) if self.dot else num_vectors * dim
        self.top = MLP(width, hidden, 1, dropout=dropout, batch_norm=batch_norm, activation=activation)

    @staticmethod
    def vector_width(dim: int) -> int:
        return dim

    def logits(self, vectors: Tensor, dense: Tensor) -> Tensor:
        if self.num_dense:
            z = self.bottom(dense)
            vectors = torch.cat([vectors, z.unsqueeze(1)], dim=1)
        if not self.dot:
            return self.top(vectors.flatten(1)).squeeze(1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        dots = products.flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([z, dots], dim=1) if self.num_dense else dots).squeeze(1)
