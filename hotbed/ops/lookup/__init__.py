"""Slots to pooled vectors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hotbed.host.pool import in_parallel, threads_for
from hotbed.ops.backend import backend_of
from hotbed.ops.blocks import empty_block
from hotbed.ops.lookup import reference
from hotbed.ops.lookups import Lookups
from hotbed.ops.precision import BF16, FP16

__all__ = ["lookup"]


def lookup(numbers: Tensor, lookups: Lookups, dim: int) -> Tensor:
    """Pooled vectors [O, D] of the lookups, at least float32; rows of absent bags and padding are zero.

    numbers is layout.numbers(records): its first D columns are the weights.
    """
    backend = backend_of(numbers)
    if backend == "reference":
        return reference.lookup(numbers, lookups, dim)
    if backend == "triton":
        from hotbed.ops.lookup import triton

        return triton.lookup(numbers, lookups, dim)
    from hotbed.ops.lookup import numba

    out = empty_block(lookups.num_out, dim, reference.result_type(numbers), numbers.device)
    kind = FP16 if numbers.dtype == torch.float16 else BF16  # of weights of 16 bits
    array = numbers.view(torch.int16).numpy().view(np.uint16) if numbers.itemsize == 2 else numbers.numpy()
    slots = lookups.slots.numpy()
    threads = threads_for(lookups.slots.numel() * dim)
    if lookups.bags is None:
        in_parallel(numba.lookup_single, array, kind, slots, out.numpy(), threads=threads)
    else:
        scale = out.new_empty(0) if lookups.bags.scale is None else lookups.bags.scale
        in_parallel(
            numba.lookup_bags,
            array,
            kind,
            slots,
            scale.numpy(),
            lookups.bags.starts.numpy(),
            lookups.bags.out_rows.numpy(),
            out.numpy(),
            threads=threads,
        )
    return out
