"""RawReader: raw rows become the very batches that the prepared dataset holds, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hotbed.data.prepare.prepare import prepare
from hotbed.data.raw_reader import RawReader
from hotbed.data.schema import Schema
from hotbed.errors import FormatError, SchemaError
from hotbed.types import Batch
from tests.data.raw_files import criteo_line, unpack_lines, write
from tests.data.small import read_rows


def assert_same(directory: Path, split: str, batches: list[Batch]) -> None:
    """The batches, one after the other, hold the rows of a split."""
    schema = Schema.load(directory)
    table = pa.concat_tables(read_rows(directory / file) for file in schema.splits[split].files)

    def stored(name: str) -> np.ndarray:
        return table[name].to_numpy()

    np.testing.assert_array_equal(torch.cat([batch.labels for batch in batches]).numpy(), stored(schema.label))
    dense = torch.cat([batch.dense for batch in batches]).numpy()
    assert dense.shape == (table.num_rows, len(schema.dense))
    for k, spec in enumerate(schema.dense):
        assert dense[:, k].tobytes() == stored(spec.name).tobytes(), spec.name
    ids = torch.cat([batch.ids for batch in batches]).numpy()
    assert ids.dtype == np.int64
    single = [feature for feature in schema.features if not feature.multi]
    assert ids.shape == (table.num_rows, len(single))
    for k, feature in enumerate(single):
        np.testing.assert_array_equal(ids[:, k], stored(feature.name))
    for feature in schema.features:
        if feature.multi:
            bags = [bag for batch in batches for bag in lists(batch, feature.name)]
            assert bags == table[feature.name].to_pylist()


def lists(batch: Batch, name: str) -> list[list[int]]:
    bag = batch.bags[name]
    assert bag.offsets[0] == 0
    assert len(bag.offsets) == batch.size + 1
    return [bag.values[a:b].tolist() for a, b in zip(bag.offsets[:-1], bag.offsets[1:])]


CSV = [
    "y,city,age,price,tags",
    *(
        f"{i % 3 % 2},c{i * i % 17},{'' if i % 5 == 0 else i * 7 - 20},{i / 7},{'|'.join(map(str, range(i % 4)))}"
        for i in range(101)
    ),
]


@pytest.mark.parametrize("integers", ["log", "bucket", "both"])
@pytest.mark.parametrize("ids", [{"ids_mode": "vocabulary", "min_count": 3}, {"ids_mode": "hash", "hash_rows": 50}])
def test_csv_with_everything(tmp_path, integers, ids):
    path = write(tmp_path / "f.csv", *CSV)
    prepare([path], tmp_path / "out", integers=integers, multi={"tags": "|"}, **ids)
    assert_same(tmp_path / "out", "train", list(RawReader(tmp_path / "out", [path], batch_size=17)))


def test_unseen_rows(tmp_path):
    train, test = write(tmp_path / "a.csv", *CSV[:50]), write(tmp_path / "b.csv", CSV[0], *CSV[50:])
    prepare([("train", train), ("test", test)], tmp_path / "out", multi={"tags": "|"}, integers="both")
    batches = list(RawReader(tmp_path / "out", [test]))
    assert_same(tmp_path / "out", "test", batches)
    assert (batches[0].ids == 0).any()


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_delimiter_and_two_word_labels_are_remembered(tmp_path, delimiter):
    rows = [("bought", "s,1"), *((("yes", "no")[i % 2], f"a;b,{i}".replace(delimiter, ".")) for i in range(9))]
    path = write(tmp_path / "f.csv", *(delimiter.join(row) for row in rows))
    prepare([path], tmp_path / "out", label="bought", positive="no", delimiter=delimiter)
    assert_same(tmp_path / "out", "train", list(RawReader(tmp_path / "out", [path])))
    again = write(
        tmp_path / "g.csv", delimiter.join(rows[0]), f"no{delimiter}x", f"maybe{delimiter}x", f"yes{delimiter}x"
    )
    reader = RawReader(tmp_path / "out", [again], max_bad=1)
    assert [batch.labels.tolist() for batch in reader] == [[1.0, 0.0]]
    assert reader.quarantine.reasons == {"label bought is neither 'no' nor 'yes'": 1}


def test_libsvm(tmp_path):
    path = write(tmp_path / "f.svm", "+1 3:1 9:1", "-1 9:1", "-1", "+1 3:1 4:1 9:1")
    prepare([path], tmp_path / "out")
    batches = list(RawReader(tmp_path / "out", [path], batch_size=3))
    assert [batch.size for batch in batches] == [3, 1]
    assert_same(tmp_path / "out", "train", batches)


def test_parquet_and_csv_of_the_same_rows(tmp_path):
    """A dataset made of Parquet can score CSV: an integer id is the same number, a string the same hash."""
    table = pa.table(
        {
            "label": [0, 1, 1, 0],
            "user": [5, 6, None, 5],
            "word": ["a", "b", "", None],
            "x": [1.5, None, 2.0, 3.0],
            "odd": [{"a": 1}] * 4,
        }
    )
    pq.write_table(table, tmp_path / "f.parquet")
    prepare([tmp_path / "f.parquet"], tmp_path / "out", ids=["user"], drop=["odd"])
    path = write(tmp_path / "f.csv", "word,user,label,x", "a,5,0,1.5", "b,6,1,", ",,1,2", ",5,0,3")
    assert_same(tmp_path / "out", "train", list(RawReader(tmp_path / "out", [path], format="csv")))
    assert_same(tmp_path / "out", "train", list(RawReader(tmp_path / "out", [tmp_path / "f.parquet"])))


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".bin"])
def test_a_dataset_made_of_csv_reads_parquet_and_arrow(tmp_path, suffix):
    text = write(
        tmp_path / "f.csv", "word,user,label,x,n,tags", "a,5,0,1.5,7,p|q", "b,6,1,,8,", ",,1,2,9,q", ",5,0,3,,p"
    )
    prepare([text], tmp_path / "out", ids=["user"], multi={"tags": "|"})
    table = pa.table(
        {
            "label": [False, True, True, False],
            "user": [5, 6, None, 5],
            "word": ["a", "b", "", None],
            "x": [1.5, None, 2.0, 3.0],
            "n": [7, 8, 9, None],
            "tags": [["p", "q"], [], ["q"], ["p"]],
            "day": pa.array([1, 2, 3, 4], type=pa.date32()),
        }
    )
    path = tmp_path / f"g{suffix}"
    if suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(table, path)
    assert_same(tmp_path / "out", "train", list(RawReader(tmp_path / "out", [path])))


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 2], type=pa.date32()),
        pa.array([True, False]),
        pa.array([True, False]).dictionary_encode(),
        pa.array([1.0, 2.0]),
    ],
    ids=lambda column: str(column.type),
)
def test_what_text_spells_in_several_ways_is_refused(tmp_path, column):
    prepare([write(tmp_path / "f.csv", "label,day", "0,a", "1,b")], tmp_path / "out")
    pq.write_table(pa.table({"label": [0, 1], "day": column}), tmp_path / "g.parquet")
    with pytest.raises(FormatError, match=r"trained on csv files, where day \(.*\) is text"):
        list(RawReader(tmp_path / "out", [tmp_path / "g.parquet"]))


def test_a_parquet_file_cut_short(tmp_path):
    prepare([write(tmp_path / "f.csv", "label,s", "0,a", "1,b")], tmp_path / "out")
    path = tmp_path / "g.parquet"
    pq.write_table(pa.table({"label": [0, 1], "s": ["a", "b"]}), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(FormatError, match=r"g\.parquet is not Parquet or Arrow, or is damaged or truncated"):
        list(RawReader(tmp_path / "out", [path]))


def test_labels_may_be_absent(tmp_path):
    path = write(tmp_path / "f.tsv", *(criteo_line(i % 2, {1: i}) for i in range(40)))
    prepare([path], tmp_path / "out")
    unlabelled = write(tmp_path / "g.tsv", *(criteo_line(0, {1: i}).split("\t", 1)[1] for i in range(40)))
    (expected,) = RawReader(tmp_path / "out", [path])
    (batch,) = RawReader(tmp_path / "out", [unlabelled])
    assert batch.labels.isnan().all()
    torch.testing.assert_close(batch.dense, expected.dense, rtol=0, atol=0)
    torch.testing.assert_close(batch.ids, expected.ids, rtol=0, atol=0)


def test_empty_labels_are_nan_but_wrong_ones_are_bad(tmp_path):
    path = write(tmp_path / "f.csv", "label,s", "1,a", "0,b")
    prepare([path], tmp_path / "out")
    reader = RawReader(tmp_path / "out", [write(tmp_path / "g.csv", "label,s", ",a", "1,a", "7,a")], max_bad="50%")
    (batch,) = reader
    assert batch.labels.isnan().tolist() == [True, False]
    assert reader.quarantine.bad_rows == 1


def test_rows_are_located_and_bad_ones_counted(tmp_path):
    train = write(tmp_path / "f.csv", "label,s,n", "1,a,1", "0,b,2")
    prepare([train], tmp_path / "out")
    other = write(tmp_path / "g.csv", "s,n,extra", "a,1,x", "", "b,oops,x", "a,3,x")
    reader = RawReader(tmp_path / "out", [train, other], batch_size=1, max_bad="50%")
    found = [(located.file, located.lines.tolist()) for located in reader.located()]
    assert found == [(str(train), [2]), (str(train), [3]), (str(other), [2]), (str(other), [5])]
    assert reader.quarantine.reasons == {"n is not a number": 1}


def test_too_many_bad_rows(tmp_path):
    path = write(tmp_path / "f.csv", "label,n,s", "1,1,a", "0,2,b")
    prepare([path], tmp_path / "out")
    reader = RawReader(tmp_path / "out", [write(tmp_path / "g.csv", "n,s", "x,a", "1,a")])
    with pytest.raises(FormatError, match="1 of 2 rows are bad") as caught:
        list(reader)
    assert "Rows are read as those of the training data (csv)." in str(caught.value)
    assert "--format" not in str(caught.value)  # predict has no such option


def test_a_missing_column_is_named(tmp_path):
    path = write(tmp_path / "f.csv", "label,n,s", "1,1,a", "0,2,b")
    prepare([path], tmp_path / "out")
    with pytest.raises(FormatError, match=r"no column s, which .* Its columns are: label, n\."):
        list(RawReader(tmp_path / "out", [write(tmp_path / "g.csv", "label,n", "1,1")]))


def test_counts_of_another_dataset_are_refused(tmp_path):
    path = write(tmp_path / "f.csv", "label,s", "1,a", "0,b")
    prepare([path], tmp_path / "out")
    counts = tmp_path / "out" / "counts" / "s.parquet"
    pq.write_table(pa.table({"id": [1, 2, 3], "count": [1, 1, 1]}), counts)
    with pytest.raises(SchemaError, match="do not belong together"):
        RawReader(tmp_path / "out", [path])
    counts.write_bytes(b"junk")
    with pytest.raises(SchemaError, match="cannot be read"):
        RawReader(tmp_path / "out", [path])
    counts.unlink()
    with pytest.raises(SchemaError, match="does not exist"):
        RawReader(tmp_path / "out", [path])


def test_a_dataset_that_never_was_raw(tmp_path):
    Schema("label", (), (), {}).save(tmp_path)
    with pytest.raises(SchemaError, match="raw_format is empty"):
        RawReader(tmp_path, ["f.csv"])


@pytest.mark.parametrize("integers", ["log", "both"])
def test_real_criteo(real_data, tmp_path, integers):
    path = real_data / "criteo_raw_10k.tsv.xz"
    prepare([path], tmp_path / "out", split="train=8000,test=2000", integers=integers, min_count=2)
    lines = unpack_lines(path)
    test = write(tmp_path / "test.tsv", *lines[8000:])
    assert_same(tmp_path / "out", "test", list(RawReader(tmp_path / "out", [test], batch_size=333)))
    train = write(tmp_path / "train.tsv", *lines[:8000])
    assert_same(tmp_path / "out", "train", list(RawReader(tmp_path / "out", [train])))


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("adult.parquet", {"label": "income", "positive": ">50K", "integers": "both"}),
        ("avazu_9k.csv.xz", {"ids": ["*"], "drop": ["id"], "min_count": 2}),
        ("frappe_test.csv.xz", {"ids": ["*"]}),
    ],
)
def test_real_files(real_data, tmp_path, file, options):
    prepare([real_data / file], tmp_path / "out", **options)
    assert_same(tmp_path / "out", "train", list(RawReader(tmp_path / "out", [real_data / file])))


def test_unsigned_integers_keep_their_size(tmp_path):
    values = [2**63 + 5, 2**63 + 6, 7, 2**64 - 1] * 10
    texts = write(tmp_path / "log.csv", "label,user,amount", *(f"{i % 2},{v},{v}" for i, v in enumerate(values)))
    prepare(texts, tmp_path / "out", ids=["user"], dense=["amount"])
    unsigned = pa.array(values, pa.uint64())
    table = pa.table({"label": [0, 1] * 20, "user": unsigned, "amount": unsigned})
    pq.write_table(table, tmp_path / "log.parquet")
    assert_same(tmp_path / "out", "train", list(RawReader(tmp_path / "out", [tmp_path / "log.parquet"])))
    (amount,) = prepare(table, tmp_path / "typed", ids=["user"], dense=["amount"]).schema.dense
    assert amount.mean == pytest.approx(np.log1p(np.array(values, dtype=float)).mean())


def timed(unit: str) -> pa.Table:
    """A log with times in this unit, as an amount and as an id."""
    seconds = np.array([1_600_000_000 + 7 * i for i in range(40)])
    times = pa.array(seconds.astype("datetime64[s]")).cast(pa.timestamp(unit))
    return pa.table({"label": [0, 1] * 20, "seen": times, "born": times})


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_mean_the_same_in_every_unit(tmp_path, unit):
    prepare(timed("ns"), tmp_path / "out", ids=["seen"])
    with pa.ipc.new_file(str(tmp_path / "log.arrow"), timed(unit).schema) as writer:
        writer.write_table(timed(unit))
    assert_same(tmp_path / "out", "train", list(RawReader(tmp_path / "out", [tmp_path / "log.arrow"])))
    prepare([("train", timed("ns")), ("test", timed(unit))], tmp_path / "two", ids=["seen"])
    assert_same(tmp_path / "two", "test", list(RawReader(tmp_path / "two", [tmp_path / "log.arrow"])))


def test_older_datasets_have_times_in_the_unit_of_their_file(tmp_path):
    prepare(timed("s"), tmp_path / "out", ids=["seen"], ids_mode="raw")
    notes = json.loads((tmp_path / "out" / "schema.json").read_text())
    del notes["notes"]["raw"]["times"]
    (tmp_path / "out" / "schema.json").write_text(json.dumps(notes))
    with pa.ipc.new_file(str(tmp_path / "log.arrow"), timed("s").schema) as writer:
        writer.write_table(timed("s"))
    (batch,) = RawReader(tmp_path / "out", [tmp_path / "log.arrow"])
    assert batch.ids[0].item() == 1_600_000_000
