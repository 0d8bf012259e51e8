"""Rows in; columns that a user should look at out: leaks of the label, several ids in one value, times, labels of two words.

`find_leaks`: the columns of a written dataset that give the label away. A column that is known only after the click (the time
of the purchase, filled for positives alone) makes a model look perfect and useless. Every column is tried alone on the first
rows of train: how well does its value order the labels (AUC)? For ids and ranges of numbers, the share of positives of each
id is counted on every other row and tried on the rest; ids that are rare there share one value, so a column whose values never
repeat is judged by whether it is filled. Real features stay far below the limit.

`number_columns`: text columns that are numbers in the main, with decimal commas, signs of a currency, or words in between.

`joined_columns`: text columns whose values look like several ids, and their separator. Without a separator, `news|art`,
`art|food` and `news|food` are three different ids, and the model learns nothing about `art`. The criterion: many values contain
the separator, and few parts make up many of them. The result is only a hint for the user: an address or a user agent may look
the same.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.data.formats import Chunk, Floats, HashedText, Instants, Integers, Lists, Text
from hotbed.data.formats.chunk import shorten
from hotbed.data.formats.parse_numbers import MISSING, OK, parse_floats
from hotbed.data.schema import IdFeature, Schema
from hotbed.data.times import looks_like_time, unit_of_numbers
from hotbed.data.values import LabelReader, LabelThreshold, value_text

LEAK_AUC = 0.99
_ROWS = 100_000  # that are inspected
_FEWEST = 10  # positives and negatives, in each half
_RARE = 3  # an id with fewer rows in one half has no share of its own
_PRIOR = 0.5  # added to the rows of an id, in units of an average row
_FLOAT_DIGITS = 12
_BINS = 100
_LABELS, _SHOWN = 10_000, 5  # labels that are inspected, and shown
_MEAN_ONE = ("1", "yes", "y", "true", "t", "click", "clicked", "pos", "positive", "on", "+1", "1.0")
_SEPARATORS = "|;,^~"
_VALUES = 2000  # that are inspected
_SHARE = 0.3  # at least this share of the values has the separator
_FEWEST_JOINED = 5  # at least this many of them are distinct
_MAKE_UP = 2  # at least this many values per part
_MOSTLY_NUMBERS = 0.5  # at least this share of the values are numbers
_PLAIN_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_SPELLED_NUMBER = re.compile(
    r"[-+]?[€$£¥]?\s?[-+]?(\d+|\d{1,3}([.,' \u00a0]\d{3})+)([.,]\d+)?\s?([%€$£¥]|EUR|USD|CHF|GBP)?"
)


def find_leaks(directory: Path, schema: Schema) -> dict[str, float]:
    """Column -> AUC of its value alone, for those above LEAK_AUC."""
    table = _first_rows(directory, schema)
    labels = table.column(schema.label).to_numpy() > 0
    halves = labels[::2], labels[1::2]
    if any(min(int(half.sum()), int((~half).sum())) < _FEWEST for half in halves):
        return {}
    found = {}
    for spec in schema.dense:
        values = table.column(spec.name).to_numpy()
        area = _auc(labels, values)
        found[spec.name] = max(area, 1 - area, _auc_of_ids(labels, _bins(values)))
    for feature in schema.features:
        column = table.column(feature.name).combine_chunks()
        ids = _firsts(column) if feature.multi else column.to_numpy()
        found[feature.name] = _auc_of_ids(labels, ids)
    return {name: round(area, _FLOAT_DIGITS) for name, area in found.items() if area >= LEAK_AUC}


def _first_rows(directory: Path, schema: Schema) -> pa.Table:
    parts, rows = [], 0
    for file in schema.splits["train"].files:
        with pa.OSFile(str(directory / file)) as source, pa.ipc.open_file(source) as opened:
            for number in range(opened.num_record_batches):
                if rows < _ROWS:
                    parts.append(opened.get_batch(number))
                    rows += parts[-1].num_rows
        if rows >= _ROWS:
            break
    return pa.Table.from_batches(parts).slice(0, _ROWS)


def _firsts(column: pa.Array) -> NDArray[np.int64]:
    """The first id of every bag, -1 for an empty one."""
    offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
    filled = offsets[1:] > offsets[:-1]
    out = np.full(len(filled), -1, dtype=np.int64)
    out[filled] = values[offsets[:-1][filled]]
    return out


def _bins(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Numbers of about equally filled ranges; a frequent value, such as that of missing ones, has a bin of its own."""
    edges = np.unique(np.quantile(values, np.linspace(0, 1, _BINS + 1)))
    return np.searchsorted(edges, values, side="left") + np.searchsorted(edges, values, side="right")


def _auc_of_ids(labels: NDArray[np.bool_], ids: NDArray[np.int64]) -> float:
    """The AUC of scoring by the share of positives of each id, counted on even rows and measured on odd ones."""
    _, numbers = np.unique(ids, return_inverse=True)
    counted = numbers[::2]
    rows = np.bincount(counted, minlength=numbers.max() + 1)
    positives = np.bincount(counted, labels[::2], minlength=len(rows))
    rare = rows < _RARE
    rows = np.where(rare, rows[rare].sum(), rows)
    positives = np.where(rare, positives[rare].sum(), positives)
    shares = (positives + _PRIOR * labels.mean()) / (rows + _PRIOR)
    return _auc(labels[1::2], shares[numbers[1::2]])


