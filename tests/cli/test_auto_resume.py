"""--auto-resume: the same command for a job that a scheduler repeats, whatever became of it before."""

import json
import shutil

import pytest

from tests.cli.test_train import CLICKS

ARGUMENTS = (*CLICKS, "--auto-resume", "--checkpoint-every", "3", "--quiet")


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def weights(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "model").rglob("*.safetensors"))}


def test_a_job_that_was_stopped_ends_with_the_same_bits(hotbed, run, tmp_path):
    (tmp_path / "run.yaml").write_text("train: {seed: 3}\n")
    command = ("train", tmp_path / "run.yaml", *ARGUMENTS, "--out")
    assert hotbed(*command, tmp_path / "whole").code == 0
    assert hotbed(*command, run, "--set", "train.max_steps=4").code == 0
    shutil.rmtree(run / "model")
    assert hotbed(*command, run, "--set", "train.max_steps=0").code == 0
    assert weights(run)
    assert weights(run) == weights(tmp_path / "whole")
    log = (run / "metrics.jsonl").read_bytes()
    again = hotbed(*command, run, "--set", "train.max_steps=0")  # there is nothing left to do
    assert again.code == 0
    assert "AUC" in again.out
    assert (run / "metrics.jsonl").read_bytes() == log


def test_what_never_came_to_a_checkpoint_starts_over(hotbed, run):
    assert hotbed("train", *ARGUMENTS, "--out", run).code == 0
    for name in ("checkpoints", "summary.json"):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    kept = hotbed("train", *ARGUMENTS, "--out", run)  # its model may be all that somebody has
    assert kept.code == 1
    assert "already holds a run" in kept.err
    shutil.rmtree(run / "model")
    assert hotbed("train", *ARGUMENTS, "--out", run).code == 0
    assert json.loads((run / "summary.json").read_text())["finished"]


def test_mistakes(hotbed, run, tmp_path):
    assert hotbed("train", *ARGUMENTS, "--set", "train.max_steps=4", "--out", run).code == 0
    changed = hotbed("train", *ARGUMENTS, "--set", "model.options.hidden=[9]", "--out", run)
    assert changed.code == 2
    assert "model.options cannot be changed with --resume" in changed.err
    for options in ((), ("--resume", run), ("--out", run, "--overwrite")):
        assert "--auto-resume continues or starts the run in --out" in hotbed("train", *ARGUMENTS, *options).err
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("not a run")
    assert "holds no run" in hotbed("train", *ARGUMENTS, "--out", tmp_path / "notes").err
    assert (tmp_path / "notes" / "mine.txt").exists()
