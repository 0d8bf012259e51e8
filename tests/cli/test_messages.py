"""What commands print for a first-time user, and what --quiet leaves out."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

from hotbed.cli.console import COMPILING, compiled_text
from hotbed.cli.messages import hotbed_command, next_commands
from hotbed.errors import RunError

SMALL = ("--set", "model.dim=4", "--set", "model.options.hidden=[8]", "--set", "train.device=cpu")
CLICKS = ("--data", "criteo-like:3000", "--set", "data.batch_size=256", *SMALL)


def test_the_end_of_a_run_says_what_was_kept_and_what_comes_next(hotbed, tmp_path):
    done = hotbed("train", *CLICKS, "--epochs", 3, "--set", "tables.lr=0.5", "--out", "my run")
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "my run" / "summary.json").read_text())
    step, epoch = summary["best_step"], summary["best_epoch"]
    assert step == 12 * epoch < 36  # so large a rate forgets
    kept = f"kept: the weights after step {step} of 36 (epoch {epoch}): their valid AUC is the best of the run"
    assert kept in done.out
    for command in ("evaluate 'my run'", "export 'my run'", "serve 'my run'", "predict 'my run' FILE --out scores.csv"):
        assert f"hotbed {command}\n" in done.out
    assert done.out.index("next: ") > done.out.index("report: ")
    last = hotbed("train", *CLICKS, "--out", "last", "--set", "train.keep_best=false")
    assert "(epoch 1): they are the last; train.keep_best is off" in last.out


def test_quiet_is_only_the_result(hotbed):
    done = hotbed("train", *CLICKS, "--cache", 0.9, "--out", "run", "--quiet")
    assert done.code == 0, done.err
    assert re.fullmatch("note: 12 steps of 256 samples are too few .*\n", done.err)  # a warning about the result
    assert "AUC" in done.out
    assert "kept: " in done.out
    assert "forecast" not in done.out
    assert "next: " not in done.out


def test_a_run_that_fails_before_its_first_step_leaves_no_folder(hotbed, tmp_path, monkeypatch):
    def refuse(*_):
        raise RunError("no.")

    with monkeypatch.context() as patched:
        patched.setattr("hotbed.train.loop.Training.train", refuse)
        assert hotbed("train", *CLICKS, "--out", "run").code == 1
    assert not (tmp_path / "run").exists()
    assert hotbed("train", *CLICKS, "--out", "run", "--quiet").code == 0


def test_so_does_one_that_is_interrupted_then(hotbed, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("hotbed.cli.train_run.print_forecast", stop)
    assert hotbed("train", *CLICKS, "--out", "run").code == 130
    assert not (tmp_path / "run").exists()


def test_compiling_has_a_line_and_no_part_in_the_speed(tmp_path):
    (tmp_path / "clicks.csv").write_text("label,city,price\n" + "1,a,0.5\n0,b,\n" * 50)

    def prepare(name):
        command = [sys.executable, "-m", "hotbed", "prepare", "clicks.csv", "--out", name]
        where = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels"), "COLUMNS": "200"}
        return subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True, check=True, timeout=300)

    cold, warm = prepare("cold"), prepare("warm")
    assert cold.stderr.count(COMPILING) == 1
    kernels, seconds = re.search(r"(\d+) kernels were compiled in ([\d.]+) s, once", cold.stdout).groups()
    assert int(kernels) > 5
    counted = float(re.search(r"MB in ([\d.]+) s", cold.stdout)[1])
    assert counted < float(seconds)
    assert COMPILING not in warm.stderr
    assert "compiled" not in warm.stdout


def test_training_leaves_compiling_out_of_its_speed(hotbed, tmp_path, monkeypatch):
    compiled = [0.0]

    def compile_seconds():
        compiled[0] += 3600.0  # an hour between any two looks
        return compiled[0]

    monkeypatch.setattr("hotbed.train.interval.compile_seconds", compile_seconds)
    assert hotbed("train", *CLICKS, "--out", "run", "--quiet").code == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["train_seconds"] == 0.0


def test_scores_that_are_there_are_kept_unless_told_otherwise(hotbed, tmp_path):
    assert hotbed("train", *CLICKS, "--out", "run", "--quiet").code == 0
    (tmp_path / "scores.csv").write_text("mine")
    told = hotbed("predict", "run", "criteo-like:3000", "--out", "scores.csv")
    assert told.code == 2
    assert "scores.csv is already there. --overwrite replaces it" in told.err
    assert (tmp_path / "scores.csv").read_text() == "mine"
    assert "there is no nothing.csv. Give raw files" in hotbed("predict", "run", "nothing.csv", "--out", "s.csv").err
    assert hotbed("predict", "run", "criteo-like:3000", "--out", "scores.csv", "--overwrite").code == 0
    assert (tmp_path / "scores.csv").read_text().startswith('"row"')


def test_a_disk_that_cannot_hold_the_run_is_told_before_anything_is_trained(hotbed, tmp_path, monkeypatch):
    monkeypatch.setattr("hotbed.train.disk_room.shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    told = hotbed("train", *CLICKS, "--out", "run")
    assert told.code == 3
    assert re.search(r"run has no room for what the run will save: .* free\. Nothing was trained\..*--out", told.err)
    assert not (tmp_path / "run").exists()


def test_hints_can_be_typed_as_they_are(hotbed, tmp_path, monkeypatch):
    assert "use --value 'item 2'." in hotbed("explain", "run", "--table", "t", "--id", "item 2").err
    monkeypatch.setenv("PATH", str(tmp_path))
    command = tmp_path / ".venv" / "bin" / "hotbed"
    command.parent.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(command.with_name("python")))
    assert hotbed_command() == f"{command.with_name('python')} -m hotbed"
    command.touch()
    assert hotbed_command() == ".venv/bin/hotbed"
    assert next_commands(tmp_path / "run").startswith("next: .venv/bin/hotbed evaluate ")
    (tmp_path / "hotbed").touch(mode=0o755)
    assert hotbed_command() == "hotbed"


def test_a_share_may_be_in_percent(hotbed):
    assert "cache: 0.15" in hotbed("train", "--cache", "15%", "--show").out
    assert "cache: 0.15" in hotbed("train", "--set", "tables.cache=15%", "--show").out
    assert "must be a number, not '15 of 100%'" in hotbed("train", "--set", "tables.cache=15 of 100%", "--show").err
    for command in (("train",), ("plan", "clicks"), ("evaluate", "run"), ("predict", "run", "x", "--out", "s.csv")):
        told = hotbed(*command, "--cache", "x%")
        assert told.code == 2
        assert "or a percentage, such as 1.5%, not 'x%'" in " ".join(told.err.split())


def test_the_usual_settings_have_flags(hotbed):
    flags = ("--batch-size", "512", "--dim", "8", "--optimizer", "adam", "--lr", "0.01", "--dense-lr", "0.002")
    shown = hotbed("train", *flags, "--show").out
    for text in ("batch_size: 512", "dim: 8", 'optimizer: "adam"', "lr: 0.01", "lr: 0.002"):
        assert text in shown


def test_help_shows_brackets(hotbed):
    assert "tables.dynamic=[user, ad]" in " ".join(hotbed("train", "--help").out.replace("│", " ").split())


def test_a_subcommand_that_is_not_there(hotbed):
    told = hotbed("checkpoint", "compare", "a", "b")
    assert told.code == 2
    assert "there is no `hotbed checkpoint compare`. Did you mean diff? There are list, verify, " in told.err
    assert "Did you mean verify?" in hotbed("checkpoint", "verfy", "a").err


def test_only_compiling_that_took_long_is_told_at_the_end():
    assert compiled_text(SimpleNamespace(kernels=7, seconds=0.9)) == ""
    assert compiled_text(SimpleNamespace(kernels=7, seconds=1.6)).startswith("7 kernels were compiled in 1.6 s")
