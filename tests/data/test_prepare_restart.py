"""prepare is killed for real, at every kind of moment, and the same command ends with the same bytes."""

from __future__ import annotations

import signal

import pytest

from hotbed.data.prepare.prepare import prepare
from tests.data.prepare_jobs import digest, run, write_logs

OPTIONS = {"split": "train=0.8,test=0.2", "max_bad": "5%", "format": "criteo", "workers": 2}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return write_logs(tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="module")
def whole(logs, tmp_path_factory):
    """A job that nobody disturbed, and how many renames it takes."""
    out = tmp_path_factory.mktemp("whole") / "out"
    code, said, error = run(out, logs, OPTIONS)
    assert code == 0, error
    return digest(out), int(said.split()[-1])


@pytest.mark.parametrize("share", [0.02, 0.35, 0.7, 0.97])
def test_killed_once_and_started_again(logs, whole, tmp_path, share):
    """Every change on disk is a rename; the job dies before one of them, early, late or between."""
    expected, renames = whole
    out = tmp_path / "out"
    code, _, error = run(out, logs, OPTIONS, deadly=1 + int(share * renames))
    assert code == -signal.SIGKILL, error
    assert not out.exists()
    code, said, error = run(out, logs, OPTIONS)
    assert code == 0, error
    if share > 0.1:
        assert "resuming the unfinished work" in said
        assert int(said.split()[-1]) < renames  # finished files are not made again
    assert digest(out) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_killed_again_and_again(logs, whole, tmp_path):
    expected, _ = whole
    out = tmp_path / "out"
    for _ in range(50):
        code, _, error = run(out, logs, OPTIONS, deadly=20)
        if code == 0:
            break
        assert code == -signal.SIGKILL, error
    assert code == 0
    assert digest(out) == expected


def test_killed_while_writing_splits_in_file_order(logs, tmp_path):
    options = {**OPTIONS, "split": "train=330,test=200", "workers": 1}
    code, _, error = run(tmp_path / "whole", logs, options)
    assert code == 0, error
    out = tmp_path / "out"
    # not a number: how many reels beyond the last split are read is a matter of luck
    assert run(out, logs, options, deadly="test")[0] == -signal.SIGKILL
    code, said, error = run(out, logs, options)
    assert code == 0, error
    assert "resuming the unfinished work" in said
    assert digest(out) == digest(tmp_path / "whole")


def test_other_settings_begin_anew(logs, tmp_path):
    out = tmp_path / "out"
    assert run(out, logs, OPTIONS, deadly=12)[0] == -signal.SIGKILL
    other = {**OPTIONS, "min_count": 2}
    code, said, error = run(out, logs, other)
    assert code == 0, error
    assert "was for other settings: it is deleted, and prepare starts over" in said
    run(tmp_path / "alone", logs, other)
    assert digest(out) == digest(tmp_path / "alone")


def test_a_file_that_was_replaced_is_read_again(tmp_path):
    files = write_logs(tmp_path)
    out = tmp_path / "out"
    assert run(out, files, OPTIONS, deadly=30)[0] == -signal.SIGKILL
    files[1].write_bytes(files[2].read_bytes())
    code, said, error = run(out, files, OPTIONS)
    assert code == 0, error
    assert "1 files have changed since and are read again" in said
    run(tmp_path / "alone", files, OPTIONS)
    assert digest(out) == digest(tmp_path / "alone")


def test_an_error_late_in_a_long_job_keeps_the_work(tmp_path, monkeypatch):
    files = write_logs(tmp_path, (30, 30))
    monkeypatch.setattr("hotbed.data.prepare.stages._WORTH_KEEPING", 1)
    whole = files[1].read_bytes()
    files[1].write_bytes(whole + b"\n" + b"x" * (9 << 20))
    with pytest.raises(Exception, match="longer than"):
        prepare(files, tmp_path / "out", format="criteo", workers=1)
    assert list((tmp_path / ".out.partial" / "work").glob("file-00000*.json"))
    files[1].write_bytes(whole)
    told = []
    prepare(files, tmp_path / "out", format="criteo", say=told.append)
    assert "1 files have changed" in told[0]
    prepare(files, tmp_path / "alone", format="criteo")
    assert digest(tmp_path / "out") == digest(tmp_path / "alone")
