"""Keys -> slots: the policies, the plan of a window."""

from hotbed.cache.cache import Arrival, Cache, CachePlan
from hotbed.cache.counts import CacheCounts
from hotbed.cache.policies import DEFAULT_POLICY, POLICIES, make_policy
from hotbed.cache.window import window_length

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "Arrival",
    "Cache",
    "CacheCounts",
    "CachePlan",
    "make_policy",
    "window_length",
]
