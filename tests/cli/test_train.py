import json
import os
import re
import shutil
import signal
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import yaml

from hotbed.cli.train_run import _refuse_finished
from hotbed.errors import RunError
from hotbed.run.config import RunConfig
from hotbed.run.folder import alone
from hotbed.train.loop import Training
from tests.fresh import HOTBED, Program
from tests.train.small import saved_step

SMALL = ("--set", "model.dim=4", "--set", "model.options.hidden=[8]", "--set", "train.device=cpu")
CLICKS = ("--data", "criteo-like:3000", "--set", "data.batch_size=256", *SMALL)


def test_a_run_from_nothing_but_a_dataset(hotbed, tmp_path):
    result = hotbed("train", *CLICKS)
    assert result.code == 0, result.err
    run = tmp_path / "runs" / "deepfm-criteo-like-3000-1"
    assert "best possible AUC" in result.out
    assert "samples/s" in result.out
    assert f"report: {run.relative_to(tmp_path)}/report.html" in result.out
    names = {path.name for path in run.iterdir()}
    assert names >= {"config.json", "data.json", "metrics.jsonl", "summary.json", "model", "checkpoints", "report.html"}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["finished"]
    assert set(summary["gap"]) == {"valid", "test"}
    assert "<html" in (run / "report.html").read_text()
    assert hotbed("train", *CLICKS).code == 0
    assert (tmp_path / "runs" / "deepfm-criteo-like-3000-2").is_dir()


def test_train_evaluate_predict_on_real_data(hotbed, tmp_path):
    run = tmp_path / "run"
    assert hotbed("train", "--data", "adult", "--epochs", 2, "--out", run, "--quiet", *SMALL).code == 0
    final = json.loads((run / "summary.json").read_text())["final"]
    assert final["test"]["auc"] > 0.88
    result = hotbed("evaluate", run)
    assert result.code == 0
    assert f"{final['test']['auc']:.4f}" in result.out
    assert f"{final['valid']['auc']:.4f}" in hotbed("evaluate", run, "--split", "valid", "--data", "adult").out

    assert hotbed("predict", run, "adult", "--out", tmp_path / "scores.parquet").code == 0
    scores = pq.read_table(tmp_path / "scores.parquet")
    assert scores.column_names == ["row", "label", "score"]
    assert scores.num_rows == final["test"]["samples"]
    assert sum(scores["label"].to_pylist()) == final["test"]["positives"]
    calibration = sum(scores["score"].to_pylist()) / final["test"]["positives"]
    assert calibration == pytest.approx(final["test"]["calibration"], rel=1e-6)
    result = hotbed("predict", run, "adult", "--split", "valid", "--out", tmp_path / "deep" / "scores.csv")
    assert result.code == 0, result.err
    first, *rest = (tmp_path / "deep" / "scores.csv").read_text().splitlines()
    assert first == '"row","label","score"'
    assert len(rest) == final["valid"]["samples"]


