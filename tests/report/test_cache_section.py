"""What the page says of a cache, and that it says nothing without one."""

import json
import math
import re

import pytest

from hotbed.report.cache import cache, cache_charts
from hotbed.report.read import read_run
from tests.report.test_page import page_of


def test_the_page_of_a_cached_run(make_run, cached_run):
    page = page_of(make_run(**cached_run))
    order = [name for name in page.ids if name in ("quality", "cache", "hits", "rows", "bytes", "stall", "data")]
    assert order == ["quality", "cache", "hits", "rows", "bytes", "stall", "data"]
    for words in (
        "What the cache did",
        "The device held 6 of 356 rows (1.7 %), in 2.0 KiB with their index; the whole tables take 3.0 MiB.",
        "The policy oracle chose which.",
        "Of all lookups of training, 96.3 % found their row on the device, and 85.1 % of the distinct rows.",
        "The most frequent 1.5 % of the ids, kept permanently, would serve up to 76.2 % of the lookups.",
        "An average batch needed 1,000 distinct rows. 149 were not there: 74 had never been used before",
        "75 came from host memory (4.6 KiB)",
        "60 changed rows went back to host memory with their optimizer state (3.8 KiB)",
        "Training waited for rows 2.0 % of its time: they were read from host memory in parallel with computation.",
    ):
        assert words in page.text, words


def test_without_a_cache_there_is_no_section(make_run):
    assert cache(read_run(make_run()), 0.015) == ""
    assert "cache" not in page_of(make_run()).ids


def test_every_chart_has_its_points(make_run, cached_run):
    found = {chart.identifier: chart.series for chart in cache_charts(read_run(make_run(**cached_run)))}
    assert {name: [one.name for one in series] for name, series in found.items()} == {
        "hits": ["of lookups", "of distinct rows"],
        "rows": ["needed", "created", "read from host memory", "written back"],
        "bytes": ["to the device", "to host memory"],
        "stall": ["share of time"],
    }
    assert all(len(one.points) == 120 for series in found.values() for one in series)
    assert found["rows"][2].points[0] == (100, pytest.approx((100 + 300 * math.exp(-1 / 20)) / 2))
    assert found["bytes"][1].points[0] == (100, 60 * 64 / 2**20)


def test_means_weigh_intervals_by_their_batches_and_seconds(make_run, cached_run):
    first, second = cached_run["metrics.jsonl"][:2]
    lines = [
        {**first, "samples_per_s": 100, "cache": {**first["cache"], "batches": 30, "keys": 100, "stall_share": 0.5}},
        {**second, "samples_per_s": 200, "cache": {**second["cache"], "batches": 10, "keys": 200, "stall_share": 0.1}},
    ]
    said = re.sub("\u202f", " ", cache(read_run(make_run(**{**cached_run, "metrics.jsonl": lines})), 0.015))
    assert "An average batch needed 125 distinct rows" in said
    share = (0.5 * 30 / 100 + 0.1 * 10 / 200) / (30 / 100 + 10 / 200)
    assert f"Training waited for rows {100 * share:.1f} % of its time: a larger cache moves fewer rows" in said


def test_intervals_that_say_nothing_are_left_out(make_run, cached_run):
    lines = [{**line, "cache": None} if number % 2 else line for number, line in enumerate(cached_run["metrics.jsonl"])]
    run = read_run(make_run(**{**cached_run, "metrics.jsonl": lines}))
    assert len(cache_charts(run)[0].series[0].points) == 60
    assert "found their row" in cache(run, 0.015)


@pytest.mark.parametrize("hollow", [None, "much", [1], math.nan])
def test_numbers_that_are_unknown_are_not_told(make_run, cached_run, hollow):
    lines = [
        {**line, "cache": dict.fromkeys(line["cache"], hollow)} if "cache" in line else line
        for line in cached_run["metrics.jsonl"]
    ]
    packed = "".join(json.dumps(line) + "\n" for line in lines).encode()
    page = page_of(make_run(**{"metrics.jsonl": packed}))
    assert "nan" not in page.text.lower()
    assert "An average batch" not in page.text
    assert page.text.count("No values were recorded.") == 4


def test_a_larger_share_is_not_compared_with_another_one(make_run, cached_run):
    config = {**cached_run["config.json"], "tables": {"cache": 0.05, "policy": "<lfu>"}}
    page = page_of(make_run(**{**cached_run, "config.json": config}))
    assert "kept permanently" not in page.text
    assert "The policy <lfu> chose which." in page.text
