"""Least frequently used, with ageing: a count halves for every half-life without use.

Without ageing a row that was hot last week stays for ever.
"""

from hotbed.ops.index import Scoring


def _score(next_use, uses, age, hot):
    return uses


LFU = Scoring("lfu", _score, half_life=128)
