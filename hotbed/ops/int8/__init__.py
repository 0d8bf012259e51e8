"""Records with weights of int8 for rows below the device, an approximation: float32 records <-> packed records.

    [ weights (D bytes, filled up to whole words) | scale | state as it was ]        columns are words of float32

A weight is `scale * q`, -127 <= q <= 127, and `scale` is max |w| / 127 of its row. `q` is rounded at random: up with the
probability of the part that is cut off, so that steps smaller than `scale` count on average. The random bits are a hash of the
key and of the whole record, state included, so they depend on no clock, thread or order of writes. A row that gets the very
same record again is rounded as before; optimizers with state never make one twice. A packed record that was unpacked packs to
itself: the scale has 17 bits, so that every product with 7 bits is exact.

A row whose largest weight is below 2^-100 becomes zeros; one that has a number which is not finite, or
2^127 and more, reads as nan.
"""

from __future__ import annotations

from torch import Tensor

from hotbed.ops.records import Layout

SURE = 126.99  # from here on q is 127: the largest weight of a row must keep its scale
LEAST = 2.0**-100
MOST = 2.0**127  # 127 times a scale that was rounded up must not overflow


def packed_width(layout: Layout) -> int:
    """Words of a packed record."""
    return weight_words(layout) + 1 + layout.used - layout.weight_columns


def weight_words(layout: Layout) -> int:
    """Words that hold the weights of a packed record."""
    return -(-layout.dim // 4)


def pack(records: Tensor, keys: Tensor, layout: Layout) -> Tensor:
    """Records [U, W] of `keys` [U] -> packed records [U, P]."""
    from hotbed.ops.int8 import numba

    return numba.pack(records, keys, layout)


def unpack(packed: Tensor, layout: Layout, out: Tensor) -> None:
    """Packed records [U, P] -> `out` [U, W]."""
    from hotbed.ops.int8 import numba

    numba.unpack(packed, layout, out)
