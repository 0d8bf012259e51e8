"""Series -> a figure: an inline SVG, its legend, its caption, the numbers as a table, and the points for hover texts.

The drawing is complete without JavaScript; page.js only adds the cursor, zoom and switches. Colours are classes c1 to c6, which
style.css defines for light and dark. A drawn point costs about 24 bytes, so curves are thinned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hotbed.report import formats
from hotbed.report.formats import data_script, fold, table, text
from hotbed.report.points import MAX_POINTS, sample, thin, usable

Unit = Literal["number", "share"]
STEPS = (1, 2, 2.5, 5, 10)
TINY = 1e-100  # closer than this, values are one value
WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 66, 544, 28, 252
DOTTED_BELOW = 40  # points; fewer are marked one by one
CHART_POINTS, LEAST_POINTS = 2400, 200  # of all curves of a chart; of each, however many there are

Style = Literal["line", "faint", "thin", "dots"]
Format = Literal["count", "decimal", "share", "significant"]
FORMATS: dict[Format, Callable[[float], str]] = {
    "count": formats.count,
    "decimal": formats.decimal,
    "share": lambda share: formats.percent(share, 2),
    "significant": formats.significant,
}


@dataclass(frozen=True)
class Series:
    """One curve: x rises, y may be nan where it is not known."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int  # 1 to 6
    style: Style = "line"
    spread: Sequence[float] = ()  # half the height of an error bar per point; for shares


class ReferenceLine(NamedTuple):
    """A straight line across the plot: at a y (best possible AUC) or at an x (cache size)."""

    value: float
    label: str


@dataclass(frozen=True)
class Chart:
    """The data and labels of a chart."""

    identifier: str
    title: str
    caption: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_format: Format = "count"
    y_format: Format = "decimal"
    y_marks: tuple[ReferenceLine, ...] = ()
    x_marks: tuple[ReferenceLine, ...] = ()
    divisions: tuple[float, ...] = ()  # faint vertical lines without a label, such as the ends of epochs
    zero: bool = False  # y starts at zero
    log_x: bool = False
    diagonal: str = ""  # label of the line y = x
    robust: bool = False  # a few values may lie above the frame

    @property
    def can_zoom(self) -> bool:
        """Only curves over time can."""
        return not (self.log_x or self.diagonal)


