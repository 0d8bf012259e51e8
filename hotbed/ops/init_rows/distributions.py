"""What initial values look like. All are exact integer arithmetic and one rounded product, so devices agree bit for bit."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import ClassVar

from hotbed.errors import ConfigError


@dataclass(frozen=True)
class Uniform:
    """Uniform in (-bound, bound), on a grid of 2^24 values."""

    bound: float


@dataclass(frozen=True)
class Normal:
    """Nearly normal: the sum of eight uniform 16-bit integers, scaled to `std`; never beyond 4.9 deviations."""

    UNIT: ClassVar[float] = 2 * math.sqrt(8 * (65536**2 - 1) / 12)  # deviation of twice that sum

    std: float


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float = 0.0


Init = Uniform | Normal | Constant
UNIFORM, NORMAL, CONSTANT = 0, 1, 2  # inside kernels


def kind_of(init: Init) -> int:
    """The number of the distribution inside kernels."""
    return {Uniform: UNIFORM, Normal: NORMAL, Constant: CONSTANT}[type(init)]


def scale_of(init: Init) -> float:
    """What the whole number behind an element is multiplied by; of a Constant, its value."""
    if isinstance(init, Constant):
        return init.value
    return init.bound / (1 << 24) if isinstance(init, Uniform) else init.std / Normal.UNIT


def parse_init(text: str) -> Init:
    """`uniform(0.01)`, `normal(0.0001)` or `constant(0)`."""
    kinds: dict[str, type[Init]] = {"uniform": Uniform, "normal": Normal, "constant": Constant}
    found = re.fullmatch(r"\s*(\w+)\s*\(\s*([-+.\deE]+)\s*\)\s*", text)
    try:
        if found and found[1] in kinds:
            return kinds[found[1]](float(found[2]))
    except ValueError:
        pass
    raise ConfigError(f"init {text!r} is not one of uniform(bound), normal(std), constant(value), with a number")
