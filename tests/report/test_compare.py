"""One page of several runs: of all kinds, in any state; what differs, and by how much."""

import json
import re
import shutil
from pathlib import Path

import pytest

from hotbed.errors import RunError
from hotbed.report import write_comparison
from hotbed.report.compare import MOST_RUNS, names_of
from tests.report.browser import CHROMIUM, DESKTOP, PHONE, SILENT, visit
from tests.report.conftest import cache_of, train_line
from tests.report.test_page import Page


@pytest.fixture
def runs(make_run, cached_run, tiered_run, whole_run, tmp_path):
    """A plain run, one with a cache, one with tiers and dynamic ids, one that was stopped, one that has just begun."""
    kinds = {
        "plain": {},
        "cached": cached_run,
        "tiers": tiered_run,
        "stopped": {"summary.json": None, "metrics.jsonl": whole_run["metrics.jsonl"][:30]},
        "begun": {"summary.json": None, "metrics.jsonl": None, "data.json": None},
    }
    found = []
    for name, changes in kinds.items():
        made = make_run(**changes)
        found.append(shutil.move(made, tmp_path / name))
    return [Path(one) for one in found]


def page_of(runs, path):
    return Page(write_comparison(runs, path).read_text())


def test_runs_of_every_kind_on_one_page(runs, tmp_path):
    path = tmp_path / "compare.html"
    page = page_of(runs, path)
    text = path.read_text()
    assert path.stat().st_size < 1_000_000
    assert not re.search(r"https?:|//[a-z]|\burl\((?!#)|@import|\bsrc=", text)
    assert [one for one in page.ids if one in ("results", "config", "curves", "times", "runs")] == [
        *("results", "config", "curves", "times", "runs")
    ]
    for words in (
        "5 runs compared",
        "stopped is not finished",
        "begun: metrics.jsonl is missing",
        "The 3 runs that were evaluated have the same AUC, 0.7741.",
    ):
        assert words in page.text
    packed = dict(re.findall(r'<figure id="([\w-]+)">.*?<script type="application/json">(.*?)</script>', text))
    series = {name: [one["name"] for one in json.loads(chart)["series"]] for name, chart in packed.items()}
    assert series["loss"] == series["loss-time"] == ["plain", "cached", "tiers", "stopped"]
    assert series["hits"] == ["cached", "tiers"]
    assert page_of(runs, path).text == page.text


def test_only_settings_that_differ_are_listed(runs, tmp_path):
    text = write_comparison(runs[:2], tmp_path / "page.html").read_text()
    settings = text.split('id="config"')[1].split("</section>")[0]
    assert "2 of 7 settings" in settings
    assert "tables.<wbr>cache" in settings
    assert "tables.<wbr>policy" in settings
    assert "batch_size" not in settings
    same = write_comparison([runs[0], runs[0]], tmp_path / "page.html").read_text()
    assert "All settings are the same" in same


def test_models_of_ones_own_are_told_apart_by_their_text(make_run, whole_run, tmp_path):
    """Two texts that differ after some hundred characters are two models."""
    runs = []
    for end in ("ReLU", "Tanh"):
        source = {"name": "Mine", "file": "mine.py", "package": "", "code": "# a line\n" * 100 + end}
        config = {**whole_run["config.json"], "model": {"name": "mine.py:Mine", "source": source}}
        runs.append(Path(shutil.move(make_run(**{"config.json": config}), tmp_path / end)))
    text = write_comparison(runs, tmp_path / "page.html").read_text()
    settings = text.split('id="config"')[1].split("</section>")[0]
    assert "1 of " in settings
    assert "model.<wbr>source.<wbr>code" in settings
    assert settings.count("101 lines, ") == 2


def test_the_lead_names_the_highest_auc_and_runs_that_share_it(make_run, whole_run, tmp_path):
    def run(name, auc):
        summary = whole_run["summary.json"]
        final = {"test": {**summary["final"]["test"], "auc": auc}}
        return Path(shutil.move(make_run(**{"summary.json": {**summary, "final": final}}), tmp_path / name))

    low, high, other = run("low", 0.7741), run("high", 0.7841), run("other", 0.7841)
    for runs, lead in (
        ([low, high], "Highest AUC: high, 0.7841."),
        ([high, other], "All runs have the same AUC, 0.7841."),
        ([low, high, other], "Highest AUC, shared by 2 runs: high, other, 0.7841."),
    ):
        assert lead in page_of(runs, tmp_path / "page.html").text


