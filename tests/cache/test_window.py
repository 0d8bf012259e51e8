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
        ([5, 5, 5], 30, None, MOST_BATCHES),  # on its own, a window takes a third of the slots: just so
        ([5, 5, 5], 29, None, 1),
        ([], 10, None, 1),
    ],
)
def test_window_length(num_keys: list[int], num_slots: int, given: int | None, length: int) -> None:
    assert window_length(num_keys, num_slots, given) == length
