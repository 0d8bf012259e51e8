"""How many batches a window takes, at the very limits."""

import pytest

from hotbed.cache.window import MOST_BATCHES, window_length


@pytest.mark.parametrize(
    ("num_keys", "num_slots", "given", "length"),
    [
        ([5, 5, 5], 15, 3, 3),  # just so: every slot is used
        ([5, 5, 5], 14, 3, 2),
        ([5, 5, 5], 15, 2, 2),  # no more than were asked for
        ([16], 15, 3, 1),  # one at least; it is refused elsewhere
        ([5] * 9, 100, None, MOST_BATCHES),
        ([6, 6, 6], 30, None, 3),  # on its own, a window takes six tenths of the slots: just so
        ([6, 6, 6], 29, None, 2),
        ([], 10, None, 1),
    ],
)
def test_window_length(num_keys: list[int], num_slots: int, given: int | None, length: int) -> None:
    assert window_length(num_keys, num_slots, given) == length
