"""What a message says of an exception from elsewhere."""

import pytest

from hotbed.errors import reason_of


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("disk full"), "disk full"),
        (ValueError("\n bad\nworse"), "bad"),
        (KeyError(), "KeyError"),
        (OSError(" "), "OSError"),
    ],
)
def test_the_reason_is_the_first_line_or_the_class(error, reason):
    assert reason_of(error) == reason
