"""What the comparison with other libraries counts: time without scoring, medians, and nothing where results differ."""

import dataclasses
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.peers.__main__ import Line, Point, Run, judge, middle, write_plot
from benchmarks.peers.job import Clock, Job
from benchmarks.peers.settings import SETTINGS
from hotbed.data.dataset import Dataset
from hotbed.data.prepare.prepare import prepare
from tests.fresh import run_python

ROOT = Path(__file__).resolve().parents[2]


def run_of(*points):
    return Run([Point(*point) for point in points], start_up=1.0, versions={})


def test_the_clock_stands_while_scores_are_taken(tmp_path, monkeypatch):
    now = iter([0.0, 2.0, 10.0, 13.0])
    monkeypatch.setattr("benchmarks.peers.job.time.perf_counter", lambda: next(now))
    clock = Clock(tmp_path)
    clock.go()
    clock.stop()
    clock.point(4, [0.5])
    clock.go()
    clock.stop()
    clock.point(8, [0.5])
    assert clock.points == [{"step": 4, "seconds": 2.0}, {"step": 8, "seconds": 5.0}]


def test_the_median_counts_runs_that_never_arrive():
    fast, slow, never = run_of((1, 1.0, 0.8)), run_of((1, 3.0, 0.8)), run_of((1, 1.0, 0.6))
    assert middle([fast, slow, slow], 0.7) == 3.0
    assert middle([fast, never, slow], 0.7) == 3.0
    assert middle([fast, never, never], 0.7) is None


def test_a_ratio_is_to_hotbed_and_different_results_are_not_compared(capsys):
    setting = dataclasses.replace(SETTINGS["criteo-deepfm"], target=0.7)
    runs = {"hotbed": [run_of((1, 1.0, 0.71))], "fuxictr": [run_of((1, 4.0, 0.712))]}
    rows = judge("x", setting, runs, close=0.005)
    assert [row["hotbed_is_faster_by"] for row in rows] == [1.0, 4.0]
    runs["fuxictr"] = [run_of((1, 4.0, 0.74))]
    assert judge("x", setting, runs, close=0.005) == []
    assert "not compared" in capsys.readouterr().out


def test_the_plot_has_a_line_for_each_system():
    drawn = write_plot({"one": [Line("hotbed", [(1, 0.7), (2, 0.8)]), Line("deepctr", [(3, 0.75)])]}, {"one": 0.72})
    svg = ElementTree.fromstring(drawn)
    assert len(svg.findall(".//{http://www.w3.org/2000/svg}polyline")) == 2


@pytest.mark.parametrize("model", ["dnn", "dcnv2"])
def test_hotbed_trains_what_a_job_says(model, tmp_path):
    log = tmp_path / "clicks.csv"
    log.write_text("label,user,ad\n" + "".join(f"{int(i % 3 == 0)},u{i % 3},a{i % 7}\n" for i in range(600)))
    prepare([log], tmp_path / "data", label="label", ids=["*"], split="train=0.8,valid=0.2")
    dataset = Dataset.open(tmp_path / "data")
    setting = dataclasses.replace(
        SETTINGS["criteo-deepfm"], data="data", model=model, batch_size=48, epochs=2, evaluations=2
    )
    job = setting.job(dataset, tmp_path, seed=0, threads=1)
    folder = tmp_path / "job"
    folder.mkdir()
    job.save(folder)
    assert Job.load(folder) == job
    done = run_python("from benchmarks.peers.run_hotbed import main; main()", folder, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    points = json.loads((folder / "done.json").read_text())["points"]
    assert [point["step"] for point in points] == list(range(job.eval_every, points[-1]["step"] + 1, job.eval_every))
    assert points[0]["seconds"] < points[-1]["seconds"]
    assert points[-1]["auc"] > 0.9
