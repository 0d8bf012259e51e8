"""Least recently used: the row whose last use lies farthest back goes first."""

from hotbed.ops.index import Scoring


def _score(next_use, uses, age, hot):
    return -age


LRU = Scoring("lru", _score, half_life=128)