def test_raw_rows_get_the_scores_of_the_dataset(hotbed, tmp_path):
    raw = tmp_path / "log.csv"
    lines = ["click,user,price"]
    lines += [f"{int((n * 7) % 5 < 2)},u{n % 11},{n % 13}" for n in range(600)]
    raw.write_text("\n".join(lines) + "\n")
    made = hotbed("prepare", raw, "--out", tmp_path / "data", "--splits", "train=500,test=100")
    assert made.code == 0, made.err
    run = tmp_path / "run"
    sets = ("--set", "data.batch_size=50", *SMALL)
    assert hotbed("train", "--data", tmp_path / "data", "--out", run, *sets).code == 0
    assert hotbed("predict", run, tmp_path / "data", "--out", tmp_path / "a.parquet").code == 0
    bad = tmp_path / "new.csv"
    bad.write_text("\n".join([lines[0], *lines[501:], "1,too,many,columns,here", ",u3,4", "0,never-seen,"]) + "\n")
    assert hotbed("predict", run, bad, "--out", tmp_path / "b.parquet", "--max-bad", 0).code == 1
    assert not (tmp_path / "b.parquet").exists()
    for wrong in (
        ("predict", run, bad, "--out", tmp_path / "c.csv", "--split", "test"),
        ("predict", run, tmp_path / "data", "--out", tmp_path / "c.csv", "--max-bad", 1),
        ("evaluate", run, bad, "--group", "user"),
        ("evaluate", run, bad, "--slice", "user"),
        ("evaluate", run, bad, "--split", "test"),
        ("evaluate", run, "--max-bad", 1),
    ):
        refused = hotbed(*wrong)
        assert refused.code == 2
        assert f"{wrong[-2]}: for " in refused.err
    result = hotbed("predict", run, bad, "--out", tmp_path / "b.parquet", "--max-bad", 1)
    assert result.code == 0, result.err
    assert "1 rows could not be read" in result.err
    ours, theirs = pq.read_table(tmp_path / "a.parquet"), pq.read_table(tmp_path / "b.parquet")
    assert theirs.column_names == ["file", "line", "label", "score"]
    assert theirs["score"].to_pylist()[:100] == pytest.approx(ours["score"].to_pylist(), abs=1e-6)
    assert theirs["label"].to_pylist()[99:] == [*ours["label"].to_pylist()[99:], None, 0.0]
    assert theirs["line"].to_pylist()[98:] == [100, 101, 103, 104]


