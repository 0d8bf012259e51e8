from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hotbed.cli import main
from tests.train.small import write_dataset

# rows that differ from each other, and move
HOT = {
    "tables.lr": 0.5,
    "tables.init": "normal(0.3)",
    "train.max_steps": 8,
    "train.device": "cpu",
    "model.dim": 4,
    "data.batch_size": 64,
}


@pytest.fixture(scope="session")
def clicks(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("export-data") / "clicks", {"train": 640, "valid": 100, "test": 150})


@pytest.fixture
def hotbed(capsys):
    """hotbed("export", ...) -> (exit code, stdout, stderr), in this process."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(one) for one in arguments])
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return call


def train(folder: Path, data: Path, model: str, *sets: str) -> Path:
    settings = [f"{name}={value}" for name, value in HOT.items()]
    arguments = ["train", "--data", str(data), "--model", model, "--out", str(folder)]
    arguments += [part for one in (*settings, *sets) for part in ("--set", one)]
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert not caught.value.code
    return folder


@pytest.fixture(scope="session")
def deepfm(clicks, tmp_path_factory):
    """A run, with a checkpoint in the middle."""
    sets = ("model.options.hidden=[8]", "train.checkpoint_every=5", "train.keep_checkpoints=9")
    return train(tmp_path_factory.mktemp("deepfm") / "run", clicks, "deepfm", *sets)


@pytest.fixture(scope="session")
def dynamic(clicks, tmp_path_factory):
    """A run of dynamic ids, some of which are not admitted, and some expired."""
    rules = ("tables.dynamic=true", "tables.admit=after 2", "tables.expire=unused 6 steps, every 2")
    sets = ("model.options.hidden=[8]", "train.checkpoint_every=5", "train.keep_checkpoints=9")
    return train(tmp_path_factory.mktemp("dynamic") / "run", clicks, "dnn", *rules, *sets)


@pytest.fixture(scope="module", autouse=True)
def _leave_torch_alone():
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
