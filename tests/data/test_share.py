"""Columns with the same ids share one vocabulary and one table: `prepare --share`."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hotbed
from hotbed.data.dataset import Dataset, describe, hot_rows
from hotbed.data.hash import hash_string
from hotbed.data.prepare import merge
from hotbed.data.prepare.arrays import write_arrays
from hotbed.data.prepare.merge import BYTES_OF_ID, CountedPiece, IdRule, load_feature, merge_table
from hotbed.data.raw_reader import RawReader
from hotbed.data.schema import IdFeature, Schema
from hotbed.errors import ConfigError, SchemaError
from tests.data.raw_files import write

ROWS = [("a", "b|c"), ("b", "b"), ("c", ""), ("b", "e|e|e"), ("a", "d|a")]
OPTIONS = {"sequence": ["history:|:2"], "share": {"history": "item"}}


@pytest.fixture
def log(tmp_path):
    lines = [f"{n % 2},{item},{n % 3},{history}" for n, (item, history) in enumerate(ROWS)]
    return write(tmp_path / "log.csv", "label,item,hour,history", *lines)


def columns(path, schema):
    return pa.ipc.open_file(path / schema.splits["train"].files[0]).read_all()


def test_one_vocabulary_numbers_the_ids_of_both(log, tmp_path):
    schema = hotbed.prepare(log, tmp_path / "data", ids=["hour"], **OPTIONS).schema
    assert [(one.name, one.table) for one in schema.features] == [
        ("item", "item"),
        ("history", "item"),  # beside it, also if other columns were between them
        ("hour", "hour"),
    ]
    kept = [history.split("|")[-2:] if history else [] for _, history in ROWS]
    uses = Counter(item for item, _ in ROWS) + Counter(one for history in kept for one in history)
    counts = Dataset.open(tmp_path / "data").counts("history")
    assert sorted(path.stem for path in (tmp_path / "data" / "counts").iterdir()) == ["hour", "item"]
    raw = {one: hash_string(one) for one in "abcde"}
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist())) == {raw[one]: uses[one] for one in "abcde"}
    row_of = {id_: 1 + row for row, id_ in enumerate(counts.ids.tolist())}
    rows = columns(tmp_path / "data", schema)
    assert rows["item"].to_pylist() == [row_of[raw[item]] for item, _ in ROWS]
    assert rows["history"].to_pylist() == [[row_of[raw[one]] for one in history] for history in kept]
    item, history, _ = schema.features
    assert (item.rows, item.distinct, item.lookups) == (6, 5, 5)
    assert (history.rows, history.distinct, history.lookups) == (6, 5, 7)


def test_ids_below_min_count_are_counted_over_both_and_unlisted_by_column(log, tmp_path):
    schema = hotbed.prepare(log, tmp_path / "data", drop=["hour"], min_count=3, **OPTIONS).schema
    item, history = schema.features  # a: 3, b: 4, c: 2, d: 1, e: 2
    assert item.rows == history.rows == 3
    assert (item.unlisted_lookups, history.unlisted_lookups) == (1, 4)


def test_raw_rows_are_numbered_as_the_dataset_is(log, tmp_path):
    schema = hotbed.prepare(log, tmp_path / "data", drop=["hour"], **OPTIONS).schema
    (batch,) = RawReader(tmp_path / "data", [log])
    rows = columns(tmp_path / "data", schema)
    assert batch.ids[:, 0].tolist() == rows["item"].to_pylist()
    assert batch.bags["history"].values.tolist() == [one for bag in rows["history"].to_pylist() for one in bag]


def test_a_shared_table_is_counted_once(log, tmp_path):
    hotbed.prepare(log, tmp_path / "data", ids=["hour"], **OPTIONS)
    dataset = Dataset.open(tmp_path / "data")
    assert [one["name"] for one in describe(dataset)["features"]] == ["item", "hour"]
    assert describe(dataset)["total"]["rows"] == 6 + 4
    keys, uses = hot_rows(dataset, 100)
    assert keys.tolist() == [1, 2, 3, 4, 5, 7, 8, 9]
    assert uses.sum() == 12 + 5


def test_whole_numbers_and_text_have_the_same_ids(tmp_path):
    table = pa.table({"label": [0, 1], "item": [7, 8], "history": ["8|7", "8"]})
    schema = hotbed.prepare(table, tmp_path / "data", ids=["item"], **OPTIONS).schema
    assert {one.source for one in schema.features} == {"string"}
    rows = columns(tmp_path / "data", schema)
    seven, eight = rows["item"].to_pylist()
    assert rows["history"].to_pylist() == [[eight, seven], [eight]]


@pytest.mark.parametrize("mode", ["hash", "raw"])
def test_other_ids_share_too(log, tmp_path, mode):
    rows = {"hash_rows": 50} if mode == "hash" else {}
    schema = hotbed.prepare(log, tmp_path / "data", drop=["hour"], ids_mode=mode, **rows, **OPTIONS).schema
    assert {one.table for one in schema.features} == {"item"}
    assert Dataset.open(tmp_path / "data").counts("item").counts.sum() == 12


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (
            {"history": "thing"},
            "--share history=thing: thing is not a column of ids. They are: item, hour_bucket, history",
        ),
        ({"history": "price"}, "price is not a column of ids"),
        ({"item": "item"}, "--share item=item: item must have a table of its own"),
        ({"history": "item", "item": "other"}, "item must have a table of its own"),
        (
            {"hour_bucket": "item"},
            r"the values of item \(string\), hour_bucket \(bucket\) become ids in different ways",
        ),
    ],
)
def test_what_cannot_share_is_refused(log, tmp_path, share, said):
    with pytest.raises(ConfigError, match=said):
        hotbed.prepare(log, tmp_path / "data", integers="bucket", **{**OPTIONS, "share": share})
    assert not (tmp_path / "data").exists()


def test_a_schema_without_sharing_is_written_as_before_and_a_wrong_one_is_refused(tmp_path):
    plain = Schema("y", (), (IdFeature("a", 4), IdFeature("b", 4)), {})
    plain.save(tmp_path)
    tree = json.loads((tmp_path / "schema.json").read_text())
    assert all("shares" not in one for one in tree["features"])
    assert Schema.load(tmp_path) == plain
    for wrong in (
        [{"shares": "c"}, {}],  # there is no c
        [{"shares": "b", "rows": 5}, {}],
        [{"shares": "b", "mode": "hash"}, {}],
    ):
        features = [{**one, **more} for one, more in zip(tree["features"], wrong)]
        (tmp_path / "schema.json").write_text(json.dumps({**tree, "features": features}))
        with pytest.raises(SchemaError):
            Schema.load(tmp_path)
    apart = (IdFeature("a", 4), IdFeature("b", 4), IdFeature("c", 4, shares="a"))
    Schema("y", (), apart, {}).save(tmp_path)
    with pytest.raises(SchemaError, match="side by side"):
        Schema.load(tmp_path)


def test_a_killed_job_resumes_to_the_same_bytes(log, tmp_path, monkeypatch):
    hotbed.prepare(log, tmp_path / "data", ids=["hour"], **OPTIONS)
    written, write_whole = [], merge.write_whole

    def stop(path, text):
        written.append(path)
        if len(written) == 2:  # after the first feature of the table, before the second
            raise KeyboardInterrupt
        write_whole(path, text)

    monkeypatch.setattr(merge, "write_whole", stop)
    with pytest.raises(KeyboardInterrupt):
        hotbed.prepare(log, tmp_path / "other", ids=["hour"], **OPTIONS)
    monkeypatch.undo()
    hotbed.prepare(log, tmp_path / "other", ids=["hour"], **OPTIONS)
    files = [path.relative_to(tmp_path / "data") for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert files
    for file in files:
        assert (tmp_path / "other" / file).read_bytes() == (tmp_path / "data" / file).read_bytes(), file


def test_the_merged_counts_do_not_depend_on_memory(tmp_path):
    """A table whose ids do not fit is counted by a sketch over both columns."""
    draws = np.random.default_rng(0)
    lists = [np.minimum(draws.zipf(1.5, 4000), 900), np.minimum(draws.zipf(1.3, 3000), 900)]
    arrays = {}
    for number, ids in enumerate(lists):
        distinct, numbers = np.unique(ids.astype(np.int64), return_inverse=True)
        arrays |= {f"ids.{number}": [distinct], f"counts.{number}": [np.bincount(numbers)]}
    for folder in ("work", "counts"):
        (tmp_path / folder).mkdir()
    write_arrays(tmp_path / "work" / "p", arrays)
    features = {0: IdFeature("a", 0), 1: IdFeature("b", 0, shares="a")}
    pieces = [CountedPiece(tmp_path / "work" / "p", 4000, (0, 4000), whole=True)]
    merge_table(features, pieces, IdRule("vocabulary"), 200 * BYTES_OF_ID, tmp_path / "work")
    found = [load_feature(number, tmp_path / "work") for number in features]
    true = Counter(np.concatenate(lists).tolist())
    kept = {id_: count for id_, count in true.items() if count > found[0].count_error}
    listed = pq.read_table(tmp_path / "counts" / "a.parquet")
    assert found[0].counting == "sketch"
    assert dict(zip(listed["id"].to_pylist(), listed["count"].to_pylist())) == kept
    for ids, feature in zip(lists, found):
        assert feature.lookups == len(ids)
        assert feature.unlisted_lookups == sum(int(one) not in kept for one in ids)
