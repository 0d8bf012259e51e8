"""The versions of a model's rows: which file has each row of a table, two bits a row.

A `RowVersion` never changes. A `RowDraft` is the next one: it starts from the current version, or from nothing, and takes rows.
It shares the marks of tables that it does not touch with the version that it started from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hotbed.host.background import pause
from hotbed.scorer.kernels import IN_MODEL, Marks
from hotbed.scorer.scratch import other_places, places_of, set_places

if TYPE_CHECKING:
    from hotbed.scorer.rows import FileRows

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bits = NDArray[np.uint8]
_AT_ONCE = 1 << 12  # rows written, or compared


class RowVersion:
    """The rows of one version."""

    def __init__(self, number: int, state: Any, bits: Sequence[Bits], counts: Ints, num_live: Ints) -> None:
        """`counts` [T] rows have `bits`; `num_live` [T] of them are in scratch files. `state` belongs to the caller."""
        self.number, self.state, self.bits, self.num_live = number, state, tuple(bits), num_live
        self.marks = Marks(np.array([one.ctypes.data for one in bits], dtype=np.int64), counts)

    def places(self, table: int, numbers: Ints) -> Ints:
        """Which file has each row."""
        places = np.empty(numbers.shape[0], dtype=np.int64)
        places_of(self.marks, table, numbers, places)
        return places


class RowDraft:
    """The rows of the next version: those of the current one, or none, and what is put or dropped."""

    def __init__(self, rows: FileRows, *, empty: bool) -> None:
        self._rows, self._current = rows, rows.current
        self.bits: list[Bits] = [np.empty(0, np.uint8) for _ in rows.spaces] if empty else list(self._current.bits)
        self.num_live = np.zeros_like(self._current.num_live) if empty else self._current.num_live.copy()
        self._own = [False] * len(self.bits)  # marks that no version uses

    @property
    def counts(self) -> Ints:
        """Rows that have marks."""
        return np.array([4 * len(one) for one in self.bits], dtype=np.int64)

    @property
    def num_bytes(self) -> int:
        return sum(one.nbytes for one in self.bits)

    def put(self, table: int, numbers: Ints, values: Floats, *, compare: bool = False) -> None:
        """These are the rows of a table from now on; where `compare`, those that are equal in the current version stay."""
        values = np.ascontiguousarray(values, dtype=np.float32)
        for start in range(0, numbers.shape[0], _AT_ONCE):
            self._put(table, numbers[start : start + _AT_ONCE], values[start : start + _AT_ONCE], compare)
            pause()

    def drop(self, table: int, numbers: Ints) -> None:
        """These rows are no longer in any scratch file."""
        known = numbers[numbers < 4 * len(self.bits[table])]
        if known.size:
            self._mark(table, known, np.full(known.shape[0], IN_MODEL, np.int64))

    def is_live(self, table: int, numbers: Ints) -> NDArray[np.bool_]:
        """Whether a scratch file has each row."""
        found = np.zeros(numbers.shape[0], dtype=np.bool_)
        known = np.flatnonzero(numbers < 4 * len(self.bits[table]))
        bits = self.bits[table][numbers[known] >> 2]
        found[known] = (bits >> (2 * (numbers[known] & 3)).astype(np.uint8)) & 3 != IN_MODEL
        return found

    def _put(self, table: int, numbers: Ints, values: Floats, compare: bool) -> None:
        current = self._current.places(table, numbers)
        places = current.copy()
        other_places(places)
        if compare and not (differs := self._rows.differs(table, numbers, values, current)).all():
            self._mark(table, numbers[~differs], current[~differs])
            numbers, values, places = numbers[differs], np.ascontiguousarray(values[differs]), places[differs]
        self._rows.write(table, numbers, values, places)
        self._mark(table, numbers, places)

    def _mark(self, table: int, numbers: Ints, places: Ints) -> None:
        if numbers.size:
            self.num_live[table] += set_places(self._writable(table, int(numbers.max()) + 1), numbers, places)

    def _writable(self, table: int, needed: int) -> Bits:
        """The marks of a table, of that many rows at least, that may be written."""
        old, rows = self.bits[table], self._rows.spaces[table].rows
        if not self._own[table] or 4 * len(old) < needed:
            grown = needed + needed // 8 if 4 * len(old) < needed else 4 * len(old)
            bits = np.zeros(-(-(grown if rows is None else rows) // 4), dtype=np.uint8)
            bits[: len(old)] = old
            self.bits[table], self._own[table] = bits, True
        return self.bits[table]
