"""Vectors of tables in, the block that a model reads out; sequences in it are padded to their greatest length.

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
