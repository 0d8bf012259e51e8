"""AutoInt+: self-attention decides which features interact, next to an MLP and a linear term."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotbed.errors import ConfigError
from hotbed.models.base import Activation, Count, Model, Rate, Widths
from hotbed.models.layers import MLP, LinearTerm, join, linear, split_first_order


class AutoInt(Model):
    """Multi-head self-attention over the features, with the deep branch and the linear term of AutoInt+.

    Each of `num_layers` layers maps the features' vectors E to relu(attention(E) + E W_res), where every head attends
    with softmax(Q K^T) V (divided by the root of the head's width with `scale`) and the heads side by side are
    `attention_dim` wide; `layer_norm` normalises before the relu. logit = <w, flatten(E_L)> + b + sum_f w_f +
    <u, dense> + MLP([v_1, ..., v_F, dense]). A dense feature x_n enters the attention as x_n e_n with a learned vector
    e_n.

    Reference: Song et al., AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural Networks,
        CIKM 2019, arXiv 1810.11921
    Parameters: 1 + N + N * D + 4 * attention_dim * (D + attention_dim * (num_layers - 1)) + (F + N) * attention_dim
        + mlp(X, hidden, 1) + (2 * attention_dim * num_layers if layer_norm else 0)
    """

    dense_vectors: nn.Parameter | None

    def __init__(
        self,
        num_features: int,
        dim: int,
        num_dense: int,
        *,
        num_layers: Count = 2,
        num_heads: Count = 2,
        attention_dim: Count = 32,
        scale: bool = False,
        layer_norm: bool = False,
        hidden: Widths = (128, 64),
        dropout: Rate = 0.0,
        batch_norm: bool = False,
        activation: Activation = "relu",
    ) -> None:
        super().__init__(num_features, dim, num_dense)
        self.linear = LinearTerm(num_dense)
        self.mlp = MLP(
            num_features * dim + num_dense, hidden, 1, dropout=dropout, batch_norm=batch_norm, activation=activation
        )
        dense_vectors = nn.Parameter(nn.init.normal_(torch.empty(num_dense, dim), std=0.05)) if num_dense else None
        self.register_parameter("dense_vectors", dense_vectors)
        widths = [dim] + [attention_dim] * (num_layers - 1)
        self.attention = nn.Sequential(
            *(
                SelfAttention(width, attention_dim, num_heads=num_heads, scale=scale, layer_norm=layer_norm)
                for width in widths
            )
        )
        self.out = linear((num_features + num_dense) * attention_dim, 1, bias=False)

    @staticmethod
    def vector_width(dim: int) -> int:
        return dim + 1

    def logits(self, vectors: Tensor, dense: Tensor) -> Tensor:
        embeddings, weights = split_first_order(vectors)
        fields = embeddings
        if self.dense_vectors is not None:
            fields = torch.cat([embeddings, dense.unsqueeze(2) * self.dense_vectors], dim=1)
        attended: Tensor = self.out(self.attention(fields).flatten(1))
        deep = self.mlp(join(embeddings, dense))
        return self.linear(weights, dense) + (attended + deep).squeeze(1)


class SelfAttention(nn.Module):
    """[B, M, width] -> [B, M, attention_dim]: every field becomes a mixture of all fields, plus itself."""

    def __init__(self, width: int, attention_dim: int, *, num_heads: int, scale: bool, layer_norm: bool) -> None:
        super().__init__()
        if attention_dim % num_heads:
            raise ConfigError(
                f"AutoInt: attention_dim {attention_dim} cannot be shared by num_heads {num_heads}; "
                f"make it a multiple, such as {num_heads * max(1, attention_dim // num_heads)}."
            )
        self.num_heads = num_heads
        self.head_width = attention_dim // num_heads
        self.scale = self.head_width**-0.5 if scale else 1.0
        self.norm = nn.LayerNorm(attention_dim) if layer_norm else nn.Identity()
        projections = [linear(width, attention_dim, bias=False).weight for _ in range(4)]
        self.weight = nn.Parameter(torch.stack([weight.detach() for weight in projections]))

    def forward(self, fields: Tensor) -> Tensor:
        B, M, _ = fields.shape
        # four products: one wide product is cheaper alone, but its strided slices make everything after it twice as slow
        query, key, value, residual = (
            F.linear(fields, weight).view(B, M, self.num_heads, self.head_width).transpose(1, 2)
            for weight in self.weight
        )
        scores = torch.matmul(query * self.scale, key.transpose(2, 3)).softmax(dim=3)
        attended = torch.matmul(scores, value) + residual
        return F.relu(self.norm(attended.transpose(1, 2).flatten(2)))
