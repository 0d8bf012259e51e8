"""How many batches are planned together.

A window of K batches costs one plan and one round of copies, so long windows are cheap for the host. But its rows are in the
cache together and cannot leave it, and the policy sees K batches less of the future, so short windows miss less. Counted in
distinct keys, batch by batch: an upper bound of the window's own.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_BATCHES = 2  # of an automatic window
_SHARE = 3  # an automatic window of several batches takes at most a third of the slots


def window_length(num_keys: Sequence[int], num_slots: int, given: int | None) -> int:
    """Of the batches that wait, the number the next window takes; at least one, at most `given` where it is given."""
    room = num_slots if given else num_slots // _SHARE
    most = given or MOST_BATCHES
    total = length = 0
    for count in num_keys[:most]:
        total += count
        if total > room:
            break
        length += 1
    return max(1, length)
