"""Gradients that wait for a step in, clipped together with those of dense weights by their common norm.

The norm is that of the gradients of rows, as the row optimizer would get them: the gradient of a row is the sum over its
lookups in all waiting batches, not the gradients of vectors. It is summed in float64; every waiting batch is walked once, on
its device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hotbed.tables.accumulation import Part, bag_of
from hotbed.tables.inputs import Feature
from hotbed.tables.spec import Table

_TINY = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds


def clip_together(
    parts: Sequence[Part],
    features: Sequence[Feature],
    tables: Mapping[str, Table],
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
) -> Tensor:
    """Scale all gradients by one factor, at most 1; returns the norm before."""
    several = [parameters] if isinstance(parameters, Tensor) else parameters
    dense = [one.grad for one in several if one.grad is not None]
    leaves = [leaf.grad for part in parts for leaf in part.leaves.values() if leaf.grad is not None]
    squares = [one.double().square().sum() for one in dense]
    squares += [rows.square().sum() for rows in row_gradients(parts, features, tables)]
    if not squares:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    norm = torch.stack([one.to(squares[0].device) for one in squares]).sum().sqrt()
    factor = (max_norm / (norm + _TINY)).clamp(max=1.0)
    for grad in (*dense, *leaves):
        grad.mul_(factor.to(grad))
    return norm


def row_gradients(parts: Sequence[Part], features: Sequence[Feature], tables: Mapping[str, Table]) -> Iterator[Tensor]:
    """For every table that learns, the gradients [distinct ids, D] of its rows, float64."""
    by_table: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for part in parts:
        for feature, grad in zip(features, _by_feature(part, features, tables)):
            if grad is not None and not tables[feature.table].frozen:
                by_table.setdefault(feature.table, []).append(_lookups(part, feature, tables[feature.table], grad))
    for found in by_table.values():
        ids, grads = torch.cat([one for one, _ in found]), torch.cat([grad for _, grad in found])
        distinct, place = torch.unique(ids, return_inverse=True)
        yield grads.new_zeros(len(distinct), grads.shape[1]).index_add(0, place, grads)


def _by_feature(part: Part, features: Sequence[Feature], tables: Mapping[str, Table]) -> Sequence[Tensor | None]:
    """The gradient of the vectors of each feature, from those of the leaves."""
    if "" not in part.leaves:
        return [part.leaves[feature.name].grad for feature in features]
    grad = part.leaves[""].grad
    if grad is None:
        return [None] * len(features)
    if grad.ndim == 3:
        return grad.unbind(1)
    return torch.split(grad, [tables[feature.table].dim for feature in features], dim=1)


def _lookups(part: Part, feature: Feature, table: Table, grad: Tensor) -> tuple[Tensor, Tensor]:
    """(row id, gradient) of every lookup of one feature; padding left out."""
    bag = bag_of(part.given, feature.name)
    real = torch.ones_like(bag.values, dtype=torch.bool) if table.padding_id is None else bag.values != table.padding_id
    ids = bag.values % table.rows if table.hashing and table.rows else bag.values
    wide = grad.double()
    if feature.pooling == "none":
        each = wide.reshape(len(ids), table.dim)
    else:
        sample = torch.repeat_interleave(torch.arange(len(bag.offsets) - 1, device=ids.device), bag.offsets.diff())
        each = wide[sample]
        if feature.pooling == "mean":
            counts = torch.zeros(len(wide), dtype=wide.dtype, device=ids.device).index_add(
                0, sample, real.to(wide.dtype)
            )
            each = each / counts.clamp(min=1)[sample].unsqueeze(1)
        if bag.weights is not None:
            each = each * bag.weights.double().unsqueeze(1)
    return ids[real], each[real]
