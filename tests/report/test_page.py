"""The whole page: well-formed, self-contained, escaped, accessible, and there whatever the run looks like."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotbed.errors import RunError
from hotbed.report import write_report
from tests.report.conftest import cache_of, ids_of, tiers_of

VOID = {"meta", "wbr", "link", "br", "hr", "img", "input"}
SECTIONS = ["learning", "quality", "data", "config", "next", "versions"]
FIGURES = ["loss", "auc", "speed", "lr", "calibration", "step-parts", "reader-queue", "memory-chart", "skew"]
LIMIT = 1_000_000


class Page(HTMLParser):
    """Parses strictly: every element closed in order, every id once."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.tags, self.headings, self.attributes, self.words = [], [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(set(self.ids)) == len(self.ids)

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"an attribute twice in {tag}"
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open, f"{tag} closed but never opened"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join("".join(self.words).replace("\u202f", " ").split())


def page_of(run):
    text = write_report(run).read_text(encoding="utf-8")
    assert len(text.encode()) < LIMIT
    page = Page(text)
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(page.headings, page.headings[1:]))
    assert [name for name in page.ids if name in SECTIONS] == SECTIONS
    assert not re.search(r"https?:|//[a-z]|\burl\((?!#)|@import|\bsrc=", text)
    assert set(page.tags) & {"link", "img", "iframe", "object", "form"} == set()
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), f"{tag} has {name}"
        if name == "href":
            assert value.startswith("#")
            assert value[1:] in page.ids
        if name == "aria-labelledby":
            assert value in page.ids
    return page


def test_the_page_of_a_whole_run(make_run):
    run = make_run()
    page = page_of(run)
    assert write_report(run) == run / "report.html"
    assert [name for name in page.ids if name in FIGURES] == FIGURES
    assert page.tags.count("svg") > page.tags.count("figure") == page.tags.count("figcaption") == 9
    for words in (
        "deepfm on criteo-like",
        "AUC 0.7741 on test, 95 % of the way from a coin toss",
        "0.3517",  # PR-AUC
        "best any model could reach here is 0.7889; the gap is 0.0148",
        "samples per second 20.3 k 12.0 k samples on cpu",
        "time 2 min 21 s stopped: all epochs done",
        "3 rows of the raw data were bad",
        "A cache of 1.5 % of the rows, 6 of 353 ids",
        "up to 76.2 % of all lookups; the other 23.8 %",
        "C2 300 301 50.0 %",
        "train 12,000 25.00 %",
        "model.dim",
        "[64, 32]",
        "hotbed evaluate",
        "torch 2.13.0",
    ):
        assert words.replace(" ", "") in page.text.replace(" ", ""), words
    assert "not finished" not in page.text


def test_equal_runs_give_equal_pages(make_run):
    run = make_run()
    first = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == first
    assert not (run / "report.html.tmp").exists()


def test_every_chart_has_its_points(make_run):
    text = write_report(make_run()).read_text()
    charts = {}
    for identifier, packed in re.findall(r'<figure id="(\w+)">.*?<script type="application/json">(.*?)</script>', text):
        charts[identifier] = {series["name"]: len(series["points"]) for series in json.loads(packed)["series"]}
    assert charts["loss"] == {"loss": 120, "smoothed": 120, "log loss on valid": 2, "log loss on test": 1}
    assert charts["auc"] == {"train, last interval": 120, "smoothed": 120, "valid": 2, "test": 1}
    assert charts["speed"] == {"samples per second": 120}
    assert charts["lr"] == {"learning rate": 120}
    assert charts["calibration"] == {"share of positives": 18}
    assert list(charts["skew"]) == ["all features", "C2", "C1", "C3"]
    assert "best possible 0.7889" in text
    assert text.count('class="division"') == 7 * 2  # the ends of two epochs


@pytest.mark.parametrize("missing", ["summary.json", "data.json", "metrics.jsonl"])
def test_a_missing_file_is_told(make_run, missing):
    assert f"{missing} is missing" in page_of(make_run(**{missing: None})).text


