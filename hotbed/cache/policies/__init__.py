"""Policies: which rows stay. Each is one function of a slot's story; none moves data, none knows a device.

The same function is compiled for the CPU, for CUDA and for the simulator; see `ScoreFunction` for its arguments.
"""

from __future__ import annotations

from hotbed.cache.policies.lfu import LFU
from hotbed.cache.policies.lru import LRU
from hotbed.cache.policies.oracle import ORACLE
from hotbed.cache.policies.static import STATIC
from hotbed.errors import ConfigError
from hotbed.ops.index import ScoreFunction

__all__ = ["DEFAULT_POLICY", "LFU", "LRU", "ORACLE", "POLICIES", "STATIC", "make_policy"]

POLICIES: dict[str, ScoreFunction] = {policy.name: policy for policy in (LRU, LFU, STATIC, ORACLE)}
DEFAULT_POLICY = "oracle"


def make_policy(name: str) -> ScoreFunction:
    """A policy by name."""
    if name not in POLICIES:
        raise ConfigError(f"no cache policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
