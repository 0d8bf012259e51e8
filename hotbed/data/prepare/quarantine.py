"""Bad rows in, counts by reason out; an error if there are too many."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hotbed.data.formats.chunk import NOT_UTF8, OPEN_QUOTE, BadRow, to_utf8
from hotbed.data.times import NOT_A_TIME_REASON
from hotbed.data.values import NOT_A_NUMBER_REASON
from hotbed.errors import ConfigError, FormatError

SHOWN_BAD = 3
_SURE_ROWS = 100_000  # a share is checked at the end, and during the job after this many rows


@dataclass(frozen=True)
class MaxBad:
    """How many bad rows are too many: a number of rows, or a share of all rows."""

    rows: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str | int | float) -> MaxBad:
        """`100` is rows, `1%` is a share."""
        plain = str(text).strip()
        try:
            if plain.endswith("%"):
                share = float(plain[:-1]) / 100
                if 0 <= share <= 1:
                    return cls(share=share)
            elif int(plain) >= 0:
                return cls(rows=int(plain))
        except ValueError:
            pass
        raise ConfigError(f"max-bad {text!r} is neither a number of rows (100) nor a percentage from 0% to 100% (1%).")

    def exceeded(self, bad: int, rows: int) -> bool:
        return bad > self.rows if self.rows is not None else bad > (self.share or 0.0) * rows

    def __str__(self) -> str:
        return f"{self.rows:,} rows" if self.rows is not None else f"{100 * (self.share or 0.0):g}%"


class Quarantine:
    """Counts bad rows by reason; raises an error if there are too many."""

    def __init__(self, max_bad: MaxBad, label_hint: str = "", advice: str = "") -> None:
        """`label_hint` is added if labels cannot be read; `advice` replaces the hint at the options of `prepare`."""
        self._max_bad = max_bad
        self._advice = advice
        self._label_hint = label_hint
        self._first: list[BadRow] = []
        self.reasons: Counter[str] = Counter()
        self.good_rows = 0

    @property
    def bad_rows(self) -> int:
        return self.reasons.total()

    def add(self, bad: Sequence[BadRow], good_rows: int) -> None:
        """Count the bad rows of a chunk; a FormatError once there are certainly too many."""
        self.count(Counter(row.reason for row in bad), bad[:SHOWN_BAD], good_rows)

    def count(self, reasons: Mapping[str, int], first: Sequence[BadRow], good_rows: int) -> None:
        """Like `add` for rows that are counted already; `first` holds some of them for messages."""
        self.good_rows += good_rows
        self.reasons.update(reasons)
        self._first += first[: SHOWN_BAD - len(self._first)]
        if self._max_bad.rows is not None or self.good_rows + self.bad_rows >= _SURE_ROWS:
            self.check()

    def check(self) -> None:
        """A FormatError if there are too many bad rows."""
        rows = self.good_rows + self.bad_rows
        if not self._max_bad.exceeded(self.bad_rows, rows):
            return
        first = "\n".join(f"  {row.file}, line {row.line}: {row.reason}: {row.text[:120]!r}" for row in self._first)
        raise FormatError(
            f"{self.bad_rows:,} of {rows:,} rows are bad; at most {self._max_bad} may be (--max-bad). The first:\n{first}\n"
            f"{self._way_out()}"
        )

    def _way_out(self) -> str:
        """The way out for the most frequent reason."""
        leave_out = " If these rows may be left out, raise --max-bad."
        reason = self.reasons.most_common(1)[0][0]
        if not self._advice and (hint := mixed_hint(reason) or time_hint(reason)):
            return hint
        other = next((row.file for row in self._first if row.reason == NOT_UTF8), None)
        if reason == NOT_UTF8 and other is not None:
            return f"{other} is not UTF-8. {to_utf8(other)}{leave_out}"
        if reason.startswith("label ") and self._label_hint:
            return self._label_hint + leave_out
        broken = next((row.file for row in self._first if row.reason == OPEN_QUOTE), None)
        if OPEN_QUOTE in self.reasons and broken is not None:
            return f"{_without_breaks(broken)}{leave_out}"
        if self._advice:
            return self._advice + leave_out
        words = (
            " A label of two words: --positive VALUE names the one that means 1." if "is not 0 or 1" in reason else ""
        )
        return f"Is the format right (--format, --label, --delimiter)?{words}{leave_out}"


def _without_breaks(file: str) -> str:
    """The way out for values in quotes that go over several lines."""
    options = "parse_options=c.ParseOptions(newlines_in_values=True)"
    code = (
        f"import pyarrow.csv as c, pyarrow.parquet as p; p.write_table(c.read_csv({file!r}, {options}), 'log.parquet')"
    )
    return (
        "A value in quotes must be on one line. If values have line breaks in them, as reviews do, convert the file: "
        f"python -c {shlex.quote(code)}"
    )


def mixed_hint(reason: str) -> str:
    """The way out for a number column that also holds text, such as 98107-2117; empty for other reasons."""
    name = reason.removesuffix(NOT_A_NUMBER_REASON)
    if name == reason:
        return ""
    return (
        f"{name} holds both numbers and text: --ids {shlex.quote(name)} reads all of its values as ids, and no row is lost; "
        f"--drop {shlex.quote(name)} leaves the column out."
    )


def time_hint(reason: str) -> str:
    """The way out for a time that cannot be read; empty for other reasons."""
    name = reason.removeprefix("time ").removesuffix(NOT_A_TIME_REASON)
    if reason != f"time {name}{NOT_A_TIME_REASON}":
        return ""
    example = shlex.quote(f"{name}:%d/%m/%Y %H:%M")
    return f"Name its format as in strptime: --time {example}. Numbers need a unit: --time {shlex.quote(name)}:ms."
