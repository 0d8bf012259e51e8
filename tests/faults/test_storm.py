"""Real signals at random moments."""

from tests.faults.storm import storm


def test_random_interrupts():
    outcomes = storm(60)
    assert set(outcomes) <= {"right", "refused"}, outcomes
    assert outcomes["right"] > 20
