"""A newcomer's small log through the commands: chosen settings, labels, leaks, calibration, raw files, tuning."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hotbed.cli.console import calibration_notes
from hotbed.data.prepare.prepare import prepare
from hotbed.data.schema import Schema
from tests.fresh import HOTBED, Program

ROWS = 3000
FAST = ("--device", "cpu", "--set", "model.options.hidden=[8]", "--set", "model.dim=4")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Ratings of users and items; a column that is filled in for good ones only."""
    draw = np.random.default_rng(0)
    user, item = draw.integers(0, 60, ROWS), draw.integers(0, 40, ROWS)
    taste = draw.normal(size=60)[user] + draw.normal(size=40)[item] + draw.normal(size=ROWS)
    rating = np.clip(np.round(3 + taste), 1, 5).astype(int)
    path = tmp_path_factory.mktemp("log") / "ratings.csv"
    lines = [f"{u},{i},{r},{'sent' if r >= 4 else ''}" for u, i, r in zip(user, item, rating)]
    path.write_text("\n".join(["user_id,item_id,rating,thanks", *lines]) + "\n")
    return path


@pytest.fixture(scope="module")
def data(log):
    out = log.with_name("data")
    prepare(log, out, positive="rating>=4", drop=["thanks"], split={"train": 0.7, "valid": 0.15, "test": 0.15})
    return out


def test_settings_are_chosen_and_said_and_kept_with_the_run(hotbed, data, tmp_path):
    done = hotbed("train", "--data", data, "--out", "run", *FAST)
    assert done.code == 0, done.err
    assert "chosen for 2,076 train samples" in done.err
    assert "batches of 256" in done.err
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["train"]["patience"] == 2
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["final"]["test"]["auc"] > 0.75
    again = hotbed("train", "run/config.json", "--out", "again")  # every setting is given now
    assert "chosen for" not in again.err
    assert json.loads((tmp_path / "again/summary.json").read_text())["final"] == summary["final"]


def test_raw_files_with_labels_are_measured(hotbed, data, log, tmp_path):
    assert hotbed("train", "--data", data, "--out", "run", "--epochs", 1, *FAST).code == 0
    done = hotbed("evaluate", "run", log)
    assert done.code == 0, done.err
    for word in ("ratings.csv", "PR-AUC", "calibration", "3,000"):
        assert word in done.out
    (tmp_path / "plain.csv").write_text("user_id,item_id\n1,2\n")
    refused = hotbed("evaluate", "run", "plain.csv")
    assert refused.code == 2
    assert "no row of plain.csv has a label (column rating)" in refused.err
    (tmp_path / "part.csv").write_text("user_id,item_id,rating\n1,2,5\n3,4,1\n1,1,\n")
    assert "1 have no label" in hotbed("evaluate", "run", "part.csv").err
    assert "Give one" in hotbed("evaluate", "run", log, "--data", data).err
    assert "there is no absent.csv" in hotbed("evaluate", "run", "absent.csv").err


def test_a_leak_is_named_by_prepare_and_by_train(hotbed, log):
    done = hotbed("prepare", log, "--out", "leaky", "--positive", "rating>=4", "--splits", "train=0.8,test=0.2")
    assert "WARNING thanks: this column alone gives the label away" in done.err
    done = hotbed("train", "--data", "leaky", "--out", "run", *FAST)
    assert "there is no valid split" in done.err
    assert "WARNING this AUC is too good to be true: thanks alone gives the label away" in done.err
    assert "--drop thanks" in done.err


def test_a_label_of_one_class_is_said_and_is_no_leak(hotbed, tmp_path):
    (tmp_path / "none.csv").write_text("click,user\n" + "".join(f"0,u{i % 9}\n" for i in range(300)))
    splits = ("--splits", "train=0.8,valid=0.1,test=0.1")
    assert "this label is 0 in every row" in hotbed("prepare", "none.csv", "--out", "none", *splits).err
    done = hotbed("train", "--data", "none", "--out", "run", *FAST)
    assert done.code == 0, done.err
    assert "WARNING click: this label is 0 in every row of train" in done.err
    assert "hardly real" not in done.err


def test_few_steps_are_explained_by_what_was_given(hotbed, tmp_path):
    (tmp_path / "tiny.csv").write_text("click,user\n" + "".join(f"{i % 3 // 2},u{i % 9}\n" for i in range(40)))
    assert hotbed("prepare", "tiny.csv", "--out", "tiny").code == 0
    assert "The log is small: 40 train samples" in hotbed("train", "--data", "tiny", "--out", "chosen", *FAST).err
    done = hotbed("train", "--data", "tiny", "--out", "given", "--batch-size", 40, *FAST)
    assert "Leave out data.batch_size" in done.err


