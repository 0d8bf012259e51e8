"""Factorization machine: main effects and the dot product of every pair of id vectors."""

from __future__ import annotations

from torch import Tensor

from hotbed.models.base import Model
from hotbed.models.factorized import factorized
from hotbed.models.layers import LinearTerm


class FM(Model):
    """Factorization machine of second order.

    logit = b + sum_f w_f + <u, dense> + sum_{i<j} <v_i, v_j>. The pair sum is computed as half of (sum v)^2 - sum v^2,
    so it costs F * D, not F^2 * D. Dense features join the linear term only.

    Reference: Rendle, Factorization Machines, ICDM 2010
    Parameters: 1 + N
    """

    def __init__(self, num_features: int, dim: int, num_dense: int) -> None:
        super().__init__(num_features, dim, num_dense)
        self.linear = LinearTerm(num_dense)

    @staticmethod
    def vector_width(dim: int) -> int:
        return dim + 1

    def logits(self, vectors: Tensor, dense: Tensor) -> Tensor:
        return self.linear.add_to(factorized(vectors)[1], dense)
