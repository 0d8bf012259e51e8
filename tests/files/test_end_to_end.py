"""From raw text in a bucket to scores, every path a URI: the bytes and the metrics of local paths."""

import json
import shutil
import threading
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from rich.text import Text

from hotbed import load
from hotbed.cli import main
from hotbed.cli.console import fail, out, print_json
from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader
from hotbed.data.prepare.prepare import prepare
from hotbed.errors import ConfigError, RunError
from hotbed.files import path_of
from hotbed.files.copies import scratch_folder
from hotbed.run.remote_folder import content_of, local_copy, refresh
from hotbed.run.remote_run import RunCopier, bring_run, working_folder
from tests.files.s3 import secrets_in

DAYS, ROWS = 3, 600
SMALL = ["--model", "fm", "--dim", "4", "--batch-size", "64", "--no-forecast", "--quiet", "--checkpoint-every", "8"]
SHAPE = {"split": "train=0.8,valid=0.1,test=0.1", "time_column": None}


def write_days(folder):
    """Three days of clicks as text."""
    draw = np.random.default_rng(5)
    for day in range(DAYS):
        user, ad = draw.integers(0, 40, ROWS), draw.integers(0, 60, ROWS)
        price = draw.normal(size=ROWS)
        click = (draw.random(ROWS) < 1 / (1 + np.exp(2 - user % 5 - ad % 3 * 0.5))).astype(int)
        lines = [f"{c},{p:.3f},u{u},a{a}" for c, p, u, a in zip(click, price, user, ad)]
        text = "\n".join(["label,price,user,ad", *lines]) + "\n"
        target = folder / f"day_{day}.csv"
        target.write_text(text)


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def remote_files(folder):
    start = len(folder.key) + 1
    found = {path.key[start:]: path for path, stat in folder.entries(recursive=True) if stat is not None}
    return {name: path.read_bytes() for name, path in found.items() if not name.endswith("/")}


def hotbed(*arguments):
    with pytest.raises(SystemExit) as caught:
        main([str(one) for one in arguments])
    return caught.value.code or 0


@pytest.fixture
def logs(bucket, tmp_path):
    """The same raw files in the bucket and in a local folder."""
    (tmp_path / "logs").mkdir()
    write_days(tmp_path / "logs")
    for path in (tmp_path / "logs").iterdir():
        (bucket / "logs" / path.name).put(path)
    return tmp_path / "logs"


def test_from_a_bucket_to_scores(logs, bucket, tmp_path, capsys):
    prepare(logs, tmp_path / "data", **SHAPE)
    prepare(str(bucket / "logs" / "day_*.csv"), bucket / "data", **SHAPE)
    assert remote_files(bucket / "data") == files_in(tmp_path / "data")
    assert not list((tmp_path / "cache" / "remote").glob("datasets/*"))  # nothing stays but the cache
    assert hotbed("train", "--data", tmp_path / "data", "--out", tmp_path / "run", *SMALL) == 0
    assert hotbed("train", "--data", bucket / "data", "--out", bucket / "run", *SMALL, "--read-cache", "50MB") == 0
    assert f"the run is in {bucket / 'run'}" in capsys.readouterr().out
    assert not list((tmp_path / "cache" / "remote").glob("runs/*/run"))
    there, here = remote_files(bucket / "run"), files_in(tmp_path / "run")
    rows = [name for name in here if name.endswith(".safetensors") or name.startswith("model/counts")]
    assert len(rows) > 3
    assert {name: there[name] for name in rows} == {name: here[name] for name in rows}
    summaries = [json.loads(one["summary.json"]) for one in (there, here)]
    assert summaries[0]["final"] == summaries[1]["final"]
    assert {"report.html", "metrics.jsonl", "config.json", "model/manifest.json"} <= set(there)
    columns = {"price": [0.5, -1.0], "user": ["u1", "u39"], "ad": ["a3", "unheard of"]}
    with load(bucket / "run") as remote, load(tmp_path / "run") as local:
        assert remote.score(columns).tolist() == local.score(columns).tolist()
    (bucket / "run" / "report.html").unlink()
    assert hotbed("report", bucket / "run") == 0
    assert (bucket / "run" / "report.html").is_file()
    capsys.readouterr()
    assert hotbed("explain", bucket / "run", "--table", "ad", "--id", "1") == 0
    assert "used" in capsys.readouterr().out
    assert hotbed("export", bucket / "run", "--no-onnx", "--out", bucket / "exported") == 0
    with load(bucket / "exported") as exported, load(tmp_path / "run") as local:
        assert np.allclose(exported.score(columns), local.score(columns), atol=1e-6)
    assert hotbed("evaluate", bucket / "run", "--split", "test") == 0
    assert hotbed("predict", bucket / "run", bucket / "logs" / "day_0.csv", "--out", tmp_path / "scores.csv") == 0
    assert secrets_in(tmp_path) == []
    assert hotbed("train", "--data", bucket / "data", "--out", bucket / "run", *SMALL) == 1
    assert "already holds a run" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="exists already"):
        prepare(str(bucket / "logs"), bucket / "data")


