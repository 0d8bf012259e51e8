"""Numbers -> the short texts people read, and the HTML around them. A number that is not there is a dash, never "nan"."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from hotbed.host.memory import in_words

SECTION = re.compile(r'<section id="([\w-]+)"[^>]*><h2[^>]*>(.*?)</h2>')
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
OPEN_ROWS, MOST_ROWS = 12, 1000  # of a long table: those shown at once, and those on the page at all
NAN = float("nan")
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


def number(value: object) -> float:
    """The value as a float; nan if it is not a number, too large, or a boolean."""
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
    """The first finite value, else nan."""
    return next((value for value in values if math.isfinite(value)), NAN)


def median(values: list[float]) -> float:
    known = sorted(value for value in values if math.isfinite(value))
    return known[len(known) // 2] if known else NAN


def text(value: object, limit: int = 300) -> str:
    """Escaped for element content and attributes, cut at `limit` characters, without characters HTML forbids."""
    plain = CONTROL.sub("\ufffd", str(value))
    return html.escape(plain if len(plain) <= limit else plain[: limit - 1] + "…")


def data_script(value: Any) -> str:
    """JSON inside a script element; no "<" survives, so nothing in it can close the element."""
    packed = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json">{packed}</script>'


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "") -> str:
    """A table in a scrolling box. The first cell of a row is its heading; cells are HTML already."""
    columns = "".join(f'<th scope="col">{name}</th>' for name in head)
    lines = "".join(
        f'<tr><th scope="row">{cells[0]}</th>{"".join(f"<td>{cell}</td>" for cell in cells[1:])}</tr>' for cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table class="{kind}">'
        f"<caption>{caption}</caption><thead><tr>{columns}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def long_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], source: str) -> str:
    """A table of features; all but the first rows are folded, and those beyond MOST_ROWS are only in the file `source`."""
    listed = rows[:MOST_ROWS]
    shown = table(caption, head, listed[:OPEN_ROWS], kind="wide")
    if len(listed) > OPEN_ROWS:
        rest = table(f"{caption}, continued", head, listed[OPEN_ROWS:], kind="wide")
        shown += fold(f"{count(len(listed) - OPEN_ROWS)} more features", rest)
    if len(rows) > MOST_ROWS:
        shown += f"<p>{count(len(rows) - MOST_ROWS)} more features are in {source}.</p>"
    return shown


def bar(share: float) -> str:
    """A percentage over a bar of that length."""
    width = 100 * min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0
    return f'<span class="bar" style="--share:{width:.0f}%">{percent(share)}</span>'


def note_list(notes: Sequence[str]) -> str:
    """Remarks at the top of a page; "" where there are none."""
    if not notes:
        return ""
    return f'<aside class="notes" aria-label="Notes"><ul>{"".join(f"<li>{note}</li>" for note in notes)}</ul></aside>'


def fold(summary: str, content: str) -> str:
    """Content that opens on demand, also without JavaScript."""
    return f"<details><summary>{summary}</summary>{content}</details>"


def contents(sections: Iterable[str]) -> str:
    """Links to sections that `section` made."""
    found = [SECTION.match(one) for one in sections]
    items = "".join(f'<li><a href="#{one[1]}">{one[2]}</a></li>' for one in found if one)
    return f'<nav class="contents" aria-label="Sections"><ul>{items}</ul></nav>'


def section(identifier: str, heading: str, *parts: str) -> str:
    """A part of the page with its heading."""
    return (
        f'<section id="{identifier}" aria-labelledby="{identifier}-heading">'
        f'<h2 id="{identifier}-heading">{heading}</h2>{"".join(parts)}</section>'
    )


def html_page(title: str, before: str, body: str) -> str:
    """One HTML file that needs nothing else: styles and script are inside, and it may fetch nothing."""
    here = files("hotbed.report")
    style, script = (here.joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "page.js"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title, 120)} - hotbed</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"{before}<main>\n{body}\n</main>\n"
        f"<script>\n{script}</script>\n</body>\n</html>\n"
    )
