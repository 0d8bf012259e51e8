"""What `prepare(ray=True)` and `hotbed prepare --ray` refuse; tests/distributed/test_ray.py runs them on a cluster."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hotbed.data.prepare.prepare import prepare
from hotbed.data.prepare.workers import WorkerThreads
from hotbed.errors import ConfigError
from tests.data.prepare_jobs import write_logs


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
