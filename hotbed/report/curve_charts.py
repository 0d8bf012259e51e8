"""Miss-ratio curves -> charts of a page: all tables together, and the tables with most misses each alone."""

from __future__ import annotations

from collections.abc import Sequence

from hotbed.forecast.curves import Curve
from hotbed.report.charts import Chart, Mark, Series, figure

_MOST_TABLES = 6  # one colour each


def curve_figures(curves: Sequence[Curve], tables: Sequence[Curve], num_rows: int, num_slots: int | None = None) -> str:
    """The figures; x is the share of the rows that a cache holds."""
    marks = (Mark(num_slots / num_rows, "the cache asked for"),) if num_slots else ()
    figures = [figure(_chart("curve-all", "Misses over cache size", _ABOUT_ALL, curves, num_rows, marks))]
    if tables:
        shown = sorted(tables, key=lambda one: -one.num_rows)[:_MOST_TABLES]
        about = f"Each table with a cache of its own under LRU, the {len(shown)} with most rows of {len(tables)}."
        figures.append(figure(_chart("curve-tables", "Tables alone", about, shown, None, ())))
    return f'<div class="figures">{"".join(figures)}</div>'


_ABOUT_ALL = (
    "Distinct rows of batches that a cache of this size does not hold. LRU without look-ahead is counted at every size in one "
    "pass; the others are simulated at the points drawn, with the look-ahead of training."
)


def _chart(
    identifier: str, title: str, about: str, curves: Sequence[Curve], num_rows: int | None, marks: tuple[Mark, ...]
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
