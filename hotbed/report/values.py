"""Values of JSON files that anybody may have written -> what the page can use: wrong ones become nan, "" or empty."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NAN = float("nan")


def number(value: object) -> float:
    """The value as a float; nan when it is none, too large, or a truth value."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NAN
    try:
        return float(value)
    except OverflowError:
        return NAN


def name_of(value: object) -> str:
    """A name, or the name inside a section such as {"name": "dlrm", ...}."""
    if isinstance(value, Mapping):
        value = value.get("name")
    return value if isinstance(value, str) else ""


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def listing(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def first_known(*values: float) -> float:
    """The first that is a finite number, else nan."""
    return next((value for value in values if math.isfinite(value)), NAN)


def median(values: list[float]) -> float:
    known = sorted(value for value in values if math.isfinite(value))
    return known[len(known) // 2] if known else NAN
