"""How many batches are known ahead, and how many of them are planned together.

A window of K batches costs one plan and one round of copies, so long windows are cheap for the host. But its rows are in the
cache together and cannot leave it, and the policy sees K batches less of the future, so short windows miss less. Counted in
distinct keys, batch by batch: an upper bound of the window's own.

One H200, Kaggle's tables, dim 64, batch 16,384, 1.5 % of the rows: windows of 1, 2, 4 and 6 batches miss 19,370, 19,470, 20,030
and 20,360 rows a step, and steps of 2, 4 and 6 take 0.68 to 0.79, 0.49 and 0.48 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

from hotbed.ops.index import AHEAD_BITS

MOST_BATCHES = 4  # of an automatic window
_BOUNDED_AHEAD = 2  # caches: keys of the batches ahead that a bounded index takes besides those in slots
_MOST_STRIDE = 8
# Of the slots that an automatic window of several batches takes at most. Longer windows cost the training thread less (0.25 ms
# each; dim 64, 1.5 %: three batches 0.81 ms a step, four 0.72) and miss more: at 0.8 batches of 32,768 miss 5.6 % more rows,
# and steps that wait for rows take 7 % longer.
_SHARE = 0.65


def most_ahead(stride: int) -> int:
    """Batches that can be ahead when `stride` of them share a bit: the first may be the last of its step."""
    return (AHEAD_BITS - 1) * stride + 1


MOST_AHEAD = most_ahead(_MOST_STRIDE)


def look_ahead_for(num_keys: int, num_slots: int, given: int | None, bounded: bool = False) -> tuple[int, int]:
    """(batches that share one bit, batches to know ahead), for batches of `num_keys` distinct keys.

    A row that will be used should be seen coming. The future that counts is four caches long: with fewer batches ahead rows
    are let go that come back soon. There are 30 bits for the batches ahead; where that is not enough, several share one.
    A bounded index holds two caches of keys ahead, also if no key comes twice.
    """
    if given is None:
        stride = max(1, min(_MOST_STRIDE, -(-4 * num_slots // (AHEAD_BITS * max(1, num_keys)))))
        if not bounded:
            return stride, most_ahead(stride)
    far = most_ahead(stride) if given is None else given
    if bounded:
        far = max(1, min(far, _BOUNDED_AHEAD * num_slots // max(1, num_keys)))
    return next(stride for stride in range(1, far + 1) if most_ahead(stride) >= far), far


def window_length(num_keys: Sequence[int], num_slots: int, given: int | None, staged: int | None = None) -> int:
    """How many of the pending batches the next window takes: at least one, and at most `given` if that is given.

    `staged`: rows that can be on their way for one window, where a budget limits them. All of a window's may be.
    """
    room = num_slots if given else int(_SHARE * num_slots)
    room = room if staged is None else min(room, staged)
    most = given or MOST_BATCHES
    total = length = 0
    for count in num_keys[:most]:
        total += count
        if total > room:
            break
        length += 1
    return max(1, length)
