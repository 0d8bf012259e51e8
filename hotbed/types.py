"""The arrows between rooms: what the loader hands to the trainer, the trainer to the tables, the tables to the model.

Shapes: B samples of a batch, F id features, N dense features, L values of all bags of one feature, D vector width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Jagged(NamedTuple):
    """The bags of one feature: sample b owns values[offsets[b]:offsets[b + 1]].

    sample   0        1    2
    values   [7 3 3]  []   [5]      ->  values  [7, 3, 3, 5]
                                        offsets [0, 3, 3, 4]
    """

    values: Tensor  # int64 [L]
    offsets: Tensor  # int64 [B + 1], starts at 0, never falls, ends at L
    weights: Tensor | None = None  # float32 [L]


@dataclass(frozen=True)
class Batch:
    """Samples as the loader yields them. `ids` holds the single-valued features in schema order, `bags` the others."""

    labels: Tensor  # float32 [B], 0 or 1
    dense: Tensor  # float32 [B, N]
    ids: Tensor  # int64 [B, F]
    bags: dict[str, Jagged] = field(default_factory=dict)
    targets: Tensor | None = None  # float32 [B, K], the labels of further tasks
    weights: Tensor | None = None  # float32 [B], how much each sample counts

    @property
    def size(self) -> int:
        """B, the number of samples."""
        return int(self.labels.shape[0])

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device (copies overlap compute when the source is pinned)."""
        if self.labels.device == torch.device(device):
            return self

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        bags = {
            name: Jagged(move(bag.values), move(bag.offsets), None if bag.weights is None else move(bag.weights))
            for name, bag in self.bags.items()
        }
        optional = (None if one is None else move(one) for one in (self.targets, self.weights))
        return Batch(move(self.labels), move(self.dense), move(self.ids), bags, *optional)
