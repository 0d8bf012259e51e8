"""How the ids of each feature of a group become keys: base + id, checked, or base + id modulo rows where hashing was asked."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Addresses(NamedTuple):
    """One entry per span."""

    base: NDArray[np.int64]
    rows: NDArray[np.int64]
    hashing: NDArray[np.bool_]
    has_padding: NDArray[np.bool_]
    padding: NDArray[np.int64]
