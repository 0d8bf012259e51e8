"""Tasks of a Ray cluster of three nodes, one of which is killed on the way: the same bytes as one process alone."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from hotbed.data.prepare.prepare import prepare
from hotbed.data.prepare.workers import WorkerThreads
from hotbed.errors import ConfigError
from tests.data.prepare_jobs import digest, write_logs
from tests.ray_nodes import NODES

CODE = (
    NODES
    + """
import hotbed.data.formats.blocks, hotbed.data.prepare.write
from hotbed.data.prepare.prepare import prepare
from hotbed.errors import HotbedError

out, ray_too, kill, *inputs = sys.argv[1:]
options = {"split": "train=0.8,test=0.2", "max_bad": "5%", "format": "criteo"}
hotbed.data.formats.blocks.REEL_BYTES, hotbed.data.prepare.write.PART_ROWS = 5_000, 100
with nodes(3 if ray_too == "ray" else 0) as cluster:
    killed = []

    def progress(seen):
        if kill == seen.stage and not killed:
            killed.append(cluster.worker_nodes.copy().pop())
            cluster.remove_node(killed[0], allow_graceful=False)

    try:
        prepare(inputs, out, ray=ray_too == "ray", progress=progress, **options)
    except HotbedError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print("killed", len(killed))
"""
)
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")


def run(out, inputs, *, ray=False, kill=""):
    command = [sys.executable, "-c", CODE, str(out), "ray" if ray else "alone", kill, *map(str, inputs)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return write_logs(tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="module")
def alone(logs, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "out"
    done = run(out, logs)
    assert done.returncode == 0, done.stderr
    return digest(out)


@needs_ray
def test_a_lost_node_changes_no_byte(logs, alone, tmp_path):
    done = run(tmp_path / "out", logs, ray=True, kill="reading")
    assert done.returncode == 0, done.stderr
    assert "killed 1" in done.stdout.splitlines()  # Ray reports the lost node, too
    assert digest(tmp_path / "out") == alone
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@needs_ray
def test_an_error_on_a_node_is_the_users(tmp_path):
    files = write_logs(tmp_path, (50, 50))
    files[1].write_bytes(b"\xff\xfe")
    done = run(tmp_path / "out", files, ray=True)
    assert done.returncode == 1
    assert "FormatError: " in done.stderr
    assert "UTF-16" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_what_does_not_go_with_ray(tmp_path):
    import pyarrow as pa

    with pytest.raises(ConfigError, match="reads files"):
        prepare(pa.table({"label": [0, 1], "x": [1, 2]}), tmp_path / "out", ray=True)
    files = write_logs(tmp_path, (50,))
    with pytest.raises(ConfigError, match="--workers 2"):
        prepare(files, tmp_path / "out", ray=True, workers=2, format="criteo")


def test_without_ray_the_message_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="pip install 'ray"):
        prepare(write_logs(tmp_path, (50,)), tmp_path / "out", ray=True, format="criteo", max_bad="5%")


def test_several_processes_of_torchrun_are_refused(tmp_path):
    files = write_logs(tmp_path, (50,))
    command = [sys.executable, "-m", "hotbed", "prepare", str(files[0]), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "WORLD_SIZE": "2"}
    )
    assert done.returncode == 2
    assert "--ray" in done.stderr


def test_threads_share_memory_and_keep_the_order():
    held, most = [0], [0]

    def work(task, progress):
        held[0] += task
        most[0] = max(most[0], held[0])
        held[0] -= task
        return task

    tasks = [3, 1, 2, 3, 9, 1]
    assert list(WorkerThreads(4, memory=4).run(work, tasks, lambda *_: None, lambda task: task)) == tasks
    assert most[0] <= 9
