"""How `make docs` turns the pages of this folder into a site: Sphinx, MyST for Markdown, Furo; warnings are errors.

Pages are written to be read in the repository too, so they link to source files. A link to a file becomes a download of it;
a link to a folder, which a site cannot hold, becomes its name. Docstrings are plain English, not reStructuredText: what that
language would take for markup is escaped before it reads them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import hotbed

HERE = Path(__file__).parent

project = "hotbed"
author = "the hotbed authors"
version = release = hotbed.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"hotbed {release}"
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
nitpicky = False

_LINK = re.compile(r"\[([^\]]*)\]\((\.\.?/[^)#\s]+)(#[^)]*)?\)")
_CODE = re.compile(r"(`[^`]*`)")


def without_folders(app: Any, name: str, source: list[str]) -> None:
    """Links to folders become names."""
    page = Path(app.env.doc2path(name))

    def shown(link: re.Match[str]) -> str:
        return f"`{link[1]}`" if (page.parent / link[2]).is_dir() else link[0]

    source[0] = _LINK.sub(shown, source[0])


def as_text(app: Any, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """A docstring as reStructuredText: code in double backticks, nothing else marked, indented blocks kept as they are."""
    result: list[str] = []
    for line in lines:
        parts = _CODE.split(line)
        parts[::2] = [re.sub(r"([*|]|_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
        parts[1::2] = [f"`{part}`" for part in parts[1::2]]
        result.append("".join(parts))
    lines[:] = _literal_blocks(result, lines)


def _literal_blocks(escaped: list[str], raw: list[str]) -> list[str]:
    """Blocks that are indented are literal."""
    result: list[str] = []
    inside = False
    for shown, given in zip(escaped, raw, strict=True):
        indented = given.startswith("    ")
        if indented and not inside:
            result += ["", "::", ""]
        if inside and given and not indented:
            result.append("")
        inside = indented or (inside and not given)
        result.append(given if inside else shown)
    return result


_MENDED = {  # what the theme leaves out for readers who hear the page or have no mouse
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="All pages">',
    '<aside class="toc-drawer': '<aside aria-label="On this page" class="toc-drawer',
    "<pre>": '<pre tabindex="0">',
}


def mend_pages(app: Any, error: Exception | None) -> None:
    """Attributes that the theme's pages lack."""
    for page in Path(app.outdir).rglob("*.html") if error is None else ():
        text = page.read_text()
        for bad, good in _MENDED.items():
            text = text.replace(bad, good)
        page.write_text(text)


def setup(app: Any) -> None:
    app.connect("source-read", without_folders)
    app.connect("autodoc-process-docstring", as_text)
    app.connect("build-finished", mend_pages)