@contextmanager
def outage(server):
    """The server is killed, and comes back with its objects while what is inside waits for it."""
    server.kill()
    back = threading.Timer(0.5, server.start)
    back.start()
    yield
    back.join()


def test_the_store_is_killed_twice_on_the_way(logs, bucket, s3_server, tmp_path, monkeypatch):
    monkeypatch.setattr("hotbed.run.remote_run.EVERY", 0.05)
    prepare(logs, tmp_path / "data", **SHAPE)
    with outage(s3_server):
        prepare(str(bucket / "logs" / "*.csv"), bucket / "data", **SHAPE)
    assert remote_files(bucket / "data") == files_in(tmp_path / "data")
    assert hotbed("train", "--data", tmp_path / "data", "--out", tmp_path / "run", *SMALL) == 0
    with outage(s3_server):
        assert hotbed("train", "--data", bucket / "data", "--out", bucket / "run", *SMALL) == 0
    there, here = remote_files(bucket / "run"), files_in(tmp_path / "run")
    rows = [name for name in here if name.startswith("model/") and name.endswith(".safetensors")]
    assert rows
    assert {name: there[name] for name in rows} == {name: here[name] for name in rows}
    assert json.loads(there["summary.json"])["final"] == json.loads(here["summary.json"])["final"]
    assert not content_of(bucket / "run").broken


def test_batches_of_a_bucket(logs, bucket, tmp_path, monkeypatch):
    prepare(logs, tmp_path / "data", **SHAPE)
    prepare(bucket / "logs", bucket / "data", **SHAPE)
    local, remote = Dataset.open(tmp_path / "data"), Dataset.open(bucket / "data")
    assert local.fingerprint == remote.fingerprint
    for cache in ("1GiB", "0"):
        monkeypatch.setenv("HOTBED_READ_CACHE", cache)
        read = [list(Loader(one, "train", batch_size=100, shuffle=True, seed=3).epoch(0)) for one in (local, remote)]
        assert len(read[0]) == len(read[1]) > 5
        assert all(bool((one.ids == other.ids).all()) for one, other in zip(*read))
        assert all(bool((one.labels == other.labels).all()) for one, other in zip(*read))


