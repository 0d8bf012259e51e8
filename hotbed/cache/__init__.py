"""Keys -> slots: the index, the policies, the plan of a window."""

from hotbed.cache.cache import Cache, CacheCounts, CachePlan
from hotbed.cache.policies import POLICIES, make_policy

__all__ = ["POLICIES", "Cache", "CacheCounts", "CachePlan", "make_policy"]
