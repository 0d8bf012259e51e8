"""Positives that count several times: the loss, the probabilities that are corrected for it, and where it is said."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hotbed.data.dataset import Dataset
from hotbed.data.prepare.prepare import prepare
from hotbed.data.schema import Task
from hotbed.errors import ConfigError
from hotbed.report import write_report
from hotbed.run.run_file import compose
from hotbed.train.build import build
from hotbed.train.run import run
from hotbed.train.step import positive_weights, task_loss

ROWS = 8000


def plain(vectors):
    return vectors


def test_the_loss_counts_positives_and_returns_the_logits_of_the_log():
    logits, labels = torch.randn(9, requires_grad=True), (torch.arange(9) % 3 == 0).float()
    found, returned = task_loss(positives=(5.0,))(plain, logits, labels)
    torch.testing.assert_close(
        found, F.binary_cross_entropy_with_logits(logits + math.log(5), labels, pos_weight=torch.tensor(5.0))
    )
    assert returned is logits
    one, _ = task_loss(positives=(1.0,))(plain, logits, labels)
    assert torch.equal(one, F.binary_cross_entropy_with_logits(logits, labels))
    weights = torch.rand(9)
    both, _ = task_loss(weighted=True, positives=(5.0,))(plain, logits, labels, weights)
    single = F.binary_cross_entropy_with_logits(logits + math.log(5), labels, reduction="none")
    torch.testing.assert_close(both, (single * (1 + 4 * labels) * weights).mean())


def test_the_best_constant_is_the_share_of_positives():
    labels = (torch.arange(1000) % 50 == 0).float()
    bias = nn.Parameter(torch.zeros(()))
    optimizer, loss = torch.optim.LBFGS([bias], max_iter=100), task_loss(positives=(20.0,))

    def closure():
        optimizer.zero_grad()
        found, _ = loss(lambda vectors: vectors + bias, torch.zeros(1000), labels)
        found.backward()
        return found

    optimizer.step(closure)
    assert torch.sigmoid(bias).item() == pytest.approx(0.02, rel=1e-3)  # 0.29 without the correction


def test_each_label_has_its_own_weight():
    labels = (Task("click"), Task("like"), Task("watched", "regression"))
    assert list(positive_weights(3, labels).values()) == [3, 1, 1]
    assert list(positive_weights({"like": 2.5}, labels).values()) == [1, 2.5, 1]
    outputs, truth = torch.randn(6, 3), torch.tensor([[1.0, 0, 2], [0, 1, 3]]).repeat(3, 1)
    found, _ = task_loss([one.kind for one in labels], positives=(1, 2.5, 1))(plain, outputs, truth)
    second = F.binary_cross_entropy_with_logits(
        outputs[:, 1] + math.log(2.5), truth[:, 1], pos_weight=torch.tensor(2.5)
    )
    first = F.binary_cross_entropy_with_logits(outputs[:, 0], truth[:, 0])
    torch.testing.assert_close(found, first + second + F.mse_loss(outputs[:, 2], truth[:, 2]))


@pytest.fixture(scope="module")
def rare(tmp_path_factory):
    """One row in thirty is a click, by ad and user."""
    draws, folder = np.random.default_rng(1), tmp_path_factory.mktemp("rare")
    user, ad = draws.integers(0, 20, ROWS), draws.integers(0, 10, ROWS)
    logit = -3.6 + np.sin(user * 1.7) + np.sin(ad * 2.3)
    click = draws.random(ROWS) < 1 / (1 + np.exp(-logit))
    columns = {"click": click.astype(int), "user": [f"u{one}" for one in user], "ad": [f"a{one}" for one in ad]}
    table = pa.table({**columns, "like": (draws.random(ROWS) < 0.5).astype(int), "long": draws.random(ROWS)})
    options = {"label": "click", "task": ["like", "long:regression"], "split": "train=0.7,test=0.3"}
    prepare(table, folder / "rare", **options)
    prepare(table, folder / "thin", **options, keep_negatives=0.2)
    return folder


def start(data, folder, *sets):
    given = ["train.device=cpu", "data.batch_size=128", "model.dim=4", "train.epochs=4", "model.name=lr", *sets]
    config, problems = compose(None, {"data.path": str(data)}, given)
    assert problems == []
    folder.mkdir()
    (folder / "config.json").write_text(config.to_json())
    return build(config, Dataset.open(data), folder)


def test_scores_stay_calibrated_and_the_run_says_so(rare, tmp_path):
    found = {}
    for name, data, weight in (("plain", "rare", 1), ("weighted", "rare", 10), ("both", "thin", 10)):
        built = start(rare / data, tmp_path / name, f"train.positive_weight={weight}", "train.base_rate=true")
        found[name] = run(built.training, built.subject).summary
    for name, notes in (
        ("plain", []),
        ("weighted", ["count 10 times"]),
        ("both", ["train holds 0.2", "count 10 times"]),
    ):
        test = found[name]["final"]["test"]
        assert 0.8 < test["calibration"] < 1.25, name  # about 6 without the correction, more with both
        assert test["auc"] > 0.7, name
        assert [wanted in note for wanted, note in zip(notes, found[name]["label_notes"], strict=True)] == [True] * len(
            notes
        )
        page = write_report(tmp_path / name).read_text()
        assert all(f"{note[:1].upper()}{note[1:]}." in page for note in found[name]["label_notes"])
    assert found["weighted"]["final"]["test"]["samples"] == found["both"]["final"]["test"]["samples"]


def test_mistakes(rare, tmp_path):
    for number, (value, says) in enumerate(
        [
            ("0", "the weight of click must be a number above 0, not 0.0"),
            ("{clik: 2}", "has no label 'clik'; there are click, like, long"),
            ("{long: 2}", "long is a number to predict and has no positives"),
            ("{like: much}", "the weight of like must be a number above 0, not 'much'"),
        ]
    ):
        with pytest.raises(ConfigError, match=f"train.positive_weight: .*{says}"):
            start(rare / "rare", tmp_path / str(number), f"train.positive_weight={value}")
    _, problems = compose(None, {}, ["train.positive_weight=[1]"])
    assert problems == ["train.positive_weight: must be a number, or a mapping of labels to numbers, not [1]"]
