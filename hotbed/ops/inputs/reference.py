"""The inputs of one group in plain tensors: what the kernels must give."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.ops.inputs import InputLayout


class SpanInputs(NamedTuple):
    """One feature of a batch."""

    values: Tensor  # int64 [L of the feature]
    offsets: Tensor  # int64 [B + 1]
    weights: Tensor | None = None  # float32 [L of the feature]


class BagArrays(NamedTuple):
    """Lookups of a batch; of bags also where each begins, and where its vector goes."""

    keys: Tensor  # [L]; -1 is padding of the user's
    starts: Tensor  # int64 [N + 1]
    out_row: Tensor  # int64 [L]
    scale: Tensor  # float32 [L]


def lay_out(layout: InputLayout, spans: list[SpanInputs]) -> BagArrays:
    """Ids that are in range, feature after feature; single ids sample after sample."""
    addresses, size = layout.addresses, int(spans[0].offsets.shape[0]) - 1
    keys, starts, out_rows, scales, position = [], [], [], [], 0
    for p, (values, offsets, weights) in enumerate(spans):
        rows, base = int(addresses.rows[p]), int(addresses.base[p])
        key = base + (values % rows if addresses.hashing[p] else values)
        if addresses.has_padding[p]:
            key = torch.where(values == int(addresses.padding[p]), -1, key)
        lengths = offsets.diff()
        scale = torch.ones(values.shape[0], dtype=torch.float32, device=values.device) if weights is None else weights
        if layout.is_bags and layout.is_mean[p]:
            counts = torch.stack([(key[a:b] >= 0).sum() for a, b in pairwise(offsets)]) if size else lengths
            scale = torch.repeat_interleave(1.0 / counts.clamp(min=1).to(torch.float32), lengths)
        column = layout.columns[p] if layout.is_bags else p
        keys.append(key)
        starts.append(offsets[:-1] + position)
        out_rows.append(
            torch.repeat_interleave(torch.arange(size, device=lengths.device) * len(spans) + column, lengths)
        )
        scales.append(scale)
        position += int(values.shape[0])
    if not layout.is_bags:
        keys = [torch.stack(keys, dim=1).reshape(-1)]
    end = torch.tensor([position], device=spans[0].offsets.device)
    return BagArrays(torch.cat(keys), torch.cat([*starts, end]), torch.cat(out_rows), torch.cat(scales))
