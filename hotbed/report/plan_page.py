"""Curves and tables of a plan -> one self-contained page, with the charts and styles of a run's report."""

from __future__ import annotations

from pathlib import Path

from hotbed.errors import RunError
from hotbed.plan.curves import Curves
from hotbed.report.curve_charts import curve_figures
from hotbed.report.markup import section, table, text
from hotbed.report.page import whole


def write_curves(path: Path, name: str, curves: Curves, num_slots: int | None = None, before: str = "") -> None:
    """Write the page; `before` are sections in front of the curves."""
    whole_curve = next(curve for curve in curves.all if curve.is_whole)
    about = ""
    if whole_curve.sampled < 1:
        about = (
            f"<p>{100 * whole_curve.sampled:.1f} % of the rows were followed for the whole curve; it is off by about "
            f"{100 * whole_curve.error:.2f} points.</p>"
        )
    figures = curve_figures(curves.all, curves.tables, curves.num_rows, num_slots)
    heading = f'<header><p class="kicker">hotbed plan</p><h1>{text(name, 120)}</h1></header>'
    body = f"{heading}{before}{section('curves', 'Misses over cache size', about, figures, _numbers(curves))}"
    try:
        path.write_text(whole(f"{name}: misses over cache size", "", body), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}. Give another --html.") from error


def _numbers(curves: Curves) -> str:
    """Misses of every table alone, at a few shares of its rows."""
    shares = (0.005, 0.015, 0.05, 0.2)
    rows = [
        [text(one.name, 60), f"{one.num_rows:,}", *(f"{100 * one.at(share * one.num_rows):.1f} %" for share in shares)]
        for one in curves.tables
    ]
    head = ["table", "rows that occur", *(f"{100 * share:g} %" for share in shares)]
    return table("Misses of every table with a cache of its own, by the share of its rows", head, rows) if rows else ""
