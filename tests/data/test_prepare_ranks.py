"""Ranks and workers share a job: the same bytes as one alone, and a rank that is lost or fails is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hotbed.data.prepare.prepare import prepare
from hotbed.data.prepare.ranks import PrepareRanks
from hotbed.errors import ConfigError
from tests.data.prepare_jobs import digest, run, start, write_logs

OPTIONS = {"split": "train=0.8,test=0.2", "max_bad": "5%", "format": "criteo", "workers": 1}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return write_logs(tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="module")
def alone(logs, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "out"
    assert run(out, logs, OPTIONS)[0] == 0
    return digest(out)


def test_workers_change_nothing(logs, alone, tmp_path):
    assert run(tmp_path / "out", logs, {**OPTIONS, "workers": 4})[0] == 0
    assert digest(tmp_path / "out") == alone


def test_ranks_change_nothing(logs, alone, tmp_path):
    world = 3
    ranks = [start(tmp_path / "out", logs, OPTIONS, rank=rank, world=world) for rank in range(world)]
    for process in ranks:
        done = process.ended()
        assert done.returncode == 0, done.stderr
    assert digest(tmp_path / "out") == alone
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_lost_rank_is_named_and_its_work_is_gone_on_with(logs, alone, tmp_path):
    lost = start(tmp_path / "out", logs, OPTIONS, deadly=2, rank=1, world=2)
    first = start(tmp_path / "out", logs, OPTIONS, rank=0, world=2, patience=2.0)
    ended = first.ended()
    assert ended.returncode == 1
    assert "RankError: rank 1 has not responded" in ended.stderr
    assert lost.ended().returncode == -signal.SIGKILL
    code, said, error = run(tmp_path / "out", logs, OPTIONS)  # another number of ranks
    assert code == 0, error
    assert "resuming the unfinished work" in said
    assert digest(tmp_path / "out") == alone


def test_a_rank_that_fails_tells_the_others(tmp_path):
    files = write_logs(tmp_path, (50, 50))
    files[1].write_bytes(b"\xff\xfe")
    ranks = [start(tmp_path / "out", files, OPTIONS, rank=rank, world=2) for rank in range(2)]
    ended = [process.ended() for process in ranks]
    errors = [one.stderr for one in ended]
    assert [one.returncode for one in ended] == [1, 1]
    assert "RankError: rank 1 stopped while reading" in errors[0]
    assert "UTF-16" in errors[0]
    assert "FormatError" in errors[1]
    assert not (tmp_path / "out").exists()


def test_torchrun(tmp_path):
    files = write_logs(tmp_path, (80, 60))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "hotbed", "prepare", *map(str, files), "--out", str(tmp_path / "out"), "--format", "criteo"]
    command += ["--max-bad", "5%"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("next: hotbed train") == 1
    prepare(files, tmp_path / "alone", format="criteo", max_bad="5%")
    assert digest(tmp_path / "out") == digest(tmp_path / "alone")


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_wrong_ranks(rank, world):
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        PrepareRanks(rank, world)


def test_a_moment_of_a_full_disk_does_not_end_the_pulse(tmp_path, monkeypatch):
    import hotbed.data.prepare.ranks as module

    ranks, written = PrepareRanks(0, 2), []
    ranks._directory = tmp_path
    beats = iter([False, False, False, True])
    monkeypatch.setattr(ranks._stop, "wait", lambda _: next(beats))

    def write(path, text):
        written.append(text)
        if len(written) == 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_note", write)
    ranks._beat()
    assert written == ["1", "2", "3"]


def test_the_pulse_ends_with_the_workspace(tmp_path):
    ranks = PrepareRanks(0, 2)
    ranks._directory = tmp_path / "gone"
    beats = []
    ranks._stop.wait = lambda _: len(beats) > 9 or beats.append("beat")
    ranks._beat()
    assert beats == ["beat"]  # it does not go on until it is stopped
    assert not ranks._directory.exists()


def test_a_full_disk_of_a_later_rank_is_an_error_of_the_data(tmp_path):
    from hotbed.data.prepare.prepare import _workspace
    from hotbed.errors import DataError

    said = pytest.raises(DataError, match=r"out' cannot be written by rank 1: .*No space left")
    with said, _workspace(tmp_path / "out", False, PrepareRanks(1, 2)):
        raise OSError(28, "No space left on device")
