"""Least recently used: the row whose last use lies farthest back goes first."""

from hotbed.ops.index import ScoreFunction


def _score(next_use, uses, age, hot):
    return -age


LRU = ScoreFunction("lru", _score, half_life=128)
