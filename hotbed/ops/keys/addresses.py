"""How the ids of each feature of a group become keys: base + id, checked, or base + id modulo rows where hashing was asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Addresses:
    """One entry per span."""

    base: NDArray[np.int64]
    rows: NDArray[np.int64]
    hashing: NDArray[np.bool_]
    has_padding: NDArray[np.bool_]
    padding: NDArray[np.int64]
    on_device: dict[Any, Any] = field(default_factory=dict)  # copies for kernels, by shape of batch

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        return self.base, self.rows, self.hashing, self.has_padding, self.padding
