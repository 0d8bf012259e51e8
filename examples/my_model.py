"""A model of your own, in every command.

    hotbed train --model examples/my_model.py:CrossAttention --out runs/mine
    hotbed evaluate runs/mine
    hotbed serve runs/mine

It is told which features there are, reads their vectors by name, and returns one logit per sample. Options of the
constructor are set with --set model.options.heads=4.
"""

import torch
from torch import nn

from hotbed.models import ModelInputs, ModelSchema


class CrossAttention(nn.Module):
    """Vectors attend to each other; a gate made of the numbers weighs them."""

    def __init__(self, schema: ModelSchema, *, heads: int = 2, hidden: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        num_features, num_dense = len(schema.features), len(schema.dense)
        self.features = schema.features
        self.attention = nn.MultiheadAttention(schema.dim, heads, dropout=dropout, batch_first=True)
        self.gate = nn.Linear(num_dense, num_features) if num_dense else None
        self.head = nn.Sequential(
            nn.Linear(num_features * schema.dim + num_dense, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, 1),
        )

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        vectors = torch.stack([inputs.vectors[name] for name in self.features], dim=1)  # [B, F, D]
        attended, _ = self.attention(vectors, vectors, vectors, need_weights=False)
        if self.gate is not None:
            attended = attended * torch.sigmoid(self.gate(inputs.dense)).unsqueeze(2)
        return self.head(torch.cat([(vectors + attended).flatten(1), inputs.dense], dim=1)).squeeze(1)
