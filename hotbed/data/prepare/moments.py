"""Mean and standard deviation of numbers that come in pieces, merged in any grouping (Chan et al. 1979)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hotbed.data.schema import DenseColumn


class Moments:
    """`add` numbers or `merge` others, then `fit` a column."""

    def __init__(self, state: tuple[int, float, float] = (0, 0.0, 0.0)) -> None:
        self.state = state  # count, mean, sum of squared distances from it

    def add(self, values: NDArray[np.float64]) -> None:
        if len(values):
            mean = float(values.mean())
            self.merge((len(values), mean, float(((values - mean) ** 2).sum())))

    def merge(self, other: tuple[int, float, float]) -> None:
        """Add the numbers that another one has seen."""
        count, mean, squares = self.state
        other_count, other_mean, other_squares = other
        if other_count == 0:
            return
        total = count + other_count
        apart = other_mean - mean
        squares += other_squares + apart**2 * count * other_count / total
        self.state = (total, mean + apart * other_count / total, squares)

    def fit(self, spec: DenseColumn) -> DenseColumn:
        """`spec` with the mean and scale that make these numbers standard; constant columns keep scale 1."""
        count, mean, squares = self.state
        deviation = float(np.sqrt(squares / max(count, 1)))
        scale = deviation if deviation > 1e-9 * max(abs(mean), 1e-30) and np.isfinite(deviation) else 1.0
        return DenseColumn(spec.name, spec.transform, mean=mean, scale=scale)