def test_a_run_cut_off_before_the_first_evaluation(make_run, lines):
    train_line, _ = lines
    text = json.dumps(train_line(1)) + '\n{"kind": "tra'
    page = page_of(make_run(**{"summary.json": None, "metrics.jsonl": text.encode()}))
    assert "Not evaluated yet" in page.text
    assert "This run is not finished" in page.text
    assert "cut off while it was written" in page.text
    assert "hotbed train --resume" in page.text


def test_a_run_without_any_line(make_run):
    page = page_of(make_run(**{"summary.json": None, "data.json": None, "metrics.jsonl": b""}))
    assert "Nothing trained yet." in page.text
    assert "The run has no measurements yet." in page.text
    assert "svg" not in page.tags


def test_a_run_that_was_interrupted_says_why(make_run, whole_run):
    summary = {**whole_run["summary.json"], "finished": False, "stopped_because": "interrupted <Ctrl-C>"}
    assert "This run is not finished (interrupted <Ctrl-C>)." in page_of(make_run(**{"summary.json": summary})).text


def test_the_epoch_whose_weights_were_kept_is_named(make_run, whole_run):
    summary = {**whole_run["summary.json"], "epochs": 5, "best_epoch": 3}
    assert "The weights of epoch 3 of 5 were kept" in page_of(make_run(**{"summary.json": summary})).text
    summary["best_epoch"] = 5
    assert "Kept are" not in page_of(make_run(**{"summary.json": summary})).text


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({}, "No row of the raw data was rejected."),
        (0, "No row of the raw data was rejected."),
        ({"label is <7>": 1}, "1 row of the raw data was bad"),
        ({"label is <7>": 4_000, "39 columns": 2}, "4,002 rows of the raw data were bad"),
        ({"label is <7>": 4_000, "39 columns": 2}, "Bad rows by reasonreasonrowslabel is <7>4,00039 columns2"),
    ],
)
def test_bad_rows_are_told(make_run, whole_run, bad, words):
    assert words in page_of(make_run(**{"summary.json": {**whole_run["summary.json"], "bad_rows": bad}})).text


def test_the_way_on_fits_the_state_of_the_run(make_run, whole_run):
    config = {**whole_run["config.json"], "train": {"epochs": 2}}
    run = make_run(**{"config.json": config})
    assert f"hotbed train --resume {run} --epochs 3" in page_of(run).text
    (run / "summary.json").unlink()
    page = page_of(run)
    assert f"hotbed train --resume {run}" in page.text
    assert "--epochs" not in page.text
    assert "AUC 0.7741 on test at its last evaluation." in page.text


def test_a_broken_loss_is_pointed_out(make_run, lines):
    train_line, _ = lines
    broken = [train_line(step, loss=math.nan if step > 7 else 0.5) for step in range(1, 11)]
    page = page_of(make_run(**{"metrics.jsonl": broken}))
    assert "The loss was not a finite number at 3 of 10 points, first at step 8." in page.text
    assert "nan" not in page.text.lower()


