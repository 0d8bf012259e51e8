"""Ranks on a Ray cluster of three nodes, one of which is killed on the way: the bits of a run that was left alone."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.crash.runs import differences_of, result_of
from hotbed.cli.ray_ranks import train_on_ray, without_ray
from hotbed.errors import ConfigError
from tests.ray_nodes import NODES

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
SETTINGS = (
    "data.batch_size=64",
    "model.dim=4",
    "model.options.hidden=[8]",
    "train.checkpoint_every=10",
    "train.log_every=10",
    "train.device=cpu",
    "parallel.timeout=60",
)
TRAIN = ("--data", "criteo-like:2000", "--epochs", "3", "--cache", "0.3", "--no-forecast")
CODE = (
    NODES
    + """
import threading, time
from pathlib import Path
from hotbed.cli import main

folder, *train = sys.argv[1:]
with nodes(3) as cluster:

    def kill():
        from ray.util import placement_group_table

        while not list(Path(folder).rglob("manifest.json")):
            time.sleep(0.05)
        groups = placement_group_table().values()
        busy = {node for group in groups if group["state"] == "CREATED" for node in group["bundles_to_node_id"].values()}
        node = next(node for node in cluster.worker_nodes if node.node_id in busy)
        cluster.remove_node(node, allow_graceful=False)
        print("killed", flush=True)

    threading.Thread(target=kill, daemon=True).start()
    main(["train", "--ray", "--ranks", "2", "--out", folder, *train])
"""
)


def _sets() -> list[str]:
    return [part for one in SETTINGS for part in ("--set", one)]


def _run(command: list[str], folder: Path) -> str:
    """What it printed, which a failure shows whole. Three nodes and two ranks start slowly on cores that others use."""
    log = folder / "printed.txt"
    with log.open("w") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            code = subprocess.run(
                command, stdout=file, stderr=file, check=False, timeout=900, env=environment
            ).returncode
        except subprocess.TimeoutExpired as error:
            pytest.fail(f"{error.timeout:.0f} s were not enough:\n{log.read_text()}")
    assert code == 0, log.read_text()
    return log.read_text()


def test_a_lost_node_changes_no_bit(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hotbed"]
    _run([*launch, "train", "--out", str(tmp_path / "alone"), *TRAIN, *_sets()], tmp_path)
    printed = _run([sys.executable, "-c", CODE, str(tmp_path / "ray"), *TRAIN, *_sets()], tmp_path)
    assert "killed" in printed
    assert "all ranks start again from the last checkpoint (restart 1 of 3)" in printed
    assert differences_of(result_of(tmp_path / "alone"), result_of(tmp_path / "ray")) == []


def test_torchrun_and_ray_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="without torchrun"):
        train_on_ray([], 2, 3, on_gpu=False)


def test_a_rank_has_the_same_command_without_ray() -> None:
    given = ["-q", "train", "--ray", "--ranks", "8", "--restarts=2", "--data", "x", "--set", "a.b=--ray"]
    assert without_ray(given) == ["-q", "train", "--data", "x", "--set", "a.b=--ray"]
