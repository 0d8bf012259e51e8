"""200 injected faults: nothing is lost, no half checkpoint counts as a whole one, no secret is in a file or a message."""

import json
import random
import zlib

import numpy as np
import pytest

from hotbed.files import path_of
from hotbed.files.copies import publish_folder
from hotbed.run.remote_folder import LocalCopy, content_of, everything
from hotbed.run.remote_run import RunCopier
from tests.files.s3 import BUCKET, FAULTS, SECRET, FaultProxy, secrets_in, set_environment

NUM_FAULTS = 200
SHARE = 0.35  # of the requests
WEIGHTS = (6, 6, 6, 6, 6, 1)  # of the faults; slow ones take their time


@pytest.fixture
def proxy(bucket, s3_server, monkeypatch):
    """Every third request or so fails, in one of six ways, drawn in an order that is always the same.

    How many requests come is not: an answer that can only be slow waits for the next that has a body.
    """
    draw, waiting = random.Random(7), []

    def fault_of(number, method):
        if method == "GET" and waiting:
            return waiting.pop()
        if draw.random() > SHARE:
            return None
        kind = draw.choices(FAULTS, WEIGHTS)[0]
        if kind in ("cut", "slow") and method != "GET":
            waiting[:] = ["slow"] if kind == "slow" else waiting
            return "dropped"
        return kind

    monkeypatch.setenv("HOTBED_STORE_TIMEOUT", "0.5")  # slow bytes are given up after it
    monkeypatch.setattr("hotbed.files.store._FIRST_PAUSE", 0.002)
    monkeypatch.setattr("hotbed.files.store._LONGEST_PAUSE", 0.02)
    made = FaultProxy(s3_server.port, fault_of)
    set_environment(monkeypatch, s3_server.environment(made.port))
    yield made
    made.close()


def checkpoint(folder, step):
    """A folder as a checkpoint is: files, and a manifest with their sizes and checksums."""
    place = folder / "checkpoints" / f"{step:012}"
    (place / "rows").mkdir(parents=True)
    marks = {}
    for number in range(3):
        content = np.random.default_rng(step + number).bytes(20_000 + step)
        (place / "rows" / f"{number}.parquet").write_bytes(content)
        marks[f"rows/{number}.parquet"] = [len(content), zlib.crc32(content)]
    body = {"files": marks, "linked": {}, "parent": None}
    (place / "manifest.json").write_text(json.dumps({"checkpoint": body}))
    return place


def assert_whole(folder):
    """Every unit that counts has the bytes of its manifest."""
    for name, unit in content_of(folder).units.items():
        marks = json.loads((folder / name / "manifest.json").read_text())["checkpoint"]["files"]
        assert set(marks) <= set(unit.files)
        for file, (size, crc) in marks.items():
            content = (folder / name / file).read_bytes()
            assert (len(content), zlib.crc32(content)) == (size, crc), f"{name}/{file}"


def test_two_hundred_faults(proxy, bucket, s3_server, tmp_path, monkeypatch, caplog, capfd):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    remote = bucket / "run"
    copier = RunCopier(run, remote, fresh=True)
    kept, step = [], 0
    through_faults = s3_server.environment(proxy.port)
    while proxy.num_faults < NUM_FAULTS:
        step += 8
        kept.append(checkpoint(run, step))
        (run / "metrics.jsonl").write_bytes(b"x" * step)
        if len(kept) > 2:  # as a run keeps the newest
            old = kept.pop(0)
            for path in sorted(old.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            old.rmdir()
        copier.copy()
        copy = LocalCopy(remote, everything)  # and back, through the same faults
        for place in kept:
            for file in ("rows/0.parquet", "rows/2.parquet", "manifest.json"):
                assert (copy.path / "checkpoints" / place.name / file).read_bytes() == (place / file).read_bytes()
        copy.close()
        set_environment(monkeypatch, s3_server.environment())  # what the store has, seen without faults
        assert {f"checkpoints/{place.name}" for place in kept} == set(content_of(remote).units)
        assert_whole(remote)
        assert (remote / "metrics.jsonl").read_bytes() == b"x" * step
        set_environment(monkeypatch, through_faults)
    assert all(proxy.counts.values()), proxy.counts
    written = capfd.readouterr()
    assert SECRET not in caplog.text + written.out + written.err
    assert secrets_in(tmp_path) == secrets_in(s3_server.folder) == []


def test_a_killed_upload_leaves_no_checkpoint(bucket, s3_server, tmp_path, monkeypatch):
    """Whatever request is the last that arrives, the folder counts only if all of it is there."""
    place = checkpoint(tmp_path, 8)
    monkeypatch.setenv("HOTBED_STORE_PATIENCE", "0.05")
    monkeypatch.setattr("hotbed.files.copies.AT_ONCE", 1)
    whole = 0
    for last in range(1, 40, 2):
        proxy = FaultProxy(s3_server.port, lambda number, method, last=last: "dropped" if number > last else None)
        remote = path_of(f"s3://{BUCKET}/{tmp_path.name}/kill-{last}")
        set_environment(monkeypatch, s3_server.environment(proxy.port))
        try:
            publish_folder(place, remote / "unit", "manifest.json")
            arrived = True
        except OSError:
            arrived = False
        finally:
            proxy.close()
        set_environment(monkeypatch, s3_server.environment())
        units = content_of(remote).units
        assert_whole(remote)
        assert "unit" in units or not arrived
        whole += arrived
        if arrived:
            break
    assert whole == 1
