"""Text formats whose lines are not columns: libsvm, and lists of items by user. Values are separated by spaces or tabs.

libsvm: `label index:value index:value ...`; `#` starts a comment.
The indices of a row become one multi-valued feature called `index`. It is a plain bag: a value must be 1 (the index is
in the bag) or 0 (it is not). Rows with other values are bad, so that no number is silently lost; CSV or Parquet fits such data
better. The order is free; an index may occur only once in a row, and lies in 0 .. 2**63 - 1. Labels are 0/1 or -1/1.

lists: `user item item ...`, as implicit feedback is often published.
Every item becomes a row with the columns `user`, `item` and `label`, which is 1: what a user did not do is not in the file. A
line with a user alone has no rows. All rows of a line have its line number, so a split by fractions keeps a user in one split.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from hotbed.data.formats.blocks import text_reels
from hotbed.data.formats.chunk import WHOLE, Chunk, Column, Faults, Integers, Lists, Reel, Text, offsets_of, take
from hotbed.data.formats.parse_numbers import MISSING, OK, TOO_LARGE, parse_floats, parse_integers
from hotbed.data.formats.split import SplitRows, show_span, split_lines
from hotbed.host.jit import njit

LABEL, INDEX = "label", "index"
USER, ITEM = "user", "item"
_BLANKS = (32, 9, 10, 13)
_SPACE, _TAB, _COLON, _HASH = 32, 9, 58, 35
_REASONS = (
    "",
    "a pair is not index:value",
    "an index is not a whole number from 0",
    "an index needs more than 64 bits",
    "a value is not a number",
    "a value is neither 0 nor 1",
    "an index occurs twice",
)


class LineFormat:
    """Reads the lines of a text file one by one."""

    typed = True

    def __init__(self, name: str) -> None:
        self.name = name

    def reels(self, path: Path) -> Iterator[Reel]:
        return text_reels(path)

    def chunks(self, path: Path, reel: Reel = WHOLE) -> Iterator[Chunk]:
        for rows, bytes_read in split_lines(path, reel):
            yield LINE_FORMATS[self.name](str(path), rows, bytes_read)


def _pairs_chunk(file: str, rows: SplitRows, bytes_read: int) -> Chunk:
    data = rows.text[0].data
    labels, index, reasons = _read_pairs(data, rows.begins, rows.ends)
    faults = Faults(len(rows.lines))
    for code in np.unique(reasons[reasons > 0]):
        faults.mark(reasons == code, _REASONS[code])
    show = partial(show_span, data)
    bad = rows.bad + faults.bad_rows(file, rows.lines, partial(show, rows.begins, rows.ends))
    bad.sort(key=lambda row: row.line)
    keep = faults.good & (labels.ends > labels.starts)  # a line with only a comment is not a row
    columns = {LABEL: take(labels, keep), INDEX: take(index, keep)}
    return Chunk(file, columns, rows.lines[keep], partial(show, rows.begins[keep], rows.ends[keep]), bad, bytes_read)


def _read_pairs(data: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> tuple[Text, Lists, np.ndarray]:
    """Label text, bags of indices, and a reason per row (0: good)."""
    n = len(begins)
    num_pairs = int(np.count_nonzero(data == _COLON))
    label_spans = np.zeros((2, n), dtype=np.int64)
    spans = np.empty((4, num_pairs), dtype=np.int64)  # begin and end of index and value
    row_of_pair = np.empty(num_pairs, dtype=np.int64)
    reasons = np.zeros(n, dtype=np.uint8)
    count = _find_pairs(data, begins, ends, label_spans, spans, row_of_pair, reasons)
    spans, row_of_pair = spans[:, :count], row_of_pair[:count]
    index, index_codes = parse_integers(Text(data, spans[0], spans[1]))
    value, value_codes = parse_floats(Text(data, spans[2], spans[3]))
    for reason, wrong in (
        (5, (value != 0) & (value != 1)),
        (4, (value_codes != OK)),
        (2, (index_codes != OK) | (index < 0)),
        (3, index_codes == TOO_LARGE),
        (1, (index_codes == MISSING)),
    ):
        reasons[row_of_pair[wrong]] = reason
    order = np.lexsort((index, row_of_pair))
    again = (np.diff(index[order]) == 0) & (np.diff(row_of_pair[order]) == 0)
    twice = row_of_pair[order][1:][again]
    reasons[twice[reasons[twice] == 0]] = 6
    used = value == 1
    lengths = np.bincount(row_of_pair[used], minlength=n)
    bags = Lists(offsets_of(lengths), Integers(index[used], np.zeros(int(used.sum()), dtype=np.bool_)))
    return Text(data, label_spans[0], label_spans[1]), bags, reasons


@njit(nogil=True, cache=True)
def _find_pairs(
    data: np.ndarray,
    begins: np.ndarray,
    ends: np.ndarray,
    labels: np.ndarray,
    spans: np.ndarray,
    row_of_pair: np.ndarray,
    reasons: np.ndarray,
) -> int:
    count = 0
    for row in range(len(begins)):
        k, end = begins[row], ends[row]
        first = True
        while k < end and data[k] != _HASH:  # ends: k passes a space, or a token of at least one byte
            if data[k] == _SPACE or data[k] == _TAB:
                k += 1
                continue
            token, colon, colons = k, -1, 0
            while k < end and data[k] != _SPACE and data[k] != _TAB and data[k] != _HASH:
                if data[k] == _COLON:
                    colon = k
                    colons += 1
                k += 1
            if first:
                labels[0, row], labels[1, row] = token, k
                first = False
            elif colons != 1:
                reasons[row] = 1
            else:
                spans[0, count], spans[1, count] = token, colon
                spans[2, count], spans[3, count] = colon + 1, k
                row_of_pair[count] = row
                count += 1
    return count


def _items_chunk(file: str, rows: SplitRows, bytes_read: int) -> Chunk:
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


LINE_FORMATS = {"libsvm": _pairs_chunk, "lists": _items_chunk}
