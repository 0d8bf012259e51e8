"""Grouped AUC, metrics by slice and of several tasks: against loops over groups, and through a run."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.nn import functional as F

from hotbed.data.dataset import Dataset
from hotbed.data.hash import hash_string, short_text
from hotbed.data.loader.loader import Loader
from hotbed.data.prepare.prepare import prepare
from hotbed.data.raw_reader import RawReader
from hotbed.data.schema import Schema, Task
from hotbed.errors import ConfigError, FormatError
from hotbed.report import write_report
from hotbed.run.run_file import compose
from hotbed.train.build import build
from hotbed.train.metrics import Breakdown, SampleIds, auc, grouped_auc, measure_tasks
from hotbed.train.run import run
from hotbed.train.step import task_loss

ROWS = 1200


def by_loop(labels, scores, groups):
    found, total = 0.0, 0
    for group in np.unique(groups):
        mine = groups == group
        if 0 < labels[mine].sum() < mine.sum():
            found, total = found + auc(labels[mine], scores[mine]) * mine.sum(), total + int(mine.sum())
    return found / total


@pytest.mark.parametrize("size", [1, 2, 37, 500])
def test_grouped_auc_is_the_mean_over_groups(size):
    draws = np.random.default_rng(size)
    labels, scores = draws.integers(0, 2, size), draws.integers(0, 9, size) / 7.0  # ties
    groups = draws.integers(-4, 9, size) * 10**12
    found = grouped_auc(labels, scores, groups)
    both = [g for g in np.unique(groups) if 0 < labels[groups == g].sum() < (groups == g).sum()]
    assert found.groups == len(both)
    if both:
        assert found.auc == pytest.approx(by_loop(labels, scores, groups), abs=1e-12)
    else:
        assert math.isnan(found.auc)
    assert math.isnan(grouped_auc([], [], []).auc)


@pytest.mark.parametrize("text", ["a", "DE", "mobile", "12345678", "Köln"])
def test_short_strings_are_read_back_from_their_id(text):
    assert short_text(hash_string(text)) == text


def test_long_strings_are_not():
    assert short_text(hash_string("Switzerland")) is None
    assert short_text(-(2**63)) is None


def test_slices_have_the_names_of_their_ids():
    ids = SampleIds.__new__(SampleIds)
    listed = SimpleNamespace(ids=np.array([70, 80]))
    ids._dataset = SimpleNamespace(
        feature=lambda mode: SimpleNamespace(mode=mode, source="int"), counts=lambda mode: listed
    )
    assert ids._names("vocabulary", np.array([0, 1, 2])) == ["unknown", "70", "80"]
    assert ids._names("hash", np.array([0, 5])) == ["0", "5"]


def test_the_loss_is_a_weighted_sum_of_those_of_tasks():
    outputs = torch.randn(7, 3, requires_grad=True)
    labels = torch.stack([torch.arange(7) % 2, torch.arange(7) % 3 / 3, (torch.arange(7) > 2)], dim=1).float()
    weights = torch.rand(7)
    loss = task_loss(("binary", "regression", "binary"), (1.0, 0.5, 0.0), weighted=True)
    found, logits = loss(lambda vectors: vectors, outputs, labels, weights)
    first = F.binary_cross_entropy_with_logits(outputs[:, 0], labels[:, 0], reduction="none")
    second = (outputs[:, 1] - labels[:, 1]).square()
    torch.testing.assert_close(found, ((first + 0.5 * second) * weights).mean())
    assert logits is outputs
    one, _ = loss(lambda vectors: vectors[:, 0], outputs, labels, weights)  # a model of one task learns the label
    torch.testing.assert_close(one, (first * weights).mean())


def test_metrics_of_a_number():
    found = measure_tasks([Task("w", "regression")], np.array([[1.0], [3.0]]), np.array([[2.0], [3.0]]))["w"]
    assert (found["rmse"], found["mae"], found["r2"]) == (math.sqrt(0.5), 0.5, 0.5)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    """`like` and `watched` depend on the same taste as the label; a weight of 0 marks labels that were drawn at random."""
    draws, folder = np.random.default_rng(0), tmp_path_factory.mktemp("data")
    user, item, country = draws.integers(0, 20, ROWS), draws.integers(0, 20, ROWS), draws.integers(0, 3, ROWS)
    taste = np.sin(user * 1.7)[:, None] * np.sin(item * 2.3)[:, None]
    wrong = draws.random(ROWS) < 0.3
    label = np.where(wrong, draws.integers(0, 2, ROWS), taste[:, 0] > 0)
    table = pa.table(
        {
            "click": label.astype(int),
            "user": [f"u{one}" for one in user],
            "item": [f"i{one}" for one in item],
            "country": [["DE", "FR", "Switzerland"][one] for one in country],
            "like": (taste[:, 0] > 0.3).astype(int),
            "watched": 3 * taste[:, 0] + 1,
            "sure": np.where(wrong, 0.0, 1.0),
        }
    )
    options = {"label": "click", "task": ["like", "watched:regression"], "weight": "sure"}
    prepare(table, folder / "clicks", split="train=0.7,test=0.3", **options)
    return Dataset.open(folder / "clicks")


def test_targets_and_weights_come_with_batches_and_not_with_features(clicks):
    schema = clicks.schema
    assert [one.name for one in schema.features] == ["user", "item", "country"]
    assert schema.dense == ()
    assert (schema.tasks, schema.weight) == ((Task("like"), Task("watched", "regression")), "sure")
    for size in (64, 20_000):  # parts of a slab, a whole one
        batch = next(Loader(clicks, "train", batch_size=size).epoch(0))
        assert batch.dense.shape == (batch.size, 0)
        assert set(batch.targets[:, 0].tolist()) == {0.0, 1.0}
        assert float(batch.targets[:, 1].max()) > 3
        assert set(batch.weights.tolist()) == {0.0, 1.0}
        moved = batch.to("meta")
        assert moved.targets.shape == batch.targets.shape
        assert moved.weights.shape == batch.weights.shape
    ids = next(Loader(clicks, "train", batch_size=64).id_batches(0))
    assert (ids.targets, ids.weights) == (None, None)


def start(clicks, folder, *sets):
    given = ["train.device=cpu", "data.batch_size=32", "model.dim=4", "train.epochs=6", "dense.lr=0.01", *sets]
    config, problems = compose(None, {"data.path": str(clicks.path)}, given)
    assert problems == []
    folder.mkdir()
    (folder / "config.json").write_text(config.to_json())
    return build(config, clicks, folder)


def test_mmoe_learns_all_tasks_and_the_report_shows_them(clicks, tmp_path):
    built = start(clicks, tmp_path / "run", "model.name=mmoe", "train.group=user", "train.slice=country")
    summary = run(built.training, built.subject).summary
    more = summary["more"]["test"]
    assert more["tasks"]["like"]["auc"] > 0.75  # planted
    assert more["tasks"]["watched"]["samples"] == summary["final"]["test"]["samples"]
    assert more["grouped_auc"]["groups"] == 19  # one user of test has one kind of label
    slices = {one["value"]: one["samples"] for one in more["by"]["country"]}
    assert set(slices) - {"DE", "FR"} == {str(hash_string("Switzerland"))}
    assert sum(slices.values()) == summary["final"]["test"]["samples"]
    page = write_report(tmp_path / "run").read_text()
    assert "Metrics by country" in page
    assert "AUC within user" in page
    assert "watched" in page
    json.dumps(summary["more"])


def test_mmoe_learns_two_kinds_of_clicks_and_a_number(tmp_path):
    """Planted: tastes of users and items for either click, and a number that is a product of the two."""
    draws, size = np.random.default_rng(0), 6000
    user, item = draws.integers(0, 30, (2, size))
    of_user, of_item = draws.normal(size=(2, 2, 30))
    liking = of_user[:, user] + of_item[:, item] + draws.normal(0, 0.5, (2, size))
    watched = 2 + of_user[0, user] * of_item[0, item] + draws.normal(0, 0.5, size)
    columns = {"click": liking[0] > 0, "like": liking[1] > 0, "watched": watched}
    ids = {"user": [f"u{one}" for one in user], "item": [f"i{one}" for one in item]}
    table = pa.table({name: values.astype(np.float64) for name, values in columns.items()} | ids)
    prepare(table, tmp_path / "data", split="train=0.8,test=0.2", label="click", task=["like", "watched:regression"])
    built = start(Dataset.open(tmp_path / "data"), tmp_path / "run", "model.name=mmoe")
    summary = run(built.training, built.subject).summary
    tasks = summary["more"]["test"]["tasks"]
    assert summary["final"]["test"]["auc"] > 0.9
    assert tasks["like"]["auc"] > 0.9
    assert tasks["watched"]["r2"] > 0.7  # of 0.88 that noise leaves


def test_samples_of_no_weight_are_not_learned(clicks, tmp_path):
    """Labels that were drawn at random have weight 0: the rows are those of a run without such samples."""
    built = start(clicks, tmp_path / "run", "model.name=lr", "train.max_steps=1", "tables.optimizer=sgd")
    batch = next(built.training.loaders.train.epoch(0))
    learner = built.training.learner
    before = learner.tables.weight("user").clone()
    learner.step(batch)
    moved = (learner.tables.weight("user") != before).any(1).nonzero().view(-1).tolist()
    assert set(moved) == set(batch.ids[batch.weights > 0][:, 0].tolist())


def test_weights_of_tasks_are_checked(clicks, tmp_path):
    with pytest.raises(ConfigError, match=r"has no label 'likes'; there are click, like, watched"):
        start(clicks, tmp_path / "a", "model.name=mmoe", "train.task_weights={likes: 2}")
    with pytest.raises(ConfigError, match="the weight of like must be a number from 0, not -1"):
        start(clicks, tmp_path / "b", "model.name=mmoe", "train.task_weights={like: -1}")
    with pytest.raises(ConfigError, match="the weight of like must be a number from 0, not True"):
        start(clicks, tmp_path / "d", "model.name=mmoe", "train.task_weights={like: true}")
    with pytest.raises(ConfigError, match="the weight of like must be a number from 0, not 'much'"):
        start(clicks, tmp_path / "e", "model.name=mmoe", "train.task_weights={like: much}")
    with pytest.raises(ConfigError, match=r"train.group: 'usr' is not an id feature with one id per sample"):
        start(clicks, tmp_path / "c", "train.group=usr")
    with pytest.raises(ConfigError, match="slice: 'town' is not an id feature"):
        SampleIds(Breakdown(by=("town",)), clicks)


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [("like", "2", "like is not 0 or 1"), ("sure", "-1", "weight sure is below 0"), ("like", "", "like is missing")],
)
def test_values_that_cannot_be_learned_from_are_bad_rows(tmp_path, column, value, reason):
    row = {"click": "1", "user": "a", "like": "0", "sure": "1"}
    rows = [row] * 3 + [{**row, column: value}]
    (tmp_path / "log.csv").write_text("\n".join([",".join(row), *(",".join(one.values()) for one in rows)]) + "\n")
    options = {"label": "click", "task": ["like"], "weight": "sure", "ids": ["user"]}
    with pytest.raises(FormatError, match=reason):
        prepare(tmp_path / "log.csv", tmp_path / "none", **options)
    report = prepare(tmp_path / "log.csv", tmp_path / "data", **options, max_bad=1)
    assert report.bad_rows == {reason: 1}
    assert Schema.load(tmp_path / "data").tasks == (Task("like"),)


def test_a_column_has_one_use(tmp_path):
    (tmp_path / "log.csv").write_text("click,user\n1,a\n")
    with pytest.raises(ConfigError, match="in both --label and --task"):
        prepare(tmp_path / "log.csv", tmp_path / "data", label="click", task=["click"])
    with pytest.raises(ConfigError, match="--weight sure: no such column"):
        prepare(tmp_path / "log.csv", tmp_path / "data", label="click", weight="sure")


def test_raw_rows_to_learn_from_have_all_labels_and_weights(tmp_path):
    """As `train --follow` reads them."""
    log = tmp_path / "log.csv"
    log.write_text("click,user,like,sure\n1,a,0,0.5\n0,b,1,2\n1,c,,1\n")
    options = {"label": "click", "task": ["like"], "weight": "sure", "ids": ["user"], "max_bad": 1}
    prepare(log, tmp_path / "data", **options)
    reader = RawReader(tmp_path / "data", [log], max_bad="1", needs_labels=True)
    (batch,) = reader
    assert reader.quarantine.bad_rows == 1
    assert reader.columns == ["click", "like", "sure", "user"]
    assert (batch.targets.tolist(), batch.weights.tolist()) == ([[0.0], [1.0]], [0.5, 2.0])
    (scored,) = RawReader(tmp_path / "data", [log])
    assert scored.weights is None
    assert scored.targets[:2].tolist() == [[0.0], [1.0]]
    assert math.isnan(scored.targets[2, 0])
