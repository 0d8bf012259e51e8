"""Run directories in every state a run can be left in."""

import json
import math

import pytest

from hotbed.errors import RunError
from hotbed.report.read import SplitScore, TrainPoint, read_run


def test_reads_every_file(make_run):
    run = read_run(make_run())
    assert (run.model, run.dataset, run.device) == ("deepfm", "criteo-like", "cpu")
    assert len(run.train) == 120
    assert [(point.split, point.step) for point in run.evals] == [("valid", 60), ("valid", 120), ("test", 120)]
    assert run.final["test"].auc == 0.7741
    assert run.best_auc == {"test": 0.7889}
    assert run.parameters == {"dense": 5000, "rows": 356, "row_values": 3916}
    assert [feature.name for feature in run.features] == ["C1", "C2", "C3"]
    assert run.total is not None
    assert run.total.top_share == 0.7625
    assert len(run.calibration) == 18
    assert (run.samples, run.seconds, run.bad_rows, run.finished) == (12_000, 141.2, {"bad": 3}, True)
    assert run.notes == ()


def test_a_run_that_was_killed_speaks_from_its_lines(make_run, lines):
    train_line, eval_line = lines
    text = "".join(json.dumps(line) + "\n" for line in [train_line(10), eval_line(10, auc=0.6), eval_line(20, auc=0.7)])
    run = read_run(make_run(**{"summary.json": None, "metrics.jsonl": (text + '{"kind":"train","st').encode()}))
    assert list(run.final) == ["valid"]
    assert run.final["valid"][:5] == SplitScore(0.7, 0.45, 0.83, 1.02, 250)[:5]
    assert (run.model, run.dataset, run.samples, run.seconds) == ("deepfm", "criteo-like", 1000, 1.0)
    assert not run.finished
    assert run.notes == (
        "summary.json is missing: the final results cannot be shown.",
        "metrics.jsonl: 1 line is not readable and left out; the last one was cut off while it was written.",
    )


def test_only_the_config_is_needed(make_run):
    run = read_run(make_run(**{"summary.json": None, "data.json": None, "metrics.jsonl": None}))
    assert (run.train, run.evals, run.final, run.features, run.total) == ((), (), {}, (), None)
    assert len(run.notes) == 3
    assert math.isnan(run.samples_per_s)


def test_a_line_written_again_after_a_resume_replaces_the_first(make_run, lines):
    train_line, eval_line = lines
    written = [train_line(10), train_line(20, loss=9.0), eval_line(20, auc=0.1), train_line(30, loss=9.0)]
    again = [train_line(20, loss=1.0), eval_line(20, auc=0.2), eval_line(20, "test", auc=0.3)]
    run = read_run(make_run(**{"metrics.jsonl": [*written, *again]}))
    assert [(point.step, point.loss) for point in run.train][1:] == [(20, 1.0)]
    assert [(point.split, point.score.auc) for point in run.evals] == [("valid", 0.2), ("test", 0.3)]


def test_evaluating_the_best_weights_at_the_end_keeps_the_later_points(make_run, lines):
    _, eval_line = lines
    written = [eval_line(10, auc=0.7), eval_line(20, auc=0.6), eval_line(10, auc=0.7), eval_line(10, "test", auc=0.65)]
    run = read_run(make_run(**{"metrics.jsonl": written}))
    assert [(point.step, point.split) for point in run.evals] == [(10, "valid"), (10, "test"), (20, "valid")]


def test_numbers_that_are_none_become_nan(make_run, lines):
    train_line, _ = lines
    text = json.dumps(train_line(1, loss=math.nan, auc=None, lr="fast", samples_per_s=True)) + "\n"
    run = read_run(make_run(**{"metrics.jsonl": text.encode()}))
    (point,) = run.train
    assert isinstance(point, TrainPoint)
    assert all(math.isnan(value) for value in (point.loss, point.auc, point.lr, point.samples_per_s))


@pytest.mark.parametrize("bad", [b"not json", b"[1]", b"\xff\xfe", b"", b'{"a":' * 5000])
def test_damaged_optional_files_are_noted(make_run, bad):
    run = read_run(make_run(**{"summary.json": bad, "data.json": bad}))
    assert [note.split(":")[0] for note in run.notes] == ["summary.json is damaged", "data.json is damaged"]


def test_lines_that_are_not_measurements_are_counted(make_run, lines):
    train_line, _ = lines
    good = json.dumps(train_line(5))
    junk = ["7", "{}", '{"kind":"train","step":1}', '{"kind":"other","step":1,"samples":1}', "\x00", ""]
    run = read_run(make_run(**{"metrics.jsonl": ("\n".join([*junk, good]) + "\n").encode()}))
    assert len(run.train) == 1
    assert run.notes == ("metrics.jsonl: 5 lines are not readable and left out.",)


def test_a_metrics_file_that_cannot_be_opened_is_noted(make_run):
    run = make_run(**{"metrics.jsonl": None})
    (run / "metrics.jsonl").mkdir()
    assert "metrics.jsonl cannot be read" in read_run(run).notes[0]


def test_no_directory(tmp_path):
    with pytest.raises(RunError, match=r"There is no run directory .*nowhere.*hotbed train --out"):
        read_run(tmp_path / "nowhere")


def test_not_a_run_directory(tmp_path):
    (tmp_path / "data.json").write_text("{}")
    with pytest.raises(
        RunError, match=r"config.json is missing \(not found there: config.json, metrics.jsonl, summary.js"
    ):
        read_run(tmp_path)


@pytest.mark.parametrize(("config", "message"), [(b"{", "cannot be read"), (b"[]", "holds a list")])
def test_a_damaged_config_is_an_error(make_run, config, message):
    with pytest.raises(RunError, match=message):
        read_run(make_run(**{"config.json": config}))
