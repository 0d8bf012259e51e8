"""Text and numbers -> HTML that is safe whatever they hold: every string of the run passes through `text`."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

SECTION = re.compile(r'<section id="([\w-]+)"[^>]*><h2[^>]*>(.*?)</h2>')
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def text(value: object, limit: int = 300) -> str:
    """Escaped for element content and attributes, cut at `limit` characters, without characters HTML forbids."""
    plain = CONTROL.sub("\ufffd", str(value))
    return html.escape(plain if len(plain) <= limit else plain[: limit - 1] + "…")


def data_script(value: Any) -> str:
    """JSON inside a script element; no "<" survives, so nothing in it can close the element."""
    packed = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json">{packed}</script>'


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "") -> str:
    """A table in a box that scrolls by itself. The first cell of a row names it; cells are HTML already."""
    columns = "".join(f'<th scope="col">{name}</th>' for name in head)
    lines = "".join(
        f'<tr><th scope="row">{cells[0]}</th>{"".join(f"<td>{cell}</td>" for cell in cells[1:])}</tr>' for cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table class="{kind}">'
        f"<caption>{caption}</caption><thead><tr>{columns}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def fold(summary: str, content: str) -> str:
    """Content that opens on demand, also without JavaScript."""
    return f"<details><summary>{summary}</summary>{content}</details>"


def contents(sections: Iterable[str]) -> str:
    """Links to sections, as `section` made them."""
    found = [SECTION.match(one) for one in sections]
    items = "".join(f'<li><a href="#{one[1]}">{one[2]}</a></li>' for one in found if one)
    return f'<nav class="contents" aria-label="Sections"><ul>{items}</ul></nav>'


def section(identifier: str, heading: str, *parts: str) -> str:
    """A part of the page with its heading."""
    return (
        f'<section id="{identifier}" aria-labelledby="{identifier}-heading">'
        f'<h2 id="{identifier}-heading">{heading}</h2>{"".join(parts)}</section>'
    )
