"""Least frequently used, with ageing: a count halves for every half-life without use.

Without ageing a row that was hot last week stays for ever. Among rows used equally often the one used last stays.
"""

from typing import Any

from hotbed.ops.index import ScoreFunction

where: Any = None  # ScoreFunction.bind gives it its meaning


def _score(next_use, uses, age, hot):
    return where(uses < 0x200000, uses, 0x200000) * 512 - where(age < 255, age, 255)


LFU = ScoreFunction("lfu", _score, half_life=128, oldest=255)