def measured(folder):
    """Every number of a run that no clock and no cache has a say in."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    aside = ("seconds", "samples_per_s", "times", "memory", "cache")
    return [{name: value for name, value in line.items() if name not in aside} for line in lines]


def test_a_cache_changes_nothing_but_the_page(hotbed, tmp_path):
    whole, cached = tmp_path / "whole", tmp_path / "cached"
    sets = ("--set", "train.eval_every=3", "--set", "train.log_every=2", "--epochs", "2")
    assert hotbed("train", *CLICKS, *sets, "--out", whole).code == 0
    result = hotbed("train", *CLICKS, *sets, "--out", cached, "--cache", "0.25", "--policy", "lru")
    assert result.code == 0, result.err
    assert "% hits" in result.err
    assert re.search(r"16,522 rows in 26 tables \(.* KiB\), 4,13\d of them at a time on cpu; writing to", result.err)
    assert measured(cached) == measured(whole)
    for name in ("dense", "tables"):
        ours, theirs = (run / "model" / f"{name}.safetensors" for run in (cached, whole))
        assert ours.read_bytes() == theirs.read_bytes()
    finals = [json.loads((run / "summary.json").read_text())["final"] for run in (cached, whole)]
    assert finals[0] == finals[1]
    assert "What the cache did" in (cached / "report.html").read_text()
    assert "What the cache did" not in (whole / "report.html").read_text()
    shown = [hotbed("evaluate", cached, *flags).out for flags in ((), ("--cache", "0.5"), ("--hbm", "8MiB"))]
    assert shown[0] == shown[1] == shown[2]
    assert "leave one of them out" in hotbed("evaluate", cached, "--cache", "0.5", "--hbm", "8MiB").err
    for name, flags in (("a.csv", ()), ("b.csv", ("--cache", "0.5"))):
        assert hotbed("predict", cached, "criteo-like:3000", "--out", tmp_path / name, *flags).code == 0
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def test_a_cache_that_cannot_hold_a_batch(hotbed, tmp_path):
    """Told before any training, with the smallest one that would do, and that one does."""
    run = tmp_path / "run"
    result = hotbed("train", *CLICKS, "--out", run, "--cache", "0.001")
    assert result.code == 3
    assert "Traceback" not in result.err
    assert not run.exists()
    share, hbm = re.search(r"--cache (0\.\d+) or --hbm (\S+) or more", result.err).groups()
    for flags in (("--cache", share), ("--hbm", hbm, "--memory", "64MiB")):
        result = hotbed("train", *CLICKS, "--out", run, "--overwrite", *flags)
        assert result.code == 0, result.err
        assert re.search(r"16,522 rows in 26 tables \(.* KiB\), 2,[5-9]\d\d of them", result.err)
    result = hotbed("train", *CLICKS, "--out", run, "--overwrite", "--hbm", hbm, "--memory", "100KiB")
    assert "the rows behind the cache need" in result.err


def test_a_folder_is_as_it_was_where_the_counts_of_the_dataset_are_damaged(hotbed, tmp_path, monkeypatch):
    run, new = tmp_path / "run", tmp_path / "new"
    assert hotbed("train", *CLICKS, "--out", run, "--set", "train.max_steps=1").code == 0

    def damaged(_):
        raise RunError("the counts are damaged")

    monkeypatch.setattr("hotbed.data.dataset.describe", damaged)
    assert "the counts are damaged" in hotbed("train", *CLICKS, "--out", run, "--overwrite").err
    assert (run / "model").is_dir()
    assert "the counts are damaged" in hotbed("train", *CLICKS, "--out", new).err
    assert not new.exists()


def test_a_run_goes_on_with_another_cache(hotbed, tmp_path):
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    assert hotbed("train", *CLICKS, "--out", whole).code == 0
    assert hotbed("train", *CLICKS, "--out", changed, "--set", "train.max_steps=5", "--cache", "0.2").code == 0
    flags = ("--set", "train.max_steps=0", "--cache", "0.3", "--policy", "lfu", "--set", "tables.window=2")
    result = hotbed("train", "--resume", changed, *flags)
    assert result.code == 0, result.err
    ours, theirs = (run / "model" / "tables.safetensors" for run in (changed, whole))
    assert ours.read_bytes() == theirs.read_bytes()
    result = hotbed("train", "--resume", changed, "--epochs", "2", "--set", "tables.precision=bf16")
    assert "tables.precision cannot be changed with --resume" in result.err


def test_an_evaluation_batch_that_does_not_fit_is_told_before_training(hotbed, tmp_path):
    run = tmp_path / "run"
    sets = ("--set", "data.batch_size=16", "--set", "data.eval_batch_size=300")
    result = hotbed("train", *CLICKS, *sets, "--out", run, "--cache", "0.05")
    assert result.code == 3
    assert "data.eval_batch_size" in result.err
    assert not run.exists()


def test_flags_files_and_sets_reach_the_run(hotbed, tmp_path):
    (tmp_path / "run.yaml").write_text("model: {name: dnn, dim: 4}\ntrain: {epochs: 9, seed: 1}\ndata: {path: adult}\n")
    result = hotbed("train", "run.yaml", "--model", "fm", "--epochs", 2, "--set", "train.seed=5", "--show")
    assert result.code == 0
    shown = yaml.safe_load(result.out)
    assert (shown["model"]["name"], shown["model"]["dim"]) == ("fm", 4)
    assert (shown["train"]["epochs"], shown["train"]["seed"]) == (2, 5)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "cache", "hbm"),
    [
        ([], 0.0, "1GiB"),
        (["--cache", "0.015"], 0.015, ""),
        (["--cache", "0"], 0.0, ""),
        (["--hbm", "2GiB"], 0.0, "2GiB"),
    ],
)
def test_a_flag_replaces_the_cache_of_the_run_file(hotbed, tmp_path, flags, cache, hbm):
    (tmp_path / "run.yaml").write_text("tables: {hbm: 1GiB}\n")
    result = hotbed("train", "run.yaml", *flags, "--policy", "lru", "--show")
    shown = yaml.safe_load(result.out)["tables"]
    assert (shown["cache"], shown["hbm"], shown["policy"]) == (cache, hbm, "lru")


def test_what_show_prints_is_a_run_file(hotbed, tmp_path):
    (tmp_path / "all.yaml").write_text(hotbed("train", "--show").out)
    again = yaml.safe_load(hotbed("train", "all.yaml", "--show").out)
    assert again == json.loads(RunConfig().to_json())


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--model", "deepfmm"], ["no model 'deepfmm'", "deepfm, dlrm"]),
        (["--set", "model.options.dropuot=1"], ["no option 'dropuot'", "Did you mean 'dropout'"]),
        (["--set", "modle.dim=3"], ["did you mean model.dim"]),
        (["--set", "model.dim"], ["must have the form path=value"]),
        (["--set", "model.dim=wide", "--set", "data.batch_size=0", "--model", "x"], ["3 settings are wrong"]),
        (["--set", "tables.options.beta1=0.5"], ["adagrad has no setting beta1"]),
        (["--set", "tables.options.lr=0.5"], ["set tables.lr instead"]),
        (["--data", "nowhere"], ["nowhere is neither an embedded dataset"]),
        (["--data", "."], ["is not a hotbed dataset"]),
        (["--data", "criteo-like:many"], ["criteo-like:many"]),
        (["absent.yaml"], ["cannot read the run file absent.yaml"]),
        (["criteo-like:2000"], ["cannot read the run file criteo-like:2000", "hotbed train --data criteo-like:2000"]),
        (["--resume", "nothing"], ["nothing is not a run"]),
        (["--device", "cuda:99"], ["train.device", "finds"]),
        (["--device", "tpu"], ["train.device: must be auto, cpu, cuda or cuda:N, not 'tpu'"]),
        (["--epochs", "0"], ["train.epochs: must be at least 1, not 0"]),
        (["--out", "taken.txt"], ["taken.txt is a file"]),
        (
            ["--cache", "0.1", "--hbm", "2GiB", "--memory", "8G"],
            ["2 settings are wrong", "tables.hbm", "tables.memory"],
        ),
        (["--cache", "0.1", "--set", "tables.decay_scope=table"], ["tables.decay_scope: must be touched"]),
        (["--resume", "x", "--out", "y"], ["leave out --out"]),
    ],
)
def test_mistakes_are_told_without_a_traceback(hotbed, tmp_path, arguments, messages):
    (tmp_path / "taken.txt").write_text("")
    result = hotbed("train", *arguments)
    on_disk = arguments[-1] in ("nowhere", ".", "nothing", "taken.txt")
    assert result.code == (1 if on_disk else 2)
    assert result.err.startswith("error: ")
    for message in messages:
        assert message in result.err
    assert "Traceback" not in result.err
    assert {path.name for path in tmp_path.iterdir()} == {"taken.txt"}


def test_an_existing_run_is_kept(hotbed, tmp_path):
    run = tmp_path / "run"
    assert hotbed("train", *CLICKS, "--out", run).code == 0
    before = (run / "summary.json").read_bytes()
    result = hotbed("train", *CLICKS, "--out", run)
    assert result.code == 1
    assert "already holds a run" in result.err
    assert (run / "summary.json").read_bytes() == before
    assert hotbed("train", *CLICKS, "--out", run, "--overwrite", "--model", "fm", "--set", "model.options={}").code == 0
    assert json.loads((run / "summary.json").read_text())["model"] == "fm"


@pytest.mark.parametrize(
    ("stale", "step", "epoch", "advice"),
    [
        (
            2,
            500,
            3,
            "no better valid AUC in 2 evaluations. To train longer: `hotbed train --resume run --set train.patience=4`.",
        ),
        (2, 500, 9, "--resume run --set train.patience=4 --epochs 10`."),
        (0, 700, 3, "max_steps 700 reached. To train longer: `hotbed train --resume run --set train.max_steps=1400`."),
        (0, 500, 9, "all 9 epochs done. To train longer: `hotbed train --resume run --epochs 10`."),
        (0, 500, 12, "--resume run --epochs 13`."),  # resumed with fewer epochs than were trained
        (2, 500, 12, "--resume run --set train.patience=4 --epochs 13`."),
    ],
)
def test_the_advice_for_a_finished_run_names_what_ended_it(stale, step, epoch, advice):
    training = SimpleNamespace(
        run="run",
        course=SimpleNamespace(patience=2),
        pace=SimpleNamespace(max_steps=700, epochs=9),
        progress=SimpleNamespace(stale=stale, step=step, epoch=epoch),
        follower=None,
    )
    training.reason_to_end = lambda: Training.reason_to_end(training)
    with pytest.raises(RunError) as caught:
        _refuse_finished(training)
    assert str(caught.value).endswith(advice)


def test_a_finished_run_can_only_go_on_for_longer(hotbed, tmp_path):
    run = tmp_path / "run"
    assert hotbed("train", *CLICKS, "--out", run).code == 0
    result = hotbed("train", "--resume", run)
    assert result.code == 1
    assert "is finished: the epoch is done" in result.err
    assert f"--resume {run} --epochs 2" in result.err
    result = hotbed("train", "--resume", run, "--set", "model.dim=8")
    assert "model.dim cannot be changed with --resume" in result.err
    result = hotbed("train", "--resume", run, "--epochs", 2, "--set", "dense.recorded=false")  # the same bits
    assert result.code == 0, result.err
    assert json.loads((run / "summary.json").read_text())["epochs"] == 2
    assert json.loads((run / "config.json").read_text())["train"]["epochs"] == 2


def test_a_run_killed_in_its_last_evaluation_goes_on(hotbed, tmp_path):
    run = tmp_path / "run"
    assert hotbed("train", *CLICKS, "--out", run).code == 0
    model = (run / "model" / "tables.safetensors").read_bytes()
    shutil.rmtree(run / "model")
    summary = (run / "summary.json").read_text()
    (run / "summary.json").unlink()
    result = hotbed("train", "--resume", run)
    assert result.code == 0, result.err
    assert (run / "model" / "tables.safetensors").read_bytes() == model
    assert hotbed("train", "--resume", run, "--epochs", 2).code == 0
    (run / "summary.json").write_text(summary)  # of the first epoch: the second one was killed before it wrote its own
    assert hotbed("train", "--resume", run).code == 0


def test_a_refused_resume_changes_nothing(hotbed, tmp_path):
    run = tmp_path / "run"
    assert hotbed("train", *CLICKS, "--out", run).code == 0
    before = sorted(run.rglob("*"))
    assert hotbed("train", "--resume", run).code == 1
    assert sorted(run.rglob("*")) == before


def test_a_page_that_cannot_be_written_does_not_hide_the_result(hotbed, tmp_path, monkeypatch):
    def full(*_):
        raise RunError("report.html cannot be written: No space left on device.")

    monkeypatch.setattr("hotbed.report.write_report", full)
    result = hotbed("train", *CLICKS, "--out", tmp_path / "run")
    assert result.code == 0, result.err
    assert "AUC" in result.out
    assert "no report page: report.html cannot be written" in result.out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["finished"]


def test_two_processes_cannot_train_in_one_folder(hotbed, tmp_path):
    run = tmp_path / "run"
    assert hotbed("train", *CLICKS, "--out", run).code == 0
    with alone(run):
        for arguments in (("--resume", run, "--epochs", 2), (*CLICKS, "--out", run, "--overwrite")):
            result = hotbed("train", *arguments)
            assert result.code == 1
            assert "another process is training in" in result.err
    assert (run / "model").is_dir()


def test_a_folder_in_use_is_refused_before_anything_is_opened(hotbed, tmp_path, monkeypatch):
    def build(*_):
        raise AssertionError("tables were built")

    monkeypatch.setattr("hotbed.train.build.build", build)
    (tmp_path / "run").mkdir()
    with alone(tmp_path / "run"):
        result = hotbed(
            "train", *CLICKS, "--out", tmp_path / "run", "--memory", "1MiB", "--ssd", f"{tmp_path}/ssd:64MiB"
        )
    assert result.code == 1
    assert "another process is training in" in result.err
    assert not (tmp_path / "ssd").exists()


def test_a_run_that_is_refused_leaves_no_folder(hotbed, tmp_path):
    result = hotbed("train", *CLICKS, "--out", tmp_path / "run", "--memory", "1MiB", "--ssd", f"{tmp_path}/ssd:1MiB")
    assert result.code == 3
    assert "the files of every dim take 4.0 MiB at least" in result.err
    assert not (tmp_path / "run").exists()


def test_scores_never_replace_their_input(hotbed, tmp_path):
    raw = tmp_path / "log.csv"
    raw.write_text("label,city\n" + "1,a\n0,b\n" * 20)
    assert hotbed("prepare", raw, "--out", tmp_path / "data").code == 0
    assert hotbed("train", "--data", tmp_path / "data", "--out", tmp_path / "run", "--quiet", *SMALL).code == 0
    (tmp_path / "link.csv").symlink_to(raw)
    before = raw.read_text()
    for out in ("log.csv", "link.csv"):
        result = hotbed("predict", tmp_path / "run", raw, "--out", tmp_path / out)
        assert result.code == 2
        assert "is one of the inputs" in result.err
    assert raw.read_text() == before


def test_evaluating_what_cannot_be(hotbed, tmp_path):
    run = tmp_path / "run"
    assert hotbed("train", *CLICKS, "--out", run, "--quiet").code == 0
    assert "has no split 'tset'" in hotbed("evaluate", run, "--split", "tset").err
    assert "other dense columns" in hotbed("evaluate", run, "--data", "adult").err
    assert "there is no" in hotbed("evaluate", tmp_path / "nothing").err
    (tmp_path / "empty").mkdir()
    assert "holds no trained model" in hotbed("evaluate", tmp_path / "empty").err
    assert "written as .parquet or .csv" in hotbed("predict", run, "criteo-like:3000", "--out", "scores.txt").err
    (run / "model" / "tables.safetensors").write_bytes(b"junk")
    result = hotbed("evaluate", run)
    assert result.code == 1
    assert "is damaged" in result.err


def test_a_diverging_run_says_so_and_has_a_page(hotbed, tmp_path):
    run = tmp_path / "run"
    sets = ("--set", "tables.optimizer=sgd", "--set", "tables.lr=1e30", "--set", "dense.lr=1e30")
    result = hotbed("train", *CLICKS, "--out", run, *sets)
    assert result.code == 1
    assert "diverged" in result.err
    assert (run / "report.html").is_file()
    assert not json.loads((run / "summary.json").read_text())["finished"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_real_signal_to_a_real_process(hotbed, cache, tmp_path, number, code):
    run = tmp_path / "run"
    assert hotbed("data", "describe", "criteo-like:3000").code == 0  # built before the clock runs
    environment = {**os.environ, "HOTBED_CACHE": str(cache)}
    process = Program(HOTBED, "train", *CLICKS, "--epochs", "100000", "--out", run, env=environment)
    for line in process.stdout:
        if "valid AUC" in line:
            process.signal(number)
            break
    ended = process.ended()
    assert ended.returncode == code, ended.stdout
    assert f"Resume with: hotbed train --resume {run}" in ended.stdout
    assert f"report: {run}/report.html" in ended.stdout
    steps = saved_step(run)
    result = hotbed("train", "--resume", run, "--set", f"train.max_steps={steps + 5}")
    assert result.code == 0, result.err
    assert json.loads((run / "summary.json").read_text())["steps"] == steps + 5


def test_progress_on_a_terminal():
    from io import StringIO

    from rich.console import Console

    from hotbed.cli.progress import LiveBar, PlainLines, progress_display
    from hotbed.telemetry.observer import Progress

    text = StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    bar = progress_display(console)
    assert isinstance(bar, LiveBar)
    assert isinstance(progress_display(Console(file=StringIO())), PlainLines)
    bar.begin(Progress(), 100)
    bar.step(Progress(step=50, batch=50))
    bar.record({"kind": "train", "loss": 0.5, "auc": 0.75, "samples_per_s": 12345.0, "epoch": 1, "step": 50})
    bar.record({"kind": "eval", "split": "valid", "auc": None, "log_loss": 0.4, "epoch": 1, "step": 50})
    bar.say("hello")
    bar.end()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue())
    assert "loss 0.5000, AUC 0.7500, 12,345 samples/s" in shown
    assert "50/100" in shown
    assert "epoch 1, step 50: valid AUC -, log loss 0.4000" in shown
    assert "hello" in shown


def test_progress_tells_of_the_cache():
    from hotbed.cli.progress import facts

    line = {"kind": "train", "loss": 0.25, "auc": 0.75, "samples_per_s": 9.0}
    assert facts(line | {"cache": None}).endswith("9 samples/s")
    told = facts(line | {"cache": {"lookup_hit_rate": 0.9876, "stall_share": None}})
    assert told.endswith("9 samples/s, 98.8 % hits, - waiting")


def test_plain_lines_are_sparse():
    from io import StringIO

    from rich.console import Console

    from hotbed.cli.progress import PlainLines
    from hotbed.telemetry.observer import Progress

    text = StringIO()
    lines = PlainLines(Console(file=text, width=200), every_seconds=1e9)
    lines.begin(Progress(), 100)
    for step in (10, 20, 30):
        lines.record({"kind": "train", "loss": 0.5, "auc": 0.75, "samples_per_s": None, "epoch": 1, "step": step})
    lines.record({"kind": "eval", "split": "test", "auc": 0.8, "log_loss": 0.4, "epoch": 1, "step": 30})
    first, second = text.getvalue().splitlines()
    assert re.fullmatch(r"epoch 1, step 10 of 100: loss 0\.5000, AUC 0\.7500, 0 samples/s, \d+ s left", first)
    assert second == "epoch 1, step 30 of 100: test AUC 0.8000, log loss 0.4000"


def test_few_steps_are_said_aloud(hotbed, tmp_path):
    few = ("--epochs", 1, "--batch-size", 4096)
    done = hotbed("train", "--data", "criteo-like:5000", "--out", tmp_path / "few", "--quiet", *few)
    assert "2 steps of 4,096 samples are too few to learn much from. Leave out data.batch_size" in done.err
    again = hotbed("train", tmp_path / "few", "--out", tmp_path / "other")
    assert "is a folder, not a run file" in again.err
    assert "Did you mean dcnv2?" in hotbed("train", "--model", "dcn", "--out", tmp_path / "other").err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--restarts", 2), "--restarts 2 belongs to --ray"),
        (("--metrics-host", "0.0.0.0"), "--metrics-host is the address of --metrics-port"),
        (("--stop-when-idle", 3), "follow.idle_seconds: is for a log that is followed; give --follow"),
        (("--checkpoint-minutes", 3), "follow.checkpoint_minutes: is for a log that is followed"),
        (("--policy", "lfu"), "--policy chooses the rows that stay in a cache; give --cache, --hbm or --ssd too"),
        (("--k-step", 8, "--no-overlap"), "--k-step, --overlap: for several ranks, which torchrun or --ray starts"),
    ],
)
def test_flags_without_an_effect_are_refused(hotbed, tmp_path, flags, said):
    found = hotbed("train", *CLICKS, "--out", tmp_path / "run", "--dry-run", *flags)
    assert found.code == 2
    assert said in " ".join(found.err.split())
