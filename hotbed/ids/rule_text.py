"""Rules of dynamic ids as a run file or a command line writes them: text in, Admit and Expire out.

after 3                                  the third occurrence is admitted
after 3, sketch 64MiB                    the same, counted in a sketch of that size
probability 0.1                          every occurrence is admitted with this probability
unused 100000 steps                      rows that none of so many training batches used go
unused 7d                                rows that were not used for a week go (s, m, h, d, w)
score below 0.5, half-life 10000         the score grows by 1 with every batch that uses the row, and halves with time
..., every 500                           look for such rows every 500 training batches

Parts stand in any order, commas between them; 100_000 is 100000. What the numbers may be, Admit and Expire say.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from hotbed.errors import ConfigError
from hotbed.ids.rules import Admit, Expire


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
    """None for no text: every id gets a row at once."""
    return Admit(**_read(text, _ADMIT, ADMIT_FORMS)) if text else None


def parse_expire(text: str) -> Expire | None:
    """None for no text: rows stay."""
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