def test_calibration_that_is_off_is_said_unless_chance_explains_it():
    (note,) = calibration_notes({"test": {"calibration": 1.4, "positives": 10_000}})
    assert "1.4 times as high" in note
    assert "train.base_rate" in note
    (note,) = calibration_notes({"test": {"calibration": 0.5, "positives": 10_000}}, base_rate=True)
    assert "train.base_rate" not in note
    assert note.endswith("unaffected. Newer data may help")
    for ratio, positives in ((1.4, 20), (1.05, 10**6), (float("nan"), 10), (None, 10), (3.0, 0)):
        assert not calibration_notes({"test": {"calibration": ratio, "positives": positives}})


def test_probabilities_that_are_too_extreme_are_said():
    found = {"calibration": 1.0, "positives": 4000, "auc": 0.81, "normalized_entropy": 1.17}
    (note,) = calibration_notes({"test": found})
    assert "1.17 times" in note
    assert "--epochs" in note
    for mild in ({"normalized_entropy": 0.9}, {"positives": 50}, {"auc": 0.5}):
        assert not calibration_notes({"test": found | mild})


def test_evaluate_knows_how_the_run_began(hotbed, data, log, tmp_path):
    """`train.base_rate` is not recommended for a run that has it."""
    for value in ("true", "false"):
        flags = ("--epochs", 1, "--set", f"train.base_rate={value}", "--set", "train.recalibrate=false", *FAST)
        assert hotbed("train", "--data", data, "--out", value, *flags).code == 0
    header, *rows = log.read_text().splitlines()
    liked = [row for row in rows if row.split(",")[2] in "45"]
    (tmp_path / "liked.csv").write_text("\n".join([header, *liked]) + "\n")
    for place in ("true", "true/checkpoints", "false"):
        said = hotbed("evaluate", place, "liked.csv").err
        assert "calibration is off" in said
        assert ("train.base_rate" in said) == (place == "false")


