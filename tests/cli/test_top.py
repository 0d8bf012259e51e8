"""`hotbed top`: one frame of runs in every state, from folders and endpoints; a live view that ends with its run."""

import fcntl
import io
import json
import math
import os
import threading

import pytest
from rich.console import Console

from hotbed.cli import main, top
from hotbed.cli.top import curve, frame, rows_of
from hotbed.cli.top_state import FINISHED, RUNNING, STOPPED, Endpoint, Folder
from hotbed.run.folder import is_training
from hotbed.telemetry.observer import Progress

CONFIG = {"model": {"name": "dlrm"}, "data": {"path": "clicks", "batch_size": 100}, "train": {"epochs": 2}}
DATA = {"splits": {"train": {"rows": 950}}}
CACHE = {"lookup_hit_rate": 0.9, "hit_rate": 0.6, "stall_share": 0.01, "bytes_in": 1024, "bytes_out": 2048}
TIERS = {"memory_bytes": 3 << 20, "memory_budget": 4 << 20, "ssd_bytes": 1 << 20, "ssd_cap": 1 << 30}


def line(step, **more):
    times = {"steps": 1, "model": 0.004, "look_up": 0.001, "ready": 6.5}
    made = {"kind": "train", "epoch": 1, "step": step, "samples": 100 * step, "seconds": step / 10, "loss": 1 / step}
    return {**made, "auc": 0.7, "samples_per_s": 1000, "times": times, "memory": {"resident_bytes": 1 << 28}, **more}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "data.json").write_text(json.dumps(DATA))
    return tmp_path


def log(folder, *lines, ending="\n"):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n".join(json.dumps(one) for one in lines) + ending)


@pytest.fixture
def training(folder):
    """The folder, held by somebody who trains in it."""
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    yield folder
    os.close(handle)


def shown(state, width=100):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(frame(state))
    text = console.export_text().replace("\u202f", " ")
    assert all(len(one) <= width for one in text.splitlines())
    return text


def test_a_run_that_trains(training):
    ids = {"user": {"rows": 5, "admitted": 7, "rejected": 2, "expired": 2}}
    log(training, *(line(step, cache=CACHE, tiers=TIERS, ids=ids) for step in range(1, 6)))
    log(
        training,
        {"kind": "eval", "step": 5, "split": "valid", "auc": 0.75, "log_loss": 0.5, "samples": 1, "seconds": 1},
    )
    state = Folder(training).look()
    assert state.status == RUNNING
    assert state.total_steps == 20
    assert state.seconds_left == pytest.approx(1.5)
    assert {name: said.replace("\u202f", " ") for name, said in rows_of(state)} == {
        "step": "5 of 20, epoch 1, 500 samples, 0.5 s so far, 1.5 s left",
        "loss": "0.2000, AUC 0.7000  █▃▂▁▁",
        "speed": "1,000 samples/s, 10 steps/s",
        "valid": "AUC 0.7500, log loss 0.5000 after step 5",
        "time of a step": "5 ms: model 80 %, lookup 20 %",
        "reader": "6.5 batches ready when training asks",
        "cache": "90.0 % of lookups hit, 60.0 % of rows, stalled 1.0 %; 10.0 KiB/s in, 20.0 KiB/s out",
        "tiers": "memory 3.0 MiB of 4.0 MiB, ssd 1.0 MiB of 1.0 GiB; – read, – written",
        "ids": "5 rows, 7 admitted, 2 rejected, 2 expired",
        "memory": "process 256.0 MiB",
    }
    for width in (100, 40, 20):
        text = shown(state, width)
        assert "step" in text
        assert "running" in text


def test_finished_stopped_and_just_begun(folder):
    state = Folder(folder).look()
    assert state.status == STOPPED
    assert "no line in the log yet" in shown(state)
    log(folder, line(1))
    (folder / "summary.json").write_text(json.dumps({"finished": True, "stopped_because": "the epoch is done"}))
    state = Folder(folder).look()
    assert state.status == FINISHED
    assert "(the epoch is done)" in shown(state)
    assert math.isnan(state.seconds_left)


def evaluated(split, epoch, auc):
    at = {"kind": "eval", "epoch": epoch, "step": 10 * epoch, "samples": 1000 * epoch, "seconds": epoch}
    return {**at, "split": split, "auc": auc, "log_loss": 0.5}


