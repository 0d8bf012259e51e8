"""A translator with dicts and lists, one lookup at a time: simple, slow, and without look-ahead.

It goes back by keeping a copy of everything after every batch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from hotbed.host.memory import parse_bytes
from hotbed.ids.rules import SCORE, STEPS, TIME, TableRules

_BITS = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
Id = tuple[int, int]  # table, id


@dataclass
class ReferenceRow:
    """An id's row."""

    number: int
    last: int = 0
    score: int = 0


@dataclass
class ReferenceState:
    """Everything there is after a batch."""

    batch: int = 0
    next_row: int = 0
    rows: dict[Id, ReferenceRow] = field(default_factory=dict)
    shared: dict[int, int] = field(default_factory=dict)  # row by table
    free: set[int] = field(default_factory=set)
    quarantined: list[tuple[int, int]] = field(default_factory=list)  # batch, row
    waiting: dict[Id, int] = field(default_factory=dict)
    sketches: dict[int, list[list[int]]] = field(default_factory=dict)
    counters: list[list[int]] = field(default_factory=list)  # seen, admitted, rejected, expired by table


class ReferenceTranslator:
    """The same answers as Translator."""

    def __init__(self, rules: Sequence[TableRules], first_row: int = 0, seed: int = 0, quarantine: int = 256) -> None:
        self.rules, self.first_row, self.seed, self.quarantine = rules, first_row, seed, quarantine
        self.state = ReferenceState(counters=[[0, 0, 0, 0] for _ in rules])
        for table, rule in enumerate(rules):
            if rule.admission is not None:
                self.state.shared[table] = self._new_row()
                if rule.admission.sketch is not None:
                    size = parse_bytes(rule.admission.sketch, "sketch") // _cell_bytes(rule.admission.after or 1)
                    self.state.sketches[table] = [[0] * (size // 4) for _ in range(4)]
        self.history = [copy.deepcopy(self.state)]

    def translate(self, lookups: Sequence[Id], learns: bool, now: int = 1) -> tuple[list[int], list[int]]:
        """(keys, released keys)."""
        if not learns:
            return [self._key(self._known(one)) for one in lookups], []
        self.state.batch += 1
        released = self._sweep(now)
        counts: dict[Id, int] = {}
        for one in lookups:
            if not self._is_padding(one):
                self.state.counters[one[0]][0] += 1
                if one not in self.state.rows:
                    counts[one] = counts.get(one, 0) + 1
        for one, count in counts.items():
            if self._is_admitted(one, count):
                self.state.rows[one] = ReferenceRow(self._new_row())
                self.state.counters[one[0]][1] += 1
            else:
                self.state.counters[one[0]][2] += count
        for one in dict.fromkeys(lookups):
            self._use(one, now)
        keys = [self._key(self._known(one)) for one in lookups]
        self.history.append(copy.deepcopy(self.state))
        return keys, [row + self.first_row for row in released]

    def roll_back(self, number: int) -> None:
        """The state after this batch."""
        del self.history[number + 1 :]
        self.state = copy.deepcopy(self.history[number])

    def _known(self, one: Id) -> int:
        if self._is_padding(one):
            return -1
        if one in self.state.rows:
            return self.state.rows[one].number
        return self.state.shared[one[0]] if self.rules[one[0]].admission is not None else -2

    def _key(self, row: int) -> int:
        return row + self.first_row if row >= 0 else row

    def _is_padding(self, one: Id) -> bool:
        return self.rules[one[0]].padding == one[1]

    def _new_row(self) -> int:
        if self.state.free:
            row = min(self.state.free)
            self.state.free.remove(row)
            return row
        self.state.next_row += 1
        return self.state.next_row - 1

    def _sweep(self, now: int) -> list[int]:
        state = self.state
        due = [rule.expiry is not None and state.batch % rule.expiry.sweep == 0 for rule in self.rules]
        if not any(due):
            return []
        released = sorted(row for batch, row in state.quarantined if batch <= state.batch - self.quarantine)
        state.quarantined = [one for one in state.quarantined if one[1] not in released]
        state.free.update(released)
        for one in [one for one in state.rows if due[one[0]] and self._is_unused(one, now)]:
            state.quarantined.append((state.batch, state.rows.pop(one).number))
            state.counters[one[0]][3] += 1
        return released

    def _is_unused(self, one: Id, now: int) -> bool:
        rule, row = self.rules[one[0]].expiry, self.state.rows[one]
        assert rule is not None
        if rule.kind == STEPS:
            return not self.state.batch - rule.span <= row.last
        if rule.kind == TIME:
            return now - row.last > rule.span
        return self._score(row, rule.span) / 256 < (rule.score_below or 0)

    def _score(self, row: ReferenceRow, half_life: int) -> int:
        score = row.score
        for batch in range(row.last + 1, self.state.batch + 1):
            if batch % half_life == 0:
                score //= 2
        return score

    def _use(self, one: Id, now: int) -> None:
        rule, row = self.rules[one[0]].expiry, self.state.rows.get(one)
        if rule is None or row is None:
            return
        if rule.kind == SCORE:
            row.score = self._score(row, rule.span) + 256
        row.last = now if rule.kind == TIME else self.state.batch

    def _is_admitted(self, one: Id, count: int) -> bool:
        rule = self.rules[one[0]].admission
        if rule is None:
            return True
        if rule.probability is not None:
            return any(self._draw(one, occurrence) < rule.probability for occurrence in range(count))
        if rule.sketch is not None:
            return self._sketched(one, count) >= (rule.after or 1)
        total = self.state.waiting.pop(one, 0) + count
        if total >= (rule.after or 1):
            return True
        self.state.waiting[one] = total
        return False

    def _draw(self, one: Id, occurrence: int) -> float:
        """From 0 to 1, of (seed, table, id, batch, occurrence)."""
        base = mix(self.seed + self.state.batch * _STEP)
        return mix(mix(hash_of(one) ^ base) + occurrence * _STEP) / 2**64

    def _sketched(self, one: Id, count: int) -> int:
        lines, limit = self.state.sketches[one[0]], self.rules[one[0]].admission.after or 1  # type: ignore[union-attr]
        seed = self.seed + one[0]
        places = [
            ((mix(mix(one[1] ^ seed) + line * _STEP) >> 32) * len(lines[line])) >> 32 for line in range(len(lines))
        ]
        total = min(min(cells[place] for cells, place in zip(lines, places)) + count, limit)
        for cells, place in zip(lines, places):
            cells[place] = max(cells[place], total)
        return total


def mix(x: int) -> int:
    """splitmix64's finaliser."""
    x &= _BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _BITS
    return x ^ (x >> 31)


def hash_of(one: Id) -> int:
    """The hash of (table, id)."""
    return mix((one[1] & _BITS) ^ ((one[0] + 1) * _STEP))


def _cell_bytes(limit: int) -> int:
    return 1 if limit < 2**8 else 2 if limit < 2**16 else 4
