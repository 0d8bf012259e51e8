"""The first labels of a log in, what to say of them when labels cannot be read out: the --positive to give.

Looks at some thousand rows only: words that come later are not named.
"""

from __future__ import annotations

import shlex
from collections import Counter

from hotbed.data.formats import Chunk, Hashed, Instants, Lists
from hotbed.data.formats.chunk import shorten
from hotbed.data.values import LabelReader, value_text

_ROWS, _SHOWN = 10_000, 5
_MEAN_ONE = ("1", "yes", "y", "true", "t", "click", "clicked", "pos", "positive", "on", "+1", "1.0")


def label_hint(chunk: Chunk, label: LabelReader) -> str:
    """Which values the label has and which option to paste; empty where all of them can be read."""
    column = chunk.columns[label.name]
    if isinstance(column, Lists | Hashed | Instants):
        return ""
    texts = (value_text(column, row) for row in range(min(_ROWS, len(chunk.lines))))
    seen = Counter(text for text in texts if text)
    if label.positive in seen or (seen and label.positive is None and all(label.reads(text) for text in seen)):
        return ""
    shown = ", ".join(repr(shorten(text)) for text in list(seen)[:_SHOWN]) + (", ..." if len(seen) > _SHOWN else "")
    rows = min(_ROWS, len(chunk.lines))
    given = f"None of the first {rows:,} labels is {label.positive!r} (--positive). " if label.positive else ""
    if not seen:
        return f"{given}Column {label.name} is empty. --label names another one."
    found = f"{given}Values of {label.name}: {shown}."
    if len(seen) != 2 and not _like(seen, label.positive):
        return f"{found} A label has two values; --label names another column, --positive VALUE the value that means 1."
    word = _like(seen, label.positive) or _likely(seen)
    return f"{found} --positive {shlex.quote(word)} says that {word!r} means 1."


def _like(seen: Counter[str], positive: str | None) -> str | None:
    """The value that differs from `positive` in case alone."""
    return next((text for text in seen if positive is not None and text.lower() == positive.strip().lower()), None)


def _likely(seen: Counter[str]) -> str:
    """A word that commonly means 1, or else the rarer one."""
    for word in _MEAN_ONE:
        for text in seen:
            if text.lower() == word:
                return text
    return min(seen, key=lambda text: seen[text])
