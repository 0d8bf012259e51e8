"""The examples run, resume, and do what a run without cache and interruption does."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.train.small import write_dataset

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("examples") / "clicks", {"train": 2048, "valid": 400, "test": 400})


def test_plain_pytorch_goes_on_where_it_stopped(clicks, tmp_path, capsys):
    main = example("plain_pytorch").main
    common = ["--data", str(clicks), "--batch-size", "16"]
    whole = main([*common, "--epochs", "3", "--checkpoints", str(tmp_path / "whole")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert not lines[-1].endswith(" 0 made place"), "a cache that holds all proves nothing"
    main([*common, "--epochs", "2", "--checkpoints", str(tmp_path / "parts")])
    again = main([*common, "--epochs", "3", "--checkpoints", str(tmp_path / "parts")])
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert again == whole
    assert whole > 0.6


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightning_goes_on_where_it_stopped(clicks, tmp_path, capsys):
    pytest.importorskip("lightning")
    main, common = example("lightning_module").main, ["--data", str(clicks), "--batch-size", "16"]
    whole = main([*common, "--epochs", "3", "--out", str(tmp_path / "whole")])
    main([*common, "--epochs", "2", "--out", str(tmp_path / "parts")])
    again = main([*common, "--epochs", "3", "--out", str(tmp_path / "parts")])
    assert again == whole
    assert "3 epochs, 384 updates" in capsys.readouterr().out.splitlines()[-1]
    saved = torch.load(tmp_path / "parts" / "last.ckpt", weights_only=False)
    assert sorted(saved["state_dict"]) == ["layers.0.bias", "layers.0.weight", "layers.2.bias", "layers.2.weight"]
    assert (tmp_path / "parts" / "rows" / saved["hotbed_rows"]).is_dir()
