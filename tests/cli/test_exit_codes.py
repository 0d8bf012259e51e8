"""What the exit code of a command says: 1 failure, 2 usage, 3 does not fit, 130 and 143 after signals (test_train.py)."""

import errno
import signal

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


def test_temporary_files_go_with_sigterm(hotbed, tmp_path, monkeypatch):
    """They were left: rows of a verified run, up to as many as its ssd holds."""
    made = []

    def terminated(*_):
        made.extend(tmp_path.glob("hotbed-verify-*"))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("hotbed.cli.verify._ways", terminated)
    before = signal.getsignal(signal.SIGTERM)
    assert (
        hotbed("verify", "--data", "criteo-like:2000", "--batch-size", "64", "--cache", "90%", "--steps", "2").code
        == 143
    )
    assert len(made) == 1
    assert not made[0].exists()
    assert signal.getsignal(signal.SIGTERM) is before
