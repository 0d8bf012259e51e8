"""Law 7: a resumed run continues bit-identically, wherever it was stopped."""

import dataclasses
import json
import shutil
import signal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hotbed.checkpoint import write
from hotbed.checkpoint.chain import find, folders_in
from hotbed.data.dataset import Dataset
from hotbed.errors import RunError
from hotbed.run.run_file import compose
from hotbed.train.build import build
from hotbed.train.checkpoint import load_checkpoint
from hotbed.train.run import run
from tests.train.small import SMALL, lines, model_bytes, saved_step, write_dataset
from tests.train.test_run import Spy

SETS = (
    "train.epochs=3",
    "train.plateau_factor=0.5",
    "train.schedule=cosine",
    "model.options.batch_norm=true",
    "tables.optimizer=adam",
    "tables.lr=0.05",
)


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):
    """The run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    built = _start(dataset, folder)
    run(built.training, built.subject)
    return folder


def _start(dataset, folder, *sets, observers=()):
    folder.mkdir(exist_ok=True)
    config, problems = compose(None, {"data.path": "clicks", "data.batch_size": 64}, [*SMALL, *SETS, *sets])
    assert problems == []
    return build(config, dataset, folder, observers)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def go_on(dataset, folder, *sets):
    torch.rand(7)  # the process that resumes has used its generator otherwise
    built = _start(dataset, folder, *sets)
    built.training.resume()
    return run(built.training, built.subject)


@pytest.mark.parametrize("step", [1, 5, 16, 23, 47, 48])
def test_stopped_at_a_step_and_resumed(dataset, whole, tmp_path, step):
    built = _start(dataset, tmp_path, observers=[Spy(at=step, act=interrupt)])
    assert run(built.training, built.subject).exit_code == 130
    ending = go_on(dataset, tmp_path)
    assert ending.summary["finished"]
    assert lines(tmp_path) == lines(whole)
    assert model_bytes(tmp_path) == model_bytes(whole)


def test_stopped_at_every_step(dataset, whole, tmp_path):
    """A run that never gets further than three steps still ends as the whole one."""
    built = _start(dataset, tmp_path, observers=[Spy(at=3, act=interrupt)])
    run(built.training, built.subject)
    for step in range(6, 60, 3):
        built = _start(dataset, tmp_path, observers=[Spy(at=step, act=interrupt)])
        built.training.resume()
        if run(built.training, built.subject).summary["finished"]:
            break
    assert lines(tmp_path) == lines(whole)
    assert model_bytes(tmp_path) == model_bytes(whole)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_stopped_within_an_evaluation(dataset, whole, tmp_path, monkeypatch, split):
    """The signal comes while a held-out split is read; nothing of it is kept."""
    built = _start(dataset, tmp_path)
    loader = built.training.loaders.held_out[split]
    real = loader.epoch

    def epoch(number, start_batch=0):
        interrupt()
        yield from real(number, start_batch)

    monkeypatch.setattr(loader, "epoch", epoch)
    ending = run(built.training, built.subject)
    assert ending.exit_code == 130
    assert not ending.summary["finished"]
    assert go_on(dataset, tmp_path).summary["finished"]
    assert lines(tmp_path) == lines(whole)
    assert model_bytes(tmp_path) == model_bytes(whole)


def test_a_crash_goes_back_to_the_last_checkpoint(dataset, whole, tmp_path):
    """What was written after the checkpoint (lines, better weights) is forgotten and written again."""

    def crash():
        raise ZeroDivisionError

    built = _start(dataset, tmp_path, "train.checkpoint_every=10", observers=[Spy(at=38, act=crash)])
    with pytest.raises(ZeroDivisionError):
        run(built.training, built.subject)
    assert saved_step(tmp_path) in (10, 20, 30)
    go_on(dataset, tmp_path, "train.checkpoint_every=10")
    assert lines(tmp_path) == lines(whole)
    assert model_bytes(tmp_path) == model_bytes(whole)


def test_training_longer_is_training_long(dataset, tmp_path):
    """One epoch, then --epochs 3, gives the lines and weights of three epochs at once."""
    built = _start(dataset, tmp_path / "long", "train.schedule=constant")
    run(built.training, built.subject)
    built = _start(dataset, tmp_path / "short", "train.schedule=constant", "train.epochs=1")
    assert run(built.training, built.subject).summary["finished"]
    assert go_on(dataset, tmp_path / "short", "train.schedule=constant").summary["finished"]
    assert lines(tmp_path / "short") == lines(tmp_path / "long")
    assert model_bytes(tmp_path / "short") == model_bytes(tmp_path / "long")


def test_training_longer_after_max_steps(dataset, whole, tmp_path):
    built = _start(dataset, tmp_path, "train.max_steps=21", "train.schedule=constant")
    run(built.training, built.subject)
    go_on(dataset, tmp_path, "train.schedule=constant")
    assert [line["step"] for line in lines(tmp_path)] == [line["step"] for line in lines(whole)]


@pytest.fixture
def stopped(dataset, tmp_path):
    built = _start(dataset, tmp_path, observers=[Spy(at=20, act=interrupt)])
    run(built.training, built.subject)
    return tmp_path


def test_nothing_to_resume(dataset, tmp_path):
    with pytest.raises(RunError, match="has no checkpoint to resume from"):
        _start(dataset, tmp_path).training.resume()


FILES = [
    "dense.safetensors",
    "dense_optimizer.safetensors",
    "interval.safetensors",
    "rest.safetensors",
    "rows/0-00000.parquet",
    "manifest.json",
]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_reported(dataset, stopped, name):
    path = find(stopped).folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match=f"(is damaged: the content of {name})|({name} is damaged)"):
        _start(dataset, stopped).training.resume()


def test_where_there_is_an_older_checkpoint_a_damaged_one_names_it_as_the_way_out(dataset, stopped):
    (older,) = folders_in(stopped / "checkpoints")
    newest = older.with_name(f"{int(older.name) + 1:012}")
    shutil.copytree(older, newest)
    for folder in (newest, older):
        (folder / "dense.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match=f"resume from the one before it, move {newest} away"):
        _start(dataset, stopped).training.resume()
    shutil.rmtree(newest)
    with pytest.raises(RunError, match="names all damage") as caught:
        _start(dataset, stopped).training.resume()
    assert "the one before it" not in str(caught.value)


def test_a_checkpoint_of_another_model_is_reported(dataset, stopped):
    with pytest.raises(RunError, match="does not fit this run"):
        _start(dataset, stopped, "model.dim=8").training.resume()
    with pytest.raises(RunError, match="does not fit this run"):
        _start(dataset, stopped, "tables.optimizer=adagrad").training.resume()


def test_a_dataset_that_has_changed_is_reported(stopped, tmp_path_factory):
    other = Dataset.open(write_dataset(tmp_path_factory.mktemp("other") / "clicks", {"train": 999, "valid": 9}))
    with pytest.raises(RunError, match="trained on 1,000 rows, but its dataset now has 999"):
        _start(other, stopped).training.resume()


def test_other_ids_under_the_same_rows_are_reported(stopped, tmp_path_factory):
    """As many rows and ids of each feature, so every tensor fits; but row 7 of a table is another id now."""
    other = write_dataset(tmp_path_factory.mktemp("other") / "clicks")
    counts = pq.read_table(other / "counts" / "user.parquet")
    turned = pa.table({"id": counts["id"].to_numpy()[::-1], "count": counts["count"]})
    pq.write_table(turned, other / "counts" / "user.parquet")
    with pytest.raises(RunError, match=r"is not what .* was trained on"):
        _start(Dataset.open(other), stopped).training.resume()


def test_other_rows_with_the_same_ids_are_reported(stopped, tmp_path_factory):
    other = Dataset.open(write_dataset(tmp_path_factory.mktemp("other") / "clicks", seed=1))
    with pytest.raises(RunError, match=r"is not what .* was trained on"):
        _start(other, stopped).training.resume()


def test_a_copy_of_the_dataset_will_do(dataset, stopped, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy") / "clicks"
    shutil.copytree(dataset.path, copy)
    training = _start(Dataset.open(copy), stopped).training
    training.resume()
    assert training.progress.step == saved_step(stopped) > 0


def rewrite(folder, **changes):
    """The manifest with other values, and a checksum that fits them."""
    entry = find(folder)
    dataclasses.replace(entry.manifest, document={**entry.manifest.document, **changes}).save(entry.folder)


def test_a_checkpoint_from_the_future_is_reported(dataset, stopped):
    path = find(stopped).folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99}))
    with pytest.raises(RunError, match="format version 99"):
        _start(dataset, stopped).training.resume()


def test_a_checkpoint_without_its_progress_is_reported(dataset, stopped):
    rewrite(stopped, progress={"step": 1})
    with pytest.raises(RunError, match="does not fit this run"):
        _start(dataset, stopped).training.resume()


def test_lost_best_weights_are_reported_before_the_run_continues(dataset, stopped):
    shutil.rmtree(stopped / "best")
    with pytest.raises(RunError, match="best"):
        _start(dataset, stopped).training.resume()


def test_damaged_best_weights_never_become_the_model(dataset, stopped):
    built = _start(dataset, stopped)
    built.training.resume()
    built.training.progress.best = dataclasses.replace(built.training.progress.best, auc=2.0)
    (path,) = (stopped / "best").glob("*/tables.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match="is damaged"):
        run(built.training, built.subject)
    assert not (stopped / "model").exists()


def test_the_checkpoint_is_no_pickle(stopped):
    files = [path for path in (stopped / "checkpoints").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json", ".parquet"}


def test_loading_restores_the_generator(dataset, stopped):
    built = _start(dataset, stopped)
    load_checkpoint(stopped, built.training.learner)
    first = torch.rand(3)
    load_checkpoint(stopped, built.training.learner)
    assert torch.equal(first, torch.rand(3))


def test_a_checkpoint_of_format_version_1_is_refused_with_the_way_out(dataset, stopped):
    shutil.rmtree(stopped / "checkpoints")
    (stopped / "checkpoint").mkdir()
    with pytest.raises(RunError, match=r"format version 1, which is no longer read\. Start it again with --overwrite"):
        _start(dataset, stopped).training.resume()


def test_a_full_disk_while_training_is_reported_and_the_run_continues(dataset, whole, tmp_path, monkeypatch):
    """The disk refuses a checkpoint on the way; the run ends as if nothing had been."""
    spy = Spy(at=30)
    built = _start(dataset, tmp_path, "train.checkpoint_every=10", observers=[spy])
    real = write.write_tensors

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "write_tensors", full)

    def free_again():
        built.training._saver.settle()  # a busy machine may not have begun to write
        monkeypatch.setattr(write, "write_tensors", real)

    spy.act = free_again
    summary = run(built.training, built.subject).summary
    assert summary["finished"]
    assert summary["failed_checkpoints"] >= 1
    assert any("the last one is kept" in text for text in spy.said)
    assert model_bytes(tmp_path) == model_bytes(whole)
    assert saved_step(tmp_path) == 48
