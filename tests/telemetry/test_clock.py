"""Every second of the training thread belongs to one part; on CUDA events of some steps say the same of the stream."""

import time

from hotbed.telemetry.clock import DENSE, LOOK_UP, MODEL, OTHER, PARTS, PLAN, SAMPLED, UPDATE, StepClock, Times


class Stream:
    """A device whose time only this test moves."""

    def __init__(self):
        self.now = self.reached = 0.0

    def point(self):
        return Event(self, self.now)


class Event:
    def __init__(self, stream, at):
        self.stream, self.at = stream, at

    def query(self):
        return self.stream.reached >= self.at

    def elapsed_time(self, later):
        return 1e3 * (later.at - self.at)


def a_step(clock, stream, seconds=0.01):
    clock.step()
    for part in (LOOK_UP, MODEL, UPDATE, MODEL, DENSE, OTHER):
        clock.enter(part)
        stream.now += seconds * (1 + part)


def test_parts_add_up_to_the_time_that_went_by():
    clock = StepClock()
    began = time.perf_counter()
    first = clock.reading()
    for _ in range(100):
        clock.step()
        before = clock.enter(MODEL)
        assert before == OTHER
        assert clock.enter(UPDATE) == MODEL
        clock.enter(before)
    found = clock.reading().minus(first)
    assert found.steps == 100
    assert 0 < sum(found.seconds) <= time.perf_counter() - began
    assert found.seconds[MODEL] > 0 < found.seconds[UPDATE]
    assert found.seconds[PLAN] == 0


def test_one_step_of_some_is_measured_on_the_stream_and_nobody_waits_for_it():
    stream = Stream()
    clock = StepClock(stream.point)
    for _ in range(2 * SAMPLED + 1):
        a_step(clock, stream)
    assert clock.reading().sampled == 0, "the device is not there yet"
    stream.reached = stream.now
    times = clock.reading()
    assert times.sampled == 2
    device = times.line()["device"]
    assert [round(device[name], 6) for name in ("look_up", "model", "update", "dense")] == [0.06, 0.14, 0.08, 0.09]
    assert round(sum(device.values()), 6) == 0.38


def test_a_step_that_something_else_follows_is_no_sample():
    stream = Stream()
    clock = StepClock(stream.point)
    for _ in range(SAMPLED):
        a_step(clock, stream)
    clock.leave()
    stream.now += 1000
    a_step(clock, stream)
    stream.reached = stream.now
    assert clock.reading().sampled == 0


def test_events_that_nobody_reads_do_not_pile_up():
    stream = Stream()
    clock = StepClock(stream.point)
    for _ in range(200 * SAMPLED):
        a_step(clock, stream)
    stream.reached = stream.now
    assert 0 < clock.reading().sampled <= 64


def test_batches_that_were_ready():
    clock = StepClock()
    clock.step()
    clock.count_ready(0)
    clock.count_ready(3)
    assert clock.reading().line()["ready"] == 1.5


def test_no_step_no_line():
    assert Times().line() is None
    assert set(Times(steps=1).line()) == {"steps", *PARTS}


def test_a_change_of_part_costs_next_to_nothing():
    clock, best = StepClock(), float("inf")
    for _ in range(5):
        began = time.thread_time()  # of this thread alone, however busy the machine is
        for _ in range(10_000):
            clock.enter(MODEL)
        best = min(best, (time.thread_time() - began) / 10_000)
    assert best < 5e-6
