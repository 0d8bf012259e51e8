import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.data.dataset import Dataset
from hotbed.errors import RunError
from hotbed.run.model_card import read_card
from hotbed.train.model_folder import load_weights, save_model, weights_of
from tests.train.small import write_dataset


@pytest.fixture
def built(start, tmp_path):
    return start(tmp_path / "run")


def test_a_model_folder_holds_what_scoring_needs(built, dataset, tmp_path):
    folder = tmp_path / "run" / "model"
    save_model(folder, built.training.learner, dataset, built.subject.card)
    card = read_card(folder)
    assert card["model"]["name"] == "deepfm"
    assert card["tables"]["site"] == {"rows": 31, "dim": 5, "pooling": "sum", "hashing": True}
    assert json.loads((folder / "schema.json").read_text())["splits"] == {}
    assert [path.name for path in (folder / "counts").iterdir()] == ["user.parquet"]
    assert set(weights_of(built.training.learner.tables)) == {"user.weight", "tags.weight", "ad.weight", "site.weight"}


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_dataset_that_was_replaced_meanwhile_gives_no_id_lists(built, tmp_path, how):
    """Of the same size and schema: only the numbers of the ids are others."""
    data = Dataset.open(write_dataset(tmp_path / "data"))
    assert data.fingerprint
    path = tmp_path / "data" / "counts" / "user.parquet"
    if how == "removed":
        shutil.rmtree(tmp_path / "data")
    else:
        counts = pq.read_table(path)
        pq.write_table(counts.set_column(0, "id", pa.array(counts["id"].to_numpy()[::-1])), path)
    with pytest.raises(
        RunError, match=r"on which the model was trained, (was replaced meanwhile|can no longer be opened)"
    ):
        save_model(tmp_path / "model", built.training.learner, data, built.subject.card)
    assert not (tmp_path / "model").exists()


def test_what_is_no_model_is_reported(built, dataset, tmp_path):
    with pytest.raises(RunError, match="there is no"):
        read_card(tmp_path / "absent" / "model")
    with pytest.raises(RunError, match="holds no trained model"):
        read_card(tmp_path / "model")
    folder = tmp_path / "model"
    save_model(folder, built.training.learner, dataset, {**built.subject.card, "format_version": 9})
    with pytest.raises(RunError, match="format version 9"):
        read_card(folder)
    (folder / "model.json").unlink()
    with pytest.raises(RunError, match="is damaged"):
        read_card(folder)


def test_weights_of_another_model_are_reported(built, start, dataset, tmp_path):
    folder = tmp_path / "model"
    save_model(folder, built.training.learner, dataset, built.subject.card)
    for change in ("model.dim=8", "model.options.hidden=[9]"):
        other = start(tmp_path / "other", change).training.learner
        with pytest.raises(RunError, match="do not fit the model"):
            load_weights(folder, other.model, other.tables)
