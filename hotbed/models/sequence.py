"""Sequences: vectors of tables in, the padded block that a model reads out; and DIN, a model that attends over one.

The block [B, C, W] has one column for every pooled feature, in the order of the schema, then `length` columns for every
sequence: the vectors of its ids in order, and zeros after the last. `lengths` [B, S] says how many are real. One tensor carries
all vectors, so a step is recorded, scored and exported in the same way with and without sequences; the price is one copy.

Shapes: B samples, L ids of one sequence feature in all samples, T its greatest length, S sequence features, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.errors import ConfigError
from hotbed.models.base import Activation, Model, ModelSchema, Rate, Widths
from hotbed.models.layers import MLP
from hotbed.types import Jagged


class VectorSequence(NamedTuple):
    """The vectors of one sequence feature."""

    vectors: Tensor  # [B, T, D], zeros after the end of each sample
    lengths: Tensor  # int64 [B], 0 to T

    @property
    def mask(self) -> Tensor:
        """Bool [B, T]: true where there is a vector, false where there is padding."""
        places = torch.arange(self.vectors.shape[1], device=self.lengths.device)
        return places < self.lengths.unsqueeze(1)


class ModelBlock(NamedTuple):
    """All vectors of a batch, as a model reads them."""

    vectors: Tensor  # [B, C, W]
    lengths: Tensor | None  # int64 [B, S]; None where no feature is a sequence


def pad(vectors: Tensor, offsets: Tensor, length: int) -> VectorSequence:
    """Vectors [L, D] of a Jagged, as tables with pooling "none" give them, padded to [B, `length`, D].

    No sample may have more than `length` of them.
    """
    lengths = offsets.diff()
    size, num_values = lengths.shape[0], vectors.shape[0]
    shift = torch.arange(size, device=offsets.device) * length - offsets[:-1]
    rows = torch.arange(num_values, device=offsets.device)
    rows = rows + torch.repeat_interleave(shift, lengths, output_size=num_values)
    padded = vectors.new_zeros(size * length, vectors.shape[1]).index_copy(0, rows, vectors)
    return VectorSequence(padded.view(size, length, vectors.shape[1]), lengths)


def block_of(
    found: Tensor | Mapping[str, Tensor], sequences: Mapping[str, int], bags: Mapping[str, Jagged]
) -> ModelBlock:
    """The block of a batch from what its tables gave, a stack [B, F, W] or vectors by feature."""
    if isinstance(found, Tensor):
        return ModelBlock(found, None)
    parts = [vectors.unsqueeze(1) for name, vectors in found.items() if name not in sequences]
    padded = [pad(found[name], bags[name].offsets, length) for name, length in sequences.items()]
    block = torch.cat([*parts, *(one.vectors for one in padded)], dim=1)
    return ModelBlock(block, torch.stack([one.lengths for one in padded], dim=1) if padded else None)


def sequences_in(block: Tensor, sequences: Mapping[str, int], lengths: Tensor) -> dict[str, VectorSequence]:
    """The sequences of a block, by feature."""
    counts = [block.shape[1] - sum(sequences.values()), *sequences.values()]
    _, *parts = torch.split(block, counts, dim=1)
    return {name: VectorSequence(part, of_it) for name, part, of_it in zip(sequences, parts, lengths.unbind(1))}


class DIN(Model):
    """Attention of the target item over every history, and an MLP over all of it.

    For target v and history h_1, ..., h_n: u = sum_t a(v, h_t) h_t with a(v, h) = MLP([v, h, v * h, v - h]), one such MLP
    for every sequence feature; weights are not normalised, so a longer interest is a stronger one (`softmax` normalises them).
    m is the mean of the history. logit = MLP([v_1, ..., v_F, u_1, ..., m_1, ..., u_1 * v, ..., m_1 * v, ..., dense]); the
    authors' own code reads the pooled history and its product with the target, too. Let target and history read one table
    (`hotbed prepare --share history=item`): the products compare vectors of the same items.

    Reference: Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD 2018, arXiv 1706.06978
    Parameters: S * mlp(4 * D, attention, 1) + mlp((F + 4 * S) * D + N, hidden, 1)
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
        width = (num_features + 4 * len(schema.sequences)) * dim + num_dense
        self.mlp = MLP(width, hidden, 1, dropout=dropout, batch_norm=batch_norm, activation=activation)

    def logits(self, vectors: Tensor, dense: Tensor, lengths: Tensor) -> Tensor:
        target = vectors[:, self.place]
        histories = list(sequences_in(vectors, self.sequences, lengths).values())
        interests = [self._interest(target, one, net) for one, net in zip(histories, self.attention)]
        means = [one.vectors.sum(1) / one.lengths.clamp(min=1).unsqueeze(1) for one in histories]
        crossed = [one * target for one in (*interests, *means)]
        pooled = vectors[:, : self.num_features].flatten(1)
        return self.mlp(torch.cat([pooled, *interests, *means, *crossed, dense], dim=1)).squeeze(1)

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
