"""Cases in which every two values meet, where a product of all of them would test the same thing many times."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Of three axes of 5, 4 and 4 values: 20 cases instead of 80. Any two values of two axes are in one of them."""
    values = [list(axis) for axis in axes]
    left = list(itertools.product(*(range(len(axis)) for axis in values)))
    unmet = {pair for case in left for pair in _pairs_of(case)}
    cases = []
    while unmet:
        case = max(left, key=lambda one: len(unmet & _pairs_of(one)))
        unmet -= _pairs_of(case)
        cases.append(case)
    return [tuple(axis[place] for axis, place in zip(values, case)) for case in sorted(cases)]


def _pairs_of(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(case), 2))