def test_valid_is_measured_and_scored_where_there_is_no_test(hotbed, log, tmp_path):
    flags = ("--positive", "rating>=4", "--drop", "thanks", "--splits", "train=0.8,valid=0.2")
    assert hotbed("prepare", log, "--out", "two", *flags).code == 0
    assert hotbed("train", "--data", "two", "--out", "run", "--epochs", 1, *FAST).code == 0
    done = hotbed("evaluate", "run", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["split"] == "valid"
    assert hotbed("predict", "run", "two", "--out", "scores.csv").code == 0
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == json.loads(done.out)["metrics"]["samples"] + 1
    assert "has no split 'test'" in hotbed("evaluate", "run", "--split", "test").err


def test_a_folder_of_raw_files_is_refused_with_the_way_to_name_them(hotbed, data, log, tmp_path):
    assert hotbed("train", "--data", data, "--out", "run", "--epochs", 1, *FAST).code == 0
    (tmp_path / "day=1").mkdir()
    (tmp_path / "day=1/ratings.csv").write_text(log.read_text())
    scores = ("--out", "scores.csv")
    for command in (
        ("evaluate", "run", "day=1"),
        ("predict", "run", "day=1", *scores),
        ("predict", "run", log, "day=1", *scores),
    ):
        done = hotbed(*command)
        assert done.code == 2
        assert "Name the raw files in it: day=1/*" in done.err
    assert f"--data {data}" in hotbed("evaluate", "run", data).err
    assert "Give it alone" in hotbed("predict", "run", data, log, *scores).err
    assert hotbed("predict", "run", "day=1/ratings.csv", *scores).code == 0


def test_a_rare_label_is_calibrated(hotbed, tmp_path):
    draw = np.random.default_rng(1)
    rows = 200_000
    app, channel = draw.integers(0, 50, rows), draw.integers(0, 200, rows)
    logit = -6.6 + draw.normal(0, 0.7, 50)[app] + draw.normal(0, 0.5, 200)[channel]
    click = draw.random(rows) < 1 / (1 + np.exp(-logit))
    assert 0.001 < click.mean() < 0.003
    lines = [f"{int(y)},{a},{c}" for y, a, c in zip(click, app, channel)]
    (tmp_path / "rare.csv").write_text("\n".join(["click,app,channel", *lines]) + "\n")
    assert hotbed("prepare", "rare.csv", "--out", "rare", "--splits", "train=0.6,valid=0.1,test=0.3").code == 0
    assert hotbed("train", "--data", "rare", "--out", "run", *FAST).code == 0
    test = json.loads((tmp_path / "run/summary.json").read_text())["final"]["test"]
    shares = {name: one.positives / one.rows for name, one in Schema.load(tmp_path / "rare").splits.items()}
    drift = shares["train"] / shares["test"]  # chance made positives of train and test differently frequent
    assert abs(test["calibration"] / drift - 1) < 0.05
    sampled = ("--splits", "train=0.6,valid=0.1,test=0.3", "--keep-negatives", 0.1)
    assert hotbed("prepare", "rare.csv", "--out", "thin", *sampled).code == 0
    whole, thin = (Schema.load(tmp_path / name).splits for name in ("rare", "thin"))
    assert thin["train"].positives == whole["train"].positives
    assert 0.09 < thin["train"].rows / whole["train"].rows < 0.12
    assert thin["test"] == whole["test"]
    done = hotbed("train", "--data", "thin", "--out", "thin-run", *FAST)
    assert "calibration is off" not in done.err
    found = json.loads((tmp_path / "thin-run/summary.json").read_text())["final"]["test"]
    assert abs(found["calibration"] / drift - 1) < 0.1  # 10 without the correction
    refused = hotbed(
        "prepare", "rare.csv", "--out", "no", "--splits", "train=50000,test=10000", "--keep-negatives", 0.1
    )
    assert "needs to know the split of a row" in refused.err


TUNE = (*FAST, "--epochs", "2", "--out", "tuned")


def test_trials_are_run_and_the_best_is_kept(hotbed, data, tmp_path):
    pytest.importorskip("optuna")
    done = hotbed("tune", "--data", data, "--trials", 3, *TUNE)
    assert done.code == 0, done.err
    assert done.err.count("valid AUC 0.") == 3
    assert "trial 0 complete" in done.err
    assert done.err.count(", tables.lr 0.") == done.err.count(", dense.lr 0.") == 3
    folders = sorted((tmp_path / "tuned/trials").iterdir())
    assert [(one / "summary.json").is_file() for one in folders] == [True] * 3
    assert sum((one / "model").is_dir() for one in folders) == 1
    assert "All trials, best first" in (tmp_path / "tuned/report.html").read_text()
    best = json.loads((tmp_path / "tuned/best.json").read_text())
    assert best["model"]["dim"] == 4  # given, so not tuned
    more = hotbed("tune", "--data", data, "--trials", 4, *TUNE)
    assert more.err.count("valid AUC 0.") == 1  # the other three are there
    other = hotbed("tune", "--data", data, "--trials", 5, *TUNE, "--seed", 3)
    assert "holds trials with another config" in other.err
    assert hotbed("train", "tuned/best.json", "--out", "best").code == 0


SECOND_WAITS = f"""
import time
from hotbed.tune import study
run, runs = study.run, []

def waiting(*given):
    runs.append(given)
    if len(runs) == 2:
        time.sleep(1000)
    return run(*given)

study.run = waiting
{HOTBED}
"""


def test_trials_continue_after_a_kill(hotbed, data, tmp_path):
    pytest.importorskip("optuna")
    arguments = ("tune", "--data", str(data), "--trials", "3", *TUNE)
    process = Program(SECOND_WAITS, *arguments, cwd=tmp_path)
    assert any("trial 0 complete" in line for line in process.stdout)
    process.kill()  # in the second trial, which has not ended
    assert process.ended().returncode < 0
    done = hotbed(*arguments)
    assert done.code == 0, done.err
    assert done.err.count("valid AUC 0.") == 2
    assert len(list((tmp_path / "tuned/trials").glob("*/summary.json"))) == 3
    assert (tmp_path / "tuned/best.json").is_file()


KILLED_AFTER_A_TRIAL = f"""
import os
from hotbed.tune import study

tell = study.load_optuna().Study.tell

def last(*given, **named):
    tell(*given, **named)
    os._exit(9)

study.load_optuna().Study.tell = last
{HOTBED}
"""


def test_the_best_trial_is_kept_after_a_kill_behind_its_end(hotbed, data, tmp_path):
    pytest.importorskip("optuna")
    arguments = ("tune", "--data", str(data), "--trials", "1", *TUNE)
    assert Program(KILLED_AFTER_A_TRIAL, *arguments, cwd=tmp_path).ended().returncode == 9
    assert not (tmp_path / "tuned/best.json").exists()
    done = hotbed(*arguments)
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "tuned/best.json").read_text())["model"]["dim"] == 4
    assert "All trials, best first" in (tmp_path / "tuned/report.html").read_text()


def test_what_tune_refuses(hotbed, log, data, tmp_path):
    pytest.importorskip("optuna")
    prepare(log, tmp_path / "plain", positive="rating>=4", split={"train": 0.8, "test": 0.2})
    assert "has no valid split" in hotbed("tune", "--data", "plain", *FAST).err
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    assert "is not empty and holds no trials" in hotbed("tune", "--data", data, "--out", "full", *FAST).err
