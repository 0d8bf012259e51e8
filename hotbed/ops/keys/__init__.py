"""Ids to keys: what names a row inside its group. An id outside its table is reported, never wrapped or clamped."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hotbed.host.pool import in_parallel, threads_for
from hotbed.ops.backend import backend_of
from hotbed.ops.keys import reference
from hotbed.ops.keys.addresses import Addresses, FirstBad
from hotbed.ops.lookups import Span, span_array

_VALUES = 8  # that are gone through in the time of one id

__all__ = ["Addresses", "FirstBad", "make_keys"]


def make_keys(ids: Tensor, spans: tuple[Span, ...], addresses: Addresses) -> tuple[Tensor, FirstBad]:
    """Keys [L] of ids [L] (-1 for padding), and the first position whose id lies outside its table.

    On CUDA keys are int32 where they fit, and nothing waits.
    """
    backend = backend_of(ids)
    if backend == "reference":
        return reference.make_keys(ids, spans, addresses)
    if backend == "triton":
        from hotbed.ops.keys import triton

        return triton.make_keys(ids, spans, addresses)
    from hotbed.ops.keys import numba

    keys = torch.empty_like(ids)
    first_bad = np.full(threads_for(_VALUES * ids.numel()), -1, dtype=np.int64)
    in_parallel(
        numba.make_keys,
        ids.numpy(),
        span_array(spans),
        *addresses.columns,
        keys.numpy(),
        first_bad,
        threads=first_bad.size,
    )
    found = first_bad[first_bad >= 0]
    return keys, FirstBad(int(found.min()) if found.size else None)