class TestResume:
    """The newest checkpoint that is whole, wherever it is."""

    @pytest.fixture
    def stopped(self, logs, bucket, tmp_path, monkeypatch):
        """A run of the bucket that was stopped after some steps, and the local run that never stopped."""
        prepare(logs, tmp_path / "data", **SHAPE)
        options = ["--data", tmp_path / "data", *SMALL]
        assert hotbed("train", *options, "--out", tmp_path / "whole") == 0
        assert hotbed("train", *options, "--out", bucket / "run", "--set", "train.max_steps=12") == 0
        return bucket / "run"

    def resume(self, place):
        return hotbed("train", "--resume", place, "--set", "train.max_steps=0", "--quiet")

    def weights(self, folder):
        return {
            name: one for name, one in folder.items() if name.startswith("model/") and name.endswith(".safetensors")
        }

    def test_on_another_machine(self, stopped, tmp_path, monkeypatch):
        monkeypatch.setenv("HOTBED_CACHE", str(tmp_path / "elsewhere"))
        assert self.resume(stopped) == 0
        assert self.weights(remote_files(stopped)) == self.weights(files_in(tmp_path / "whole"))

    def test_half_a_checkpoint_is_none(self, stopped, tmp_path):
        content = content_of(stopped)
        newest = max(name for name in content.units if name.startswith("checkpoints/"))
        victim = next(name for name in content.units[newest].files if name.endswith(".safetensors"))
        (stopped / newest / victim).write_bytes(b"cut")
        assert newest in content_of(stopped).broken
        (stopped / newest / "manifest.json").unlink()  # as an upload that never ended
        content = content_of(stopped)
        assert newest not in content.units
        bring_run(stopped, working_folder(stopped))
        assert not (working_folder(stopped) / newest).exists()
        if any(name.startswith("checkpoints/") for name in content.units):
            assert self.resume(stopped) == 0
            assert self.weights(remote_files(stopped)) == self.weights(files_in(tmp_path / "whole"))

    def test_the_local_folder_may_be_newer(self, stopped, tmp_path):
        """The store was away at the end: what it lacks is still here."""
        folder = working_folder(stopped)
        bring_run(stopped, folder)
        newest = max((folder / "checkpoints").iterdir())
        for path in [path for path, stat in (stopped / "checkpoints" / newest.name).entries(recursive=True) if stat]:
            path.unlink()
        assert self.resume(stopped) == 0
        assert self.weights(remote_files(stopped)) == self.weights(files_in(tmp_path / "whole"))

    @pytest.mark.parametrize("has_common_steps", [True, False])
    def test_a_run_that_was_started_anew_elsewhere_is_not_mixed_with_the_local_one(
        self, stopped, tmp_path, monkeypatch, capsys, has_common_steps
    ):
        """The local folder has as many steps as the store, of the run that was overwritten."""
        bring_run(stopped, working_folder(stopped))
        monkeypatch.setenv("HOTBED_CACHE", str(tmp_path / "elsewhere"))
        steps = "12" if has_common_steps else "5"
        options = ["--data", tmp_path / "data", *SMALL, "--set", "train.seed=5", "--set", f"train.max_steps={steps}"]
        assert hotbed("train", *options, "--out", stopped, "--overwrite") == 0
        theirs = remote_files(stopped)
        monkeypatch.setenv("HOTBED_CACHE", str(tmp_path / "cache"))
        capsys.readouterr()
        assert self.resume(stopped) == 1
        assert f"holds another run than {working_folder(stopped)}" in " ".join(capsys.readouterr().err.split())
        assert remote_files(stopped) == theirs
        shutil.rmtree(working_folder(stopped))
        assert self.resume(stopped) == 0

    def test_a_job_that_is_repeated_on_any_machine(self, stopped, tmp_path, monkeypatch):
        monkeypatch.setenv("HOTBED_CACHE", str(tmp_path / "elsewhere"))
        command = ["train", "--data", tmp_path / "data", *SMALL, "--quiet", "--auto-resume", "--out"]
        assert hotbed(*command, stopped, "--set", "train.max_steps=0") == 0
        assert self.weights(remote_files(stopped)) == self.weights(files_in(tmp_path / "whole"))
        fresh = stopped.parent / "fresh"
        assert hotbed(*command, fresh) == 0
        assert self.weights(remote_files(fresh)) == self.weights(files_in(tmp_path / "whole"))

    def test_a_place_without_a_run(self, bucket):
        with pytest.raises(RunError, match=r"has no config\.json"):
            bring_run(bucket / "nothing", working_folder(bucket / "nothing"))


