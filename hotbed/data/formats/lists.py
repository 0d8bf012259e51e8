"""Lists of items by user: `user item item ...`, separated by spaces or tabs, as implicit feedback is often published.

Every item becomes a row with the columns `user`, `item` and `label`, which is 1: what a user did not do is not in the file. A
line with a user alone has no rows. All rows of a line have its line number, so a split by fractions keeps a user in one split.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from hotbed.data.formats.blocks import text_reels
from hotbed.data.formats.chunk import WHOLE, Chunk, Column, Reel, Text
from hotbed.data.formats.split import SplitRows, show_span, split_lines

USER, ITEM, LABEL = "user", "item", "label"
_BLANKS = (32, 9, 10, 13)


class ListsFormat:
    name = "lists"
    typed = True

    def reels(self, path: Path) -> Iterator[Reel]:
        return text_reels(path)

    def chunks(self, path: Path, reel: Reel = WHOLE) -> Iterator[Chunk]:
        for rows, bytes_read in split_lines(path, reel):
            yield _chunk(str(path), rows, bytes_read)


def _chunk(file: str, rows: SplitRows, bytes_read: int) -> Chunk:
    data = rows.text[0].data
    blank = np.isin(data, _BLANKS)
    before = np.append(True, blank[:-1])
    starts, ends = np.flatnonzero(~blank & before), np.flatnonzero(~blank & np.append(blank[1:], True)) + 1
    line_of = np.searchsorted(rows.begins, starts, side="right") - 1  # bad lines lie between good ones
    inside = (line_of >= 0) & (starts < np.append(rows.ends, 0)[line_of])
    starts, ends, line_of = starts[inside], ends[inside], line_of[inside]
    is_user = np.append(True, line_of[1:] != line_of[:-1])[: len(starts)]
    user_of = np.cumsum(is_user) - 1
    users, items = np.flatnonzero(is_user)[user_of[~is_user]], ~is_user
    count = int(items.sum())
    columns: dict[str, Column] = {
        LABEL: Text(np.frombuffer(b"1", np.uint8), np.zeros(count, np.int64), np.ones(count, np.int64)),
        USER: Text(data, starts[users], ends[users]),
        ITEM: Text(data, starts[items], ends[items]),
    }
    lines = line_of[items]
    show = partial(show_span, data, rows.begins[lines], rows.ends[lines])
    return Chunk(file, columns, rows.lines[lines], show, rows.bad, bytes_read)
