"""Real signals at random moments."""

import pytest

from tests.faults.storm import storm


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # a signal in a weak reference's callback
def test_random_interrupts():
    outcomes = storm(60)
    assert set(outcomes) <= {"right", "refused"}, outcomes
    assert outcomes["right"] > 20