def test_checkpoints_that_go_are_removed_in_the_store(bucket, tmp_path):
    """Manifest first; what is being written is never copied."""
    run = tmp_path / "run"
    for name in ("checkpoints/000000000008", "checkpoints/000000000016", "checkpoints/000000000024.new"):
        (run / name).mkdir(parents=True)
        (run / name / "rows").write_bytes(name.encode())
        (run / name / "manifest.json").write_text(json.dumps({"rows": [len(name), zlib.crc32(name.encode())]}))
    (run / "config.json").write_text("{}")
    copier = RunCopier(run, bucket / "run", fresh=True)
    copier.copy()
    assert set(content_of(bucket / "run").units) == {"checkpoints/000000000008", "checkpoints/000000000016"}
    local = local_copy(bucket / "run")  # as a server has it
    assert sorted(path.name for path in (local / "checkpoints").iterdir()) == ["000000000008", "000000000016"]
    assert local_copy(bucket / "run" / "checkpoints" / "000000000016") == local / "checkpoints" / "000000000016"
    shutil.rmtree(run / "checkpoints" / "000000000008")
    copier.copy()
    refresh(local)
    assert [path.name for path in (local / "checkpoints").iterdir()] == ["000000000016"]
    refresh(tmp_path)  # a local path has nothing to bring
    assert set(content_of(bucket / "run").units) == {"checkpoints/000000000016"}
    assert not [name for name in remote_files(bucket / "run") if "000000000008" in name]


def test_a_checkpoint_never_arrives_before_the_log_it_needs(bucket, tmp_path, monkeypatch):
    """Training continues while files travel: it adds a line and a checkpoint after the log was copied."""
    run = tmp_path / "run"

    run.mkdir()

    def step(number):
        with (run / "metrics.jsonl").open("a") as log:
            log.write(f"{number}\n")
        folder = run / "checkpoints" / f"{number:012}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")

    def stored():
        units = [int(Path(name).name) for name in content_of(bucket / "run").units]
        return units, [int(line) for line in (bucket / "run" / "metrics.jsonl").read_text().split()]

    step(1)
    (run / "config.json").write_text("{}")
    copier = RunCopier(run, bucket / "run", fresh=True)
    real, numbers = copier._copy_loose, iter([2, 3])

    def copy(name):
        real(name)
        if name == "metrics.jsonl":
            step(next(numbers))

    monkeypatch.setattr(copier, "_copy_loose", copy)
    for newest in (1, 2):
        copier.copy()
        units, log = stored()
        assert max(units) == newest
        assert set(units) <= set(log)


class TestEveryPathOfARun:
    """Scores, the analysis of a run, and what a second run of the same place may remove."""

    @pytest.fixture
    def run(self, logs, bucket, tmp_path):
        prepare(logs, tmp_path / "data", **SHAPE)
        assert hotbed("train", "--data", tmp_path / "data", "--out", bucket / "run", *SMALL) == 0
        return bucket / "run"

    def test_scores_are_written_there(self, run, bucket, tmp_path):
        raw = bucket / "logs" / "day_0.csv"
        for place in (tmp_path / "scores.csv", bucket / "scores.csv"):
            assert hotbed("predict", run, raw, "--out", place) == 0
        assert (bucket / "scores.csv").read_bytes() == (tmp_path / "scores.csv").read_bytes()
        assert hotbed("predict", run, raw, "--out", bucket / "scores.csv") == 2  # already there
        assert hotbed("predict", run, raw, "--out", raw, "--overwrite") == 2  # the input
        assert not [path for path in (tmp_path / "cache" / "remote" / "scores").iterdir() if path.is_dir()]

    def test_the_analysis_is_kept_there_until_the_model_is_another(self, run, tmp_path):
        assert hotbed("report", run, "--analyze") == 0
        found = json.loads((run / "analysis.json").read_text())
        assert found["contributions"].keys() == {"price", "user", "ad"}
        assert "What it learned from" in (run / "report.html").read_text()
        assert hotbed("train", "--resume", run, "--epochs", 40, "--set", "train.patience=0") == 0
        assert "What it learned from" not in (run / "report.html").read_text()
        exported = run / "export" / "manifest.json"
        exported.write_text("{}")
        assert hotbed("train", "--data", tmp_path / "data", "--out", run, "--overwrite", *SMALL) == 0
        assert not (run / "analysis.json").exists()  # of the model before
        assert exported.read_text() == "{}"

    def test_what_has_not_arrived_is_not_lost(self, run, tmp_path, capsys):
        """The store was away until the run had ended, and the command is repeated."""
        folder = working_folder(run)
        bring_run(run, folder)
        before = files_in(folder)
        for path in [path for path, stat in run.entries(recursive=True) if stat is not None]:
            path.unlink()
        command = ["train", "--data", tmp_path / "data", "--out", run, *SMALL]
        for more in ([], ["--dry-run"], ["--dry-run", "--overwrite"]):
            assert hotbed(*command, *more) == (0 if "--overwrite" in more else 1)
            assert files_in(folder) == before
        assert f"--resume {run} continues it and copies it there" in " ".join(capsys.readouterr().err.split())
        assert remote_files(run) == {}
        assert hotbed(*command, "--overwrite") == 0
        assert "summary.json" in remote_files(run)

    def test_a_dry_run_leaves_nothing_on_this_machine(self, run, bucket, tmp_path):
        there = remote_files(run)
        assert hotbed("train", "--resume", run, "--epochs", 40, "--set", "train.patience=0", "--dry-run") == 0
        assert hotbed("train", "--data", tmp_path / "data", "--out", bucket / "new", "--dry-run", *SMALL) == 0
        assert remote_files(run) == there
        assert not list((tmp_path / "cache" / "remote" / "runs").iterdir())

    def test_a_run_file_there(self, run, tmp_path):
        assert hotbed("train", run / "config.json", "--out", tmp_path / "again", "--dry-run") == 0

    def test_top_watches_the_folder_in_which_it_trains(self, run, capsys):
        assert hotbed("top", run, "--once") == 1
        assert f"{run} does not train on this machine" in capsys.readouterr().err
        bring_run(run, working_folder(run))
        assert hotbed("top", run, "--json") == 0
        assert json.loads(capsys.readouterr().out)["runs"][0]["status"] == "finished"

    def test_checkpoints_are_not_pruned_there_by_hand(self, run, capsys):
        assert hotbed("checkpoint", "verify", run) == 0
        assert hotbed("checkpoint", "prune", run, "--keep", 1) == 2
        assert f"{run} is in an object store; train.keep_checkpoints prunes" in " ".join(
            capsys.readouterr().err.split()
        )


