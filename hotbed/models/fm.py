"""Main effects and pairs: logistic regression, the factorization machine, and DeepFM, an MLP over the same vectors.

`factorization_terms`: the terms of a factorization machine, with its own backward pass.

In: vectors [B, F, D + 1], an embedding and a first-order weight side by side. Out: the embeddings, contiguous, and for each
sample the sum of its weights and of <v_i, v_j> over all pairs i < j. Autograd would split the sum into twenty operations, each
over all of [B, F, D]: nearly one of the three milliseconds of a DeepFM step with 256 samples on two cores, 39 features of dim
8. When torch compiles or exports a model it does its own fusion and gets the plain operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotbed.models.base import Activation, Model, Rate, Widths
from hotbed.models.layers import MLP, LinearTerm, fm_interaction, join, split_first_order


def factorization_terms(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """[B, F, D + 1] -> embeddings [B, F, D], contiguous, and the sum of first and second order [B]."""
    if vectors.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        embeddings, orders = _FactorizationTerms.apply(vectors)  # type: ignore[no-untyped-call]
        return embeddings, orders
    return _plain(vectors)


def _plain(vectors: Tensor) -> tuple[Tensor, Tensor]:
    embeddings, weights = split_first_order(vectors)
    embeddings = embeddings.contiguous()
    return embeddings, weights.sum(dim=1) + fm_interaction(embeddings)


class _FactorizationTerms(torch.autograd.Function):
    """d pairs / d v_i = sum_j v_j - v_i."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> tuple[Tensor, Tensor]:
        embeddings, orders = _plain(vectors)
        ctx.save_for_backward(embeddings)
        return embeddings, orders

    @staticmethod
    def backward(ctx: Any, grad_embeddings: Tensor, grad_orders: Tensor) -> Tensor:
        (embeddings,) = ctx.saved_tensors
        others = embeddings.sum(dim=1, keepdim=True) - embeddings
        of_vectors = torch.addcmul(grad_embeddings, others, grad_orders[:, None, None])
        of_weights = grad_orders[:, None, None].expand(-1, embeddings.shape[1], 1)
        return torch.cat([of_vectors, of_weights], dim=2)


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
        return self.linear.add_to(factorization_terms(vectors)[1], dense)


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
        embeddings, orders = factorization_terms(vectors)
        deep = self.mlp(join(embeddings, dense)).squeeze(1)
        return self.linear.add_to(orders, dense) + deep
