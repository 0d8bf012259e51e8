"""Sequences: prepare cuts them, and every reader gives the same ids in the same order."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.data.dataset import Dataset
from hotbed.data.hash import hash_string
from hotbed.data.loader.loader import Loader
from hotbed.data.prepare.prepare import prepare
from hotbed.data.raw_reader import RawReader
from hotbed.data.schema import Schema
from hotbed.errors import ConfigError, DataError

ROWS = 60
HISTORIES = [[(7 * row + 3 * k * k) % 23 for k in range(row % 9)] for row in range(ROWS)]


def write_csv(path):
    lines = [f"{row % 2},u{row % 7},{'|'.join(f'i{one}' for one in HISTORIES[row])}" for row in range(ROWS)]
    path.write_text("label,user,history\n" + "\n".join(lines) + "\n")
    return path


def sequences_of(batches, name="history"):
    found = []
    for batch in batches:
        bag = batch.bags[name]
        found += [bag.values[start:end].tolist() for start, end in zip(bag.offsets, bag.offsets[1:])]
    return found


def rows_of(dataset, values):
    """The row number of every value, by the counts of the dataset."""
    listed = dataset.counts("history").ids.tolist()
    return [listed.index(hash_string(f"i{one}")) + 1 for one in values]


@pytest.mark.parametrize(("option", "cut"), [("history:|:4", slice(-4, None)), ("history:|:4:first", slice(4))])
def test_prepare_keeps_one_end_in_order_and_every_reader_agrees(tmp_path, option, cut):
    raw = write_csv(tmp_path / "log.csv")
    prepare(raw, tmp_path / "data", sequence=[option])
    dataset = Dataset.open(tmp_path / "data")
    feature = dataset.feature("history")
    assert (feature.length, feature.keep, feature.multi) == (4, "last" if "first" not in option else "first", True)
    expected = [rows_of(dataset, one[cut]) for one in HISTORIES]
    assert sequences_of(Loader(dataset, "train", batch_size=16).epoch(0)) == expected
    assert sequences_of(RawReader(tmp_path / "data", [raw])) == expected


def test_lists_in_parquet_need_no_separator(tmp_path):
    table = pa.table({"label": np.arange(ROWS) % 2, "user": ["u"] * ROWS, "history": HISTORIES})
    pq.write_table(table, tmp_path / "log.parquet")
    prepare(tmp_path / "log.parquet", tmp_path / "data", sequence=["history::3"], ids_mode="raw")
    found = sequences_of(Loader(Dataset.open(tmp_path / "data"), "train", batch_size=64).epoch(0))
    assert found == [one[-3:] for one in HISTORIES]


def test_a_dataset_without_sequences_is_what_it_was(tmp_path):
    raw = write_csv(tmp_path / "log.csv")
    prepare(raw, tmp_path / "bags", multi={"history": "|"})
    text = (tmp_path / "bags" / "schema.json").read_text()
    assert '"length"' not in text  # older versions read it
    assert '"keep"' not in text
    prepare(raw, tmp_path / "data", sequence=["history:|:50"])
    schema = Schema.load(tmp_path / "data")
    assert schema.features[1].length == 50
    assert schema.identity() != Schema.load(tmp_path / "bags").identity()


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ("history", "COLUMN:SEPARATOR:LENGTH"),
        ("history:|:0", "1 or more"),
        ("history:|:9:middle", "history:|:50:first"),
        ("past:|:9", "--sequence past: no such column"),
        ("user:|:9", "both --ids and --sequence"),
    ],
)
def test_mistakes(tmp_path, sequence, message):
    with pytest.raises(ConfigError) as caught:
        prepare(write_csv(tmp_path / "log.csv"), tmp_path / "data", ids=["user"], sequence=[sequence])
    assert message in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_a_file_with_longer_sequences_than_the_schema_allows(tmp_path):
    prepare(write_csv(tmp_path / "log.csv"), tmp_path / "data", sequence=["history:|:8"])
    path = tmp_path / "data" / "schema.json"
    path.write_text(path.read_text().replace('"length": 8', '"length": 5'))
    with pytest.raises(DataError, match="a sequence of 'history' has 8 ids; the schema allows 5"):
        list(Loader(Dataset.open(tmp_path / "data"), "train", batch_size=64).epoch(0))
