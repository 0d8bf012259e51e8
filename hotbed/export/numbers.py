"""Rows as float32 in, rows in the precision of an export out, each row by itself.

fp32    as they are
fp16    rounded to nearest: off by |w| / 2048 at most, or by 3e-8 where |w| < 6.2e-5; above 65,504 an error
int8    scale = max |w| / 127 of the row, weight = round(w / scale): off by scale / 2 = max |w| / 254 of the row at most,
        give or take a rounding of float32; rows without a number above 1.5e-36 become 0
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import RunError
from hotbed.run.export_format import Precision

Floats = NDArray[np.float32]
_MOST = 127
_LEAST = np.float32(np.finfo(np.float32).tiny * _MOST)  # below, a scale has not all of its bits


class Stored(NamedTuple):
    """Rows as an export holds them."""

    weight: NDArray[Any]  # [n, D]
    scale: Floats | None  # [n], of int8


def stored(rows: Floats, precision: Precision, table: str, ids: NDArray[np.int64]) -> Stored:
    """The rows [n, D] of these ids [n]; a RunError names the first that the precision cannot hold."""
    size = np.abs(rows).max(axis=1, initial=0.0)
    if not np.isfinite(size).all():
        at = int(np.flatnonzero(~np.isfinite(size))[0])
        raise RunError(
            f"table {table!r}: the row of id {ids[at]} holds {rows[at][~np.isfinite(rows[at])][0]}, which is no number to "
            "score with; the model has diverged in training. Export an earlier checkpoint."
        )
    if precision == "fp32":
        return Stored(rows, None)
    if precision == "fp16":
        half = rows.astype(np.float16) if size.max(initial=0.0) < 65520 else None  # from there on it rounds to infinity
        if half is None:
            at = int(np.argmax(size))
            raise RunError(
                f"table {table!r}: the row of id {ids[at]} holds a number of size {size[at]:g}, and fp16 ends at 65504. "
                "Export with --precision fp32, or int8, which has a scale for every row."
            )
        return Stored(half, None)
    scale = np.where(size < _LEAST, np.float32(0.0), size / np.float32(_MOST)).astype(np.float32)
    divisor = np.where(scale == 0, np.float32(np.inf), scale)
    return Stored(np.rint(rows / divisor[:, None]).clip(-_MOST, _MOST).astype(np.int8), scale)
