"""Curves as plain characters, for any terminal: one sign per curve, log x axis, y from 0 to the highest value."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hotbed.forecast.curves import Curve, Curves

SIGNS = "*o+x#@"
WIDTH, HEIGHT = 60, 13  # lines: a quarter of the highest value is three
_MARGIN = 8


class PlotLine(NamedTuple):
    """One curve of a plot."""

    name: str
    points: Sequence[tuple[float, float]]  # x above 0 and ascending, y
    joined: bool = True  # else only the points are drawn


def percent(share: float) -> str:
    """A share as a percentage with two significant digits."""
    return f"{float(f'{100 * share:.2g}'):g} %"


def plot(
    lines: Sequence[PlotLine],
    x_label: str,
    show_x: Callable[[float], str],
    show_y: Callable[[float], str] = lambda share: f"{100 * share:.0f} %",
) -> str:
    """Draw y over x, the first lines on top; "" if there is nothing to draw."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    xs = [x for line in lines for x, _ in line.points]
    low, high = math.log(min(xs)), math.log(max(xs))
    span = high - low or 1.0
    top = max(y for line in lines for _, y in line.points) or 1.0
    cells = [[" "] * WIDTH for _ in range(HEIGHT)]
    order = sorted(zip(SIGNS, lines), key=lambda one: one[1].joined)  # points are drawn over curves
    for sign, line in reversed(order):
        for column in range(WIDTH):
            y = _value(line, math.exp(low + span * column / (WIDTH - 1)), span / (WIDTH - 1))
            if y is not None:
                cells[min(HEIGHT - 1, HEIGHT - 1 - round(y / top * (HEIGHT - 1)))][column] = sign
    rows = []
    for number, cell in enumerate(cells):
        value = top * (HEIGHT - 1 - number) / (HEIGHT - 1)
        label = show_y(value) if number % 3 == 0 else ""
        rows.append(f"{label:>{_MARGIN - 2}} |{''.join(cell).rstrip()}")
    first, last = show_x(min(xs)), show_x(max(xs))
    rows.append(" " * (_MARGIN - 1) + "+" + "-" * WIDTH)
    rows.append(" " * _MARGIN + first + x_label.center(WIDTH - len(first) - len(last)) + last)
    drawn = {sign for cell in cells for sign in cell}
    names = [f"{sign} {line.name}{'' if sign in drawn else ' (under the others)'}" for sign, line in zip(SIGNS, lines)]
    rows += textwrap.wrap("   ".join(name.replace(" ", "\0") for name in names), WIDTH, break_long_words=False)
    return "\n".join([*rows[: HEIGHT + 2], *(" " * _MARGIN + row.replace("\0", " ") for row in rows[HEIGHT + 2 :])])


def _value(line: PlotLine, x: float, step: float) -> float | None:
    """The curve at x; for single points, the nearest one if it lies in this column."""
    points = line.points
    if not line.joined or len(points) == 1:
        near = min(points, key=lambda point: abs(math.log(point[0] / x)))
        return near[1] if abs(math.log(near[0] / x)) <= step / 2 + 1e-12 else None
    if not points[0][0] * (1 - 1e-9) <= x <= points[-1][0] * (1 + 1e-9):
        return None
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            share = (math.log(x) - math.log(x0)) / (math.log(x1) - math.log(x0)) if x1 > x0 else 1.0
            return y0 + (y1 - y0) * min(max(share, 0.0), 1.0)
    return points[-1][1]


def curve_text(curves: Curves) -> str:
    """Miss ratios over the share of the rows in the cache, from half the smallest simulated size on."""
    rows = curves.num_rows
    least = min((curve.sizes[0] for curve in curves.all if not curve.is_whole and len(curve.sizes)), default=0.0) / 2

    def line(curve: Curve) -> PlotLine:
        points = [(float(size) / rows, float(y)) for size, y in zip(curve.sizes, curve.misses) if size >= max(least, 1)]
        return PlotLine(curve.name, points, joined=curve.is_whole)

    parts = [plot([line(curve) for curve in curves.all], "share of the rows in the cache", percent)]
    whole = next(curve for curve in curves.all if curve.is_whole)
    if whole.sampled < 1:
        parts.append(
            f"{whole.name}: {100 * whole.sampled:.1f} % of the rows were followed; off by about {100 * whole.error:.2f} points"
        )
    return "misses, of the distinct rows of a batch\n" + "\n".join(parts)