def _auc(labels: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """Area under the ROC curve; a tie counts half."""
    _, numbers = np.unique(scores, return_inverse=True)
    positives = np.bincount(numbers, labels)
    negatives = np.bincount(numbers, ~labels)
    below = np.cumsum(negatives) - negatives / 2
    return float((positives * below).sum() / (positives.sum() * negatives.sum()))


def joined_columns(chunk: Chunk, features: Sequence[IdFeature]) -> dict[str, str]:
    """Column -> separator, for features whose values would be read as one id each."""
    found = {}
    for feature in features:
        column = chunk.columns.get(feature.name)
        if feature.multi or feature.source != "string" or not isinstance(column, Text):
            continue
        separator = _separator([value for value in _first_texts(column) if value])
        if separator:
            found[feature.name] = separator
    return found


def time_columns(chunk: Chunk, features: Sequence[IdFeature], open_names: Collection[str]) -> dict[str, str]:
    """Columns of times that would be read as ids or amounts -> plain, format if one must be named, or the unit of numbers.

    `features`: whose text may be times; `open_names`: columns that no option and no name makes ids or amounts.
    """
    found: dict[str, str] = {}
    for feature in features:
        column = chunk.columns.get(feature.name)
        if feature.source == "string" and isinstance(column, Text):
            kind = looks_like_time(_first_texts(column))
            found |= {feature.name: kind} if kind else {}
    for name in open_names:
        column = chunk.columns.get(name)
        unit = unit_of_numbers(_first_numbers(column)) if isinstance(column, Text | Integers | Floats) else ""
        found |= {name: unit} if unit else {}
    return found


def number_columns(chunk: Chunk, features: Sequence[IdFeature]) -> dict[str, str]:
    """Text columns that would be read as ids but hold many numbers, plain or written as 1.234,50 € -> what is not plain."""
    found = {}
    for feature in features:
        column = chunk.columns.get(feature.name)
        if feature.multi or feature.source != "string" or not isinstance(column, Text):
            continue
        texts = [text for text in map(str.strip, _first_texts(column)) if text]
        plain = [bool(_PLAIN_NUMBER.fullmatch(text)) for text in texts]
        numbers = sum(known or bool(_SPELLED_NUMBER.fullmatch(text)) for text, known in zip(texts, plain))
        odd = next((text for text, known in zip(texts, plain) if not known), "")
        if odd and len(texts) >= _FEWEST and numbers >= _MOSTLY_NUMBERS * len(texts):
            found[feature.name] = shorten(odd)
    return found


def spaced_columns(chunk: Chunk, features: Sequence[IdFeature]) -> dict[str, str]:
    """Text columns whose values begin or end with a space, which is a part of the id -> such a value."""
    found: dict[str, str] = {}
    for feature in features:
        column = chunk.columns.get(feature.name)
        if feature.source == "string" and isinstance(column, Text):
            spaced = next((text for text in _first_texts(column) if text != text.strip()), "")
            found |= {feature.name: shorten(spaced)} if spaced else {}
    return found


def _first_texts(column: Text) -> list[str]:
    return [column.string(i) for i in range(min(len(column.starts), _VALUES))]


def _first_numbers(column: Text | Integers | Floats) -> NDArray[np.float64]:
    """The first values without the missing ones; none if some are not numbers."""
    if isinstance(column, Integers):
        return np.asarray(column.values[:_VALUES][~column.missing[:_VALUES]]).astype(np.float64)
    if isinstance(column, Floats):
        return np.asarray(column.values[:_VALUES][~np.isnan(column.values[:_VALUES])])
    values, codes = parse_floats(Text(column.data, column.starts[:_VALUES], column.ends[:_VALUES]))
    return np.asarray(values[codes == OK] if ((codes == OK) | (codes == MISSING)).all() else values[:0])


def _separator(values: list[str]) -> str:
    for one in _SEPARATORS:
        joined = [value for value in values if one in value]
        parts = {part.strip() for value in joined for part in value.split(one)}
        if len(joined) < _SHARE * len(values) or len(set(joined)) < max(_FEWEST_JOINED, _MAKE_UP * len(parts)):
            continue
        return one
    return ""


def label_hint(chunk: Chunk, label: LabelReader) -> str:
    """The values of the label and the option to use; empty if all of them can be read."""
    column = chunk.columns[label.name]
    if isinstance(column, Lists | HashedText | Instants):
        return ""
    texts = (value_text(column, row) for row in range(min(_LABELS, len(chunk.lines))))
    seen = Counter(text for text in texts if text)
    is_word = label.positive is not None and LabelThreshold.parse(label.positive) is None
    if label.positive in seen or (seen and not is_word and all(label.reads(text) for text in seen)):
        return ""
    shown = ", ".join(repr(shorten(text)) for text in list(seen)[:_SHOWN]) + (", ..." if len(seen) > _SHOWN else "")
    rows = min(_LABELS, len(chunk.lines))
    given = f"None of the first {rows:,} labels is {label.positive!r} (--positive). " if label.positive else ""
    if not seen:
        return f"{given}Column {label.name} is empty. --label names another one."
    found = f"{given}Values of {label.name}: {shown}."
    if len(seen) != 2 and not _like(seen, label.positive):
        return f"{found} A label has two values; --label names another column, --positive VALUE the value that means 1."
    word = _like(seen, label.positive) or _largest(seen) or _likely(seen)
    return f"{found} --positive {shlex.quote(word)} says that {word!r} means 1."


def _like(seen: Counter[str], positive: str | None) -> str | None:
    """The value that differs from `positive` only in case."""
    return next((text for text in seen if positive is not None and text.lower() == positive.strip().lower()), None)


def _largest(seen: Counter[str]) -> str | None:
    """The larger one of two numbers."""
    return max(seen, key=float) if all(_PLAIN_NUMBER.fullmatch(text) for text in seen) else None


def _likely(seen: Counter[str]) -> str:
    """A word that commonly means 1, else the rarer value."""
    for word in _MEAN_ONE:
        for text in seen:
            if text.lower() == word:
                return text
    return min(seen, key=lambda text: seen[text])
