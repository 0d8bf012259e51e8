"""Sections -> one HTML file that needs nothing else: styles, script and drawings are inside, and it may fetch nothing."""

from __future__ import annotations

from importlib.resources import files

from hotbed.report import sections
from hotbed.report.cache import cache
from hotbed.report.formats import contents, text
from hotbed.report.ids import ids
from hotbed.report.memory import forecast, memory
from hotbed.report.read import Run
from hotbed.report.tiers import tiers
from hotbed.report.times import times

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)


def render(run: Run) -> str:
    """The whole page. The same run gives the same bytes."""
    parts = (
        sections.learning(run),
        sections.quality(run),
        times(run),
        cache(run, sections.CACHE_SHARE),
        tiers(run),
        ids(run),
        memory(run),
        forecast(run),
        sections.data(run),
        sections.asked(run),
        sections.go_on(run),
        sections.made_with(run),
    )
    shown = [part for part in parts if part]
    body = f"{sections.headline(run)}{contents(shown)}\n" + "\n".join(shown)
    return whole(f"{run.model} on {run.dataset}", '<a class="skip" href="#learning">Skip to the curves</a>\n', body)


def whole(title: str, before: str, body: str) -> str:
    """An HTML file around a body."""
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
