"""The pieces that several models share: the linear term, the MLP, the factorization-machine and cross interactions.

Everything here is batch-first and loops over layers only, never over features or samples. Weights start from a normal
distribution scaled by fan-in and fan-out, biases from zero, in one fixed order: torch.manual_seed decides them all.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotbed.models.base import Activation, Rate, Widths

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}


def linear(num_in: int, num_out: int, *, bias: bool = True) -> nn.Linear:
    """A Linear layer with our initialisation; num_in may be 0 (then the output is the bias)."""
    layer = nn.Linear(max(num_in, 1), num_out, bias=bias)  # torch warns about an empty one
    layer.in_features = num_in
    std = (2.0 / (num_in + num_out)) ** 0.5
    layer.weight = nn.Parameter(nn.init.normal_(torch.empty(num_out, num_in), std=std))
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class BatchNorm(nn.BatchNorm1d):
    """Batch norm that uses the running statistics for a batch of one sample, which has no variance."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and input.shape[0] < 2:
            return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(input)


class MLP(nn.Sequential):
    """[B, num_in] -> [B, hidden[-1]], or [B, num_out] when given: linear, batch norm, activation, dropout per layer."""

    __call__: Callable[..., Tensor]

    def __init__(
        self,
        num_in: int,
        hidden: Widths,
        num_out: int | None = None,
        *,
        dropout: Rate = 0.0,
        batch_norm: bool = False,
        activation: Activation = "relu",
    ) -> None:
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise((num_in, *hidden)):
            layers.append(linear(width_in, width_out))
            if batch_norm:
                layers.append(BatchNorm(width_out))
            layers.append(ACTIVATIONS[activation]())
            if dropout:
                layers.append(nn.Dropout(dropout))
        width = hidden[-1] if hidden else num_in
        if num_out is not None:
            layers.append(linear(width, num_out))
        super().__init__(*layers)
        self.num_out = width if num_out is None else num_out


class LinearTerm(nn.Module):
    """bias + sum of the first-order id weights + <u, dense>: [B, F], [B, N] -> [B]."""

    __call__: Callable[..., Tensor]
    weight: nn.Parameter | None

    def __init__(self, num_dense: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))
        weight = nn.Parameter(nn.init.normal_(torch.empty(num_dense), std=0.01)) if num_dense else None
        self.register_parameter("weight", weight)

    def forward(self, id_weights: Tensor, dense: Tensor) -> Tensor:
        return self.add_to(id_weights.sum(dim=1), dense)

    def add_to(self, total: Tensor, dense: Tensor) -> Tensor:
        """total [B] + bias + <u, dense>."""
        total = total + self.bias
        return total if self.weight is None else torch.addmv(total, dense, self.weight)


class CrossNetwork(nn.Module):
    """x_{l+1} = x_0 * (W_l x_l + b_l) + x_l; with rank r > 0, W_l = U_l V_l with inner width r."""

    __call__: Callable[..., Tensor]

    def __init__(self, width: int, num_layers: int, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(linear(width, rank, bias=False), linear(rank, width)) if rank else linear(width, width)
            for _ in range(num_layers)
        )

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for layer in self.layers:
            x = torch.addcmul(x, x0, layer(x))
        return x


def split_first_order(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """[B, F, D + 1] -> the vectors [B, F, D] and the first-order weights [B, F], as views with one joint backward."""
    embeddings, weights = torch.split(vectors, [vectors.shape[2] - 1, 1], dim=2)
    return embeddings, weights.squeeze(2)


def join(vectors: Tensor, dense: Tensor) -> Tensor:
    """[B, F, D] and [B, N] side by side: [B, F * D + N]."""
    flat = vectors.flatten(1)
    return torch.cat([flat, dense], dim=1) if dense.shape[1] else flat


def fm_interaction(vectors: Tensor) -> Tensor:
    """The sum of <v_i, v_j> over all pairs i < j, in one pass: [B, F, D] -> [B]."""
    return 0.5 * (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1)
