"""Least recently used: the row whose last use lies farthest back goes first."""

from typing import Any

from hotbed.ops.index import Scoring


def _score(next_use: Any, uses: Any, age: Any, hot: Any) -> Any:
    return -age


LRU = Scoring("lru", _score, half_life=64)
