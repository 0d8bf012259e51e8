"""The first rows in; out the columns of text whose values look like several ids in one, and what stands between them.

`news|art`, `art|food` and `news|food` are three ids to a model that is not told of the bar, and it learns nothing of `art`. The
sign: many values have the separator, and few parts make up many of them. It is a hint for the user, never a decision: an
address or a name of a browser may look the same.
"""

from __future__ import annotations

from hotbed.data.formats import Chunk, Text
from hotbed.data.prepare.layout import Layout

_SEPARATORS = "|;,^~"
_ROWS = 2000  # that are looked at
_SHARE = 0.3  # of the values have the separator, at least
_FEWEST = 5  # different ones of them
_MAKE_UP = 2  # values for each part, at least


def joined_columns(chunk: Chunk, layout: Layout) -> dict[str, str]:
    """Column -> separator, of features that would read each value as one id."""
    found = {}
    for feature in layout.features:
        column = chunk.columns.get(feature.name)
        if feature.multi or feature.source != "string" or not isinstance(column, Text):
            continue
        values = [column.string(i) for i in range(min(len(column.starts), _ROWS))]
        separator = _separator([value for value in values if value])
        if separator:
            found[feature.name] = separator
    return found


def _separator(values: list[str]) -> str:
    for one in _SEPARATORS:
        joined = [value for value in values if one in value]
        parts = {part.strip() for value in joined for part in value.split(one)}
        if len(joined) < _SHARE * len(values) or len(set(joined)) < max(_FEWEST, _MAKE_UP * len(parts)):
            continue
        return one
    return ""
