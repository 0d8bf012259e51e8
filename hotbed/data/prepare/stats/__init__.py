"""Streams of ids in, statistics of bounded size out: how many are distinct, and which are frequent.

    hyperloglog.py    number of distinct ids from 64 KiB, standard error 0.41 %
    heavy_hitters.py  every id seen more than E times, where E shrinks with the memory given; E is known afterwards

Both are deterministic, take the ids in pieces and can be merged, so that pieces may be counted anywhere.
"""

from hotbed.data.prepare.stats.heavy_hitters import HeavyHitters
from hotbed.data.prepare.stats.hyperloglog import HyperLogLog

__all__ = ["HeavyHitters", "HyperLogLog"]