@pytest.mark.parametrize(
    "command",
    [
        "tune --out s3://clicks/tuned",
        "data make criteo-like:1000 --out s3://clicks/data",
        "data make criteo-like:1000 --text s3://clicks/day_0.tsv",
        "data get movielens-100k --out s3://clicks/raw",
        "simulate --html s3://clicks/curves.html",
        "plan --html s3://clicks/plan.html",
        "bench --csv s3://clicks/bench.csv",
        "train --trace s3://clicks/trace.json",
        "train --ssd s3://clicks/rows:1GiB --memory 1GiB",
        "serve runs/none --scratch s3://clicks/scratch",
    ],
)
def test_what_must_be_local_is_refused_elsewhere(tmp_path, monkeypatch, capsys, command):
    """A folder called `s3:` was made on the local disk."""
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTBED_CACHE", str(tmp_path / "cache"))
    assert hotbed(*command.split()) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "is in an object store, and has to be on a local disk" in said or "must be a folder of a local disk" in said
    assert not (tmp_path / "s3:").exists()


def test_what_a_killed_upload_left_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTBED_CACHE", str(tmp_path))
    root = tmp_path / "remote" / "exports"
    (root / "killed" / "export").mkdir(parents=True)
    with scratch_folder("exports") as mine:
        assert not (root / "killed").exists()
        with scratch_folder("exports") as other:  # of another process
            assert mine.is_dir()
            assert other != mine
    assert [path.name for path in root.iterdir()] == [".lock"]


def test_no_output_shows_the_secrets_of_a_uri(tmp_path, monkeypatch, capsys):
    uri = "s3://AKIAKNOWN:never-to-be-seen@clicks/raw.csv"
    monkeypatch.setenv("HOTBED_CACHE", str(tmp_path / "cache"))
    assert str(path_of(uri)) == "s3://clicks/raw.csv"
    out().print(f"{uri} was read")
    print_json({"data": uri, "place": [Path(uri)], "bad": float("nan")})
    fail(f"there is no {Path(uri)}", 1)
    out().print(Text.assemble((uri, "bold"), " is a bucket"))
    fail("there is no s3:/SOMEONE:never-to-be-seen@elsewhere/run", 1)  # it was not read as a URI
    printed = "".join(capsys.readouterr())
    assert "never-to-be-seen" not in printed
    assert '"data": "s3://***:***@clicks/raw.csv"' in printed
