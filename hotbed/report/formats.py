"""Numbers -> the short texts people read. A number that is not there is a dash, never "nan"."""

from __future__ import annotations

import math

from hotbed.host.memory import in_words

MISSING = "–"
SPACE = "\u202f"  # narrow and never broken across lines


def count(value: float) -> str:
    """A whole number with thousands separators: 1,234,567."""
    return f"{value:,.0f}" if math.isfinite(value) and abs(value) < 1e15 else _odd(value)


def compact(value: float) -> str:
    """Three digits and a unit: 812, 45.8 k, 1.23 M, 33.8 G."""
    if not math.isfinite(value) or abs(value) >= 1e15:
        return _odd(value)
    for least, scale, unit in ((9.995e11, 1e12, "T"), (9.995e8, 1e9, "G"), (9.995e5, 1e6, "M"), (9_999.5, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / scale:#.3g}".rstrip(".") + SPACE + unit
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def decimal(value: float, digits: int = 4) -> str:
    """A fixed number of decimals, for metrics: 0.7825."""
    return f"{value:,.{digits}f}" if math.isfinite(value) and abs(value) < 1e9 else _odd(value)


def percent(share: float, digits: int = 1) -> str:
    """A share as a percentage: 0.7625 -> 76.2 %."""
    return f"{100 * share:,.{digits}f}{SPACE}%" if math.isfinite(share) else _odd(share)


def significant(value: float, digits: int = 4) -> str:
    """A number of any size: 0.001, 2.5e-05."""
    return f"{value:.{digits}g}" if math.isfinite(value) else _odd(value)


def size(amount: float) -> str:
    """Bytes: 1.5 GiB."""
    return in_words(amount).replace(" ", SPACE) if math.isfinite(amount) and 0 <= amount < 1e18 else _odd(amount)


def duration(seconds: float) -> str:
    """Time in the two units that matter: 0.84 s, 42 s, 3 min 20 s, 2 h 5 min."""
    if not math.isfinite(seconds) or seconds < 0:
        return MISSING
    if seconds < 9.995:
        return f"{seconds:.2g}{SPACE}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}{SPACE}s"
    if whole < 3600:
        return f"{whole // 60}{SPACE}min" + (f" {whole % 60}{SPACE}s" if whole % 60 else "")
    minutes = round(seconds / 60)
    return f"{minutes // 60:,}{SPACE}h" + (f" {minutes % 60}{SPACE}min" if minutes % 60 else "")


def milliseconds(seconds: float) -> str:
    """The time of a step: 0.812 ms, 13.4 ms, 1,150 ms."""
    if not math.isfinite(seconds):
        return MISSING
    said = f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else significant(1e3 * seconds, 3)
    return f"{said}{SPACE}ms"


def _odd(value: float) -> str:
    if math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.3g}"