def figure(chart: Chart) -> str:
    """The figure, or a sentence if nothing can be drawn."""
    limit = min(MAX_POINTS, max(LEAST_POINTS, CHART_POINTS // max(len(chart.series), 1)))
    drawn = [(series, [point for point in thin(series.points, limit) if usable(point[0])]) for series in chart.series]
    drawn = [(series, points) for series, points in drawn if any(usable(y) for _, y in points)]
    heading = f'<h3 id="{chart.identifier}-title">{text(chart.title)}</h3>'
    if not drawn:
        return f'<figure id="{chart.identifier}">{heading}<p class="empty">No values were recorded.</p></figure>'
    x_axis, y_axis, outside = _axes(chart, drawn)
    caption = text(chart.caption, 1000) + (f" {outside}" if outside else "")
    payload = {
        "box": [LEFT, TOP, RIGHT, BOTTOM],
        "x": [_short(x_axis.low), _short(x_axis.high), int(x_axis.log)],
        "y": [_short(y_axis.low), _short(y_axis.high)],
        "formats": [chart.x_format, chart.y_format],
        "labels": [chart.x_label, chart.y_label],
        "zero": int(chart.zero),
        "zoom": int(chart.can_zoom),
        "divisions": [_short(x) for x in chart.divisions],
        "marks": [[_short(mark.value), mark.label[:60]] for mark in chart.y_marks],
        "series": [
            {
                "name": series.name,
                "color": series.color,
                "style": series.style,
                "points": [[_short(x), _short(y) if usable(y) else None] for x, y in points],
            }
            for series, points in drawn
        ],
    }
    return (
        f'<figure id="{chart.identifier}">{heading}{_legend([series for series, _ in drawn])}'
        f'<div class="plot" data-plot>{_svg(chart, drawn, x_axis, y_axis)}{data_script(payload)}</div>'
        f"<figcaption>{caption}</figcaption>{fold('Numbers', _numbers(chart))}</figure>"
    )


Drawn = list[tuple[Series, list[tuple[float, float]]]]


def _axes(chart: Chart, drawn: Drawn) -> tuple[Axis, Axis, str]:
    """Both axes. Noise of a faint series may leave the frame; the returned sentence says how far."""
    xs = [x for _, points in drawn for x, _ in points] + [mark.value for mark in chart.x_marks]
    share = chart.x_format == "share"
    if chart.log_x:
        x_axis = logarithmic(xs, (LEFT, RIGHT), unit="share" if share else "number")
    else:
        x_axis = linear(xs, (LEFT, RIGHT), unit="share" if share else "number", zero=True, snug=not share)
    framed = [mark.value for mark in chart.y_marks] + (xs if chart.diagonal else [])
    noise: list[float] = []
    for series, points in drawn:
        ys = sorted(y for _, y in points if usable(y))
        cut = len(ys) // 50 if series.style == "faint" and len(drawn) > 1 else 0
        above = max(cut, -(-len(ys) // 20)) if chart.robust and len(ys) > 5 else cut
        noise += [ys[0], ys[-1]] if above else []
        framed += ys[cut : len(ys) - above]
        framed += [end for (_, y), half in zip(points, series.spread) for end in _bar_ends(y, half)]
    unit: Unit = "share" if chart.y_format == "share" else "number"
    y_axis = linear(framed, (BOTTOM, TOP), unit=unit, zero=chart.zero)
    if not noise or (y_axis.low <= min(noise) and max(noise) <= y_axis.high):
        return x_axis, y_axis, ""
    ends = [FORMATS[chart.y_format](end) for end in (min(noise), max(noise))]
    return x_axis, y_axis, f"Single values run from {ends[0]} to {ends[1]}; the rarest lie outside the frame."


def _svg(chart: Chart, drawn: Drawn, x_axis: Axis, y_axis: Axis) -> str:
    first = [f"{s.name} from {_said(chart, p[0])} to {_said(chart, p[-1])}" for s, p in drawn[:6]]
    label = text(f"{chart.title} over {chart.x_label}. {'; '.join(first)}.", 800)
    clip = f"{chart.identifier}-clip"
    lines = [_grid(chart, x_axis, y_axis)]
    lines += [f'<path class="division" d="M{_px(x_axis.place(x))} {TOP}V{BOTTOM}"/>' for x in chart.divisions]
    if chart.diagonal:
        end = min(x_axis.high, y_axis.high)
        lines.append(f'<path class="mark" d="M{LEFT} {BOTTOM}L{_px(x_axis.place(end))} {_px(y_axis.place(end))}"/>')
        lines.append(_note(RIGHT - 4, TOP + 100, chart.diagonal, "end"))
    curves = "".join(_curve(index, series, points, x_axis, y_axis) for index, (series, points) in enumerate(drawn))
    lines.append(f'<g clip-path="url(#{clip})">{curves}</g>')
    for mark in chart.y_marks:
        y = y_axis.place(mark.value)
        lines.append(f'<path class="mark" d="M{LEFT} {_px(y)}H{RIGHT}"/>{_note(RIGHT - 4, y - 6, mark.label, "end")}')
    for mark in chart.x_marks:
        x = x_axis.place(mark.value)
        lines.append(f'<path class="mark" d="M{_px(x)} {TOP}V{BOTTOM}"/>{_note(x + 6, BOTTOM - 8, mark.label)}')
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f'<clipPath id="{clip}"><rect x="{LEFT - 6}" y="{TOP - 6}" width="{RIGHT - LEFT + 12}" '
        f'height="{BOTTOM - TOP + 12}"/></clipPath><g class="drawn">{"".join(lines)}</g><g class="cursor"></g></svg>'
    )


def _grid(chart: Chart, x_axis: Axis, y_axis: Axis) -> str:
    lines = [f'<text class="axis" x="{LEFT - 8}" y="14" text-anchor="start">{text(chart.y_label)}</text>']
    for value, label in zip(y_axis.ticks, y_axis.labels):
        y = y_axis.place(value)
        lines.append(f'<path class="grid" d="M{LEFT} {_px(y)}H{RIGHT}"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{_px(y + 4)}" text-anchor="end">{label}</text>')
    for value, label in zip(x_axis.ticks, x_axis.labels):
        x = x_axis.place(value)
        anchor = "end" if x > RIGHT - 16 else "middle"
        lines.append(f'<path class="tick" d="M{_px(x)} {BOTTOM}v5"/>')
        lines.append(f'<text x="{_px(x)}" y="{BOTTOM + 19}" text-anchor="{anchor}">{label}</text>')
    lines.append(f'<path class="base" d="M{LEFT} {BOTTOM}H{RIGHT}"/>')
    lines.append(f'<text class="axis" x="{RIGHT}" y="{BOTTOM + 40}" text-anchor="end">{text(chart.x_label)}</text>')
    return "".join(lines)


def _curve(index: int, series: Series, points: list[tuple[float, float]], x_axis: Axis, y_axis: Axis) -> str:
    places = [(x_axis.place(x), y_axis.place(y)) if usable(y) else None for x, y in points]
    parts = []
    if series.style != "dots" and len(points) > 1:
        commands = []
        for place, before in zip(places, [None, *places]):
            if place:
                commands.append(f"{'L' if before else 'M'}{_px(place[0])} {_px(place[1])}")
        parts.append(f'<path class="curve" d="{"".join(commands)}"/>')
    for place, (_, y), half in zip(places, points, series.spread):
        if place and half:
            low, high = map(y_axis.place, _bar_ends(y, half))
            parts.append(f'<path class="spread" d="M{_px(place[0])} {_px(low)}V{_px(high)}"/>')
    if series.style == "dots" or len(points) == 1 or (series.style == "line" and len(points) < DOTTED_BELOW):
        marked = [place for place in places if place]
    else:
        marked = [
            p
            for before, p, after in zip([None, *places], places, [*places[1:], None])
            if p and not before and not after
        ]
    parts += [f'<circle cx="{_px(x)}" cy="{_px(y)}" r="3.5"/>' for x, y in marked]  # a line shows no point between gaps
    return f'<g class="series {series.style} c{series.color}" data-series="{index}">{"".join(parts)}</g>'


def _legend(series: list[Series]) -> str:
    if len(series) == 1:
        return ""
    dot, dash = '<circle cx="12" cy="5" r="3.5"/>', '<path class="curve" d="M1 5H23"/>'
    entries = "".join(
        f'<li class="{entry.style} c{entry.color}" data-series="{index}"><svg viewBox="0 0 24 10" aria-hidden="true">'
        f"{dot if entry.style == 'dots' else dash}</svg><span>{text(entry.name, 60)}</span></li>"
        for index, entry in enumerate(series)
    )
    return f'<ul class="legend">{entries}</ul>'


def _numbers(chart: Chart) -> str:
    """The plot as a table: evenly spaced points of every series, in one row where x is equal."""
    cells: dict[float, dict[int, float]] = {}
    for index, series in enumerate(chart.series):
        for x, y in sample(series.points):
            cells.setdefault(x, {})[index] = y
    write_x, write_y = FORMATS[chart.x_format], FORMATS[chart.y_format]
    rows = (
        [write_x(x), *(write_y(cells[x][k]) if k in cells[x] else "" for k in range(len(chart.series)))]
        for x in sorted(cells)
    )
    return table(text(chart.title), [text(chart.x_label), *(text(s.name, 60) for s in chart.series)], rows)


def _bar_ends(y: float, half: float) -> tuple[float, float]:
    """An error bar of a share stays a share."""
    return max(y - half, 0.0), min(y + half, 1.0)


def _note(x: float, y: float, label: str, anchor: str = "start") -> str:
    return f'<text class="note" x="{_px(x)}" y="{_px(max(y, TOP - 4))}" text-anchor="{anchor}">{text(label, 60)}</text>'


def _said(chart: Chart, point: tuple[float, float]) -> str:
    return f"{FORMATS[chart.y_format](point[1])} at {FORMATS[chart.x_format](point[0])}"


def _px(pixels: float) -> str:
    return f"{pixels:.1f}".removesuffix(".0")


def _short(value: float) -> float:
    """Counts as they are, other numbers to six digits."""
    return int(value) if value == round(value) and abs(value) < 1e15 else float(f"{value:.6g}")


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
