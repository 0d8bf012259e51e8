"""What ranks say of each other: signs of life, and who is behind."""

import json
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from hotbed.parallel.world import Heartbeat, RankStatus


@pytest.fixture
def pulse():
    found = Heartbeat(dist.HashStore(), 0, 4, timeout=1000.0)
    yield found
    found.end()


def test_ranks_that_are_silent_stand_still_or_are_behind_are_named(pulse):
    now = time.time()
    assert pulse._between == 0.5  # seconds, however long the time-out
    pulse.enter("training")
    pulse.batches = 3
    for rank, stages in ((1, 0), (2, 1)):
        sign = RankStatus(stages, "reading", now - 7, 3, now)
        pulse._store.set(f"pulse-{rank}", json.dumps(sign))
    said = pulse.diagnosis(0.2).split("; ")
    assert said == [
        "rank 1 no longer gives a sign of life: it was last in the stage 'reading' for 7 s",
        "rank 2 no longer gives a sign of life: it was last in the stage 'reading' for 7 s",
        "rank 3 has never given a sign of life",
    ]


class StoodClock:
    """Time passes when somebody sleeps; meanwhile the others give a sign of life."""

    def __init__(self, others):
        self.now, self._others = 1000.0, others

    def time(self):
        return self.now

    monotonic = time

    def sleep(self, seconds):
        self.now += seconds
        for one in self._others:
            one._give_sign()


def test_a_rank_that_is_behind_says_where_it_is(monkeypatch):
    store = dist.HashStore()
    pulses = [Heartbeat(store, rank, 2, timeout=2.0) for rank in range(2)]
    for one in pulses:  # the clock below takes the place of their threads
        one.end()
    monkeypatch.setattr("hotbed.parallel.world.time", StoodClock(pulses))
    for _ in range(2):
        pulses[0].enter("an epoch", alone=True)
    pulses[1].enter("evaluation", alone=True)
    pulses[0].batches, pulses[1].batches = 9, 4
    assert pulses[0].diagnosis(1.0) == "rank 1 is behind, in the stage 'evaluation' for 1 s, with 4 batches read of 9"


def test_the_first_error_of_all_ranks_is_everyones():
    store = dist.HashStore()
    pulses = [Heartbeat(store, rank, 2, timeout=1000.0) for rank in range(2)]
    for one in pulses:
        one.end()
    assert pulses[0].failure() is None
    assert pulses[1].fail("first") == (1, "first")
    assert pulses[0].fail("second") == (1, "first")
    assert pulses[0].failure() == (1, "first")


def test_an_error_is_waited_for_and_no_longer_than_that(pulse, monkeypatch):
    pulse.end()
    clock = StoodClock([])
    monkeypatch.setattr("hotbed.parallel.world.time", clock)
    assert pulse.failure(wait=1.0) is None
    assert clock.now == pytest.approx(1001.0, abs=0.1)
    monkeypatch.setattr(clock, "sleep", lambda seconds: pulse.fail("late"))
    assert pulse.failure(wait=1.0) == (0, "late")


_ENDS_WHILE_IT_BEATS = """
import time
from datetime import timedelta
from torch.distributed import TCPStore
from hotbed.parallel.world import Heartbeat

class Busy:
    def __init__(self, store):
        self._store = store

    def check(self, keys):
        return self._store.check(keys)

    def set(self, key, value):
        until = time.monotonic() + 1
        while time.monotonic() < until:
            self._store.set(key, value)

pulse = Heartbeat(Busy(TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))), 0, 1, 1.0)
time.sleep(0.3)
pulse.end()
"""


def test_a_rank_may_end_in_the_middle_of_a_beat():
    """A thread inside the store when Python ends aborts the process; its node then fails, and others wait for it."""
    ended = subprocess.run(
        [sys.executable, "-c", _ENDS_WHILE_IT_BEATS], check=False, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")
