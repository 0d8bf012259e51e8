"""A Ray cluster of three nodes, one of which is killed under each command: the bits of a command that was left alone."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.crash.runs import differences_of, result_of
from hotbed.cli.ray_ranks import AttemptEnd, _Attempt, _noting_sigterm, train_on_ray, without_ray
from hotbed.errors import ConfigError
from tests.data.prepare_jobs import digest, write_logs
from tests.distributed.train_ranks import TrainRanks
from tests.fresh import run_python

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
SETTINGS = (
    "data.batch_size=64",
    "model.dim=4",
    "model.options.hidden=[8]",
    "train.checkpoint_every=10",
    "train.log_every=10",
    "train.device=cpu",
    "parallel.timeout=300",
)
# Long: a node is killed once the first checkpoint is there, which takes some looks and calls of Ray.
TRAIN = ("--data", "criteo-like:2000", "--epochs", "12", "--cache", "0.3", "--no-forecast")
PREPARE = """
import hotbed.data.formats.blocks, hotbed.data.prepare.write
from hotbed.data.prepare.prepare import prepare

def prepared(out, *inputs, **more):
    hotbed.data.formats.blocks.REEL_BYTES, hotbed.data.prepare.write.PART_ROWS = 5_000, 100
    prepare(list(inputs), out, split="train=0.8,test=0.2", max_bad="5%", format="criteo", **more)
"""
ALONE = PREPARE + "import sys; prepared(*sys.argv[1:])"
# One cluster for all commands, since it starts slowly on cores that others use. A killed node is replaced for the next command.
# argv: a folder for what each command printed, and the arguments of each.
CODE = (
    PREPARE
    + """
import json, logging, os, sys, threading, time, traceback
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table
from hotbed.cli import main
from hotbed.errors import HotbedError

folder, commands = Path(sys.argv[1]), json.loads(sys.argv[2])
logging.disable(logging.WARNING)
here = {"num_cpus": 1, "memory": 8 << 30, "object_store_memory": 80 << 20}

def kill(node):
    cluster.remove_node(node, allow_graceful=False)
    print("killed", flush=True)

def wrong(*inputs):
    prepared(*inputs, ray=True)

def right(*inputs):
    killed = []

    def progress(seen):
        if seen.stage == "reading" and not killed:
            killed.append(cluster.worker_nodes.copy().pop())
            kill(killed[0])

    prepared(*inputs, ray=True, progress=progress)

def train(run, *words):
    def kill_a_rank():
        while not list(Path(run).rglob("manifest.json")):
            time.sleep(0.05)
        groups = placement_group_table().values()
        busy = {node for group in groups if group["state"] == "CREATED" for node in group["bundles_to_node_id"].values()}
        kill(next(node for node in cluster.worker_nodes if node.node_id in busy))

    threading.Thread(target=kill_a_rank, daemon=True).start()
    main(["train", "--ray", "--ranks", "2", "--out", run, *words])

@contextmanager
def printed_to(path):
    sys.stdout.flush()
    kept = [os.dup(number) for number in (1, 2)]
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(handle, number)
    os.close(handle)
    yield
    sys.stdout.flush()
    for number, one in zip((1, 2), kept):
        os.dup2(one, number)
        os.close(one)

cluster = Cluster(initialize_head=True, head_node_args={**here, "include_dashboard": False})
try:
    cluster.add_node(**here)
    for name, arguments in commands.items():
        while len(cluster.worker_nodes) < 2:
            cluster.add_node(**here)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
        with printed_to(folder / f"{name}.txt"):
            code = 0
            try:
                {"wrong": wrong, "right": right, "train": train}[name](*arguments)
            except SystemExit as ended:
                code = ended.code or 0
            except HotbedError as error:
                code = f"{type(error).__name__}: {error}"
            except BaseException:
                traceback.print_exc()
                code = "a bug"
        (folder / f"{name}.json").write_text(json.dumps(code))
finally:
    ray.shutdown()
    cluster.shutdown()
