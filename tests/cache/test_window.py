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
        ([13, 13, 13], 60, None, 3),  # on its own, a window takes 0.65 of the slots: just so
        ([13, 13, 13], 59, None, 2),
        ([], 10, None, 1),
    ],
)
def test_window_length(num_keys: list[int], num_slots: int, given: int | None, length: int) -> None:
    assert window_length(num_keys, num_slots, given) == length


def test_rows_on_their_way_limit_a_window() -> None:
    assert [window_length([10] * 4, 1000, given, 25) for given in (None, 3, 1)] == [2, 2, 1]
    assert window_length([30, 10], 1000, None, 25) == 1  # refused elsewhere
    assert window_length([10] * 4, 20, 4, 25) == 2
