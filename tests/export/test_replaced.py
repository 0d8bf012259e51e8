"""A model that is replaced while its files are read one after the other is refused: they are of two versions."""

import shutil

import pytest

from hotbed.errors import RunError
from hotbed.export import write
from hotbed.export.write import ExportOptions, export
from hotbed.run import model_card
from hotbed.run.folder import write_folder
from hotbed.train import model_folder
from hotbed.train.model_folder import load_learner

ROWS = ExportOptions(onnx=False)


@pytest.fixture
def run(deepfm, tmp_path):
    return shutil.copytree(deepfm, tmp_path / "run")


@pytest.fixture
def replace(run):
    """Another run of the same folder ends: its model has other dense weights."""

    def fill(new):
        shutil.copytree(run / "model", new, dirs_exist_ok=True)
        (new / "manifest.json").unlink()
        dense = new / "dense.safetensors"
        dense.write_bytes(dense.read_bytes()[:-4] + b"\x00\x00\x80\x3f")

    return lambda: write_folder(run / "model", fill)


def after(function, happens):
    """After its first call."""
    left = [happens]

    def both(*arguments, **options):
        found = function(*arguments, **options)
        if left:
            left.pop()()
        return found

    return both


@pytest.mark.parametrize("name", ["_model", "_write_table", "open_source"])
def test_while_it_is_exported(run, replace, tmp_path, monkeypatch, name):
    monkeypatch.setattr(write, name, after(getattr(write, name), replace))
    with pytest.raises(RunError, match="was replaced while it was read"):
        export(run, tmp_path / "out", ROWS)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    export(run, tmp_path / "out", ROWS)
    assert (tmp_path / "out" / "dense.safetensors").read_bytes()[-4:] == b"\x00\x00\x80\x3f"


@pytest.mark.parametrize("name", ["read_card", "read_tensors"])
def test_while_it_is_loaded(run, replace, monkeypatch, name):
    monkeypatch.setattr(model_folder, name, after(getattr(model_folder, name), replace))
    with pytest.raises(RunError, match="was replaced while it was read"):
        load_learner(run / "model", "cpu")
    monkeypatch.undo()
    load_learner(run / "model", "cpu")


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_while_a_command_opens_it(run, replace, clicks, tmp_path, monkeypatch, hotbed, command):
    """The ids of a dataset are compared with those of the model after it is loaded."""
    monkeypatch.setattr(model_folder, "load_learner", after(model_folder.load_learner, replace))
    arguments = [] if command == "evaluate" else [clicks, "--out", tmp_path / "scores.csv"]
    code, _, err = hotbed(command, run, *arguments, "--device", "cpu")
    assert code == 1
    assert "was replaced while it was read" in " ".join(err.split())


def test_a_checkpoint_takes_the_meaning_of_ids_from_a_model_of_one_version(run, replace, tmp_path, monkeypatch):
    copy = shutil.copyfile
    monkeypatch.setattr("hotbed.export.source.shutil.copyfile", after(copy, replace))
    with pytest.raises(RunError, match="was replaced while it was read"):
        export(run / "checkpoints" / f"{5:012}", tmp_path / "out", ROWS)


def test_damage_is_still_named(run, tmp_path):
    (run / "model" / "dense.safetensors").write_bytes(b"cut")
    with pytest.raises(RunError, match="is damaged"):
        model_card.read_card(run / "model")
    with pytest.raises(RunError, match="is damaged"):
        export(run, tmp_path / "out", ROWS)
