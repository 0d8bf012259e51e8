"""A model of several tasks: shared experts, a gate and a tower for each task."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from hotbed.models.base import Activation, Count, Model, ModelSchema, Rate, Widths
from hotbed.models.layers import MLP, join, linear


class MMoE(Model):
    """Experts that all tasks share, mixed by a gate of each task.

    x = [v_1, ..., v_F, dense]; for task t: f_t = sum_e softmax(G_t x)_e MLP_e(x), logit_t = MLP_t(f_t). Returns [B, T], the
    label first; with no further label (`hotbed prepare --task`) it is one task, [B].

    Reference: Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts, KDD 2018
    Parameters: E * mlp(X, experts) + T * ((X + 1) * E + mlp(last(X, experts), hidden, 1))
    """

    def __init__(
        self,
        num_features: int,
        dim: int,
        num_dense: int,
        schema: ModelSchema,
        *,
        num_experts: Count = 4,
        experts: Widths = (64,),
        hidden: Widths = (32,),
        dropout: Rate = 0.0,
        batch_norm: bool = False,
        activation: Activation = "relu",
    ) -> None:
        super().__init__(num_features, dim, num_dense)
        width, tasks = num_features * dim + num_dense, schema.tasks or ("label",)
        mlp = partial(MLP, dropout=dropout, batch_norm=batch_norm, activation=activation)
        self.experts = nn.ModuleList(mlp(width, experts) for _ in range(num_experts))
        mixed = experts[-1] if experts else width
        self.gates = nn.ModuleList(linear(width, num_experts) for _ in tasks)
        self.towers = nn.ModuleList(mlp(mixed, hidden, 1) for _ in tasks)

    def logits(self, vectors: Tensor, dense: Tensor) -> Tensor:
        x = join(vectors, dense)
        found = torch.stack([expert(x) for expert in self.experts], dim=1)  # [B, E, H]
        outputs = []
        for gate, tower in zip(self.gates, self.towers):
            shares = torch.softmax(gate(x), dim=1).unsqueeze(1)  # [B, 1, E]
            outputs.append(tower(torch.bmm(shares, found).squeeze(1)))
        return outputs[0].squeeze(1) if len(outputs) == 1 else torch.cat(outputs, dim=1)
