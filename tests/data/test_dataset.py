"""Opening a dataset directory: what is wrong is said, with the file and the way out, before a run starts."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.data import workspace
from hotbed.data.dataset import Dataset
from hotbed.data.synthetic import write_dataset
from hotbed.errors import ConfigError, SchemaError
from tests.data.small import make_dataset, make_table, replace_column, write_rows

PART = "train/part-00000.arrow"


@pytest.fixture
def directory(tmp_path) -> Path:
    make_dataset(tmp_path / "d", {"train": [25, 5], "test": [7]}, bags=True)
    return tmp_path / "d"


def refused(directory: Path, *words: str) -> None:
    with pytest.raises(SchemaError) as caught:
        Dataset.open(directory)
    for word in words:
        assert word in str(caught.value)


def test_an_intact_directory_opens(directory):
    dataset = Dataset.open(str(directory))
    assert dataset.path == directory
    assert [group.rows for group in dataset.split("train")] == [10, 10, 5, 5]
    assert [(group.file.name, group.number) for group in dataset.split("train")][-2:] == [
        ("part-00000.arrow", 2),
        ("part-00001.arrow", 0),
    ]
    assert dataset.feature("tags").multi


def test_absent_and_damaged_files(directory):
    refused(directory.parent / "nowhere", "no schema.json", "hotbed prepare")
    part = directory / PART
    intact = part.read_bytes()
    for damaged in (b"", b"ARROW1", intact[: len(intact) // 2], intact[:-1], b"junk" * 100):
        part.write_bytes(damaged)
        refused(directory, str(part), "not a readable Arrow file", "hotbed prepare")
    part.unlink()
    refused(directory, str(part), "does not exist")
    part.mkdir()
    refused(directory, str(part), "does not exist")


def test_a_damaged_parquet_file(tmp_path):
    """As hotbed 0.1 wrote them."""
    make_dataset(tmp_path, {"train": [25]}, kind="parquet")
    assert Dataset.open(tmp_path).row_groups["train"][0].rows == 10
    part = tmp_path / "train/part-00000.parquet"
    for damaged in (b"", b"PAR1", part.read_bytes()[:-1]):
        part.write_bytes(damaged)
        refused(tmp_path, str(part), "not a readable Parquet file", "hotbed prepare")


def test_columns_and_types(directory):
    part = directory / PART
    table = make_table(25, bags=True)
    write_rows(table.drop_columns(["x"]), part)
    refused(directory, str(part), "no column 'x'", "y (float)")
    write_rows(table, part)
    wrong = {
        "label": pa.array([0] * 25, pa.int64()),
        "x": pa.array([0.0] * 25, pa.float64()),
        "a": pa.array(["1"] * 25),
        "b": pa.array([1.0] * 25, pa.float32()),
        "tags": pa.array([1] * 25, pa.int32()),
    }
    for name, values in wrong.items():
        replace_column(part, name, values)
        refused(directory, str(part), f"column '{name}' has type {values.type}", "must be")
        write_rows(table, part)
    replace_column(part, "tags", pa.array([[1]] * 25, pa.large_list(pa.int64())))
    Dataset.open(directory)


def test_row_counts(directory):
    write_rows(make_table(24, bags=True), directory / PART)
    refused(directory, PART, "holds 24 rows; schema.json says 25")


def test_a_schema_that_contradicts_itself(directory):
    path = directory / "schema.json"
    text = path.read_text()
    raw = json.loads(text)
    raw["features"][0]["name"] = "x"
    path.write_text(json.dumps(raw))
    refused(directory, "schema.json", "x more than once")
    raw = json.loads(text)
    raw["splits"]["train"]["file_rows"] = [30]
    path.write_text(json.dumps(raw))
    refused(directory, "split train lists 2 files and 1 row counts")


def test_counts(directory):
    dataset = Dataset.open(directory)
    ids, counts = dataset.counts("a")
    assert ids.dtype == counts.dtype == np.int64
    assert np.all(np.diff(counts) <= 0)
    with pytest.raises(SchemaError, match="no id feature 'c'; its features are: a, b, tags"):
        dataset.counts("c")


def test_bad_counts_files(directory):
    dataset = Dataset.open(directory)
    path = directory / "counts" / "a.parquet"
    tables = {
        "int64 columns id and count": pa.table({"id": [1.5], "count": [1]}),
        "empty entries": pa.table({"id": pa.array([None], pa.int64()), "count": [1]}),
    }
    for message, table in tables.items():
        pq.write_table(table, path)
        with pytest.raises(SchemaError, match=message):
            dataset.counts("a")
    pq.write_table(pa.table({"id": [1]}), path)
    with pytest.raises(SchemaError, match=r"a\.parquet"):
        dataset.counts("a")
    path.write_bytes(b"junk")
    with pytest.raises(SchemaError, match="cannot be read"):
        dataset.counts("a")
    path.unlink()
    with pytest.raises(SchemaError, match="does not exist"):
        dataset.counts("a")


def test_an_unknown_split_lists_the_known_ones(directory):
    with pytest.raises(SchemaError, match="no split 'valid'; its splits are: test, train"):
        Dataset.open(directory).split("valid")


def test_statistics_do_not_change_a_fingerprint(directory):
    """A dataset made before they existed stays the dataset a run was trained on."""
    dataset = Dataset.open(directory)
    schema = dataset.schema
    known = [dataclasses.replace(one, counting="sketch", count_error=7, lookups=9) for one in schema.features]
    dataclasses.replace(schema, features=tuple(known)).save(directory)
    again = Dataset.open(directory)
    assert again.schema.features[0].count_error == 7
    assert again.fingerprint == dataset.fingerprint


def test_files_that_changed_places(tmp_path):
    directory = tmp_path / "d"
    write_dataset(directory, train=200, valid=100, test=100)
    splits = [directory / split / "part-00000.arrow" for split in ("valid", "test")]
    contents = [file.read_bytes() for file in splits]
    for file, content in zip(splits, reversed(contents)):
        file.write_bytes(content)
    with pytest.raises(SchemaError, match=r"it was written as valid/part-00000.arrow and is now test/part-00000.arrow"):
        Dataset.open(directory)


@pytest.mark.parametrize("when", ["flush_tree", "put_folder"])
def test_a_second_job_is_refused_until_the_first_has_moved_its_files(tmp_path, monkeypatch, when):
    out, said = tmp_path / "d", []
    real = getattr(workspace, when)

    def during(*arguments):
        with pytest.raises(ConfigError, match="another job is writing") as caught, workspace.Workspace(out):
            pass
        said.append(str(caught.value))
        real(*arguments)

    monkeypatch.setattr(workspace, when, during)
    write_dataset(out, train=200, valid=100, test=100)
    assert len(said) == 1
    assert Dataset.open(out).schema.splits["train"].rows == 200


def test_what_a_next_job_has_begun_stays_when_the_first_one_ends(tmp_path):
    first = workspace.Workspace(tmp_path / "d")
    with first:
        (first.path / "schema.json").write_text("{}")
        first.commit()
        second = workspace.Workspace(tmp_path / "d", overwrite=True)
        second.__enter__()
        (second.path / "begun").write_text("")
    assert (second.path / "begun").exists()
    second.__exit__(None, None, None)
    assert [one.name for one in tmp_path.iterdir()] == ["d"]
