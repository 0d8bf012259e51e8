"""Keys -> slots: the policies, the plan of a window."""

from hotbed.cache.cache import Cache
from hotbed.cache.counts import CacheCounts
from hotbed.cache.index import BYTES_PER_SLOT, bounded_cells
from hotbed.cache.plans import Arrival, CachePlan, Decision
from hotbed.cache.policies import DEFAULT_POLICY, POLICIES, make_policy
from hotbed.cache.window import MOST_AHEAD, MOST_BATCHES, look_ahead_for, most_ahead, window_length

__all__ = [
    "BYTES_PER_SLOT",
    "DEFAULT_POLICY",
    "MOST_AHEAD",
    "MOST_BATCHES",
    "POLICIES",
    "Arrival",
    "Cache",
    "CacheCounts",
    "CachePlan",
    "Decision",
    "bounded_cells",
    "look_ahead_for",
    "make_policy",
    "most_ahead",
    "window_length",
]
