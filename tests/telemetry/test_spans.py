"""Stretches of threads: nobody is told unless asked, lengths are bounded, and what comes out is a trace."""

import threading
import time

import pytest

from hotbed.telemetry import spans
from hotbed.telemetry.clock import LOOK_UP, MODEL, OTHER, StepClock
from hotbed.telemetry.spans import READER, STEPS, Span, Spans
from tests.train.traces import check_events, tracks_of


@pytest.fixture
def told():
    made = Spans(2, 4)
    spans.install(made)
    yield made
    spans.install(None)


def steps(clock, count):
    for _ in range(count):
        clock.step()
        clock.enter(LOOK_UP)
        clock.enter(MODEL)
        clock.enter(OTHER)


def test_only_the_steps_asked_for(told):
    clock = StepClock()
    clock.spans = told
    steps(clock, 6)
    events = told.events()
    check_events(events)
    tracks = tracks_of(events)
    assert [one["name"] for one in tracks[STEPS]] == ["step 2", "step 3"]
    assert len(tracks["model"]) == len(tracks["lookup"]) == 2
    assert told.is_over


def test_what_is_no_training_is_left_out(told):
    clock = StepClock()
    clock.spans = told
    steps(clock, 2)
    clock.leave()
    clock.enter(MODEL)
    clock.enter(OTHER)
    assert spans.next_step() is None, "an evaluation reads too"
    clock.back()
    assert spans.next_step() == 3
    steps(clock, 3)
    assert len(tracks_of(told.events())["model"]) == 2


def test_arrows_lead_from_the_read_to_the_step(told):
    clock = StepClock()
    clock.spans = told
    assert list(spans.reads(range(5), 1)) == [0, 1, 2, 3, 4]
    steps(clock, 6)
    events = told.events()
    check_events(events)
    assert [one["id"] for one in events if one["ph"] == "s"] == [2, 3]
    assert [one["name"] for one in tracks_of(events)[READER]] == ["batch of step 2", "batch of step 3"]


def test_threads_have_tracks_of_their_own(told):
    clock = StepClock()
    clock.spans = told

    def work():
        with spans.span("read rows"):
            pass
        assert spans.recorded("decode", abs)(-3) == 3

    steps(clock, 2)
    thread = threading.Thread(target=work, name="hotbed-transfer")
    thread.start()
    thread.join()
    steps(clock, 2)
    assert [one["name"] for one in tracks_of(told.events())["hotbed-transfer"]] == ["read rows", "decode"]


def test_lists_are_bounded(told, monkeypatch):
    monkeypatch.setattr(spans, "MOST_PARTS", 5)
    clock = StepClock()
    clock.spans = told
    steps(clock, 3)
    for _ in range(spans.MOST + 10):
        now = time.perf_counter()
        told.add(Span("mover", "read", now, now))
    steps(clock, 3)
    assert told.dropped > 0
    assert len(told.events()) < spans.MOST + 100


def test_nothing_is_recorded_unless_requested():
    with spans.span("anything"):
        pass
    assert spans.next_step() is None
    assert spans.recorded("decode", abs) is abs
    assert Spans(5, 9).events() == []
