"""FinalMLP: two MLPs over the same input, joined by a bilinear form."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hotbed.errors import ConfigError
from hotbed.models.base import Activation, Count, Model, Numbers, Rate, Widths
from hotbed.models.layers import MLP, join, linear


class FinalMLP(Model):
    """Two streams of MLPs whose outputs meet in a multi-head bilinear form.

    x = [v_1, ..., v_F, dense]; a = MLP_1(g_1 * x), b = MLP_2(g_2 * x); logit = <w_a, a> + <w_b, b> + c +
    sum_h a_h^T W_h b_h over `num_heads` equal pieces of a and b. With `gating`, g_i = 2 sigmoid(MLP(context_i)) weighs
    the inputs of stream i, where context_i is the vectors of the features numbered in `context` and `second_context`,
    or a learned vector of D numbers when the list is empty; otherwise g_i = 1. The second stream takes the first one's
    hidden layers and dropout unless it has its own. A gate counts as mlp(len(context) * D or D, gate_hidden, X), never
    with batch norm, and D more when its context is learned.

    Reference: Mao et al., FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction, AAAI 2023, arXiv 2304.00902
    Parameters: mlp(X, hidden) + mlp(X, second_hidden) + last(X, hidden) + last(X, second_hidden) + 1
        + last(X, hidden) * last(X, second_hidden) // num_heads
        + (gate(context) + gate(second_context) if gating else 0)
    """

    def __init__(
        self,
        num_features: int,
        dim: int,
        num_dense: int,
        *,
        hidden: Widths = (128, 64),
        second_hidden: Widths | None = None,
        dropout: Rate = 0.0,
        second_dropout: Rate | None = None,
        batch_norm: bool = False,
        activation: Activation = "relu",
        num_heads: Count = 1,
        gating: bool = False,
        gate_hidden: Widths = (64,),
        context: Numbers = (),
        second_context: Numbers = (),
    ) -> None:
        super().__init__(num_features, dim, num_dense)
        width = num_features * dim + num_dense
        second_hidden = hidden if second_hidden is None else second_hidden
        second_dropout = dropout if second_dropout is None else second_dropout
        self.first = MLP(width, hidden, dropout=dropout, batch_norm=batch_norm, activation=activation)
        self.second = MLP(width, second_hidden, dropout=second_dropout, batch_norm=batch_norm, activation=activation)
        self.fusion = BilinearFusion(self.first.num_out, self.second.num_out, num_heads)
        self.gates = nn.ModuleList(
            FeatureGate(num_features, dim, width, hidden=gate_hidden, context=features)
            for features in ((context, second_context) if gating else ())
        )

    def logits(self, vectors: Tensor, dense: Tensor) -> Tensor:
        first = second = join(vectors, dense)
        if self.gates:
            first, second = first * self.gates[0](vectors), second * self.gates[1](vectors)
        return self.fusion(self.first(first), self.second(second))


class FeatureGate(nn.Module):
    """2 sigmoid(MLP(context)): one factor per input column, [B, width], or [width] when the context is learned."""

    __call__: Callable[..., Tensor]
    learned: nn.Parameter | None

    def __init__(self, num_features: int, dim: int, width: int, *, hidden: Widths, context: Numbers) -> None:
        super().__init__()
        wrong = [number for number in context if number >= num_features]
        if wrong:
            raise ConfigError(f"FinalMLP: context names features {wrong}; there are {num_features}, counted from 0.")
        self.context = list(context)
        self.mlp = MLP(max(1, len(context)) * dim, hidden, width)
        learned = None if context else nn.Parameter(nn.init.normal_(torch.empty(dim), std=0.05))
        self.register_parameter("learned", learned)

    def forward(self, vectors: Tensor) -> Tensor:
        context = vectors[:, self.context].flatten(1) if self.learned is None else self.learned
        return 2.0 * self.mlp(context).sigmoid()


class BilinearFusion(nn.Module):
    """<w_a, a> + <w_b, b> + c + sum_h a_h^T W_h b_h: [B, H1], [B, H2] -> [B]."""

    __call__: Callable[..., Tensor]

    def __init__(self, width_a: int, width_b: int, num_heads: int) -> None:
        super().__init__()
        if width_a % num_heads or width_b % num_heads:
            raise ConfigError(
                f"FinalMLP: num_heads {num_heads} must divide the last hidden width of both streams, {width_a} and "
                f"{width_b}."
            )
        self.linear_a = linear(width_a, 1)
        self.linear_b = linear(width_b, 1, bias=False)
        shape = (num_heads, width_a // num_heads, width_b // num_heads)
        std = (2.0 / (shape[1] + shape[2])) ** 0.5
        self.weight = nn.Parameter(nn.init.normal_(torch.empty(shape), std=std))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        heads, width_a, width_b = self.weight.shape
        a_heads = a.view(-1, heads, width_a).transpose(0, 1)  # [heads, B, H1 / heads]
        b_heads = b.view(-1, heads, width_b).transpose(0, 1)
        bilinear = (torch.bmm(a_heads, self.weight) * b_heads).sum(dim=(0, 2))
        linear_part: Tensor = self.linear_a(a) + self.linear_b(b)
        return linear_part.squeeze(1) + bilinear