def test_the_newest_and_the_best_epoch_are_told_apart(folder):
    log(folder, line(10), evaluated("valid", 1, 0.7), evaluated("valid", 2, 0.8), evaluated("valid", 3, 0.6))
    said = dict(rows_of(Folder(folder).look()))
    newest = "AUC 0.6000, log loss 0.5000 after step 30 (epoch 3)"
    assert said["valid"] == f"{newest}; best AUC 0.8000 after step 20 (epoch 2)"
    log(folder, evaluated("test", 2, 0.75))
    (folder / "summary.json").write_text(json.dumps({"finished": True, "best_step": 20}))
    said = dict(rows_of(Folder(folder).look()))
    assert said["valid"] == f"{newest}; best AUC 0.8000 after step 20 (epoch 2), whose weights are kept"
    assert said["test"] == "AUC 0.7500, log loss 0.5000 after step 20 (epoch 2), whose weights are kept"


def test_without_a_run_those_that_train_are_shown_else_the_newest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def printed():
        with pytest.raises(SystemExit) as ended:
            main(["top", "--once"])
        return ended.value.code or 0, capsys.readouterr()

    code, said = printed()
    assert code == 1
    assert "there is no run in runs/" in said.err
    assert "hotbed top RUN" in said.err
    for age, name in enumerate(("newest", "older", "oldest")):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "config.json").write_text(json.dumps(CONFIG))
        os.utime(run / "config.json", (1000 - age, 1000 - age))
    code, said = printed()
    assert code == 0
    assert "no run in runs/ is active" in said.err
    assert "not running newest" in said.out
    assert "older" not in said.out
    handle = os.open(tmp_path / "runs" / "oldest", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    code, said = printed()
    os.close(handle)
    assert said.err == ""
    assert "running oldest" in said.out
    assert "newest" not in said.out


def test_lines_are_read_as_they_come_and_anew_when_a_resumed_run_cuts_them(folder):
    source = Folder(folder)
    log(folder, line(1), line(2), ending="\n{torn")
    assert source.look().step == 2
    (folder / "metrics.jsonl").write_text("")
    log(folder, line(1), {"kind": "train"}, [1], ending="\nnonsense\n")
    state = source.look()
    assert state.step == 1
    assert state.losses == [1.0]


def test_an_endpoint_says_what_the_folder_does(training):
    pytest.importorskip("prometheus_client")
    from hotbed.telemetry.prometheus import MetricsServer

    record = line(5, cache=CACHE, ids={"us/er": {"rows": 5}})
    log(training, record)
    server = MetricsServer("127.0.0.1", 0)
    server.begin(Progress(step=5, samples=500), 20)
    server.record(record)
    source = Endpoint(server.url.removesuffix("/metrics"))
    state, same = source.look(), Folder(training).look()
    assert state.numbers == same.numbers
    assert (state.step, state.total_steps, state.batch_size) == (5, 20, 100)
    assert state.seconds_left == pytest.approx(1.5)
    server.end()
    state = source.look()
    assert state.status == STOPPED
    assert "no longer answers" in shown(state)


def test_what_is_no_run_is_reported(tmp_path, capsys):
    for given, said in ((str(tmp_path), "no config.json"), ("http://127.0.0.1:9", "--metrics-port")):
        with pytest.raises(SystemExit) as ended:
            main(["top", given])
        assert ended.value.code == 1
        assert said in capsys.readouterr().err


def test_the_command_prints_a_frame(folder, capsys):
    log(folder, line(3))
    with pytest.raises(SystemExit) as ended:
        main(["top", str(folder), str(folder), "--once"])
    assert not ended.value.code
    assert capsys.readouterr().out.count("3 of 20") == 2


def test_a_live_view_ends_with_its_run(folder, monkeypatch):
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    log(folder, line(1))
    monkeypatch.setattr(top, "out", lambda: Console(force_terminal=True, width=60, file=io.StringIO()))
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        log(folder, line(1 + len(looks)))
        if len(looks) == 3:
            os.close(handle)

    monkeypatch.setattr(top.time, "sleep", sleep)
    watcher = threading.Thread(target=top._live, args=([Folder(folder)], 0.5))
    watcher.start()
    watcher.join(30)
    assert looks == [0.5] * 3
    assert not is_training(folder)


def test_curves_of_blocks():
    assert curve([]) == curve([1.0]) == ""
    assert curve([0.0, 1.0]) == "▁█"
    assert curve([2.0, 2.0]) == "▁▁"
    assert len(curve([float(k) for k in range(1000)])) == 32
