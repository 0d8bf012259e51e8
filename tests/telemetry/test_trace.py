"""--trace: a file of some steps of a real run."""

import time

import pytest

from hotbed.errors import ConfigError, RunError
from hotbed.telemetry.spans import MOST_STEPS, Span, Spans, StepRange, TraceWriter, _Recorder, parse_steps
from hotbed.train.run import run
from tests.train.traces import check_events, events_of, tracks_of

SETS = ("data.batch_size=16", "train.epochs=1", "train.eval_every=10", "train.log_every=5", "train.checkpoint_every=7")


def traced(start, folder, path, steps, *sets):
    said = []
    writer = TraceWriter(path, steps)
    built = start(folder, *SETS, *sets, observers=[writer])
    writer.watch(built.training.learner.tables.clock, said.append)
    run(built.training, built.subject)
    return said


@pytest.mark.parametrize("sets", [(), ("tables.cache=0.7", "tables.window=2")], ids=["plain", "cached"])
def test_a_trace_of_a_run(start, tmp_path, sets):
    path = tmp_path / "trace.json"
    said = traced(start, tmp_path / "run", path, StepRange(5, 25, False), *sets)
    assert said == [f"trace: {path} (open it at ui.perfetto.dev)"]
    assert _Recorder.spans is None, "nothing is recorded after the last step"
    tracks = tracks_of(events_of(path))
    assert [one["args"]["step"] for one in tracks["steps"]] == list(range(5, 25))
    assert len(tracks["reader thread"]) == 20, "each batch once, none of evaluations"
    for name in ("lookup", "model", "update", "dense update", *(("plan", "copy") if sets else ())):
        assert tracks[name], name
    inside = sum(one["dur"] for one in tracks["model"])
    assert 0 < inside < sum(one["dur"] for one in tracks["steps"])
    assert path.stat().st_size < 200_000


def test_threads_of_one_name_have_tracks_of_their_own():
    """The pool of an evaluation has the thread names of the pool that reads ahead for training meanwhile."""
    now, spans = time.perf_counter(), Spans(1, 2)
    spans.step()
    for start, end in ((-3, 1), (-2, 2), (-1, 3)):
        spans.add(Span("hotbed-transfer", "bring rows", now + start, now + end))
    spans.step()
    check_events(spans.events())
    tracks = tracks_of(spans.events())
    assert [len(tracks[f"hotbed-transfer{lane}"]) for lane in ("", " (2)", " (3)")] == [1, 1, 1]


def test_the_usual_steps_of_a_short_run_are_its_first(start, tmp_path):
    path = tmp_path / "trace.json"
    traced(start, tmp_path / "run", path, StepRange(), "train.max_steps=8")
    steps = tracks_of(events_of(path))["steps"]
    assert [one["args"]["step"] for one in steps] == list(range(1, 9))


def test_steps_that_never_come_are_reported(start, tmp_path):
    path = tmp_path / "trace.json"
    said = traced(start, tmp_path / "run", path, StepRange(500, 600, False))
    assert said == ["no trace: the run had none of the steps 500 to 599"]
    assert not path.exists()


def test_texts_of_steps():
    assert parse_steps("50:100") == StepRange(50, 100, False)
    assert parse_steps(None) == StepRange()
    for wrong in ("", "50", "50:", ":50", "a:b", "9:9", "9:3", "0:5", "-1:5", "1:5:9", "1.5:3"):
        with pytest.raises(ConfigError, match="FIRST:STOP"):
            parse_steps(wrong)
    with pytest.raises(ConfigError, match="at most"):
        parse_steps(f"1:{MOST_STEPS + 2}")


def test_a_place_that_cannot_be_is_reported_before_training(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere" / "trace.json"):
        with pytest.raises(ConfigError, match="--trace"):
            TraceWriter(path, StepRange())


def test_a_disk_that_refuses_is_an_error_with_a_way_out(start, tmp_path):
    path = tmp_path / "trace.json"
    path.with_name("trace.json.tmp").mkdir()
    with pytest.raises(RunError, match="--trace"):
        traced(start, tmp_path / "run", path, StepRange(1, 3, False))
