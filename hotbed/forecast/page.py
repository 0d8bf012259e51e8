"""Curves and tables of a plan -> one self-contained page, with the charts and styles of a run's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotbed.errors import RunError
from hotbed.forecast.curves import Curve, Curves
from hotbed.host.memory import in_words
from hotbed.report.charts import Chart, ReferenceLine, Series, figure
from hotbed.report.formats import html_page, percent, section, table, text

_MOST_TABLES = 6  # one colour each


def write_curves(path: Path, name: str, curves: Curves, num_slots: int | None = None, before: str = "") -> None:
    """Write the page; `before` holds sections to show above the curves."""
    whole_curve = next(curve for curve in curves.all if curve.is_whole)
    about = ""
    if whole_curve.sampled < 1:
        about = (
            f"<p>{100 * whole_curve.sampled:.1f} % of the rows were sampled for the whole curve; its error is about "
            f"{100 * whole_curve.error:.2f} points.</p>"
        )
    figures = curve_figures(curves.all, curves.tables, curves.num_rows, num_slots)
    heading = f'<header><p class="kicker">hotbed plan</p><h1>{text(name, 120)}</h1></header>'
    body = f"{heading}{before}{section('curves', 'Misses over cache size', about, figures, _numbers(curves))}"
    try:
        path.write_text(html_page(f"{name}: misses over cache size", "", body), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}. Give another --html.") from error


def forecast_section(figures: Mapping[str, Any]) -> str:
    """What a run would need, from `Forecast.figures`."""
    rows = [
        [text(part["tier"]), text(part["name"]), in_words(part["num_bytes"]), "exact" if part["exact"] else "estimate"]
        for part in figures["bytes"]
    ]
    parts = [table("Bytes of every tier", ["tier", "what", "bytes", ""], rows)]
    traffic, speed = figures["traffic"], figures["speed"]
    lines = []
    if traffic is not None:
        lines.append(["distinct rows of a batch found in the cache", percent(traffic["hit_rate"], 2)])
        lines.append(["lookups that hit", percent(traffic["lookup_hit_rate"], 2)])
        lines += [["to the device, per step", in_words(figures["bytes_in"])], ["back", in_words(figures["bytes_out"])]]
    if speed is not None:
        lines += [["samples/s", f"{speed['samples_per_s']:,.0f}"], ["bottleneck", text(speed["bottleneck"])]]
    if lines:
        parts.append(table("A step", ["what", "forecast"], lines))
    parts += [f"<p>Does not fit, because {text(problem, 1000)}</p>" for problem in figures["problems"]]
    parts += [f"<p>{text(note, 1000)}</p>" for note in figures["notes"]]
    return section("forecast", "What it needs", *parts)


def _numbers(curves: Curves) -> str:
    """Misses of each table alone, at a few cache sizes."""
    shares = (0.005, 0.015, 0.05, 0.2)
    rows = [
        [text(one.name, 60), f"{one.num_rows:,}", *(f"{100 * one.at(share * one.num_rows):.1f} %" for share in shares)]
        for one in curves.tables
    ]
    head = ["table", "rows that occur", *(f"{100 * share:g} %" for share in shares)]
    return table("Misses of each table with its own cache, by the share of its rows", head, rows) if rows else ""


def curve_figures(curves: Sequence[Curve], tables: Sequence[Curve], num_rows: int, num_slots: int | None = None) -> str:
    """The figures; x is the share of the rows that a cache holds."""
    marks = (ReferenceLine(num_slots / num_rows, "the requested cache"),) if num_slots else ()
    figures = [figure(_chart("curve-all", "Misses over cache size", _ABOUT_ALL, curves, num_rows, marks))]
    if tables:
        shown = sorted(tables, key=lambda one: -one.num_rows)[:_MOST_TABLES]
        about = f"Each table with its own LRU cache; shown are the {len(shown)} largest of {len(tables)} tables."
        figures.append(figure(_chart("curve-tables", "Tables alone", about, shown, None, ())))
    return f'<div class="figures">{"".join(figures)}</div>'


_ABOUT_ALL = (
    "Distinct rows of batches that a cache of this size does not hold. LRU without look-ahead is counted at every size in one "
    "pass; the others are simulated at the points drawn, with the look-ahead of training."
)


def _chart(
    identifier: str,
    title: str,
    about: str,
    curves: Sequence[Curve],
    num_rows: int | None,
    marks: tuple[ReferenceLine, ...],
) -> Chart:
    series = tuple(
        Series(
            curve.name,
            [(float(size) / (num_rows or curve.num_rows), float(y)) for size, y in zip(curve.sizes, curve.misses)],
            1 + number % 6,
        )
        for number, curve in enumerate(curves)
    )
    return Chart(
        identifier,
        title,
        about,
        "share of the rows in the cache",
        "misses",
        series,
        x_format="share",
        y_format="share",
        x_marks=marks,
        zero=True,
        log_x=True,
    )
