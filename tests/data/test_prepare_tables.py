"""prepare from tables in memory, Arrow datasets and Hugging Face directories: the same as from the same rows in a file."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

import hotbed
from hotbed.data.prepare.prepare import prepare
from hotbed.errors import ConfigError, FormatError
from tests.data.prepare_jobs import digest

ROWS = 1000
TABLE = pa.table(
    {
        "label": np.arange(ROWS) % 2,
        "city": [f"c{i % 13}" for i in range(ROWS)],
        "price": np.arange(ROWS) / 7,
        "tags": [[str(k) for k in range(i % 4)] for i in range(ROWS)],
    }
)


def rows_of(directory) -> dict[str, str]:
    """All but the schema, which names its sources."""
    return {name: value for name, value in digest(directory).items() if name != "schema.json"}


@pytest.fixture
def expected(tmp_path):
    pq.write_table(TABLE, tmp_path / "f.parquet")
    prepare([tmp_path / "f.parquet"], tmp_path / "file", split="train=0.7,test=0.3")
    return rows_of(tmp_path / "file")


def test_a_table(tmp_path, expected, monkeypatch):
    report = hotbed.prepare(TABLE, tmp_path / "out", split="train=0.7,test=0.3")
    assert rows_of(tmp_path / "out") == expected
    assert report.schema.notes["sources"] == ["table 1"]
    assert report.schema.raw_format == "parquet"
    monkeypatch.setattr("hotbed.data.prepare.inputs._REEL_ROWS", 300)
    hotbed.prepare([TABLE], tmp_path / "reels", split="train=0.7,test=0.3")
    assert rows_of(tmp_path / "reels")["counts/city.parquet"] == expected["counts/city.parquet"]


def test_named_tables(tmp_path):
    batch = TABLE.slice(800).combine_chunks().to_batches()[0]
    schema = prepare([("train", TABLE.slice(0, 800)), ("test", batch)], tmp_path / "out").schema
    assert {name: split.rows for name, split in schema.splits.items()} == {"train": 800, "test": 200}


def test_a_data_frame(tmp_path, expected):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({name: TABLE[name].to_pylist() for name in TABLE.column_names})
    prepare(frame, tmp_path / "out", split="train=0.7,test=0.3")
    assert rows_of(tmp_path / "out") == expected


def test_an_arrow_dataset_of_many_files(tmp_path, expected):
    (tmp_path / "parts").mkdir()
    for number, begin in enumerate(range(0, ROWS, 300)):
        pq.write_table(TABLE.slice(begin, 300), tmp_path / "parts" / f"{number}.parquet")
    data = pa.dataset.dataset(tmp_path / "parts")
    prepare(data, tmp_path / "out", split="train=0.7,test=0.3")
    made = rows_of(tmp_path / "out")
    assert made["counts/city.parquet"] == expected["counts/city.parquet"]
    assert made["counts/tags.parquet"] == expected["counts/tags.parquet"]


def test_partition_columns_of_an_arrow_dataset(tmp_path):
    for day in (1, 2):
        (tmp_path / "parts" / f"day={day}").mkdir(parents=True)
        pq.write_table(TABLE.slice(0, 100), tmp_path / "parts" / f"day={day}" / "0.parquet")
    data = pa.dataset.dataset(tmp_path / "parts", partitioning="hive")
    schema = prepare(data, tmp_path / "out", ids=["day"]).schema
    assert {feature.name: feature.distinct for feature in schema.features}["day"] == 2
    assert schema.splits["train"].rows == 200


def save_to_disk(directory, table, shards=2, **state) -> None:
    """What `datasets.Dataset.save_to_disk` writes."""
    directory.mkdir(parents=True)
    names = [f"data-{k:05d}-of-{shards:05d}.arrow" for k in range(shards)]
    each = -(-len(table) // shards)
    for k, name in enumerate(names):
        with pa.ipc.new_stream(str(directory / name), table.schema) as writer:
            writer.write_table(table.slice(k * each, each))
    listed = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None, **state}
    (directory / "state.json").write_text(json.dumps(listed))
    (directory / "dataset_info.json").write_text(json.dumps({"features": {}}))


class TestHuggingFace:
    def test_a_dataset(self, tmp_path):
        save_to_disk(tmp_path / "hf", TABLE)
        schema = prepare([tmp_path / "hf"], tmp_path / "out").schema
        assert schema.splits["train"].rows == ROWS
        assert schema.notes["sources"] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
        assert schema.raw_format == "parquet"

    def test_a_dict_of_splits(self, tmp_path):
        for split, rows in (("train", 700), ("test", 300)):
            save_to_disk(tmp_path / "hf" / split, TABLE.slice(0, rows))
        (tmp_path / "hf" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
        schema = prepare(str(tmp_path / "hf"), tmp_path / "out").schema
        assert {name: split.rows for name, split in schema.splits.items()} == {"train": 700, "test": 300}

    @pytest.mark.parametrize(
        ("state", "message"),
        [
            ({"_indices_data_files": [{"filename": "i.arrow"}]}, "flatten_indices"),
            ({"_data_files": [{"filename": "gone.arrow"}]}, r"gone\.arrow, which cannot be read"),
            ({"_data_files": []}, "no files"),
            ({"_data_files": 3}, "does not list data files"),
        ],
    )
    def test_damage(self, tmp_path, state, message):
        save_to_disk(tmp_path / "hf", TABLE, **state)
        with pytest.raises(FormatError, match=message):
            prepare([tmp_path / "hf"], tmp_path / "out")


class TestWrongInputs:
    def test_a_table_without_rows(self, tmp_path):
        with pytest.raises(FormatError, match="no good row"):
            prepare(TABLE.slice(0, 0), tmp_path / "out")

    def test_a_table_needs_no_format(self, tmp_path):
        with pytest.raises(ConfigError, match="a table needs none"):
            prepare(TABLE, tmp_path / "out", format="csv")

    @pytest.mark.parametrize(
        ("second", "message"),
        [
            ({"label": [0], "city": [["x"]], "price": [1.0], "tags": [["a"]]}, r"b\.parquet: column city holds lists"),
            ({"label": [0], "city": ["x"], "price": [[1.0]], "tags": [["a"]]}, r"b\.parquet: number column price"),
            ({"label": [0], "city": ["x"], "price": ["dear"], "tags": [["a"]]}, "price is not a number"),
            ({"label": [0], "city": ["x"], "price": [1.0], "tags": ["a"]}, r"b\.parquet: column tags holds single"),
            ({"label": [[0]], "city": ["x"], "price": [1.0], "tags": [["a"]]}, r"b\.parquet: label column"),
        ],
    )
    def test_mixed_schemas(self, tmp_path, second, message):
        pq.write_table(TABLE.slice(0, 10), tmp_path / "a.parquet")
        pq.write_table(pa.table(second), tmp_path / "b.parquet")
        with pytest.raises(FormatError, match=message):
            prepare([tmp_path / "a.parquet", tmp_path / "b.parquet"], tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_corrupt_row_group(self, tmp_path):
        path = tmp_path / "f.parquet"
        pq.write_table(TABLE, path, row_group_size=100)
        place = pq.ParquetFile(path).metadata.row_group(7).column(1).data_page_offset
        data = bytearray(path.read_bytes())
        data[place : place + 40] = b"\xff" * 40
        path.write_bytes(data)
        with pytest.raises(FormatError, match=r"f\.parquet is not Parquet or Arrow, or is damaged"):
            prepare([path], tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_an_empty_file_among_others(self, tmp_path):
        pq.write_table(TABLE.slice(0, 10), tmp_path / "a.parquet")
        pq.write_table(TABLE.slice(0, 0), tmp_path / "b.parquet")
        schema = prepare([tmp_path / "b.parquet", tmp_path / "a.parquet"], tmp_path / "out").schema
        assert schema.splits["train"].rows == 10  # a file without rows is no error
        (tmp_path / "c.parquet").write_bytes(b"")
        with pytest.raises(FormatError, match=r"c\.parquet is not Parquet"):
            prepare([tmp_path / "a.parquet", tmp_path / "c.parquet"], tmp_path / "more")

    @pytest.mark.parametrize(
        "place", ["hotbed.data.prepare.arrays.os.replace", "hotbed.data.prepare.write.ArrowWriter.write"]
    )
    def test_a_full_disk(self, tmp_path, monkeypatch, place):
        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(place, full)
        with pytest.raises(hotbed.errors.DataError, match="No space left"):
            prepare(TABLE, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []
