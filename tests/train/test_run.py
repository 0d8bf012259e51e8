"""Whole runs on a small dataset: what is written, how they end, and that equal runs are equal."""

import dataclasses
import json
import math
import re
import signal

import pytest
import torch

from hotbed.data.dataset import Dataset
from hotbed.errors import RunError
from hotbed.run.model_card import read_card
from hotbed.train.evaluation import evaluate
from hotbed.train.run import run
from tests.train.small import lines, model_bytes, saved_step, write_dataset


class Spy:
    """Notes what an observer is told, and may act at a step."""

    def __init__(self, at=None, act=lambda: None, when="step"):
        self.at, self.act, self.when = at, act, when
        self.records, self.steps, self.said, self.ended = [], [], [], False

    def begin(self, progress, total_steps):
        self.total_steps = total_steps

    def step(self, progress):
        self.steps.append(progress.step)
        if self.when == "step" and progress.step == self.at:
            self.act()

    def record(self, record):
        self.records.append(record)
        if self.when == record.get("split") and record["step"] == self.at:
            self.act()

    def say(self, text):
        self.said.append(text)

    def end(self):
        self.ended = True


def test_a_run_leaves_what_it_promises(start, tmp_path):
    spy = Spy()
    built = start(tmp_path, "train.epochs=2", observers=[spy])
    ending = run(built.training, built.subject)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert ending.exit_code == 0
    assert summary == json.loads(json.dumps(ending.summary))
    assert summary["finished"]
    assert summary["stopped_because"] == "all 2 epochs done"
    assert summary["model"] == "deepfm"
    assert summary["dataset"] == "clicks"
    assert summary["parameters"]["rows"] == 50 + 9 + 20 + 31
    assert summary["parameters"]["row_values"] == 110 * 5
    assert summary["samples"] == 2000
    assert summary["bad_rows"] == 3
    assert set(summary["final"]) == {"valid", "test"}
    assert summary["final"]["test"]["samples"] == 300
    assert summary["gap"]["test"] == 0.95 - summary["final"]["test"]["auc"]
    assert sum(count for _, _, count in summary["calibration_curve"]) == 300
    assert summary["final"]["test"]["auc"] > 0.7
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "model.json", "dense.safetensors", "tables.safetensors", "schema.json", "counts", "manifest.json"
    }  # fmt: skip
    assert spy.total_steps == 32
    assert spy.steps == list(range(1, 33))
    assert spy.ended


def test_lines_come_at_their_steps(start, tmp_path):
    built = start(tmp_path, "train.epochs=2", "train.log_every=5", "train.eval_every=9")
    run(built.training, built.subject)
    found = lines(tmp_path)
    train = [line for line in found if line["kind"] == "train"]
    assert [line["step"] for line in train] == [5, 10, 15, 16, 20, 25, 30, 32]
    assert [line["epoch"] for line in train] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert train[3]["samples"] == 1000
    assert all(0 < line["loss"] < 2 and 0 <= line["auc"] <= 1 for line in train)
    evaluations = [(line["split"], line["step"]) for line in found if line["kind"] == "eval"]
    assert evaluations[:3] == [("valid", 9), ("valid", 18), ("valid", 27)]
    assert evaluations[-1][0] == "test"
    assert all(line["split_samples"] == {"valid": 400, "test": 300}[line["split"]] for line in found if "split" in line)


@pytest.mark.parametrize("model", ["lr", "deepfm"])
def test_equal_runs_are_equal_whatever_the_number_of_readers(start, tmp_path, model):
    sets = ["train.epochs=2", f"model.name={model}", *(["model.options={}"] if model == "lr" else [])]
    for name, threads in (("one", 1), ("two", 1), ("three", 3)):
        built = start(tmp_path / name, *sets, f"data.threads={threads}")
        run(built.training, built.subject)
    for name in ("two", "three"):
        assert lines(tmp_path / name) == lines(tmp_path / "one")
        assert model_bytes(tmp_path / name) == model_bytes(tmp_path / "one")


def test_another_seed_is_another_run(start, tmp_path):
    for seed in (1, 2):
        built = start(tmp_path / str(seed), f"train.seed={seed}")
        run(built.training, built.subject)
    assert lines(tmp_path / "1") != lines(tmp_path / "2")


def test_max_steps_ends_within_an_epoch(start, tmp_path):
    built = start(tmp_path, "train.max_steps=7", "train.epochs=3")
    assert built.training.total_steps == 7
    summary = run(built.training, built.subject).summary
    assert summary["steps"] == 7
    assert summary["stopped_because"] == "max_steps 7 reached"
    assert [line["step"] for line in lines(tmp_path) if line["kind"] == "train"] == [5, 7]
    assert set(summary["final"]) == {"valid", "test"}


@pytest.mark.parametrize("with_valid", [True, False])
def test_a_recalibrated_model_predicts_the_share_of_positives(start, tmp_path, with_valid):
    built = start(tmp_path, "train.max_steps=2", "train.recalibrate=true")
    loaders = built.training.loaders
    if not with_valid:
        del loaders.held_out["valid"]
    run(built.training, built.subject)
    train = evaluate(built.training.learner, loaders.train)
    positives, samples = train.metrics.positives, train.metrics.samples
    found = train
    if with_valid:
        found = evaluate(built.training.learner, loaders.held_out["valid"])
        positives, samples = positives + found.metrics.positives, samples + found.metrics.samples
    mean = torch.from_numpy(found.logits).double().sigmoid().mean().item()
    assert mean == pytest.approx(positives / samples, abs=0.003 if with_valid else 1e-5)


@pytest.mark.parametrize("rule", ["random", "days"])
def test_a_valid_split_at_random_has_the_share_of_the_log(start, tmp_path, monkeypatch, rule):
    """Days may have a share of their own; of rows that were taken at random, another share is chance."""
    built = start(tmp_path, "train.max_steps=2", "train.recalibrate=true")
    loaders = built.training.loaders
    monkeypatch.setitem(loaders.train.dataset.schema.notes, "split", rule)
    valid, learner = loaders.held_out["valid"], built.training.learner
    few = evaluate(learner, valid).labels.mean() / 2

    def with_few(batches):
        for batch in batches:
            keep = torch.rand(len(batch.labels), generator=draw) < 0.5
            yield dataclasses.replace(batch, labels=batch.labels * keep)

    draw = torch.Generator().manual_seed(0)
    whole = valid.epoch
    valid.epoch = lambda *given: with_few(whole(*given))
    run(built.training, built.subject)
    valid.epoch = whole
    mean = torch.from_numpy(evaluate(learner, valid).logits).double().sigmoid().mean().item()
    assert (mean < 1.3 * few) == (rule == "days")


@pytest.mark.parametrize("keep_best", [True, False])
def test_patience_plateau_and_the_best_model(start, tmp_path, keep_best):
    """A learning rate that soon overfits: valid AUC falls, both rates shrink, the run stops, the best weights win."""
    built = start(
        tmp_path,
        "train.epochs=30",
        "train.patience=2",
        "train.plateau_factor=0.5",
        "tables.lr=0.5",
        f"train.keep_best={str(keep_best).lower()}",
    )
    summary = run(built.training, built.subject).summary
    valid = [line for line in lines(tmp_path) if line.get("split") == "valid"]
    scores = [line["auc"] for line in valid]
    best = scores.index(max(scores))
    assert len(scores) == best + 3
    assert len(scores) < 30
    assert summary["stopped_because"] == "no better valid AUC in 2 evaluations"
    assert summary["final"]["valid"]["auc"] == (max(scores) if keep_best else scores[-1])
    kept = valid[best] if keep_best else valid[-1]
    assert summary["best_epoch"] == kept["epoch"]
    test_line = lines(tmp_path)[-1]
    assert test_line["split"] == "test"
    assert test_line["step"] == kept["step"]
    factors = {line["epoch"]: line["lr_factor"] for line in lines(tmp_path) if line["kind"] == "train"}
    assert factors[best + 1] == 0.5 ** sum(1 for n in range(best) if scores[n] < max(scores[: n + 1]))
    assert factors[best + 3] == factors[best + 2] * 0.5


def test_a_new_best_starts_patience_anew(start, tmp_path, monkeypatch):
    scores = iter([0.6, 0.5, 0.7, 0.65, 0.64, 0.9])

    def evaluated(*args):
        found = evaluate(*args)
        return found._replace(metrics=found.metrics._replace(auc=next(scores)))

    monkeypatch.setattr("hotbed.train.loop.evaluate", evaluated)
    built = start(tmp_path, "train.epochs=30", "train.patience=2", "train.keep_best=false")
    reason = built.training.train(lambda: False)
    built.training.close()
    assert reason == "no better valid AUC in 2 evaluations"
    assert built.training.progress.epoch == 5
    assert built.training.progress.best.auc == 0.7


def test_schedules_reach_the_rates(start, tmp_path):
    built = start(tmp_path, "train.schedule=cosine", "train.warmup_steps=4", "train.log_every=1", "dense.lr=0.1")
    run(built.training, built.subject)
    factors = [line["lr_factor"] for line in lines(tmp_path) if line["kind"] == "train"]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert 0 < factors[-1] < 0.05
    assert lines(tmp_path)[0]["lr"] == 0.1 * 0.25


