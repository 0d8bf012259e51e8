"""Train with a share of its negatives: the loss learns the logits of the whole log, in batches of any size."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from hotbed.data.dataset import Dataset
from hotbed.data.prepare.prepare import prepare
from hotbed.run.run_file import compose
from hotbed.train.build import build
from hotbed.train.step import sampled_shift, task_loss
from hotbed.types import Batch
from tests.train.followed import SETTINGS, write_hour

KEPT = 0.1


def plain(vectors):
    return vectors


@pytest.mark.parametrize("size", [1, 2, 9])
def test_the_loss_moves_the_label_and_returns_the_logits_of_the_log(size):
    logits, labels = torch.randn(size), (torch.arange(size) % 3 == 0).float()
    found, returned = task_loss(kept=KEPT)(plain, logits, labels)
    torch.testing.assert_close(found, F.binary_cross_entropy_with_logits(logits + math.log(10), labels))
    assert returned is logits
    assert sampled_shift(KEPT) == pytest.approx(math.log(10))
    assert sampled_shift(1.0) == 0


def test_further_labels_learn_the_sampled_log():
    logits, labels = torch.randn(6, 2), torch.tensor([[1.0, 0], [0, 1]]).repeat(3, 1)
    found, returned = task_loss(["binary", "binary"], kept=KEPT)(plain, logits, labels)
    first = F.binary_cross_entropy_with_logits(logits[:, 0] + math.log(10), labels[:, 0])
    torch.testing.assert_close(found, first + F.binary_cross_entropy_with_logits(logits[:, 1], labels[:, 1]))
    assert returned is logits


def test_positives_that_count_several_times_move_it_further():
    logits, labels = torch.randn(6), torch.tensor([1.0, 0]).repeat(3)
    found, _ = task_loss(positives=(5.0,), kept=KEPT)(plain, logits, labels)
    whole = F.binary_cross_entropy_with_logits(logits + math.log(50), labels, pos_weight=torch.tensor(5.0))
    torch.testing.assert_close(found, whole)


@pytest.fixture(scope="module")
def thin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thin")
    raw = write_hour(folder / "raw" / "hour-0.csv", 0, 1000)
    split = {"train": 0.8, "valid": 0.2}
    prepare([raw], folder / "clicks", label="click", split=split, time_column="ts", keep_negatives=KEPT)
    return Dataset.open(folder / "clicks")


def start(dataset, folder, *sets):
    is_followed = any(text.startswith("follow.source=") for text in sets)
    settings = [text for text in SETTINGS if is_followed or not text.startswith("follow.")]
    config, problems = compose(
        None, {"data.path": str(dataset.path)}, [*settings, "model.options.dropout=0", "train.base_rate=true", *sets]
    )
    assert problems == []
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.to_json())
    return build(config, dataset, folder)


def test_a_batch_of_one_sample_learns_the_logits_of_the_whole_log_too(thin, tmp_path):
    training = start(thin, tmp_path / "run", "tables.lr=0", "dense.lr=0").training
    whole = next(iter(training.loaders.train.epoch(0)))
    one = Batch(whole.labels[:1], whole.dense[:1], whole.ids[:1], {})
    logits = training.learner.score(one)
    expected = F.binary_cross_entropy_with_logits(logits + math.log(10), one.labels)
    torch.testing.assert_close(training.learner.step(one).loss, expected)
    training.close()


def test_a_followed_log_has_all_its_negatives(thin, tmp_path):
    write_hour(tmp_path / "logs" / "001.csv", 1, 1)
    built = start(thin, tmp_path / "run", f"follow.source={tmp_path / 'logs'}", "tables.lr=0", "dense.lr=0")
    log, learner = built.training.loaders.train, built.training.learner
    assert log.look()
    (batch,) = log.epoch(0)
    expected = F.binary_cross_entropy_with_logits(learner.score(batch), batch.labels)
    torch.testing.assert_close(learner.step(batch).loss, expected)
    assert built.subject.label_notes == ()
    built.training.close()
