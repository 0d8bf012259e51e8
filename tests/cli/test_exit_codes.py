"""What the exit code of a command says: 1 failure, 2 usage, 3 does not fit, 130 and 143 after signals."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from hotbed.errors import BudgetError, ConfigError, DataError, RunError, StoreError, exit_code_of, without_room

TINY = ("--data", "criteo-like:2000", "--batch-size", "64", "--epochs", "1", "--no-forecast")


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RunError(""), 1), (DataError(""), 1), (ValueError(""), 1), (OSError(errno.EACCES, ""), 1), (ConfigError(""), 2),
        (BudgetError(""), 3), (without_room(StoreError, ""), 3), (MemoryError(), 3), (torch.OutOfMemoryError(""), 3),
        (OSError(errno.ENOSPC, ""), 3), (KeyboardInterrupt(), 130),
        (caused(StoreError(""), OSError(errno.EDQUOT, "")), 3), (caused(StoreError(""), OSError(errno.EIO, "")), 1),
        (caused(RunError(""), caused(StoreError(""), OSError(errno.ENOSPC, ""))), 3),
        (caused(RunError(""), torch.OutOfMemoryError("")), 3), (caused(RunError(""), ConfigError("")), 2),
    ],
    ids=repr,
)  # fmt: skip
def test_codes_of_errors(error, code):
    assert exit_code_of(error) == code


def test_failure(hotbed):
    assert hotbed("evaluate", "runs/missing").code == 1
    assert hotbed("prepare", "missing.csv", "--out", "made").code == 1


@pytest.mark.parametrize(
    "line",
    ["trian", "train --epoch 3", "train --batch-size x", "train --set model.dmi=3", "prepare", "train --cache 0.1 --hbm 1GiB",
     "serve runs/missing --tls-cert x", "prepare x.csv --out y --memory 1KB"],
)  # fmt: skip
def test_usage(hotbed, line):
    assert hotbed(*line.split()).code == 2


def test_it_does_not_fit(hotbed, monkeypatch):
    result = hotbed("train", *TINY, "--cache", "0.0001")
    assert (result.code, "the cache is too small" in result.err) == (3, True)
    assert hotbed("plan", "criteo-like:2000", "--cache", "0.0001", "--calibrate", "no", "--no-curve").code == 3
    assert hotbed("simulate", "criteo-like:2000", "--batch-size", "64", "--cache", "0.0001").code == 3
    with monkeypatch.context() as changed:
        changed.setattr("hotbed.tables.sizing.fit.available_memory", lambda device: 1000)
        result = hotbed("train", *TINY)
    assert (result.code, "do not fit" in result.err) == (3, True)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hotbed.cli.train.read_config", full)
    result = hotbed("train")
    assert (result.code, "No space left" in result.err, "Traceback" in result.err) == (3, True, False)


def test_a_bug_is_a_traceback_and_a_failure(hotbed, monkeypatch):
    def bug(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("hotbed.cli.train.read_config", bug)
    with pytest.raises(ZeroDivisionError):
        hotbed("train")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals(tmp_path, cache, number, code):
    """Of a run that saves first, in a process of its own; a shell sees 128 + the number of the signal."""
    command = [sys.executable, "-m", "hotbed", "train", *TINY, "--epochs", "1000", "--set", "train.log_every=1"]
    env = os.environ | {"HOTBED_CACHE": str(cache)}
    process = subprocess.Popen([*command, "--out", "run"], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (log.is_file() and log.stat().st_size):
        time.sleep(0.002)
    process.send_signal(number)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == code, said
