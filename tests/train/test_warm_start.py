"""A new run from an older one's checkpoint."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hotbed.checkpoint.chain import find
from hotbed.data.dataset import Dataset
from hotbed.errors import RunError
from hotbed.train.run import run
from hotbed.train.warm_start import source_of, start_from
from tests.train.small import write_dataset


@pytest.fixture(scope="module")
def finished(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    built = start(folder)
    run(built.training, built.subject)
    return folder, built.training.learner


def test_the_same_dataset_carries_every_row(finished, start, dataset, tmp_path):
    folder, learner = finished
    built = start(tmp_path, "tables.cache=0.9")
    carried = start_from([find(folder)], tmp_path, built.training.learner, dataset)
    for table in learner.tables.tables:
        assert torch.equal(built.training.learner.tables.weight(table), learner.tables.weight(table))
    assert len(carried.notes) == 1
    assert json.loads((tmp_path / "warm_start.json").read_text())["rows"] == carried.rows
    assert run(built.training, built.subject).summary["finished"]


@pytest.fixture
def renumbered(tmp_path):
    """The same ids of `user`, rarest first now, and two of them replaced by new ones."""
    path = write_dataset(tmp_path / "data" / "clicks", seed=1)
    ids = pq.read_table(path / "counts" / "user.parquet")["id"].to_numpy()[::-1].copy()
    ids[:2] = 10**6, 10**6 + 1
    pq.write_table(pa.table({"id": ids, "count": ids}), path / "counts" / "user.parquet")
    return Dataset.open(path)


def test_rows_follow_ids_that_the_dataset_numbers_otherwise(finished, start, renumbered, tmp_path):
    folder, learner = finished
    built = start(tmp_path / "run", data=renumbered)
    carried = start_from([find(folder)], tmp_path / "run", built.training.learner, renumbered)
    old, new = learner.tables.weight("user"), built.training.learner.tables.weight("user")
    assert torch.equal(new[0], old[0])  # the unknown
    assert torch.equal(new[3:], old[1:48].flip(0))
    assert any("rows whose ids the tables do not have: user 2" in note for note in carried.notes)
    assert torch.equal(built.training.learner.tables.weight("ad"), learner.tables.weight("ad"))


def test_without_the_old_numbers_nothing_is_guessed(start, renumbered, dataset, tmp_path):
    built = start(tmp_path / "old", "train.max_steps=3")
    built.training.train(lambda: False)
    built.training.close()
    other = start(tmp_path / "run", data=renumbered)
    fresh = other.training.learner.tables.weight("user").clone()
    carried = start_from([find(tmp_path / "old")], tmp_path / "run", other.training.learner, renumbered)
    assert torch.equal(other.training.learner.tables.weight("user"), fresh)
    assert any("table user: the dataset numbers ids otherwise" in note for note in carried.notes)


def test_a_run_cannot_begin_from_itself(finished):
    folder, _ = finished
    with pytest.raises(RunError, match="cannot be started again from its own checkpoint"):
        source_of(folder, folder)
