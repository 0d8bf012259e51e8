"""A weighted mean over ranks on its way: flat tensors of this rank in, the mean of all ranks out, by one collective.

Every rank sends w x, w, and its step number and the square of it. The sums give the mean, sum(w x) / sum(w), and show on every
rank alike whether all ranks sent the same step: their step numbers are equal exactly if W sum(s^2) = sum(s)^2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.errors import RankError
from hotbed.optim.kstep.ranks import Ranks

_NUM_EXTRA = 3
_STEP_CYCLE = 61  # step numbers travel modulo this: their squares stay exact in float32, also over thousands of ranks


class Cargo(NamedTuple):
    """What one rank puts into a mean."""

    parts: Sequence[Tensor]  # flat
    weight: float
    step: int


class Flight:
    """Started when built; it runs beside what follows when `overlap`, and is over otherwise."""

    def __init__(self, cargo: Cargo, ranks: Ranks, *, overlap: bool) -> None:
        self._size, self._step = ranks.size, cargo.step
        number = cargo.step % _STEP_CYCLE
        self._wire = torch.cat([*cargo.parts, cargo.parts[0].new_tensor([cargo.weight, number, number * number])])
        self._wire[:-_NUM_EXTRA].mul_(cargo.weight)
        self._waiting = ranks.start_sum(self._wire) if overlap else None
        if not overlap:
            ranks.sum_(self._wire)

    def mean(self) -> Tensor | None:
        """The mean of all parts, one after the other; None when no rank had any weight. To be asked for once."""
        if self._waiting is not None:
            self._waiting.wait()
        weight, numbers, squares = self._wire[-_NUM_EXTRA:].tolist()
        if self._size * squares != numbers * numbers:
            raise RankError(
                f"ranks meet in a merge after different numbers of steps (this one after {self._step}): all ranks need the "
                "same k, and call step() and merge() equally often; a rank without samples calls step(weight=0)"
            )
        return self._wire[:-_NUM_EXTRA].div_(weight) if weight > 0 else None
