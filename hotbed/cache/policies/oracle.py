"""The loader knows the future: the row whose next use is farthest goes first.

Rows that no batch ahead uses rank below all that one does, by their aged count.
"""

from typing import Any

from hotbed.ops.index import ScoreFunction

where: Any = None  # ScoreFunction.bind gives it its meaning


def _score(next_use, uses, age, hot):
    return where(next_use > 0, 0x40000000 - next_use, uses)


ORACLE = ScoreFunction("oracle", _score, half_life=128)
