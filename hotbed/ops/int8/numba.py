"""Packing, compiled: one pass over a row for its largest weight and its hash, one for the bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotbed.host.jit import njit
from hotbed.host.splitmix import GOLDEN, mix
from hotbed.ops.int8 import LEAST, MOST, SURE, packed_width, weight_words
from hotbed.ops.records import Layout

_ABS = np.uint32(0x7FFFFFFF)


def pack(records: Tensor, keys: Tensor, layout: Layout) -> Tensor:
    """Records [U, W] of `keys` [U] -> packed records [U, P]."""
    packed = torch.empty(records.shape[0], packed_width(layout), dtype=torch.float32, device="cpu")
    shape = layout.dim, weight_words(layout), layout.weight_columns, layout.used
    _pack(records.detach().numpy(), keys.numpy(), packed.numpy(), shape)
    return packed


def unpack(packed: Tensor, layout: Layout, out: Tensor) -> None:
    """Packed records [U, P] -> `out` [U, W]."""
    shape = layout.dim, weight_words(layout), layout.weight_columns, layout.used
    _unpack(packed.numpy(), out.numpy(), shape)


@njit(nogil=True, inline="always")
def _scale_of(largest: Any) -> Any:
    """max |w| / 127, rounded up to 17 bits; `largest` holds the bits of a number that is not negative."""
    value = np.uint32(largest).view(np.float32)
    if not value < np.float32(MOST):
        return np.float32(np.nan)
    if value < np.float32(LEAST):
        return np.float32(0)
    bits = np.uint32(np.float32(value / np.float32(127)).view(np.uint32) + np.uint32(0x7F))
    return np.uint32(bits & np.uint32(0xFFFFFF80)).view(np.float32)


@njit(nogil=True, cache=True, error_model="numpy")
def _pack(records: Any, keys: Any, packed: Any, shape: Any) -> None:
    dim, words, state, used = shape
    bits, numbers = records.view(np.uint32), packed.view(np.int8)
    for n in range(keys.shape[0]):
        row, largest = mix(np.uint64(keys[n]) + GOLDEN), np.uint32(0)
        for d in range(dim):
            largest = max(largest, np.uint32(bits[n, d] & _ABS))
        for column in range(used):
            row = np.uint64((row ^ np.uint64(bits[n, column])) * np.uint64(0x100000001B3))
        row, scale = mix(row), _scale_of(largest)
        for word in range(dim // 4, words):
            packed[n, word] = np.float32(0)
        for d in range(dim):
            if not scale > np.float32(0):
                numbers[n, d] = 0
                continue
            size = np.float32(np.uint32(bits[n, d] & _ABS).view(np.float32) / scale)
            below = np.floor(size)
            random = np.uint32(mix(np.uint64(row + np.uint64(d + 1) * GOLDEN)) >> np.uint64(40))
            up = np.float32(random) * np.float32(2.0**-24) < size - below
            q = np.float32(127) if size >= np.float32(SURE) else below + np.float32(up)
            numbers[n, d] = np.int8(-q if bits[n, d] > _ABS else q)
        packed[n, words] = scale
        for column in range(used - state):
            packed[n, words + 1 + column] = records[n, state + column]


@njit(nogil=True, cache=True)
def _unpack(packed: Any, out: Any, shape: Any) -> None:
    dim, words, state, used = shape
    numbers = packed.view(np.int8)
    for n in range(packed.shape[0]):
        for d in range(dim):
            out[n, d] = np.float32(numbers[n, d]) * packed[n, words]
        for column in range(used - state):
            out[n, state + column] = packed[n, words + 1 + column]
        for column in range(used, out.shape[1]):
            out[n, column] = np.float32(0)