def test_a_run_without_held_out_data(start, tmp_path):
    data = Dataset.open(write_dataset(tmp_path / "data", {"train": 130}))
    built = start(tmp_path / "run", data=data)
    summary = run(built.training, built.subject).summary
    assert summary["finished"]
    assert summary["final"] == {}
    assert summary["calibration_curve"] == []
    assert (tmp_path / "run" / "model" / "model.json").is_file()


def test_a_last_batch_of_one_and_one_class_only(start, tmp_path):
    data = Dataset.open(write_dataset(tmp_path / "data", {"train": 65, "valid": 1, "test": 2}))
    built = start(tmp_path / "run", "model.options.batch_norm=true", "train.log_every=1", data=data)
    summary = run(built.training, built.subject).summary
    assert summary["finished"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["final"]["valid"]["auc"] is None
    assert next(line["auc"] for line in lines(tmp_path / "run") if line["step"] == 2) is None


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_stops(start, tmp_path, number, code):
    spy = Spy(at=7, act=lambda: signal.raise_signal(number))
    built = start(tmp_path, observers=[spy])
    ending = run(built.training, built.subject)
    assert ending.exit_code == code
    assert not ending.summary["finished"]
    assert ending.summary["stopped_because"] == "interrupted"
    assert ending.summary["steps"] == 7
    assert ending.summary["final"] == {}
    assert ending.summary["best_step"] is ending.summary["kept_because"] is None  # no weights are kept before the end
    assert saved_step(tmp_path) == 7
    assert not (tmp_path / "model").exists()


def poison(built):
    with torch.no_grad():
        next(built.training.learner.model.parameters()).fill_(math.nan)


def test_divergence_is_reported_and_the_last_good_checkpoint_kept(start, tmp_path):
    spy = Spy(at=8)
    built = start(tmp_path, "train.checkpoint_every=3", "train.log_every=100", observers=[spy])
    spy.act = lambda: poison(built)
    with pytest.raises(RunError, match=r"no longer a number at step 9: .*tables\.lr.*--resume .* last good checkpoint"):
        run(built.training, built.subject)
    assert saved_step(tmp_path) in (3, 6)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert not summary["finished"]
    assert "step 9" in summary["stopped_because"]


def test_divergence_in_the_last_step_never_becomes_a_model(start, tmp_path):
    spy = Spy(at=16)
    built = start(tmp_path, observers=[spy])
    spy.act = lambda: poison(built)
    with pytest.raises(Exception, match="diverged"):
        run(built.training, built.subject)
    assert not (tmp_path / "model").exists()


def test_lack_of_memory_is_reported(start, tmp_path):
    def act():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB\nmore")

    built = start(tmp_path, observers=[Spy(at=2, act=act)])
    with pytest.raises(RunError, match=r"out of memory at step 2 .*Tried to allocate 3 GiB.*data\.batch_size"):
        run(built.training, built.subject)
    assert not json.loads((tmp_path / "summary.json").read_text())["finished"]


def test_a_full_disk_is_reported(start, tmp_path, monkeypatch):
    built = start(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hotbed.checkpoint.write.write_tensors", full)
    ended = run(built.training, built.subject)
    assert re.search(r"cannot write .*checkpoints: No space left on device", ended.unsaved)
    assert f"not lost: {tmp_path / 'model'} is whole" in ended.unsaved
    assert "no checkpoint to resume from" in ended.unsaved
    assert read_card(tmp_path / "model")["model"]["name"] == ended.summary["model"]
    assert ended.summary["failed_checkpoints"] == 1
    assert json.loads((tmp_path / "summary.json").read_text())["final"]["test"]["auc"] > 0.5


def test_a_disk_too_full_for_the_model_keeps_the_checkpoint_to_continue_from(start, tmp_path, monkeypatch):
    built = start(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("hotbed.train.model_folder.write_tensors", full)
        with pytest.raises(RunError, match=r"/model: No space left.*The checkpoint of step 16 is whole: .*--resume"):
            run(built.training, built.subject)
    again = start(tmp_path)
    again.training.resume()
    assert run(again.training, again.subject).summary["finished"]


def test_a_disk_too_full_for_the_summary_does_not_hide_the_cause(start, tmp_path, monkeypatch):
    built = start(tmp_path)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hotbed.checkpoint.write.write_tensors", full)
    monkeypatch.setattr("hotbed.run.folder.write_file", full)
    with pytest.raises(RunError, match=r"cannot write .*checkpoint"):
        run(built.training, built.subject)


def test_progress_is_plain_data(start, tmp_path):
    built = start(tmp_path)
    run(built.training, built.subject)
    assert json.loads(json.dumps(dataclasses.asdict(built.training.progress)))["step"] == 16
