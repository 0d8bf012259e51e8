"""DeepFM: a factorization machine and an MLP over the same vectors."""

from __future__ import annotations

from torch import Tensor

from hotbed.models.base import Model
from hotbed.models.factorized import factorized
from hotbed.models.layers import MLP, LinearTerm, join
from hotbed.models.options import Activation, Rate, Widths


class DeepFM(Model):
    """A factorization machine and an MLP that share one set of vectors.

    logit = b + sum_f w_f + <u, dense> + sum_{i<j} <v_i, v_j> + MLP([v_1, ..., v_F, dense]). Pairs are explicit, higher
    orders implicit; no feature engineering.

    Reference: Guo et al., DeepFM: A Factorization-Machine based Neural Network, IJCAI 2017, arXiv 1703.04247
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
        embeddings, orders = factorized(vectors)
        deep = self.mlp(join(embeddings, dense)).squeeze(1)
        return self.linear.add_to(orders, dense) + deep