def test_numbers_that_are_all_unknown(make_run, whole_run, lines):
    train_line, eval_line = lines

    def hollow(value):
        if isinstance(value, dict):
            return {name: hollow(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [hollow(inner) for inner in value]
        return math.nan if isinstance(value, float | int) and not isinstance(value, bool) else value

    broken = [{**hollow(line), "step": 1, "samples": 1} for line in (train_line(1), eval_line(1))]
    files = {name: hollow(whole_run[name]) for name in ("summary.json", "data.json")}
    page = page_of(make_run(**files, **{"metrics.jsonl": broken}))
    assert "nan" not in page.text.lower()
    assert "No values were recorded." in page.text


def test_no_features(make_run, whole_run):
    data = {
        **whole_run["data.json"],
        "features": [],
        "total": {"rows": 0, "distinct": 0, "top_share": None, "curve": []},
    }
    page = page_of(make_run(**{"data.json": data}))
    assert "The dataset has no id features." in page.text
    assert "skew" not in page.ids


def test_a_thousand_features_and_a_very_long_run(make_run, whole_run, lines, feature):
    train_line, eval_line = lines
    features = [feature(f"feature {k} " + "x" * 90, 40 + k) for k in range(1000)]
    config = {**whole_run["config.json"], "tables": {f"t{k}": {"rows": k, "note": "y" * 400} for k in range(1000)}}
    metrics = [
        train_line(step, loss=7.0 if step == 9_999 else 0.5, cache=cache_of(step, keys=step))
        for step in range(1, 20_001)
    ]
    metrics += [eval_line(step) for step in range(10, 20_000, 10)]
    data = {**whole_run["data.json"], "features": features}
    page = page_of(make_run(**{"data.json": data, "config.json": config, "metrics.jsonl": metrics}))
    assert "988 more features" in page.text
    assert page.text.count("feature 999 ") >= 1
    assert "1,505 more settings are in config.json" in page.text


EVIL = "<script>alert(1)</script>\"'&amp;</style></title>\x00\ud800"


def test_names_never_become_markup(make_run, whole_run, lines, feature):
    train_line, eval_line = lines
    summary = {
        **whole_run["summary.json"],
        **dict.fromkeys(("model", "dataset", "device", "stopped_because"), EVIL),
        "final": {EVIL: {"auc": 0.7}},
        "versions": {EVIL: EVIL},
        "finished": False,
    }
    data = {
        "splits": {EVIL: {"rows": 1, "positive_rate": 0.1}},
        "features": [feature(EVIL, 9)],
        "total": feature(EVIL, 9),
    }
    files = {"summary.json": summary, "data.json": data, "config.json": {EVIL: {EVIL: EVIL}}}
    run = make_run(**files, **{"metrics.jsonl": [train_line(1), eval_line(1, EVIL)]})
    page = page_of(run)
    assert page.tags.count("script") == 1 + page.tags.count("figure")
    assert "<script>alert(1)</script>" in page.text
    assert "<script>alert" not in (run / "report.html").read_text()


def test_colours_are_readable_in_light_and_dark(make_run):
    style = re.search(r"<style>(.*?)</style>", write_report(make_run()).read_text(), re.S)[1]

    def luminance(color):
        parts = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a, b):
        low, high = sorted([luminance(a), luminance(b)])
        return (high + 0.05) / (low + 0.05)

    themes = [dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in style.split(":root")[1:3]]
    assert len(themes) == 2
    for theme in themes:
        for ground in ("page", "sheet", "wash"):
            for ink in ("ink", "soft", "accent"):
                assert contrast(theme[ink], theme[ground]) >= 4.5, (ink, ground)
        assert contrast(theme["ink"], theme["warn-wash"]) >= 4.5
        for hue in (f"c{k}" for k in range(1, 7)):
            assert contrast(theme[hue], theme["page"]) >= 3, hue


def test_a_wrong_directory_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(RunError, match=r"config\.json is missing"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_is_an_error(make_run):
    run = make_run()
    (run / "report.html").mkdir()
    with pytest.raises(RunError, match=r"report\.html cannot be written"):
        write_report(run)


LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
NESTED = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_the_files_hold_there_is_a_page(make_run, whole_run, data):
    """Replace values anywhere in the files by anything JSON can say."""

    def spoil(value, depth=0):
        if data.draw(st.integers(0, 9)) == 0:
            return data.draw(NESTED)
        if isinstance(value, dict):
            return {name: spoil(inner, depth + 1) for name, inner in value.items()}
        if isinstance(value, list):
            return [spoil(inner, depth + 1) for inner in value[:3]]
        return value

    files = {name: spoil(whole_run[name]) for name in ("summary.json", "data.json")}
    storage = {"cache": cache_of(1), "tiers": tiers_of(1), "ids": ids_of(1)}
    metrics = [spoil({**line, **storage}) for line in whole_run["metrics.jsonl"][::40]]
    files = {name: json.dumps(value).encode() for name, value in files.items()}
    page_of(make_run(**files, **{"metrics.jsonl": metrics}))


def test_a_usual_learning_rate_is_no_changed_setting():
    from hotbed.report.sections import _defaults

    assert 0.02 in _defaults("tables.lr", {"tables.optimizer": "adagrad"})
    assert 0.02 not in _defaults("tables.lr", {"tables.optimizer": "adam"})
    assert 0.001 in _defaults("dense.lr", {"dense.optimizer": "adam"})
