"""Initial values of rows: a pure function of (seed, table, id), the same on every device, order and world size."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from hotbed.host.pool import in_parallel
from hotbed.ops.backend import backend_of
from hotbed.ops.init_rows import reference
from hotbed.ops.init_rows.distributions import Constant, Init, Normal, Uniform, parse_init, scale_of

__all__ = ["Constant", "Init", "Normal", "Uniform", "init_rows", "parse_init", "scale_of", "stream_of"]


def stream_of(seed: int, table: str) -> int:
    """The 64-bit number that (seed, table name) stands for."""
    digest = hashlib.blake2b(f"{seed}\0{table}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def init_rows(out: Tensor, ids: Tensor, stream: int, init: Init) -> None:
    """Write the initial values of `ids` [U] into `out` [U, D]."""
    backend = backend_of(out)
    if backend == "triton" and out.dtype == torch.float32 and out.is_contiguous():
        from hotbed.ops.init_rows import triton

        triton.init_rows(out, ids, stream, init)
    elif backend != "numba" or isinstance(init, Constant):
        reference.init_rows(out, ids, stream, init)
    else:
        from hotbed.ops.init_rows import numba

        array = out.numpy()
        scale = array.dtype.type(scale_of(init))
        in_parallel(numba.fill, array, ids.numpy(), np.uint64(stream), isinstance(init, Normal), scale)
