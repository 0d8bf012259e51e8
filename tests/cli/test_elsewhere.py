"""Commands about a run from another folder than it was trained in, and about a run that is still training."""

import os
import re
import shutil

import pytest

from hotbed.run.folder import alone

SMALL = (
    "--set",
    "model.dim=4",
    "--set",
    "model.options.hidden=[8]",
    "--set",
    "train.device=cpu",
    "--batch-size",
    "4096",
    "--quiet",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a log, its dataset and a run, made there with relative paths."""
    home = tmp_path_factory.mktemp("home")
    (home / "clicks.csv").write_text("click,city,price\n" + "1,a,0.5\n0,b,1.5\n0,c,\n1,a,2\n" * 25)
    return home


@pytest.fixture
def home(trained, hotbed, monkeypatch):
    monkeypatch.chdir(trained)
    if not (trained / "mydata").exists():
        assert hotbed("prepare", "clicks.csv", "--out", "mydata", "--splits", "train=0.6,valid=0.2,test=0.2").code == 0
        assert hotbed("train", "--data", "mydata", "--out", "runs/mine", *SMALL).code == 0
    return trained


def test_the_dataset_is_found_from_elsewhere(hotbed, home, tmp_path, monkeypatch):
    here = hotbed("evaluate", "runs/mine").out
    monkeypatch.chdir(tmp_path)
    there = hotbed("evaluate", home / "runs" / "mine")
    assert there.code == 0, there.err
    assert there.out == here
    story = hotbed("explain", home / "runs" / "mine", "--table", "city", "--value", "a")
    assert story.code == 0, story.err
    assert (
        hotbed("export", home / "runs" / "mine", "--no-onnx", "--out", "exported").err == ""
    )  # rows ordered by counts
    longer = shutil.copytree(home / "runs" / "mine", tmp_path / "longer")
    resumed = hotbed("train", "--resume", longer, "--epochs", 2, "--quiet")
    assert resumed.code == 0, resumed.err


def test_runs_and_data_may_move_together(hotbed, home, tmp_path, monkeypatch):
    shutil.copytree(home, tmp_path / "moved")
    (tmp_path / "moved" / "runs" / "mine" / "data.json").write_text('{"path": "/nowhere/mydata"}')
    monkeypatch.chdir(tmp_path)
    assert hotbed("evaluate", "moved/runs/mine").code == 0


def test_where_it_is_gone_the_way_out_is_told(hotbed, home, tmp_path, monkeypatch):
    shutil.copytree(home / "runs" / "mine", tmp_path / "mine")
    (tmp_path / "mine" / "data.json").unlink()
    monkeypatch.chdir(tmp_path)
    for command in (["evaluate", "mine"], ["train", "--resume", "mine", "--epochs", 2, "--quiet"]):
        lost = hotbed(*command)
        assert lost.code == 1
        assert "mine was trained on mydata, which is no longer there" in lost.err
        assert "--data DATASET" in lost.err
        found = hotbed(*command, "--data", home / "mydata")
        assert found.code == 0, found.err


@pytest.mark.parametrize(
    ("command", "checkpoint"),
    [
        ("evaluate", False),
        ("predict", False),
        ("export", False),
        ("serve", False),
        ("evaluate", True),
        ("export", True),
    ],
)
def test_a_run_that_still_trains_is_told_as_such(hotbed, home, tmp_path, command, checkpoint):
    run = tmp_path / "run"
    shutil.copytree(home / "runs" / "mine", run)
    shutil.rmtree(run / "model")
    (run / "summary.json").unlink()
    if not checkpoint:
        shutil.rmtree(run / "checkpoints")
    more = {"predict": ("clicks.csv", "--out", tmp_path / "s.csv"), "serve": ("--port", "0")}.get(command, ())
    with alone(run):
        told = hotbed(command, run, *more)
    assert told.code == 1
    assert f"{run} is still training" in told.err
    assert f"hotbed top {run}" in told.err
    assert (f"hotbed evaluate {run}/checkpoints" in told.err) == checkpoint
    stopped = hotbed(command, run, *more)
    assert "holds no trained model" in stopped.err
    assert (f"hotbed train --resume {run}" in stopped.err) == checkpoint
    assert os.listdir(tmp_path) == ["run"]


def test_scores_of_a_checkpoint_name_it(hotbed, home, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(home / "runs" / "mine", run)
    shutil.rmtree(run / "model")
    with alone(run):
        told = hotbed("predict", run, "clicks.csv", "--out", tmp_path / "s.csv")
    assert told.code == 0, told.err
    assert re.search(r"100 scores in .*s.csv, by the model step-1-[0-9a-f]{8}", told.out)


def test_a_checkpoint_of_an_embedded_dataset_is_measured_and_exported(hotbed, tmp_path):
    data = ("--data", "criteo-like:3000", "--set", "data.batch_size=256", "--set", "train.keep_best=false")
    assert hotbed("train", *data, *SMALL, "--out", "run").code == 0
    whole = hotbed("evaluate", "run").out
    shutil.rmtree(tmp_path / "run" / "model")  # as if it had been interrupted
    measured = hotbed("evaluate", "run/checkpoints")
    assert measured.code == 0, measured.err
    assert "at step 12 on criteo-like:3000" in " ".join(measured.out.split())
    assert re.search(r"AUC.*\d\.\d+", measured.out)[0] == re.search(r"AUC.*\d\.\d+", whole)[0]
    exported = hotbed("export", "run/checkpoints", "--no-onnx", "--out", "exported")
    assert exported.code == 0, exported.err
    assert (tmp_path / "exported" / "README.md").is_file()
