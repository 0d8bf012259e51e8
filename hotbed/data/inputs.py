"""What the user names in, files with their splits out; and which split a row goes to.

`train=a.csv` names the split; a plain path leaves it to the split rule. A directory stands for the files in it, by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import njit

from hotbed.data.hash import mix
from hotbed.errors import ConfigError, FormatError

_SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_RESERVED = ("counts",)


class Source(NamedTuple):
    """One raw file; `split` is empty where the split rule decides."""

    split: str
    path: Path


def list_sources(inputs: Sequence[str | Path | tuple[str, str | Path]]) -> list[Source]:
    """Every file to read, in order."""
    if not inputs:
        raise ConfigError(
            "no raw files were given. Name files or directories: hotbed prepare train=a.csv test=b.csv ..."
        )
    sources = []
    for given in inputs:
        split, path = given if isinstance(given, tuple) else _name_split(given)
        if split:
            check_split_name(split)
        sources += [Source(split, file) for file in _files(Path(path))]
    named = [bool(source.split) for source in sources]
    if any(named) and not all(named):
        plain = next(source.path for source in sources if not source.split)
        raise ConfigError(f"{plain} has no split while other inputs do. Write split=path for all of them or for none.")
    return sources


def check_split_name(name: str) -> None:
    if not _SPLIT_NAME.fullmatch(name) or name in _RESERVED:
        raise ConfigError(
            f"{name!r} cannot be the name of a split. Use letters, digits, _ and -, such as train, valid, test."
        )


def _name_split(given: str | Path) -> tuple[str, str | Path]:
    text = str(given)
    split, equals, path = text.partition("=")
    if isinstance(given, Path) or not equals or "/" in split or os.path.exists(text):
        return "", given
    check_split_name(split)
    return split, path


def _files(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.is_file() and file.name[0] not in "._")
            if not files:
                raise FormatError(f"{path} is a directory without files.")
            return files
        if not path.exists():
            raise FormatError(f"{path} does not exist.")
        if not path.is_file():
            raise FormatError(f"{path} is not a plain file; hotbed reads its input more than once. Write it to a file.")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise FormatError(f"{str(path)!r} cannot be read: {error}.") from error
    return [path]


def file_mark(path: Path) -> tuple[int, int]:
    """Size and time of the last change: what tells whether a file is still the same."""
    try:
        found = path.stat()
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}.") from error
    return found.st_size, found.st_mtime_ns


class SplitRule:
    """Sends rows to splits: `train=0.8,test=0.2` at random by file and line, `train=50000,test=10000` in file order."""

    def __init__(self, shares: Mapping[str, float | int]) -> None:
        if not shares:
            raise ConfigError("the split rule is empty. Write for example train=0.8,valid=0.1,test=0.1.")
        for name in shares:
            check_split_name(name)
        counts = [isinstance(share, int) for share in shares.values()]
        if any(counts) != all(counts):
            raise ConfigError(f"split {dict(shares)} mixes rows and fractions. Use 0.8 or 50000, not both.")
        if any(share <= 0 for share in shares.values()):
            raise ConfigError(f"split {dict(shares)} has an empty split. Every number must be above 0.")
        self.by_count = all(counts)
        if not self.by_count and sum(shares.values()) > 1 + 1e-9:
            raise ConfigError(f"split {dict(shares)} adds up to {sum(shares.values()):g}. Fractions may add up to 1.")
        self.names = tuple(shares)
        self._ends = np.cumsum(list(shares.values()))

    @classmethod
    def parse(cls, text: str) -> SplitRule:
        """`train=0.8,test=0.2` or `train=50000,test=10000`."""
        shares: dict[str, float | int] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition("=")
            try:
                share = int(number) if number.isdecimal() else float(number)
            except ValueError:
                share = 0
            if name in shares or not 0 < share < 2**62:  # also refuses nan
                raise ConfigError(
                    f"split {text!r} cannot be read at {part!r}. Write train=0.8,valid=0.1,test=0.1 or train=50000,test=10000."
                )
            shares[name] = share
        return cls(shares)

    def full(self, rows: int) -> bool:
        """Whether no row after the first `rows` can belong to a split."""
        return self.by_count and rows >= int(self._ends[-1])

    def assign(self, file: int, lines: np.ndarray, rows_before: int) -> np.ndarray:
        """The index into `names` of every row, int64 [n]; len(names) for rows that belong to no split."""
        if self.by_count:
            return np.searchsorted(self._ends, np.arange(rows_before, rows_before + len(lines)), side="right")
        return np.searchsorted(self._ends, _uniform(file, lines), side="right")


@njit(nogil=True, cache=True)
def _uniform(file: int, lines: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per line, a pure function of (file, line)."""
    out = np.empty(len(lines))
    start = mix(np.uint64(file) + np.uint64(1))
    for i in range(len(lines)):
        out[i] = (mix(start ^ np.uint64(lines[i])) >> np.uint64(11)) / 2.0**53
    return out
