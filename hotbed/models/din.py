"""A model that reads a history: attention of a candidate over the vectors of a sequence.

Models of this kind are told the names of their features: `target` names the candidate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.errors import ConfigError
from hotbed.models.base import Activation, Model, ModelSchema, Rate, Widths
from hotbed.models.layers import MLP
from hotbed.models.sequence import VectorSequence, sequences_in


class DIN(Model):
    """Attention of the target item over every history, and an MLP over all of it.

    For target v and history h_1, ..., h_n: u = sum_t a(v, h_t) h_t with a(v, h) = MLP([v, h, v * h, v - h]), one such MLP
    for every sequence feature; weights are not normalised, so a longer interest is a stronger one (`softmax` normalises them).
    logit = MLP([v_1, ..., v_F, u_1, ..., u_S, u_1 * v, ..., u_S * v, dense]).

    Reference: Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD 2018, arXiv 1706.06978
    Parameters: S * mlp(4 * D, attention, 1) + mlp((F + 2 * S) * D + N, hidden, 1)
    """

    reads_sequences = True

    def __init__(
        self,
        num_features: int,
        dim: int,
        num_dense: int,
        schema: ModelSchema,
        *,
        target: str = "",
        attention: Widths = (32,),
        softmax: bool = False,
        hidden: Widths = (128, 64),
        dropout: Rate = 0.0,
        batch_norm: bool = False,
        activation: Activation = "relu",
    ) -> None:
        super().__init__(num_features, dim, num_dense, sequences=schema.sequences)
        self.place = _place_of(target, schema)
        self.softmax = softmax
        self.attention = torch.nn.ModuleList(
            MLP(4 * dim, attention, 1, activation=activation) for _ in schema.sequences
        )
        width = (num_features + 2 * len(schema.sequences)) * dim + num_dense
        self.mlp = MLP(width, hidden, 1, dropout=dropout, batch_norm=batch_norm, activation=activation)

    def logits(self, vectors: Tensor, dense: Tensor, lengths: Tensor) -> Tensor:
        target = vectors[:, self.place]
        histories = sequences_in(vectors, self.sequences, lengths).values()
        interests = [self._interest(target, one, net) for one, net in zip(histories, self.attention)]
        crossed = [one * target for one in interests]
        pooled = vectors[:, : self.num_features].flatten(1)
        return self.mlp(torch.cat([pooled, *interests, *crossed, dense], dim=1)).squeeze(1)

    def _interest(self, target: Tensor, history: VectorSequence, net: torch.nn.Module) -> Tensor:
        """The history as the target sees it, [B, D]."""
        keys, mask = history.vectors, history.mask
        query = target.unsqueeze(1).expand_as(keys)
        weights: Tensor = net(torch.cat([query, keys, query * keys, query - keys], dim=2)).squeeze(2)  # [B, T]
        if self.softmax:
            weights = torch.softmax(weights.masked_fill(~mask, -1e9), dim=1)
        weights = weights * mask.to(weights.dtype)
        return torch.bmm(weights.unsqueeze(1), keys).squeeze(1)


def _place_of(target: str, schema: ModelSchema) -> int:
    """Which feature attends; where it is not named, the one whose name is a part of that of a sequence (item, item_history)."""
    if not schema.sequences:
        raise ConfigError(
            "din attends over sequences, and the data has none. `hotbed prepare --sequence 'history:|:50'` makes one of a "
            "column of ids in order."
        )
    likely = [name for name in schema.features if any(name in one for one in schema.sequences)]
    name = target or (likely[0] if likely else "")
    if name not in schema.features:
        raise ConfigError(
            f"din needs the feature that attends over {', '.join(schema.sequences)}: --set model.options.target=..., one of "
            f"{', '.join(schema.features)}" + (f", not {target!r}." if target else ".")
        )
    return schema.features.index(name)
