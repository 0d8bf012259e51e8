"""Models around an MLP: the plain deep network, Wide & Deep, DCN-V2 (cross layers) and DLRM (dot products of pairs)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hotbed.models.base import Activation, Count, CountOrZero, Model, Rate, Widths
from hotbed.models.layers import MLP, CrossNetwork, LinearTerm, join, linear, split_first_order


class DNN(Model):
    """An MLP over the concatenated id vectors and dense features.

    logit = MLP([v_1, ..., v_F, dense]). All interactions are implicit; with enough data and a good dropout or L2 it is
    hard to beat.

    Reference: Covington et al., Deep Neural Networks for YouTube Recommendations, RecSys 2016
    Parameters: mlp(F * D + N, hidden, 1)
    """

    def __init__(
        self,
        num_features: int,
        dim: int,
        num_dense: int,
        *,
        hidden: Widths = (128, 64),
        dropout: Rate = 0.0,
        batch_norm: bool = False,
        activation: Activation = "relu",
    ) -> None:
        super().__init__(num_features, dim, num_dense)
        width = num_features * dim + num_dense
        self.mlp = MLP(width, hidden, 1, dropout=dropout, batch_norm=batch_norm, activation=activation)

    def logits(self, vectors: Tensor, dense: Tensor) -> Tensor:
        return self.mlp(join(vectors, dense)).squeeze(1)


class WideDeep(Model):
    """A linear term and an MLP, trained together.

    logit = b + sum_f w_f + <u, dense> + MLP([v_1, ..., v_F, dense]). The wide half here is the first-order weight of
    every id; crossed columns, if wanted, are features of the data.

    Reference: Cheng et al., Wide & Deep Learning for Recommender Systems, DLRS 2016, arXiv 1606.07792
    Parameters: 1 + N + mlp(F * D + N, hidden, 1)
    """

    def __init__(
        self,
        num_features: int,
        dim: int,
        num_dense: int,
        *,
        hidden: Widths = (128, 64),
        dropout: Rate = 0.0,
        batch_norm: bool = False,
        activation: Activation = "relu",
    ) -> None:
        super().__init__(num_features, dim, num_dense)
        width = num_features * dim + num_dense
        self.linear = LinearTerm(num_dense)
        self.mlp = MLP(width, hidden, 1, dropout=dropout, batch_norm=batch_norm, activation=activation)

    @staticmethod
    def vector_width(dim: int) -> int:
        return dim + 1

    def logits(self, vectors: Tensor, dense: Tensor) -> Tensor:
        embeddings, weights = split_first_order(vectors)
        return self.linear(weights, dense) + self.mlp(join(embeddings, dense)).squeeze(1)


class DCNv2(Model):
    """Explicit crosses of bounded order, with an MLP in parallel or stacked on top.

    x_0 = [v_1, ..., v_F, dense]; x_{l+1} = x_0 * (W_l x_l + b_l) + x_l for `num_cross` layers; then logit =
    <w, [x_L, MLP(x_0)]> + b (parallel) or <w, MLP(x_L)> + b (stacked). With `low_rank` r > 0 every W_l is a product of
    two matrices with inner width r, which costs 2 X r instead of X^2 (X = F * D + N).

    Reference: Wang et al., DCN V2: Improved Deep & Cross Network, WWW 2021, arXiv 2008.13535
    Parameters: num_cross * X * ((2 * low_rank or X) + 1) + mlp(X, hidden) + last(X, hidden) + 1
        + (X if structure == "parallel" else 0)
    """

    def __init__(
        self,
        num_features: int,
        dim: int,
        num_dense: int,
        *,
        structure: Literal["parallel", "stacked"] = "parallel",
        num_cross: Count = 2,
        low_rank: CountOrZero = 0,
        hidden: Widths = (128, 64),
        dropout: Rate = 0.0,
        batch_norm: bool = False,
        activation: Activation = "relu",
    ) -> None:
        super().__init__(num_features, dim, num_dense)
        width = num_features * dim + num_dense
        self.parallel = structure == "parallel"
        self.cross = CrossNetwork(width, num_cross, low_rank)
        self.mlp = MLP(width, hidden, dropout=dropout, batch_norm=batch_norm, activation=activation)
        self.out = linear(self.mlp.num_out + (width if self.parallel else 0), 1)

    def logits(self, vectors: Tensor, dense: Tensor) -> Tensor:
        x0 = join(vectors, dense)
        crossed = self.cross(x0)
        top = torch.cat([crossed, self.mlp(x0)], dim=1) if self.parallel else self.mlp(crossed)
        logits: Tensor = self.out(top)
        return logits.squeeze(1)


class DLRM(Model):
    """Pairwise dot products between id vectors and a vector made of the dense features.

    z = MLP_bottom(dense) in R^D; logit = MLP_top([z, <a_i, a_j> for all i < j]) over a = (v_1, ..., v_F, z). Without
    dense features there is no z, and the top MLP sees the dot products alone. With interaction="cat" the top sees
    [a_1, a_2, ...] itself instead. `hidden` is the top MLP, `bottom` the layers before the D outputs of the bottom
    MLP; dropout acts in the top.

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

    def logits(self, vectors: Tensor, dense: Tensor) -> Tensor:
        if self.num_dense:
            z = self.bottom(dense)
            vectors = torch.cat([vectors, z.unsqueeze(1)], dim=1)
        if not self.dot:
            return self.top(vectors.flatten(1)).squeeze(1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        dots = products.flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([z, dots], dim=1) if self.num_dense else dots).squeeze(1)
