"""Logistic regression: the baseline that knows main effects only."""

from __future__ import annotations

from torch import Tensor

from hotbed.models.base import Model
from hotbed.models.layers import LinearTerm


class LR(Model):
    """Logistic regression over ids and dense features.

    logit = b + sum_f w_f + <u, dense>, where w_f is the one weight of the id of feature f. It is convex, trains in
    seconds, and every other model has to beat it; it cannot learn that two ids matter together. `dim` is not used: the
    tables are one column wide.

    Reference: McMahan et al., Ad Click Prediction: a View from the Trenches, KDD 2013
    Parameters: 1 + N
    """

    def __init__(self, num_features: int, dim: int, num_dense: int) -> None:
        super().__init__(num_features, dim, num_dense)
        self.linear = LinearTerm(num_dense)

    @staticmethod
    def vector_width(dim: int) -> int:
        return 1

    def logits(self, vectors: Tensor, dense: Tensor) -> Tensor:
        return self.linear(vectors.squeeze(2), dense)
