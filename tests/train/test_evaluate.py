from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from hotbed.data.schema import Task
from hotbed.errors import RunError
from hotbed.run.predictions import predict, split_batches
from hotbed.train.evaluation import _measure, _whole, evaluate
from hotbed.train.metrics import measure


@pytest.fixture
def training(start, tmp_path):
    return start(tmp_path / "run", "data.eval_batch_size=37").training


def test_every_sample_counts_once(training):
    found = evaluate(training.learner, training.loaders.held_out["valid"])
    assert found is not None
    assert found.metrics.samples == len(found.labels) == len(found.logits) == 400
    assert found.metrics == measure(found.labels, found.logits)


def test_it_can_be_stopped(training):
    calls = iter([False, False, True])
    assert evaluate(training.learner, training.loaders.held_out["valid"], lambda: next(calls)) is None


def test_a_model_that_has_diverged_is_reported(training):
    training.learner.tables.weight("user").fill_(float("nan"))
    with pytest.raises(Exception, match="diverged"):
        evaluate(training.learner, training.loaders.held_out["valid"])


def test_tasks_are_measured_where_there_are_targets_and_scores_of_them():
    labels, outputs, targets = (
        np.array([0.0, 1.0, 1.0]),
        np.array([[0.1, 0.2], [0.4, 0.3], [0.2, 0.5]]),
        np.ones((3, 1)),
    )
    loader = SimpleNamespace(dataset=SimpleNamespace(schema=SimpleNamespace(tasks=(Task("buy", "binary"),))))
    ids = SimpleNamespace(measure=lambda *scored: {})
    scored = (labels, outputs, np.zeros((3, 0)))
    assert "tasks" in _measure([*scored, targets], loader, ids)[1]
    assert "tasks" not in _measure(scored, loader, ids)[1]
    assert "tasks" not in _measure([labels, outputs[:, :1], scored[2], targets], loader, ids)[1]


def test_scores_of_all_ranks_are_on_the_first():
    own = np.arange(4.0)
    assert _whole([own, own[:0], own[:2]], own).tolist() == [0, 1, 2, 3, 0, 1]
    assert _whole([], own).shape == (0,)


@pytest.mark.parametrize("name", ["scores.parquet", "scores.csv"])
def test_scores_are_the_probabilities_of_the_logits(training, tmp_path, name):
    loader = training.loaders.held_out["test"]
    found = evaluate(training.learner, loader)
    assert found is not None
    assert predict(training.learner, split_batches(loader), tmp_path / name) == 300
    if name.endswith("csv"):
        row, label, score = np.loadtxt(tmp_path / name, delimiter=",", skiprows=1).T
    else:
        row, label, score = (column.to_numpy() for column in pq.read_table(tmp_path / name).columns)
    np.testing.assert_array_equal(row, np.arange(300))
    np.testing.assert_array_equal(label, found.labels)
    np.testing.assert_allclose(score, 1 / (1 + np.exp(-found.logits.astype(np.float64))), rtol=1e-12)


def test_scores_appear_whole_or_not_at_all(training, tmp_path):
    path = tmp_path / "scores.parquet"
    batches = split_batches(training.loaders.held_out["test"])

    def broken():
        yield next(batches)
        raise RunError("the input broke off")

    with pytest.raises(RunError, match="broke off"):
        predict(training.learner, broken(), path)
    with pytest.raises(RunError, match="nothing to score"):
        predict(training.learner, iter([]), path)
    training.learner.tables.weight("user").fill_(float("nan"))
    with pytest.raises(RunError, match="diverged"):
        predict(training.learner, split_batches(training.loaders.held_out["test"]), path)
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_scores_have_two_formats(training, tmp_path):
    with pytest.raises(RunError, match=r"written as \.parquet or \.csv; .*ends in '\.txt'"):
        predict(training.learner, iter([]), tmp_path / "scores.txt")


def test_an_unwritable_place_is_reported(training, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        predict(training.learner, split_batches(training.loaders.held_out["test"]), tmp_path / "file" / "s.csv")
