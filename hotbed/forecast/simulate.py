"""A trace in, what a cache would do with it out: hits, misses, evictions, to the row those of training.

One cache at a time; whoever runs several over one trace makes a Replay of it first. Bytes and waiting are not known here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hotbed.cache import DEFAULT_POLICY, MOST_AHEAD, CacheCounts
from hotbed.errors import ConfigError
from hotbed.forecast.replay import Ahead, Replay
from hotbed.forecast.trace import Trace
from hotbed.ops.index import AHEAD_BITS


def simulate(
    trace: Trace | Replay,
    num_slots: int,
    policy: str = DEFAULT_POLICY,
    *,
    window: int | None = None,
    look_ahead: int | None = None,
    hot: NDArray[np.int64] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> CacheCounts:
    """What training on the trace counts.

    Args:
        trace: the batches.
        num_slots: rows that fit in the cache.
        policy: which rows stay.
        window: batches planned together, at most; None is what `hotbed.prefetch` chooses.
        look_ahead: batches known in advance; None is what `hotbed.prefetch` chooses, 0 the plain loop, which knows none.
        hot: keys that are told to the policy, ascending; they are brought in first and counted as one batch, as in training.
        progress: called with the number of batches planned.
    """
    if look_ahead is not None and not 0 <= look_ahead <= MOST_AHEAD:
        raise ConfigError(f"look_ahead is {look_ahead}; it can be 0 to {MOST_AHEAD}.")
    if window is not None and not 1 <= window <= AHEAD_BITS:
        raise ConfigError(f"window is {window}; it can be 1 to {AHEAD_BITS}.")
    replay = trace if isinstance(trace, Replay) else Replay(trace)
    return replay.run(num_slots, policy, Ahead(window, look_ahead), hot=hot, progress=progress).counts
