"""Learning-rate schedules: the number of an update (from 0) in, a learning rate out. Stateless, so resume is exact."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hotbed.errors import ConfigError


@runtime_checkable
class Schedule(Protocol):
    """Anything with `at(step) -> learning rate`."""

    def at(self, step: int) -> float: ...


@dataclass(frozen=True)
class Fixed:
    """The same rate at every step."""

    lr: float

    def at(self, step: int) -> float:
        return self.lr


@dataclass(frozen=True)
class Warmup:
    """A straight line from lr / warmup to lr over `warmup` steps, then constant."""

    lr: float
    warmup: int

    def at(self, step: int) -> float:
        return self.lr * min(1.0, (step + 1) / max(1, self.warmup))


@dataclass(frozen=True)
class Cosine:
    """Warm-up, then half a cosine down to `final` at step `steps`, then constant."""

    lr: float
    steps: int
    warmup: int = 0
    final: float = 0.0

    def at(self, step: int) -> float:
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        share = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.final + 0.5 * (self.lr - self.final) * (1.0 + math.cos(math.pi * share))


@dataclass(frozen=True)
class Decay:
    """lr * factor ** (step // every)."""

    lr: float
    every: int
    factor: float = 0.1

    def at(self, step: int) -> float:
        return float(self.lr * self.factor ** (step // self.every))


SCHEDULES: dict[str, type] = {"constant": Fixed, "warmup": Warmup, "cosine": Cosine, "decay": Decay}


def as_schedule(lr: float | Schedule) -> Schedule:
    """A number becomes a constant schedule."""
    if isinstance(lr, Schedule):
        return lr
    if isinstance(lr, bool) or not isinstance(lr, (int, float)):
        raise ConfigError(f"lr must be a number or a schedule with a method at(step), not {lr!r}")
    return Fixed(float(lr))


def as_factor(value: float) -> float:
    """What a learning rate may be multiplied by: NaN or less than 0 would ruin every row that a step touches."""
    try:
        factor = float(value)
    except (TypeError, ValueError):
        factor = math.nan
    if not 0 <= factor < math.inf:
        raise ConfigError(f"lr_factor must be a finite number, 0 or more, not {value!r}")
    return factor
