"""Which ids get a row of their own, and for how long: rules as a user writes them, and as arrays for the kernels.

Admit(after=5)                     the fifth occurrence is admitted; every pending id is counted exactly (about 26 bytes)
Admit(after=5, sketch="64MiB")     the same, counted in a sketch of that size: never too late, sometimes too early
Admit(probability=0.1)             every occurrence is admitted with this probability
Expire(unused_steps=100_000)       rows that none of the last 100,000 training batches used expire
Expire(unused="7d")                rows that were not used for a week expire
Expire(score_below=0.5, half_life=10_000)   the score grows by 1 with every batch that uses the row, and halves with
                                   every 10,000th training batch; it counts in steps of 1/256

`parse_admit`, `parse_expire`: rules of dynamic ids as a run file or a command line writes them -> Admit and Expire.

after 3                                  the third occurrence is admitted
after 3, sketch 64MiB                    the same, counted in a sketch of that size
probability 0.1                          every occurrence is admitted with this probability
unused 100000 steps                      rows that none of the last 100,000 training batches used expire
unused 7d                                rows that were not used for a week expire (s, m, h, d, w)
score below 0.5, half-life 10000         the score grows by 1 with every batch that uses the row, and halves with time
..., every 500                           look for such rows every 500 training batches

Parts are in any order, separated by commas; 100_000 is 100000. Admit and Expire check the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import ConfigError
from hotbed.host.memory import parse_bytes

ALWAYS, COUNT, SKETCH, CHANCE = range(4)
NEVER, STEPS, TIME, SCORE = range(4)
SCORE_UNIT = 256
MAX_COUNT = 2**31 - 1
_MIN_SKETCH = 1024
_LEAST_EVERY = 256
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_TIME = re.compile(r"(\d+)\s*([smhdw])")


@dataclass(frozen=True)
class Admit:
    """When an id gets a row of its own; until then it reads and trains the shared row of its table."""

    after: int | None = None
    sketch: str | int | None = None
    probability: float | None = None

    def __post_init__(self) -> None:
        wrong = []
        if (self.after is None) == (self.probability is None):
            wrong.append("give either after= (occurrences) or probability=")
        if self.after is not None and not 1 <= self.after <= MAX_COUNT:
            wrong.append(f"after: must be 1 to {MAX_COUNT:,}, not {self.after}")
        if self.probability is not None and not 0 < self.probability <= 1:
            wrong.append(f"probability: must be above 0 and at most 1, not {self.probability}")
        if self.sketch is not None and self.after is None:
            wrong.append("sketch: counts occurrences and goes with after=")
        elif self.sketch is not None and parse_bytes(self.sketch, "sketch") < _MIN_SKETCH:
            wrong.append(f"sketch: must be {_MIN_SKETCH} bytes or more, not {self.sketch!r}")
        _refuse("Admit", wrong)

    @property
    def kind(self) -> int:
        if self.probability is not None:
            return CHANCE
        return COUNT if self.sketch is None else SKETCH

    @property
    def threshold(self) -> int:
        """For CHANCE: an occurrence is admitted if its 64 random bits are below this."""
        return min(2**64 - 1, int((self.probability or 0) * 2**64))


@dataclass(frozen=True)
class Expire:
    """When an id loses its row; checked every `every` training batches (by default a tenth of the span, at least 256)."""

    unused_steps: int | None = None
    unused: str | int | None = None
    score_below: float | None = None
    half_life: int | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        wrong = []
        if sum(way is not None for way in (self.unused_steps, self.unused, self.score_below)) != 1:
            wrong.append("give one of unused_steps= (batches), unused= (time) and score_below= (with half_life=)")
        if (self.score_below is None) != (self.half_life is None):
            wrong.append("score_below and half_life go together")
        if self.unused is not None and _seconds(self.unused) is None:
            wrong.append(f"unused: must be seconds or a time such as 30m, 12h, 7d or 2w, not {self.unused!r}")
        for name, value, most in (
            ("unused_steps", self.unused_steps, MAX_COUNT),
            ("half_life", self.half_life, 2**22),  # a row used in every batch has a score of twice the half-life
            ("every", self.every, MAX_COUNT),
        ):
            if value is not None and not 1 <= value <= most:
                wrong.append(f"{name}: must be 1 to {most:,} training batches, not {value}")
        if self.score_below is not None and not 1 / SCORE_UNIT <= self.score_below <= 2**22:
            wrong.append(f"score_below: must be 1/{SCORE_UNIT} to {2**22:,}, not {self.score_below}")
        _refuse("Expire", wrong)

    @property
    def kind(self) -> int:
        if self.score_below is not None:
            return SCORE
        return STEPS if self.unused_steps is not None else TIME

    @property
    def span(self) -> int:
        """Batches, seconds or the half-life, depending on the kind."""
        return self.unused_steps or self.half_life or _seconds(self.unused) or 0

    @property
    def sweep(self) -> int:
        """Training batches from one sweep to the next."""
        if self.every is not None:
            return self.every
        return _LEAST_EVERY if self.kind == TIME else max(_LEAST_EVERY, self.span // 10)


@dataclass(frozen=True)
class TableRules:
    """The rules of one table. Without admission every id gets a row at once, without expiry it keeps it."""

    admission: Admit | None = None
    expiry: Expire | None = None
    padding: int | None = None  # an id without a row: its key is -1, and it is not counted


class RuleArrays:
    """The rules of T tables, [T] each."""

    def __init__(self, rules: Sequence[TableRules]) -> None:
        admissions, expiries = [one.admission for one in rules], [one.expiry for one in rules]
        self.admit = np.array([one.kind if one else ALWAYS for one in admissions], dtype=np.uint8)
        self.after = np.array([one.after or 0 if one else 0 for one in admissions], dtype=np.int64)
        self.chance = np.array([one.threshold if one else 0 for one in admissions], dtype=np.uint64)
        self.expire = np.array([one.kind if one else NEVER for one in expiries], dtype=np.uint8)
        self.span = np.array([one.span if one else 0 for one in expiries], dtype=np.int64)
        self.every = np.array([one.sweep if one else 0 for one in expiries], dtype=np.int64)
        scores = [int(np.ceil((one.score_below or 0) * SCORE_UNIT)) if one else 0 for one in expiries]
        self.score = np.array(scores, dtype=np.int64)
        self.padded = np.array([one.padding is not None for one in rules], dtype=np.bool_)
        self.padding = np.array([one.padding or 0 for one in rules], dtype=np.int64)

    def due(self, batch: int) -> NDArray[np.bool_]:
        """Which tables are swept before this batch; bool [T]."""
        return np.asarray((self.every > 0) & (batch % np.maximum(self.every, 1) == 0))


def _seconds(span: str | int | None) -> int | None:
    """Seconds of a time span; None if the text is not one."""
    if isinstance(span, str):
        match = _TIME.fullmatch(span.strip())
        span = int(match[1]) * _SECONDS[match[2]] if match else None
    return span if isinstance(span, int) and not isinstance(span, bool) and 0 < span < 2**31 else None


def _refuse(name: str, wrong: Sequence[str]) -> None:
    if wrong:
        raise ConfigError(f"{name}: " + "; ".join(wrong))


class _Part(NamedTuple):
    """One way to say one setting of a rule."""

    name: str
    pattern: str
    read: Callable[[str], Any]


_WHOLE, _NUMBER = r"(\d[\d_]*)", r"(\d+\.?\d*(?:e-?\d+)?|\.\d+)"
_ADMIT = (
    _Part("after", rf"after {_WHOLE}", int),
    _Part("sketch", r"sketch (\S.*)", str),
    _Part("probability", rf"probability {_NUMBER}", float),
)
_EXPIRE = (
    _Part("unused_steps", rf"unused {_WHOLE} steps?", int),
    _Part("unused", r"unused (\d+ ?[smhdw])", str),
    _Part("score_below", rf"score below {_NUMBER}", float),
    _Part("half_life", rf"half-life {_WHOLE}", int),
    _Part("every", rf"every {_WHOLE}", int),
)
ADMIT_FORMS = "'after 3', 'after 3, sketch 64MiB' or 'probability 0.1'"
EXPIRE_FORMS = (
    "'unused 100000 steps', 'unused 7d' or 'score below 0.5, half-life 10000', each with ', every 500' or not"
)


def parse_admit(text: str) -> Admit | None:
    """The admission rule of a text; None for an empty one: every id gets a row at once."""
    return Admit(**_read(text, _ADMIT, ADMIT_FORMS)) if text else None


def parse_expire(text: str) -> Expire | None:
    """The expiry rule of a text; None for an empty one: rows stay."""
    return Expire(**_read(text, _EXPIRE, EXPIRE_FORMS)) if text else None


def _read(text: str, parts: tuple[_Part, ...], forms: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for said in text.split(","):
        words = " ".join(said.split())
        fitting = [(part, match) for part in parts if (match := re.fullmatch(part.pattern, words))]
        if not fitting:
            raise ConfigError(f"must be {forms}, not {text!r}; {words!r} means nothing there")
        part, match = fitting[0]
        if part.name in found:
            raise ConfigError(f"must be {forms}, not {text!r}, which says {part.name.replace('_', ' ')} twice")
        found[part.name] = part.read(match[1])
    return found
