"""What every model is: pooled vectors and dense features in, one logit per sample out.

A model knows nothing of tables, devices or caches; it says how wide the vectors must be, and that is the whole seam. A
model with first-order id weights asks for one column more and reads the weight there, so that one record carries both.

Shapes: B samples, F id features, W vector width (what the tables hold), D = dim, N dense features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from hotbed.errors import ConfigError, ShapeError


class Model(nn.Module):
    """Base of all models: checks the shapes once, then asks the model for `logits`."""

    __call__: Callable[..., Tensor]

    def __init__(self, num_features: int, dim: int, num_dense: int) -> None:
        super().__init__()
        for name, value, low in (("num_features", num_features, 1), ("dim", dim, 1), ("num_dense", num_dense, 0)):
            if value < low:
                raise ConfigError(f"{type(self).__name__}: {name} is {value}; it must be at least {low}.")
        self.num_features = num_features
        self.dim = dim
        self.num_dense = num_dense

    @staticmethod
    @abstractmethod
    def vector_width(dim: int) -> int:
        """W, the width of the table rows that a model of this dim reads."""

    @abstractmethod
    def logits(self, vectors: Tensor, dense: Tensor) -> Tensor:
        """The score before the sigmoid, [B]."""

    def forward(self, vectors: Tensor, dense: Tensor) -> Tensor:
        """Logits [B] from pooled vectors [B, F, W] and dense features [B, N]."""
        width = self.vector_width(self.dim)
        if vectors.dim() != 3 or vectors.shape[1:] != (self.num_features, width):
            raise ShapeError(
                f"{type(self).__name__} got vectors of shape {tuple(vectors.shape)}; with {self.num_features} features "
                f"and dim {self.dim} it reads [B, {self.num_features}, {width}]."
            )
        if dense.shape != (vectors.shape[0], self.num_dense):
            raise ShapeError(
                f"{type(self).__name__} got dense features of shape {tuple(dense.shape)}; in addition to these vectors it "
                f"reads [{vectors.shape[0]}, {self.num_dense}]."
            )
        return self.logits(vectors, dense)
