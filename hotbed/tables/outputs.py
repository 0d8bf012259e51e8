"""The output rows of one group, cut into features for `output="dict"`, and their gradients put together again.

The features share one block [O, D]: the pooled ones as [B, F, D], then the values of each sequence. Cutting copies nothing. A
slice of autograd's for each feature would give each a gradient as large as the block; here the gradients that come back are
joined once, and not even that where they lie side by side in memory already, as the backward of torch.cat and torch.stack
leaves them.

Shapes: B samples, F pooled features, O output rows, D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.ops.blocks import Scratch, empty_block
from hotbed.tables.inputs import BatchInputs, Feature


class FeatureSplit(NamedTuple):
    """Where the features of one group are in its output rows."""

    size: int  # B
    pooled: tuple[str, ...]
    sequences: dict[str, tuple[int, ...]]  # the shape of each without D: (L,) or (B, T)

    @property
    def names(self) -> tuple[str, ...]:
        """The features in the order of their parts."""
        return *self.pooled, *self.sequences

    def split(self, block: Tensor) -> tuple[Tensor, ...]:
        """The features' parts of a block [O, D]: views of it."""
        dim = block.shape[1]
        if not self.sequences:
            return block.view(self.size, len(self.pooled), dim).unbind(1)
        counts = [self.size * len(self.pooled), *map(math.prod, self.sequences.values())]
        rows, *others = torch.split(block, counts)
        parts = rows.view(self.size, len(self.pooled), dim).unbind(1) if self.pooled else ()
        return *parts, *(part.view(*shape, dim) for part, shape in zip(others, self.sequences.values()))

    def join(self, grads: Sequence[Tensor | None], scratch: Scratch | None = None) -> Tensor:
        """The gradient [O, D] of the block from those of its parts; a part without one counts as zero.

        `scratch` is for callers on the host who are done with the gradient before the next one comes.
        """
        side_by_side = None if self.sequences else _as_block(grads)
        if side_by_side is not None:
            return side_by_side
        given = next(grad for grad in grads if grad is not None)
        dim, num_pooled = given.shape[-1], len(self.pooled)
        counts = [self.size * num_pooled, *map(math.prod, self.sequences.values())]
        if len(grads) == 1:
            return given.reshape(counts[-1], dim)
        if scratch is not None:
            block = scratch.block(sum(counts), dim, given.dtype)
        else:
            block = empty_block(sum(counts), dim, given.dtype, given.device)
        rows, *others = torch.split(block, counts)
        if num_pooled:
            zero = given.new_zeros(()).expand(self.size, dim)
            pooled = [zero if grad is None else grad for grad in grads[:num_pooled]]
            torch.stack(pooled, dim=1, out=rows.view(self.size, num_pooled, dim))
        for part, grad in zip(others, grads[num_pooled:]):
            part.zero_() if grad is None else part.view_as(grad).copy_(grad)
        return block


def split_of(features: Sequence[Feature], given: BatchInputs) -> FeatureSplit:
    """How the output rows of one group's features are laid out for one batch."""
    pooled = tuple(feature.name for feature in features if feature.pooling != "none")
    sequences: dict[str, tuple[int, ...]] = {}
    for feature in features:
        name = feature.name
        if feature.pooling == "none":
            count = int(given.bags[name].values.shape[0]) if name in given.bags else given.size
            sequences[name] = given.shapes.get(name, (count,))
    return FeatureSplit(given.size, pooled, sequences)


def _as_block(grads: Sequence[Tensor | None]) -> Tensor | None:
    """The memory [B * F, D] in which gradients [B, D] of F features lie side by side; None where they do not."""
    first = grads[0]
    if first is None:
        return None
    size, dim = first.shape
    row, address, step = len(grads) * dim, first.data_ptr(), dim * first.element_size()
    strides = (first.stride(0) if size < 2 else row, first.stride(1) if dim < 2 else 1)  # of one row, any will do
    for grad in grads:
        if grad is None or grad.data_ptr() != address or grad.stride() != strides:
            return None
        address += step
    if (first.storage_offset() + size * row) * first.element_size() > first.untyped_storage().nbytes():
        return None  # neighbours by chance: memory of different tensors
    return first.as_strided((size * len(grads), dim), (dim, 1))
