"""The plain deep network (concatenated vectors, then an MLP), and Wide & Deep, which adds a linear model."""

from __future__ import annotations

from torch import Tensor

from hotbed.models.base import Activation, Model, Rate, Widths
from hotbed.models.layers import MLP, LinearTerm, join, split_first_order


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

    @staticmethod
    def vector_width(dim: int) -> int:
        return dim

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
