"""DCN-V2: cross layers that raise the order of interaction by one each, beside or below an MLP."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hotbed.models.base import Activation, Count, CountOrZero, Model, Rate, Widths
from hotbed.models.layers import MLP, CrossNetwork, join, linear


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

    @staticmethod
    def vector_width(dim: int) -> int:
        return dim

    def logits(self, vectors: Tensor, dense: Tensor) -> Tensor:
        x0 = join(vectors, dense)
        crossed = self.cross(x0)
        top = torch.cat([crossed, self.mlp(x0)], dim=1) if self.parallel else self.mlp(crossed)
        logits: Tensor = self.out(top)
        return logits.squeeze(1)
