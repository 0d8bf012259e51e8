"""Raw columns in, labels, numbers and 64-bit ids out; a row with a value that cannot be read is bad."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.data.formats.chunk import (
    Column,
    Faults,
    Floats,
    HashedText,
    Instants,
    Integers,
    Lists,
    Scalar,
    Text,
    Unsigned,
    num_values,
    offsets_of,
)
from hotbed.data.formats.parquet import text_of_strings
from hotbed.data.formats.parse_numbers import MISSING, NOT_A_NUMBER, TOO_LARGE, parse_floats, parse_integers
from hotbed.data.hash import MISSING_ID, hash_text
from hotbed.data.schema import ClockSource, DenseColumn, IdFeature, clock_of
from hotbed.data.times import NOT_A_TIME_REASON, TimeColumn, clock_ids, missing_times, read_times
from hotbed.errors import FormatError
from hotbed.host.jit import njit

# bucket k > 2 starts where log(x)**2 reaches k - 2, rounded up to a whole number: 3, 5, 6, 8, 10, 12, ...
BUCKET_STARTS = np.unique([math.ceil(math.exp(math.sqrt(k))) for k in range(1, 1900)]).astype(np.float64)


_THRESHOLD = re.compile(r"\s*(.*?)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+))\s*")
_SIGNS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
LARGEST = 1e30  # larger numbers are treated as damage; their squares would overflow
NOT_A_NUMBER_REASON = " is not a number"  # follows the name of the column
FLOAT32_MAX = float(np.finfo(np.float32).max)


class Bags(NamedTuple):
    """One bag of ids per row: row i owns ids[offsets[i]:offsets[i + 1]]."""

    offsets: np.ndarray  # int64 [n + 1]
    ids: np.ndarray  # int64


class LabelThreshold(NamedTuple):
    """The numbers that mean 1: `rating>=4`."""

    column: str  # empty if it is not named
    sign: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> LabelThreshold | None:
        """The condition; None if the text is a value: `>50K`."""
        found = _THRESHOLD.fullmatch(text)
        return None if found is None else cls(found[1], found[2], float(found[3]))

    def holds(self, text: str) -> float:
        """1, 0, or NaN if the text is not a number."""
        try:
            number = float(text) if text.isascii() and "_" not in text else math.nan
        except ValueError:
            number = math.nan
        return math.nan if math.isnan(number) else float(_SIGNS[self.sign](number, self.limit))


class LabelReader:
    """Reads labels: 0/1 or true/false, or two values of which `positive` means 1; also -1/1 if `signed`.

    With `positive`, the first other value seen is the negative one; a third value is a fault, not a negative. A condition
    (`>=4`) instead of a value makes labels of numbers.
    """

    def __init__(
        self,
        name: str,
        *,
        positive: str | None = None,
        negative: str | None = None,
        signed: bool,
        optional: bool = False,
    ) -> None:
        self.name = name
        self.positive = positive
        self.negative = negative
        self._threshold = None if positive is None else LabelThreshold.parse(positive)
        self._label_of_number = {0.0: 0.0, 1.0: 1.0} | ({-1.0: 0.0} if signed else {})
        self._optional = optional

    def read(self, column: Column, faults: Faults) -> np.ndarray:
        """Float32 [n]; a label that cannot be read is a fault (NaN if labels are optional and it is missing)."""
        if isinstance(column, Lists | HashedText | Instants):
            raise FormatError(f"label column {self.name} holds lists; it must hold one value per row.")
        if self.positive is None and isinstance(column, Text) and _one_digit(column):
            plain: np.ndarray = (column.data[column.starts] - ord("0")).astype(np.float32)
            return plain
        if isinstance(column, Text):
            keys, missing = hash_text(column), column.starts == column.ends
        elif isinstance(column, Integers):
            keys, missing = column.values, column.missing
        else:
            keys, missing = column.values, np.isnan(column.values)
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        distinct = np.empty(len(first), dtype=np.float32)
        for k in np.argsort(first):  # in file order: the first other value is the negative one
            distinct[k] = self._label(_string(column, int(first[k])))
        labels: np.ndarray = distinct[inverse]
        labels[missing] = np.nan
        if not self._optional:
            faults.mark(missing, f"label {self.name} is missing")
        faults.mark(np.isnan(labels) & ~missing, self._fault())
        return labels

    def reads(self, text: str) -> bool:
        """Whether `text` is a label."""
        return not math.isnan(self._label(text))

    def _label(self, text: str) -> float:
        """1, 0, or NaN if the text is not a label."""
        text = text.strip()
        if self.positive is not None:
            if text == self.positive:
                return 1.0
            if self._threshold is not None:
                return self._threshold.holds(text)
            if self.negative is None and text:
                self.negative = text
            return 0.0 if text == self.negative else math.nan
        plain = text.lower()
        if plain in ("true", "false"):
            return float(plain == "true")
        if not plain.isascii() or "_" in plain:  # float() would accept both
            return math.nan
        try:
            return self._label_of_number.get(float(plain), math.nan)
        except ValueError:
            return math.nan

    def _fault(self) -> str:
        if self._threshold is not None:
            return f"label {self.name} is not a number, as --positive {self.positive!r} needs"
        if self.positive is not None:
            return f"label {self.name} is neither {self.positive!r} nor {self.negative!r}"
        return f"label {self.name} is not 0 or 1"


def _one_digit(text: Text) -> bool:
    """Whether all values are 0 or 1."""
    if not (text.ends - text.starts == 1).all():
        return False
    return bool((text.data[text.starts] >> 1 == ord("0") >> 1).all())


def value_text(column: Scalar, row: int) -> str:
    """A value as --positive would name it; empty if it is missing."""
    missing = (isinstance(column, Integers) and column.missing[row]) or (
        isinstance(column, Floats) and np.isnan(column.values[row])
    )
    return "" if missing else _string(column, row).strip()


def _string(column: Scalar, row: int) -> str:
    if isinstance(column, Text):
        return column.string(row)
    return str((_magnitudes(column) if isinstance(column, Integers) else column.values)[row])


def read_dense(column: Column, spec: DenseColumn, faults: Faults) -> np.ndarray:
    """Float64 [n]: transformed, missing values 0, not yet shifted and scaled."""
    if isinstance(column, Lists | HashedText | Instants):
        raise FormatError(f"number column {spec.name} holds lists; it must hold one number per row.")
    if spec.transform == "log" and isinstance(column, Integers) and not isinstance(column, Unsigned):
        return _log_integers(column)
    values = _numbers(column, spec.name, faults)
    if spec.transform == "log":
        values = np.sign(values) * np.log1p(np.abs(values))
    return np.where(np.isnan(values), 0.0, values)


class Target(NamedTuple):
    """A further label or the weight of samples, by its column."""

    name: str
    kind: str  # "binary", "regression" or "weight"


class Targets(NamedTuple):
    """All that are read; `optional` ones may be missing, as may their columns, and are NaN."""

    columns: Sequence[Target] = ()
    optional: bool = False


NO_TARGETS = Targets()


def read_target(column: Column, target: Target, faults: Faults, *, optional: bool = False) -> np.ndarray:
    """Float64 [n]; a value that its kind does not allow, or that is missing and not optional, is a fault."""
    name = target.name
    if isinstance(column, Lists | HashedText | Instants):
        raise FormatError(f"column {name} holds lists; a task or a weight needs one number per row.")
    values = _numbers(column, name, faults)
    missing = np.isnan(values)
    if not optional:
        faults.mark(missing, f"{name} is missing")
    if target.kind == "binary":
        faults.mark(~missing & (values != 0) & (values != 1), f"{name} is not 0 or 1")
    if target.kind == "weight":
        faults.mark(~missing & (values < 0), f"weight {name} is below 0")
    return values


_LOGS = np.log1p(np.arange(1 << 16))  # most integers of click logs are small; a table takes a sixth of the time


def _log_integers(column: Integers) -> np.ndarray:
    """sign(x) * log1p(|x|), 0 where missing."""
    out = np.empty(len(column.values))
    if _look_up_logs(column.values, column.missing, _LOGS, out):
        large = np.flatnonzero(np.isnan(out))
        values = column.values[large].astype(np.float64)
        out[large] = np.sign(values) * np.log1p(np.abs(values))
    return out


@njit(nogil=True, cache=True)
def _look_up_logs(values: np.ndarray, missing: np.ndarray, logs: np.ndarray, out: np.ndarray) -> int:
    """Logs of the integers in the table, NaN for the others; returns the number of others."""
    large = 0
    for i in range(len(values)):
        value = np.int64(0) if missing[i] else values[i]
        if 0 <= value < len(logs):
            out[i] = logs[value]
        elif -len(logs) < value < 0:
            out[i] = -logs[-value]
        else:
            out[i] = np.nan
            large += 1
    return large


def standardise(values: np.ndarray, spec: DenseColumn) -> np.ndarray:
    """Shifted and scaled as in the dataset, float32 [n]."""
    standard = (values - spec.mean) / spec.scale
    return np.clip(standard, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)


def read_ids(column: Column, feature: IdFeature, faults: Faults) -> np.ndarray | Bags:
    """The 64-bit ids of a feature: int64 [n], or bags if it is multi-valued."""
    if (clock := clock_of(feature.source)) is not None:
        return _clock_ids(column, feature, clock, faults)
    if not feature.multi:
        if isinstance(column, Lists | Instants):
            raise FormatError(f"column {feature.name} holds lists where one id per row is expected.")
        if isinstance(column, HashedText):
            return column.ids
        return _scalar_ids(column, feature, faults)
    if isinstance(column, Text) and feature.separator:
        column = split_values(column, feature.separator)
    if not isinstance(column, Lists):
        raise FormatError(f"column {feature.name} holds single values where lists are expected.")
    if feature.length:
        column = _cut(column, feature.length, feature.keep)
    value_faults = Faults(int(column.offsets[-1]))
    ids = _scalar_ids(column.values, feature, value_faults)
    if value_faults.any:
        row_of_value = np.repeat(np.arange(len(column.offsets) - 1), np.diff(column.offsets))
        rows = np.zeros(len(column.offsets) - 1, dtype=np.bool_)
        rows[row_of_value[~value_faults.good]] = True
        faults.mark(rows, f"{feature.name} holds a value that is not an id")
    return Bags(column.offsets, ids)


def _cut(lists: Lists, length: int, keep: str) -> Lists:
    """At most `length` values of each row: the last of them, or the first."""
    lengths = np.diff(lists.offsets)
    if lengths.max(initial=0) <= length:
        return lists
    row_of_value = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(int(lists.offsets[-1])) - lists.offsets[row_of_value]
    kept = place < length if keep == "first" else place >= (lengths - length)[row_of_value]
    values = lists.values
    if isinstance(values, Text):
        some: Scalar = Text(values.data, values.starts[kept], values.ends[kept])
    else:
        some = type(values)(*(part[kept] for part in values))
    return Lists(offsets_of(np.minimum(lengths, length)), some)


def _clock_ids(column: Column, feature: IdFeature, clock: ClockSource, faults: Faults) -> np.ndarray:
    """Hours or weekdays of a time column; a missing time has an id of its own."""
    name = feature.name.removesuffix(f"_{clock.part}")
    broken = Faults(num_values(column))
    times = read_times(column, TimeColumn(name, clock.unit), broken)
    missing = missing_times(column)
    faults.mark(~broken.good & ~missing, f"time {name}{NOT_A_TIME_REASON}")
    return np.where(missing, MISSING_ID, clock_ids(times, clock.part))


def _scalar_ids(column: Scalar, feature: IdFeature, faults: Faults) -> np.ndarray:
    if feature.source == "bucket":
        return bucket_ids(_numbers(column, feature.name, faults))
    if isinstance(column, Floats):
        column = _whole(column, feature.name, faults)
    if feature.source == "string":
        return hash_text(column if isinstance(column, Text) else _decimal(column))
    if isinstance(column, Text):
        values, codes = parse_integers(column)
        faults.mark(codes == NOT_A_NUMBER, f"{feature.name} is not an integer")
        faults.mark(codes == TOO_LARGE, f"{feature.name} needs more than 64 bits")
        column = Integers(values, codes == MISSING)
    faults.mark((column.values == MISSING_ID) & ~column.missing, f"{feature.name} is -2**63, the id of missing values")
    return np.where(column.missing, MISSING_ID, column.values)


def bucket_ids(values: np.ndarray) -> np.ndarray:
    """Log buckets of numbers (NaN: missing), int64 [n].

    Up to 2 a number is its own bucket (rounded towards zero); above, bucket 2 + k starts where log(x)**2 reaches k,
    so buckets widen with x. Negative numbers mirror positive ones.
    """
    size = np.abs(np.nan_to_num(values, nan=0.0))
    bucket = np.where(size < 3, np.floor(size), 2 + np.searchsorted(BUCKET_STARTS, size, side="right"))
    return np.where(np.isnan(values), MISSING_ID, np.where(values < 0, -bucket, bucket).astype(np.int64))


def _numbers(column: Scalar, name: str, faults: Faults) -> np.ndarray:
    """Float64 [n], NaN where missing."""
    if isinstance(column, Integers):
        return np.where(column.missing, np.nan, _magnitudes(column).astype(np.float64))
    if isinstance(column, Floats):
        values = column.values
    else:
        values, codes = parse_floats(column)
        if codes.max(initial=0) > MISSING:
            faults.mark(codes == NOT_A_NUMBER, f"{name}{NOT_A_NUMBER_REASON}")
            faults.mark(codes == TOO_LARGE, f"{name} is infinite or beyond {LARGEST:g}")
    huge = np.abs(values) > LARGEST
    if huge.any():
        faults.mark(huge, f"{name} is infinite or beyond {LARGEST:g}")
        values = np.where(huge, np.nan, values)
    return values


def _whole(column: Floats, name: str, faults: Faults) -> Integers:
    """Floats that represent integers (a column of integers with missing values often does)."""
    missing = np.isnan(column.values)
    whole = np.where(missing, 0.0, column.values)
    wrong = (np.floor(whole) != whole) | (np.abs(whole) >= 2**53)
    faults.mark(wrong, f"{name} is not a whole number")
    return Integers(np.where(wrong, 0.0, whole).astype(np.int64), missing)


def _decimal(column: Integers) -> Text:
    """Integers as decimal text, so that 42 in Parquet and 42 in CSV are the same string id."""
    return text_of_strings(pc.cast(pa.array(_magnitudes(column), mask=column.missing), pa.string()))


def _magnitudes(column: Integers) -> np.ndarray:
    """The integers as numbers: int64, or uint64 if they have no sign."""
    return column.numbers if isinstance(column, Unsigned) else column.values


def split_values(text: Text, separator: str) -> Lists:
    """Split every value at `separator`; empty pieces are dropped, so a missing value is an empty bag."""
    byte = ord(separator)
    most = len(text.starts) + int(np.count_nonzero(text.data == byte))
    starts, ends = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    lengths = np.zeros(len(text.starts), dtype=np.int64)
    count = _split_values(text.data, text.starts, text.ends, byte, starts, ends, lengths)
    return Lists(offsets_of(lengths), Text(text.data, starts[:count], ends[:count]))


@njit(nogil=True, cache=True)
def _split_values(
    data: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    separator: int,
    piece_starts: np.ndarray,
    piece_ends: np.ndarray,
    lengths: np.ndarray,
) -> int:
    count = 0
    for row in range(len(starts)):
        begin = starts[row]
        for k in range(starts[row], ends[row] + 1):
            if k == ends[row] or data[k] == separator:
                if k > begin:
                    piece_starts[count] = begin
                    piece_ends[count] = k
                    count += 1
                    lengths[row] += 1
                begin = k + 1
    return count
