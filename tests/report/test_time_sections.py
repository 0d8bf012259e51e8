"""Where the time goes, memory against what was given, and the run on the curve of misses."""

import json
import math

import pytest

from hotbed.cli.top import rows_of
from hotbed.cli.top_state import Folder
from hotbed.report import write_comparison, write_report
from hotbed.report.cache import miss_chart, operating_point
from hotbed.report.memory import memory, memory_chart
from hotbed.report.read import read_run
from hotbed.report.times import mean_parts, time_charts, times
from tests.report.conftest import cache_of, memory_of, times_of, train_line

DEVICE = {"look_up": 1e-4, "model": 8e-4, "update": 1e-4, "reader": 0, "plan": 0, "wait": 0, "copy": 0, "dense": 0}


def test_a_run_without_a_clock_says_nothing_of_it(make_run):
    old = [{k: v for k, v in train_line(step).items() if k not in ("times", "memory")} for step in range(1, 9)]
    run = read_run(make_run(**{"metrics.jsonl": old}))
    assert times(run) == ""
    assert memory(run) == ""


def test_parts_of_a_mean_step_leave_out_the_first_interval(make_run):
    run = read_run(make_run())
    said = times(run)
    assert "7.8\u202fms on average" in said
    assert "64.1\u202f% of it was model" in said
    assert "data.threads</code>" not in said
    assert "<td>5.000</td>" in said, "the model's"


def test_a_slow_reader_is_told(make_run):
    slow = [train_line(step, times=times_of(step, reader=4e-3, ready=0.1)) for step in range(1, 9)]
    assert "<code>data.threads</code>" in times(read_run(make_run(**{"metrics.jsonl": slow})))


def test_on_cuda_the_stream_is_what_a_step_is_made_of(make_run):
    lines = [train_line(step, times=times_of(step, device={**DEVICE, "other": 0})) for step in range(1, 9)]
    run = read_run(make_run(**{"metrics.jsonl": lines}))
    said = times(run)
    assert "1\u202fms on average" in said
    assert "80.0\u202f% of it was model" in said
    chart = time_charts(run)[0]
    assert "stream" in chart.caption
    assert dict(chart.series[0].points)[800] == pytest.approx(0.8)


def test_parts_that_are_not_numbers_leave_out_their_interval_only(make_run):
    lines = [train_line(step, times=times_of(step, plan=None if step % 2 else 3e-4)) for step in range(1, 9)]
    run = read_run(make_run(**{"metrics.jsonl": lines}))
    mean = mean_parts([point.times for point in run.train], lambda one: one.thread)
    assert mean.plan == pytest.approx(3e-4)
    for bad in ({"steps": 0}, {"steps": "x"}, {"steps": 1}, {"device": 7}):
        lines = [train_line(1, times=bad)]
        assert times(read_run(make_run(**{"metrics.jsonl": lines}))) == ""


def test_memory_beside_what_was_given_and_forecast(make_run, tiered_run):
    config = {**tiered_run["config.json"], "tables": {"hbm": "2KiB", "memory": "4MiB", "ssd": "/fast/rows:2MiB"}}
    told = {"forecast": {"device_bytes": 5 << 20, "memory_bytes": 3 << 20, "bytes": []}, "truth": {}}
    run = read_run(make_run(**{**tiered_run, "config.json": config, "forecast.json": told}))
    said = memory(run).replace("\u202f", " ")
    for row in (
        "<td>2.0 KiB</td><td>–</td><td>2.0 KiB</td>",
        "<td>4.0 MiB</td><td>3.0 MiB</td><td>3.0 MiB</td>",
        "<td>2.0 MiB</td><td>–</td><td>1.1 MiB</td>",
    ):
        assert row in said
    lines = [train_line(1, memory=memory_of(1, device_bytes=3 << 30, device_peak_bytes=4 << 30))]
    run = read_run(make_run(**{"metrics.jsonl": lines, "config.json": {"tables": {"hbm": "2GiB"}}}))
    chart = memory_chart(run)
    assert [one.name for one in chart.series] == ["process", "device", "device, highest so far"]
    assert chart.y_label == "GiB"
    assert chart.y_marks[0].value == 2


def test_the_run_on_the_curve_of_misses(make_run, cached_run):
    curve = {"num_rows": 200, "sizes": [1, 20, 200], "missed_lookups": [0.9, 0.5, 0.1], "misses": [1, 1, 1]}
    folder = make_run(**{**cached_run, "misses.json": curve})
    chart = miss_chart(read_run(folder))
    lru, frequent, dot = chart.series
    assert lru.points == [(0.005, 0.9), (0.1, 0.5), (1.0, 0.1)]
    assert frequent.points[-1][1] < frequent.points[0][1]
    ((share, missed),) = dot.points
    assert share == pytest.approx(6 / 353)
    means = [(100 + 300 * math.exp(-step / 20)) / 4000 for step in range(1, 121)]
    assert missed == pytest.approx(sum(means) / 120)
    for damaged in (b"{", json.dumps({"sizes": [1], "missed_lookups": []}).encode(), b"[]"):
        (folder / "misses.json").write_bytes(damaged)
        assert [one.name for one in miss_chart(read_run(folder)).series] == ["the most frequent ids", "this run"]


def test_without_a_cache_there_is_no_operating_point(make_run, cached_run):
    assert operating_point(read_run(make_run())) is None
    assert miss_chart(read_run(make_run())) is None
    lines = [train_line(1, cache=cache_of(1, lookup_hit_rate=None))]
    assert operating_point(read_run(make_run(**{**cached_run, "metrics.jsonl": lines}))) is None


@pytest.mark.parametrize("odd", [None, True, "<b>", [], {}, -1, 1e308, math.inf, 10**400], ids=str)
def test_odd_values_anywhere_leave_a_page(make_run, cached_run, odd):
    """Of one run, of several, and in the terminal."""
    parts = {"times": times_of(2), "memory": memory_of(2), "cache": cache_of(2)}
    lines = [train_line(1, **parts)]
    for part, values in parts.items():
        lines += [train_line(2 + k, **{**parts, part: {**values, name: odd}}) for k, name in enumerate(values)]
        lines.append(train_line(50, **{**parts, part: odd}))
    told = {"forecast": {"device_bytes": odd, "bytes": odd, "traffic": odd}, "truth": {"samples_per_s": odd}}
    tables = {"hbm": odd, "memory": odd, "ssd": odd}
    changes = {"metrics.jsonl": lines, "forecast.json": told, "misses.json": {"num_rows": odd, "sizes": odd}}
    folder = make_run(**{**cached_run, **changes, "config.json": {"tables": tables, "train": {"epochs": odd}}})
    page = write_report(folder).read_text()
    assert "Where the time goes" in page
    assert "<b>" not in page
    assert "2 runs compared" in write_comparison([folder, folder], folder / "compare.html").read_text()
    assert rows_of(Folder(folder).look())