def test_differences_are_to_the_first_run(make_run, whole_run, tmp_path):
    first = Path(shutil.move(make_run(), tmp_path / "a"))
    summary = whole_run["summary.json"]
    better = {**summary["final"]["test"], "auc": 0.7841, "log_loss": 0.4433}
    second = make_run(**{"summary.json": {**summary, "final": {"test": better}, "samples_per_s": 40_624.4}})
    text = write_comparison([first, second], tmp_path / "page.html").read_text()
    for cell in (
        "<td>0.7741</td><td>0.7841<small>+0.0100</small></td>",
        "<td>0.4533</td><td>0.4433<small>\u22120.0100</small></td>",
        "<small>2.00 times</small>",
        "<td>0.7759</td><td>–</td>",
        "<small>same</small>",
    ):
        assert cell in text


def test_noise_of_long_runs_does_not_hide_other_runs(make_run, cached_run, tmp_path):
    lines = [train_line(step, samples_per_s=1000 + 900 * (-1) ** step) for step in range(1, 1001)]
    run = make_run(**{**cached_run, "metrics.jsonl": lines})
    text = write_comparison([run, run], tmp_path / "page.html").read_text()
    payload = json.loads(re.search(r'id="speed".*?<script type="application/json">(.*?)</script>', text, re.S)[1])
    ys = [y for _, y in payload["series"][0]["points"]]
    assert max(ys) - min(ys) < 200


def test_differences_that_no_digit_shows_are_none(make_run, whole_run, tmp_path):
    """Not +0.0000."""
    summary = whole_run["summary.json"]
    final = {"test": {**summary["final"]["test"], "auc": 0.77410001}}
    first = make_run()
    second = shutil.copytree(first, tmp_path / "second")
    (second / "summary.json").write_text(json.dumps({**summary, "final": final}))
    text = write_comparison([first, second], tmp_path / "page.html").read_text()
    assert "0.0000" not in text


def test_every_folder_that_is_no_run_is_named(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    given = [runs[0], tmp_path / "empty", tmp_path / "absent", tmp_path / "broken"]
    with pytest.raises(RunError) as told:
        write_comparison(given, tmp_path / "page.html")
    assert all(name in str(told.value) for name in ("empty", "absent", "broken"))
    assert not (tmp_path / "page.html").exists()


def test_too_many_runs_and_no_place(runs, tmp_path):
    with pytest.raises(RunError, match=f"at most {MOST_RUNS}"):
        write_comparison([runs[0]] * (MOST_RUNS + 1), tmp_path / "page.html")
    with pytest.raises(RunError, match="--out"):
        write_comparison(runs, tmp_path / "nowhere" / "page.html")


def test_names_that_tell_runs_apart():
    assert names_of([Path("/runs/a"), Path("/runs/b")]) == ["a", "b"]
    assert names_of([Path("/x/a"), Path("/y/a")]) == ["x/a", "y/a"]
    assert names_of([Path("/x/a"), Path("/x/a")]) == ["a (1)", "a (2)"]


def test_other_datasets_are_told(make_run, whole_run, tmp_path):
    first = Path(shutil.move(make_run(), tmp_path / "a"))
    other = make_run(**{"summary.json": {**whole_run["summary.json"], "dataset": "<b>adult"}})
    text = write_comparison([first, other], tmp_path / "page.html").read_text()
    assert "use different datasets (&lt;b&gt;adult, criteo-like)" in text


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser(runs, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = write_comparison(runs, tmp_path / "compare.html")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=SILENT)
        for width, scheme in ((PHONE, "dark"), (DESKTOP, "light")):
            with visit(browser, page, width=width, scheme=scheme) as seen:
                assert seen.is_as_wide_as_its_window()
                switch = seen.page.locator("[data-switches] button").nth(1)
                switch.click()
                assert switch.get_attribute("aria-pressed") == "false"
                gone = seen.page.locator("figure .legend button", has_text="cached")
                assert {one.get_attribute("aria-pressed") for one in gone.all()} == {"false"}
                assert seen.page.locator("#loss [data-series='1']").last.is_hidden()
                switch.press("Enter")
                assert seen.page.locator("#loss [data-series='1']").last.is_visible()
                found = axe.Axe().run(seen.page).response["violations"]
                assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
        browser.close()


def test_twelve_long_runs_are_below_two_megabytes(make_run, cached_run, tmp_path):
    lines = [train_line(step, cache=cache_of(step, bytes_in=step % 7)) for step in range(1, 3001)]
    run = make_run(**{**cached_run, "metrics.jsonl": lines})
    assert write_comparison([run] * MOST_RUNS, tmp_path / "page.html").stat().st_size < 2_000_000
