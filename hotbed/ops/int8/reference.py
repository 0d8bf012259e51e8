"""Packing in plain numpy, an array operation for each step of the definition."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.host.splitmix import GOLDEN, mixed
from hotbed.ops.int8 import LEAST, MOST, SURE, packed_width, weight_words
from hotbed.ops.records import Layout

_U64 = np.uint64


def pack(records: Tensor, keys: Tensor, layout: Layout) -> Tensor:
    """Records [U, W] of `keys` [U] -> packed records [U, P]."""
    weights = records[:, : layout.dim].numpy()
    q, scale = _quantised(weights, _random(records[:, : layout.used].numpy(), keys.numpy(), layout.dim))
    packed = np.zeros((len(weights), packed_width(layout)), np.float32)
    words = weight_words(layout)
    packed.view(np.int8)[:, : layout.dim] = q
    packed[:, words] = scale
    packed[:, words + 1 :] = records[:, layout.weight_columns : layout.used].numpy()
    return torch.from_numpy(packed)


def unpack(packed: Tensor, layout: Layout, out: Tensor) -> None:
    """Packed records [U, P] -> `out` [U, W]."""
    found, words = packed.numpy(), weight_words(layout)
    out.zero_()
    q = found.view(np.int8)[:, : layout.dim].astype(np.float32)
    out[:, : layout.dim] = torch.from_numpy(q * found[:, words, None])
    out[:, layout.weight_columns : layout.used] = torch.from_numpy(found[:, words + 1 :])


def _quantised(
    weights: NDArray[np.float32], random: NDArray[np.uint32]
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    largest = np.abs(weights).max(1, initial=0)  # nan if one is
    bits = (largest / np.float32(127)).view(np.uint32)
    scale = ((bits + np.uint32(0x7F)) & np.uint32(0xFFFFFF80)).view(np.float32)
    scale = np.where(largest < LEAST, np.float32(0), scale)
    scale = np.where(largest < MOST, scale, np.float32(np.nan))
    usable = (scale > 0)[:, None]
    size = np.where(usable, np.abs(weights) / np.where(usable, scale[:, None], np.float32(1)), np.float32(0))
    below = np.floor(size)
    up = (random >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24) < size - below
    q = np.where(size >= np.float32(SURE), np.float32(127), below + up)
    return np.where(np.signbit(weights), -q, q).astype(np.int8), scale


def _random(records: NDArray[np.float32], keys: NDArray[np.int64], dim: int) -> NDArray[np.uint32]:
    """32 bits for every weight, of the key, the record and the place."""
    with np.errstate(over="ignore"):
        row = mixed(keys.astype(_U64) + GOLDEN)
        for column in np.ascontiguousarray(records).view(np.uint32).T:
            row = (row ^ column) * _U64(0x100000001B3)
        row = mixed(row)[:, None]
        places = np.arange(1, dim + 1, dtype=_U64) * GOLDEN
        return (mixed(row + places) >> _U64(32)).astype(np.uint32)
