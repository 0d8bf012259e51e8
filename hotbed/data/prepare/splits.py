"""The split of every row.

    train=0.8,test=0.2        at random, a pure function of (file, line)
    train=50000,test=10000    good rows in file order; the remaining rows belong to no split
    days:valid=1,test=1       whole days of the time column: here the last day is test, the one before valid, the rest train

The last two depend on all previous rows (or all rows), so they are determined as ranges afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from hotbed.errors import ConfigError, FormatError
from hotbed.host.jit import njit
from hotbed.host.splitmix import mix

TRAIN = "train"
_SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_RESERVED = ("counts", "work")
_KEPT_FILES = 2**40  # other numbers than those of files
_EXAMPLES = "Write train=0.8,valid=0.1,test=0.1 or train=50000,test=10000 or, with --time, days:test=1."


class SplitRange(NamedTuple):
    """Good rows begin .. end - 1, counted over all files, that belong to one split."""

    split: str
    begin: int
    end: int


def check_split_name(name: str) -> None:
    if not _SPLIT_NAME.fullmatch(name) or name in _RESERVED:
        raise ConfigError(
            f"{name!r} cannot be the name of a split. Use letters, digits, _ and -, such as train, valid, test."
        )


class SplitRule:
    """One of the three rules above."""

    def __init__(self, shares: Mapping[str, float | int], days: bool = False) -> None:
        if not shares:
            raise ConfigError(f"the split rule is empty. {_EXAMPLES}")
        for name in shares:
            check_split_name(name)
        counts = [isinstance(share, int) for share in shares.values()]
        if any(counts) != all(counts):
            raise ConfigError(f"split {dict(shares)} mixes rows and fractions. Use 0.8 or 50000, not both.")
        if any(share <= 0 for share in shares.values()):
            raise ConfigError(f"split {dict(shares)} has an empty split. Every number must be above 0.")
        if days and (not all(counts) or TRAIN in shares):
            raise ConfigError(
                f"split days:{dict(shares)} must give whole days to splits other than train, which takes the days before."
            )
        self.kind: Literal["random", "count", "days"] = "days" if days else "count" if all(counts) else "random"
        if self.kind == "random" and sum(shares.values()) > 1 + 1e-9:
            raise ConfigError(f"split {dict(shares)} adds up to {sum(shares.values()):g}. Fractions may add up to 1.")
        self.names = (TRAIN, *shares) if days else tuple(shares)
        self._shares = list(shares.values())
        self._ends = np.cumsum(self._shares)

    @classmethod
    def parse(cls, text: str) -> SplitRule:
        """The rule as a user writes it."""
        shares: dict[str, float | int] = {}
        days = text.startswith("days:")
        for part in text.removeprefix("days:").split(","):
            name, _, number = part.strip().partition("=")
            try:
                share = int(number) if number.isdecimal() else float(number)
            except ValueError:
                share = 0
            if name in shares or not 0 < share < 2**62:  # also refuses nan
                raise ConfigError(f"split {text!r} cannot be read at {part!r}. {_EXAMPLES}")
            shares[name] = share
        return cls(shares, days)

    @property
    def is_known_while_reading(self) -> bool:
        """Whether the split of a row depends on its file and line alone."""
        return self.kind == "random"

    def full(self, rows: int) -> bool:
        """Whether no row after the first `rows` can belong to a split."""
        return self.kind == "count" and rows >= int(self._ends[-1])

    def assign(self, file: int, lines: np.ndarray) -> np.ndarray:
        """For the random rule: the index into `names` of every row, int64 [n]; len(names) for rows of no split."""
        return np.searchsorted(self._ends, _uniform(file, lines), side="right")

    def stretches(self, rows: int, days: Sequence[tuple[int, int]]) -> list[SplitRange]:
        """For the other two rules: the range of each split, given the number of rows and (day, its first row) in order."""
        if self.kind == "count":
            ends = [min(int(end), rows) for end in self._ends]
            return [SplitRange(name, begin, end) for name, begin, end in zip(self.names, [0, *ends], ends)]
        if len(days) <= sum(self._shares):
            raise FormatError(
                f"--splits takes {sum(self._shares)} whole days and train needs at least one more; the time column spans "
                f"{len(days)}. Take fewer days, or prepare more files."
            )
        firsts = [first for _, first in days]
        borders = [0]
        left = len(days) - int(sum(self._shares))
        for share in self._shares:
            borders.append(firsts[left])
            left += int(share)
        return [SplitRange(name, begin, end) for name, begin, end in zip(self.names, borders, [*borders[1:], rows])]


def keep_share(file: int, lines: np.ndarray, share: float) -> np.ndarray:
    """Which lines are among a share of all, bool [n]; independent of the split."""
    return np.asarray(_uniform(_KEPT_FILES - file, lines) < share)


@njit(nogil=True, cache=True)
def _uniform(file: int, lines: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per line, a pure function of (file, line)."""
    out = np.empty(len(lines))
    start = mix(np.uint64(file) + np.uint64(1))
    for i in range(len(lines)):
        out[i] = (mix(start ^ np.uint64(lines[i])) >> np.uint64(11)) / 2.0**53
    return out
