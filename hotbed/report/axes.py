"""Values -> an axis: which range to show, where the ticks stand, what they say, and where a value falls in pixels."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hotbed.report import formats

Unit = Literal["number", "share"]
STEPS = (1, 2, 2.5, 5, 10)
TINY = 1e-100  # closer than this, values are one value


@dataclass(frozen=True)
class Axis:
    """A range of values laid over a range of pixels."""

    low: float
    high: float
    first: float  # pixel of low
    last: float  # pixel of high
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """The pixel of a value."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        return self.first + (value - low) / (high - low) * (self.last - self.first)


def linear(
    values: Iterable[float],
    pixels: tuple[float, float],
    *,
    unit: Unit = "number",
    zero: bool = False,
    snug: bool = False,
    ticks: int = 5,
) -> Axis:
    """An axis with round ticks. `zero` starts it there; `snug` ends it at the last value and not at the next tick."""
    known = [*values, *([0.0] if zero else [])] or [0.0, 1.0]
    low, high = min(known), max(known)
    largest = max(abs(low), abs(high))
    if high - low <= max(1e-9 * largest, TINY):
        spread = 0.1 * largest if largest > TINY else 1.0
        low, high = (low, high + spread) if zero and low >= 0 else (low - spread, high + spread)
    step = _round_step((high - low) / ticks)
    if not snug:
        whole = unit == "share" and high <= 1
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        high = min(high, 1.0) if whole else high
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    places = tuple(k * step for k in range(first, last + 1))
    return Axis(low, high, *pixels, places, _labels(places, step, unit))


def logarithmic(values: Iterable[float], pixels: tuple[float, float], *, unit: Unit = "number") -> Axis:
    """An axis with ticks at powers of ten, about five; it begins at one and ends at the largest value."""
    known = [value for value in values if value > 0] or [0.1, 1.0]
    high = max(known)
    low = 10.0 ** math.floor(math.log10(min(*known, high / 10)) + 1e-9)
    lowest, highest = round(math.log10(low)), math.floor(math.log10(high) + 1e-9)
    apart = 1 + (highest - lowest) // 5
    places = tuple(10.0**power for power in range(highest, lowest - 1, -apart))[::-1]
    return Axis(low, high, *pixels, places, tuple(_plain(place, unit) for place in places), log=True)


def _plain(value: float, unit: Unit) -> str:
    if unit == "number":
        return _trim(value)
    return f"{100 * value:.10f}".rstrip("0").rstrip(".") + formats.SPACE + "%"


def _round_step(rough: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(rough))
    return next(step * magnitude for step in STEPS if step * magnitude >= rough * (1 - 1e-9))


def _labels(places: tuple[float, ...], step: float, unit: Unit) -> tuple[str, ...]:
    if unit == "share":
        digits = _digits(step * 100)
        return tuple(f"{place * 100:.{digits}f}{formats.SPACE}%" for place in places)
    largest = max((abs(place) for place in places), default=0.0)
    if largest >= 1e15 or largest < 1e-4:
        return tuple(_trim(place) for place in places)
    scale, suffix = next(
        ((scale, formats.SPACE + name) for scale, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
         if largest >= scale * (10 if name == "k" else 1)),
        (1.0, ""),
    )  # fmt: skip
    digits = _digits(step / scale)
    return tuple(f"{place / scale:,.{digits}f}{suffix}" if place else "0" for place in places)


def _digits(step: float) -> int:
    """Decimals that tell ticks apart: 0.05 -> 2, 0.25 -> 2, 2.5 -> 1, 5 -> 0."""
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return digits if abs(step * 10**digits - round(step * 10**digits)) < 1e-6 else digits + 1


def _trim(value: float) -> str:
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")
