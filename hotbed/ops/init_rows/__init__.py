"""First values of rows: a pure function of (seed, table, id), the same on every device, order and world size."""

from __future__ import annotations

import hashlib

import numpy as np
from torch import Tensor

from hotbed.ops.init_rows import reference
from hotbed.ops.init_rows.distributions import Constant, Init, Normal, Uniform, parse_init
from hotbed.ops.threads import in_parallel

__all__ = ["Constant", "Init", "Normal", "Uniform", "init_rows", "parse_init", "stream_of"]


def stream_of(seed: int, table: str) -> int:
    """The 64-bit number that (seed, table name) stands for."""
    digest = hashlib.blake2b(f"{seed}\0{table}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def init_rows(out: Tensor, ids: Tensor, stream: int, init: Init) -> None:
    """Write the first values of `ids` [U] into `out` [U, D]."""
    if out.device.type != "cpu" or isinstance(init, Constant):
        reference.init_rows(out, ids, stream, init)
        return
    from hotbed.ops.init_rows import numba

    array = out.numpy()
    scale = init.bound / (1 << 24) if isinstance(init, Uniform) else init.std / Normal.UNIT
    normal = isinstance(init, Normal)
    in_parallel(numba.fill, array, ids.numpy(), np.uint64(stream), normal, array.dtype.type(scale))
