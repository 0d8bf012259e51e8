"""What to try next follows from what was measured, and nothing is said where nothing stands out."""

from dataclasses import replace
from pathlib import Path

import pytest

from hotbed.report.advice import advice, analysis, hints_of
from hotbed.report.points import CachePoint, StepParts, TimesPoint
from hotbed.report.read import EvalPoint, RunRecord, SplitScore, TrainPoint

NAN = float("nan")


def point(step, loss=0.5, cache=None, times=None):
    return TrainPoint(1, step, step * 64.0, loss, 0.1, 0.7, 1e5, step / 10, cache=cache, times=times)


def run(**facts):
    plain = RunRecord(Path("runs/x"), {}, "deepfm", "clicks", train=tuple(map(point, (50, 100, 150))), finished=True)
    return replace(plain, **facts)


def evals(*scores):
    return tuple(EvalPoint(50 * k, 1.0, "valid", SplitScore(auc=score)) for k, score in enumerate(scores, 1))


def cached(stall):
    blank = dict.fromkeys(CachePoint._fields, NAN)
    return CachePoint(**{**blank, "batches": 10.0, "stall_share": stall})


def timed(reader):
    parts = StepParts(reader, 0, 0, 0, 0, 1.0 - reader, 0, 0, 0)
    blank = dict.fromkeys(TimesPoint._fields)
    return TimesPoint(**{**blank, "thread": parts, "steps": 10.0})


def test_a_good_run_gets_no_advice():
    fine = run(
        evals=evals(0.70, 0.7502, 0.7504),
        train=tuple(point(k, cache=cached(0.01), times=timed(0.1)) for k in (50, 100)),
    )
    assert list(hints_of(fine)) == []
    assert advice(fine) == ""


@pytest.mark.parametrize(
    ("facts", "finding", "way"),
    [
        ({"train": (point(10, NAN), point(90))}, "not a number at step 10", "--lr"),
        ({"train": (point(12),)}, "only 12 steps", "--batch-size"),
        ({"evals": evals(0.75, 0.74)}, "fell from 0.7500 to 0.7400", "train.patience"),
        ({"evals": evals(0.74, 0.75)}, "still rising, by 0.0100", "--resume"),
        ({"final": {"test": SplitScore(calibration=1.3)}}, "1.30 times the observed rate", "--lr"),
        ({"train": (point(50, cache=cached(0.4)),)}, "waited for rows during 40", "--cache"),
        ({"train": (point(50, times=timed(0.5)),)}, "waited for the reader during 50", "data.threads"),
    ],
)
def test_each_finding_has_a_way_out(facts, finding, way):
    (hint,) = hints_of(run(**facts))
    assert finding in hint.finding.replace("\u202f", " ")
    assert way in hint.way
    assert finding.split()[0] in advice(run(**facts))


def test_the_analysis_is_shown_where_there_is_one():
    assert analysis(run()) == ""
    worst = [{"row": 7, "label": 1, "score": 0.01, "ids": {"ad": [3]}, "dense": {}}]
    found = {"split": "test", "samples": 900, "auc": 0.7, "contributions": {"ad": 0.1, "<b>": 0.0}, "worst": worst}
    page = analysis(run(analysis=found))
    assert "0.10000" in page
    assert "&lt;b&gt;" in page
    assert "ad 3" in page