"""
)


def _train_words() -> list[str]:
    return [*TRAIN, *(part for one in SETTINGS for part in ("--set", one))]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_logs(tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="module")
def wrong_logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    files = write_logs(tmp_path_factory.mktemp("wrong"), (50, 50))
    files[1].write_bytes(b"\xff\xfe")
    return files


@pytest.fixture(scope="module")
def on_ray(logs: list[Path], wrong_logs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all commands: `NAME` is what one wrote, `NAME.txt` what it printed, `NAME.json` how it ended."""
    folder, out = tmp_path_factory.mktemp("printed"), tmp_path_factory.mktemp("on-ray")
    commands: dict[str, list[Any]] = {
        "wrong": [out / "wrong", *wrong_logs],
        "right": [out / "right", *logs],
        "train": [out / "train", *_train_words()],
    }
    words = [sys.executable, "-c", CODE, str(folder), json.dumps(commands, default=str)]
    with (folder / "all.txt").open("w") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            subprocess.run(words, stdout=file, stderr=file, check=False, timeout=1800, env=environment)
        except subprocess.TimeoutExpired as error:
            pytest.fail(f"{error.timeout:.0f} s were not enough:\n{_texts(folder)}")
    for path in folder.iterdir():
        path.rename(out / path.name)
    return out


def _texts(folder: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(folder.glob("*.txt")))


def _ended(folder: Path, name: str) -> tuple[Any, str]:
    """How a command ended, and what it printed."""
    assert (folder / f"{name}.json").exists(), _texts(folder)
    return json.loads((folder / f"{name}.json").read_text()), (folder / f"{name}.txt").read_text()


@needs_ray
def test_training_loses_a_node_and_changes_no_bit(on_ray: Path, tmp_path: Path) -> None:
    code, printed = _ended(on_ray, "train")
    assert code == 0, printed
    assert "killed" in printed
    assert "all ranks start again from the last checkpoint (restart 1 of 3)" in printed
    alone = TrainRanks(["train", "--out", str(tmp_path / "alone"), *_train_words()], tmp_path / "alone")
    assert alone.ended() == [0, 0], alone.texts()
    assert differences_of(result_of(tmp_path / "alone"), result_of(on_ray / "train")) == []


@needs_ray
def test_preparing_loses_a_node_and_changes_no_byte(on_ray: Path, logs: list[Path], tmp_path: Path) -> None:
    code, printed = _ended(on_ray, "right")
    assert code == 0, printed
    assert printed.splitlines().count("killed") == 1  # Ray reports the lost node, too
    done = run_python(ALONE, tmp_path / "out", *logs)
    assert done.returncode == 0, done.stderr
    assert digest(on_ray / "right") == digest(tmp_path / "out")
    assert {path.name for path in on_ray.glob("*right*")} == {"right", "right.txt", "right.json"}


@needs_ray
def test_an_error_on_a_node_is_the_users(on_ray: Path) -> None:
    code, printed = _ended(on_ray, "wrong")
    assert code.startswith("FormatError: "), printed
    assert "UTF-16" in code
    assert "Traceback" not in printed
    assert not (on_ray / "wrong").exists()


@needs_ray
def test_torchrun_and_ray_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="without torchrun"):
        train_on_ray([], 2, 3, on_gpu=False)


class Rank:
    """An actor that ends when it gets a signal."""

    def __init__(self, asks: signal.Signals) -> None:
        self.poll = self.signal = self
        self._asks, self.noted = asks, list[int]()

    def remote(self, number: int | None = None) -> tuple[list[Any], int | None]:
        if number is not None:
            self.noted.append(number)
        elif not self.noted:
            os.kill(os.getpid(), self._asks)
        return [], 128 + self.noted[0] if self.noted else None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_all_ranks_and_names_the_exit_code(number: signal.Signals) -> None:
    pytest.importorskip("ray")
    before = signal.getsignal(signal.SIGTERM)
    attempt = _Attempt.__new__(_Attempt)
    ranks = [Rank(number), Rank(number)]
    attempt._ray = SimpleNamespace(get=lambda found, timeout: found)
    attempt._count, attempt._actors, attempt._codes, attempt._lost = 2, ranks, {}, {}
    with _noting_sigterm():
        end = attempt._follow()
    assert end == AttemptEnd(128 + number)
    assert [rank.noted for rank in ranks] == [[number], [number]]
    assert signal.getsignal(signal.SIGTERM) is before


@needs_ray
def test_a_rank_has_the_same_command_without_ray() -> None:
    given = ["-q", "train", "--ray", "--ranks", "8", "--restarts=2", "--data", "x", "--set", "a.b=--ray"]
    assert without_ray(given) == ["-q", "train", "--data", "x", "--set", "a.b=--ray"]
