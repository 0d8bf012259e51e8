"""A time column in, microseconds since 1970 (UTC) out; a row whose value is not a time is bad.

Arrow's dates and timestamps have their own unit. Text is a number or close to ISO 8601: 2014-10-21, 2014/10/21 5:30,
optionally with seconds, a fraction, `T` instead of the space, `Z` or an offset; month, day and hour may have one digit. A
number, perhaps with a fraction, counts `unit` since 1970 (seconds by default) or is a date: yyyymmdd, or yymmddhh as in
Avazu's log. Any other text needs a format of strptime as `unit`: %d.%m.%Y %H:%M. A time without an offset is in UTC.

`clock_ids`: hour or weekday of a time as an id.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.data.formats.chunk import Column, Faults, Floats, Instants, Integers, Text
from hotbed.data.formats.parse_numbers import OK, parse_floats, parse_integers
from hotbed.errors import ConfigError, FormatError
from hotbed.host.jit import njit

SECOND = 1_000_000
DAY = 86_400 * SECOND
_DATE = re.compile(r"\s*(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))(\D|$)")
_NAMED_MONTH = re.compile(
    r"\d.*\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)|\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b.*\d{4}",
    re.I,
)
_DATES = (
    "%d/%m/%Y",
    "%d.%m.%Y",
    "%d-%m-%Y",
    "%d/%m/%y",
    "%m/%d/%Y",
    "%m-%d-%Y",
    "%m.%d.%Y",
    "%m/%d/%y",
    "%d.%m.%y",
    "%Y.%m.%d",
)
_NAMED_DATES = (
    "%d-%b-%Y",
    "%d-%b-%y",
    "%d %b %Y",
    "%d %B %Y",
    "%d/%b/%Y",
    "%b %d, %Y",
    "%B %d, %Y",
    "%b %d %Y",
    "%a, %d %b %Y",
)
_CLOCKS = (
    "",
    " %H:%M",
    " %H:%M:%S",
    " %H:%M:%S.%f",
    " %I:%M %p",
    " %I:%M:%S %p",
    ":%H:%M:%S %z",
    " %H:%M:%S %z",
    " %H:%M:%S %Z",
)
_SPELLED = ("yyyymmdd", "yymmddhh")
UNITS = {"s": SECOND, "ms": 1000, "us": 1, "ns": -1000, "hour": 3600 * SECOND, "day": DAY}
EARLIEST, LATEST = -62_135_596_800 * SECOND, 253_402_300_800 * SECOND  # the years 1 and 10000
NO_TIME = -(2**63)
_MOMENTS = ("s", "ms", "us", "ns")
_RECENT = 600_000_000 * SECOND, 2_200_000_000 * SECOND  # 1989 to 2039
_FEWEST_TIMES = 3  # distinct numbers
NOT_A_TIME_REASON = " is not a time"  # follows the name of the column


class TimeColumn(NamedTuple):
    """The time column, and the unit of its numbers."""

    name: str
    unit: str = "s"  # or a format of strptime

    @classmethod
    def parse(cls, text: str) -> TimeColumn:
        """`COLUMN`, `COLUMN:UNIT` or `COLUMN:FORMAT`."""
        name, colon, format = text.partition(":%")
        if colon and name:
            _check_format("%" + format, text)
            return cls(name, "%" + format)
        name, colon, unit = text.rpartition(":")
        if colon and unit in (*UNITS, *_SPELLED):
            return cls(name, unit)
        if colon and name and len(unit) < 10 and unit.isalpha():
            known = ", ".join((*UNITS, *_SPELLED))
            raise ConfigError(f"--time {text}: {unit!r} is not a unit of time. The units are: {known}.")
        return cls(text)


def read_times(column: Column, spec: TimeColumn, faults: Faults) -> NDArray[np.int64]:
    """Microseconds since 1970, int64 [n]."""
    if not isinstance(column, Instants | Integers | Floats | Text):
        raise FormatError(f"time column {spec.name} holds lists or ids; it must hold one time per row.")
    missing = missing_times(column)
    if isinstance(column, Instants):
        times = column.micros
    elif isinstance(column, Integers | Floats):
        times = _from_numbers(np.where(missing, 0, column.values), spec.unit)
    elif spec.unit.startswith("%"):
        times = _from_format(column, spec.unit)
    else:
        times = _from_text(column, spec.unit)
    faults.mark(missing, f"time {spec.name} is missing")
    faults.mark((times == NO_TIME) & ~missing, f"time {spec.name}{NOT_A_TIME_REASON}")
    outside = ((times < EARLIEST) | (times >= LATEST)) & (times != NO_TIME) & ~missing
    faults.mark(
        outside, f"time {spec.name} lies outside the years 1 to 9999; is its unit right? (--time {spec.name}:UNIT)"
    )
    return times


def looks_like_time(texts: Sequence[str]) -> str:
    """plain: texts are times that can be read as they are. Dates in another form: their format of strptime, or `format`."""
    texts = [text for text in texts if text]
    are_dates = all(_DATE.match(text) for text in texts)
    if not texts or not (are_dates or all(_NAMED_MONTH.search(text) for text in texts)):
        return ""
    data = np.frombuffer("".join(texts).encode(), np.uint8)
    ends = np.cumsum([len(text.encode()) for text in texts])
    starts = ends - [len(text.encode()) for text in texts]
    if are_dates and (_parse_iso(data, starts, ends) != NO_TIME).all():
        return "plain"
    distinct = list(dict.fromkeys(text.strip() for text in texts))
    formats = (f"{date}{clock}" for date in (_DATES if are_dates else _NAMED_DATES) for clock in _CLOCKS)
    found = next((one for one in formats if all(_strptime(text, one) != NO_TIME for text in distinct)), "")
    return found or ("format" if are_dates else "")


def is_ambiguous(format: str) -> bool:
    """Whether the order of day and month in a format of `looks_like_time` is only the more common one."""
    return format.startswith(_DATES[:4])


def unit_of_numbers(values: NDArray[np.int64] | NDArray[np.float64]) -> str:
    """The unit of numbers that all look like times: dates as numbers, or moments since 1989; empty if they do not."""
    if len(np.unique(values)) < _FEWEST_TIMES:
        return ""
    whole = bool((np.floor(values) == values).all())
    for unit in _SPELLED:
        if whole and values.max() < 10**8 and (_from_numbers(values, unit) != NO_TIME).all():
            return unit
    first, last = _RECENT
    return next((unit for unit in _MOMENTS if _in_range(_from_numbers(values, unit), first, last)), "")


def _in_range(times: NDArray[np.int64], first: int, last: int) -> bool:
    return bool(((times >= first) & (times < last)).all())


def missing_times(column: Column) -> NDArray[np.bool_]:
    """The rows without a time, bool [n]."""
    if isinstance(column, Instants | Integers):
        return np.asarray(column.missing)
    if isinstance(column, Floats):
        return np.asarray(np.isnan(column.values))
    return np.asarray(column.starts == column.ends) if isinstance(column, Text) else np.zeros(0, np.bool_)


def _from_numbers(values: NDArray[np.int64] | NDArray[np.float64], unit: str) -> NDArray[np.int64]:
    if unit.startswith("%"):
        return np.full(len(values), NO_TIME)
    if unit in _SPELLED:
        readable = np.abs(values) < 10**9
        return np.asarray(_spelled(np.where(readable, values, 0).astype(np.int64), unit == "yymmddhh"))
    factor = UNITS[unit]
    micros = values / -factor if factor < 0 else values.astype(np.float64) * factor
    readable = np.abs(micros) < LATEST
    if values.dtype.kind == "f":
        exact = np.round(np.where(readable, micros, 0.0)).astype(np.int64)
    else:
        whole = np.where(readable, values, 0).astype(np.int64)
        exact = whole // -factor if factor < 0 else whole * factor
    return np.where(readable, exact, np.where(micros < 0, EARLIEST - 1, LATEST))


def _from_text(column: Text, unit: str) -> NDArray[np.int64]:
    """Whole numbers, ISO 8601, or numbers with a fraction: 1593878937.744."""
    whole, codes = parse_integers(column)
    times = np.where(codes == OK, _from_numbers(whole, unit), _parse_iso(*column))
    other = times == NO_TIME
    if other.any():
        numbers, codes = parse_floats(Text(column.data, column.starts[other], column.ends[other]))
        times[other] = np.where(codes == OK, _from_numbers(np.where(codes == OK, numbers, 0.0), unit), NO_TIME)
    return times


def _from_format(column: Text, format: str) -> NDArray[np.int64]:
    """Texts by strptime; equal ones are read once."""
    known: dict[str, int] = {}
    out = np.empty(len(column.starts), dtype=np.int64)
    for i in range(len(out)):
        text = column.string(i)
        if text not in known:
            known[text] = _strptime(text, format)
        out[i] = known[text]
    return out


def _strptime(text: str, format: str) -> int:
    for one in _formats_in_utc(format):
        try:
            moment = datetime.strptime(text.strip(), one)
        except (ValueError, OverflowError):
            continue
        since = moment.replace(tzinfo=moment.tzinfo or UTC) - datetime(1970, 1, 1, tzinfo=UTC)
        return (since.days * 86_400 + since.seconds) * SECOND + since.microseconds
    return NO_TIME


def _formats_in_utc(format: str) -> list[str]:
    """%Z is UTC or GMT. Python also knows the names of the zone of the machine there, and drops its offset."""
    if "%Z" not in format.replace("%%", ""):
        return [format]
    return ["%%".join(part.replace("%Z", zone) for part in format.split("%%")) for zone in ("UTC", "GMT")]


def _check_format(format: str, text: str) -> None:
    """A ConfigError if strptime cannot use the format."""
    try:
        moment = datetime(2001, 2, 3, 4, 5, 6)
        datetime.strptime(moment.strftime(format), format)
    except ValueError as error:
        raise ConfigError(
            f"--time {text}: {format!r} is not a format of strptime ({error}). For example: %d/%m/%Y %H:%M."
        ) from None


def clock_ids(times: NDArray[np.int64], part: str) -> NDArray[np.int64]:
    """The hour (0 to 23) or the weekday (0 is Monday) of times in microseconds since 1970 (a Thursday), UTC."""
    return times // (3600 * SECOND) % 24 if part == "hour" else (times // DAY + 3) % 7


def show_time(micros: int) -> str:
    """A time as text."""
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)).strftime("%Y-%m-%d %H:%M:%S")


@njit(nogil=True, cache=True)
def _days(year: int, month: int, day: int) -> int:
    """Days since 1970-01-01 (civil calendar), or a number below -10**7 if there is no such day."""
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    longest = 31 - (month - 1) % 7 % 2 if month != 2 else 28 + leap
    if not (1 <= year <= 9999 and 1 <= month <= 12 and 1 <= day <= longest):
        return -(10**8)
    before = year - (month <= 2)
    of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    era = before // 400
    of_era = before - era * 400
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


@njit(nogil=True, cache=True)
def _spelled(values: NDArray[np.int64], with_hours: bool) -> NDArray[np.int64]:
    """yyyymmdd from the year 1000 on, as yymmdd is another date; or yymmddhh of this century."""
    out = np.empty(len(values), dtype=np.int64)
    for i in range(len(values)):
        value = values[i]
        hour = np.int64(0)
        if with_hours:
            hour, value = value % 100, value // 100 + 20_000_000
        days = _days(value // 10_000, value // 100 % 100, value % 100) if value >= 10_000_000 else -(10**8)
        out[i] = days * DAY + hour * 3600 * SECOND if days > -(10**7) and 0 <= hour < 24 else NO_TIME
    return out


@njit(nogil=True, cache=True)
def _number(data: NDArray[np.uint8], begin: int, end: int) -> int:
    """Decimal digits, or -1."""
    total = 0
    for k in range(begin, end):
        if not 48 <= data[k] <= 57:
            return -1
        total = total * 10 + (data[k] - 48)
    return total


@njit(nogil=True, cache=True)
def _digits(data: NDArray[np.uint8], at: int, end: int) -> int:
    """How many digits follow: 0, 1 or 2."""
    if at >= end or not 48 <= data[at] <= 57:
        return 0
    return 2 if at + 1 < end and 48 <= data[at + 1] <= 57 else 1


@njit(nogil=True, cache=True)
def _parse_iso(data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    out = np.empty(len(starts), dtype=np.int64)
    for i in range(len(starts)):
        out[i] = _parse_iso_one(data, starts[i], ends[i])
    return out


@njit(nogil=True, cache=True)
def _parse_iso_one(data: NDArray[np.uint8], at: int, end: int) -> int:
    if end - at < 8 or (data[at + 4] != 45 and data[at + 4] != 47):  # - or /
        return NO_TIME
    between = data[at + 4]
    year = _number(data, at, at + 4)
    at += 5
    width = _digits(data, at, end)
    month = _number(data, at, at + width)
    at += width
    if width == 0 or at >= end or data[at] != between:
        return NO_TIME
    at += 1
    width = _digits(data, at, end)
    if width == 0:
        return NO_TIME
    days = _days(year, month, _number(data, at, at + width))
    if days < -(10**7):
        return NO_TIME
    micros = days * DAY
    at += width
    if at == end:
        return micros
    if data[at] != 32 and data[at] != 84:  # a space or T
        return NO_TIME
    at += 1
    scale = 3600 * SECOND
    limit = 24
    for part in range(3):  # hours, minutes, seconds
        width = _digits(data, at, end)
        if width < 2 and (part > 0 or width == 0):  # only the hour may have one digit
            return NO_TIME
        value = _number(data, at, at + width)
        if not 0 <= value < limit:
            return NO_TIME
        micros += value * scale
        at += width
        scale //= 60
        limit = 60
        if part == 2 or at == end or data[at] != 58:
            break
        at += 1
    if part == 2 and at < end and data[at] == 46:  # a fraction of a second
        at += 1
        scale = SECOND
        while at < end and 48 <= data[at] <= 57:
            scale //= 10
            micros += (data[at] - 48) * scale
            at += 1
    if at < end and data[at] == 90:  # Z
        at += 1
    elif at + 5 <= end and (data[at] == 43 or data[at] == 45):
        colon = at + 3 < end and data[at + 3] == 58
        hours, minutes = _number(data, at + 1, at + 3), _number(data, at + 3 + colon, at + 5 + colon)
        if at + 5 + colon != end or not (0 <= hours < 24 and 0 <= minutes < 60):
            return NO_TIME
        offset = (hours * 60 + minutes) * 60 * SECOND
        micros -= offset if data[at] == 43 else -offset
        at = end
    return micros if at == end else NO_TIME
