"""prepare: small files against what the schema promises, then real logs against plain Python."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import math
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.data.dataset import Dataset
from hotbed.data.hash import MISSING_ID, hash_string
from hotbed.data.prepare.prepare import prepare
from hotbed.data.schema import Schema
from hotbed.errors import ConfigError, FormatError
from tests.data.raw_files import criteo_line, unpack_lines, write
from tests.data.small import read_rows
from tests.fresh import run_python


def rows(directory: Path, split: str) -> pa.Table:
    schema = Schema.load(directory)
    return pa.concat_tables(read_rows(directory / file) for file in schema.splits[split].files)


def counts(directory: Path, feature: str) -> dict[int, int]:
    table = pq.read_table(directory / "counts" / f"{feature}.parquet")
    return dict(zip(table["id"].to_pylist(), table["count"].to_pylist()))


def digest(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def small(tmp_path) -> Path:
    return write(
        tmp_path / "small.csv",
        "click,city,age,price,tags",
        "1,Oslo,30,1.5,a|b|a",
        "0,Rome,,2.5,",
        "0,Oslo,-1,,b",
        "1,,100,0.5,c",
        "0,Rome,2,1.0,|b|",
        "0,Bern,0,1.0,d",
    )


class TestDirectory:
    def test_what_it_holds(self, small, tmp_path):
        report = prepare([small], tmp_path / "out", multi={"tags": "|"}, integers="both")
        out = tmp_path / "out"
        assert sorted(path.name for path in out.iterdir()) == ["counts", "quarantine.jsonl", "schema.json", "train"]
        assert report.schema == Schema.load(out)
        schema = report.schema
        assert schema.raw_format == "csv"
        assert schema.label == "click"
        assert [column.name for column in schema.dense] == ["age", "price"]
        assert [(one.name, one.multi, one.source) for one in schema.features] == [
            ("city", False, "string"),
            ("age_bucket", False, "bucket"),
            ("tags", True, "string"),
        ]
        assert (schema.splits["train"].rows, schema.splits["train"].positives) == (6, 2)
        table = rows(out, "train")
        assert table.schema.types == [pa.float32()] * 3 + [pa.int32(), pa.int32(), pa.list_(pa.int32())]
        assert table["click"].to_pylist() == [1, 0, 0, 1, 0, 0]

    def test_rows_by_frequency_then_id_and_missing_is_a_value(self, small, tmp_path):
        report = prepare([small], tmp_path / "out", multi={"tags": "|"})
        city = counts(tmp_path / "out", "city")
        assert city == {
            hash_string("Oslo"): 2,
            hash_string("Rome"): 2,
            hash_string("Bern"): 1,
            MISSING_ID: 1,
        }
        assert list(city) == sorted(city, key=lambda id_: (-city[id_], id_))
        row = {id_: 1 + k for k, id_ in enumerate(city)}
        expected = [row[hash_string(name)] for name in ("Oslo", "Rome", "Oslo", "", "Rome", "Bern")]
        table = rows(tmp_path / "out", "train")
        assert table["city"].to_pylist() == expected
        assert report.schema.features[0].rows == 5
        assert report.schema.features[0].distinct == 4
        tags = {id_: 1 + k for k, id_ in enumerate(counts(tmp_path / "out", "tags"))}
        expected_tags = [["a", "b", "a"], [], ["b"], ["c"], ["b"], ["d"]]
        assert table["tags"].to_pylist() == [[tags[hash_string(tag)] for tag in bag] for bag in expected_tags]

    def test_dense_is_transformed_then_standard_on_train(self, small, tmp_path):
        report = prepare([small], tmp_path / "out", drop=["tags"])
        age, price = report.schema.dense
        assert (age.transform, price.transform) == ("log", "none")
        logs = np.array([math.log1p(30), 0, -math.log1p(1), math.log1p(100), math.log1p(2), 0])
        np.testing.assert_allclose((age.mean, age.scale), (logs.mean(), logs.std()), rtol=1e-12)
        table = rows(tmp_path / "out", "train")
        np.testing.assert_allclose(table["age"], (logs - logs.mean()) / logs.std(), rtol=1e-6, atol=1e-7)
        prices = np.array([1.5, 2.5, 0, 0.5, 1, 1])
        np.testing.assert_allclose(table["price"], (prices - prices.mean()) / prices.std(), rtol=1e-6, atol=1e-7)

    def test_a_constant_column_is_left_at_zero(self, tmp_path):
        path = write(tmp_path / "f.csv", "label,x,s", *(f"{i % 2},7.25,{i}s" for i in range(10)))
        report = prepare([path], tmp_path / "out")
        assert report.schema.dense[0].scale == 1.0
        assert rows(tmp_path / "out", "train")["x"].to_pylist() == [0.0] * 10

    @pytest.mark.parametrize(
        ("value", "bucket"),
        [
            (0, 0),
            (1, 1),
            (2, 2),
            (2.9, 2),
            (3, 3),
            (4, 3),
            (5, 4),
            (6, 5),
            (7, 5),
            (8, 6),
            (1000, 49),
            (-1, -1),
            (-5, -4),
        ],
    )
    def test_bucket(self, tmp_path, value, bucket):
        path = write(tmp_path / "f.csv", "label,n,s", "0,1,a", "1,,b")
        other = write(tmp_path / "g.csv", "label,n,s", f"0,{value},a")
        prepare([path, other], tmp_path / "out", integers="bucket")
        assert set(counts(tmp_path / "out", "n_bucket")) == {1, MISSING_ID, bucket}
        if value >= 3:
            assert bucket == 2 + math.floor(math.log(value) ** 2)

    def test_min_count_sends_the_rare_to_row_0(self, small, tmp_path):
        report = prepare([small], tmp_path / "out", min_count=2, drop=["tags"])
        assert set(counts(tmp_path / "out", "city")) == {hash_string("Oslo"), hash_string("Rome")}
        feature = report.schema.features[0]
        assert (feature.rows, feature.distinct) == (3, 4)
        city = rows(tmp_path / "out", "train")["city"].to_pylist()
        assert [city[3], city[5]] == [0, 0]
        assert 0 not in (city[0], city[1])

    def test_ids_unseen_in_train_are_unknown(self, tmp_path):
        train = write(tmp_path / "a.csv", "label,s", "1,x", "0,y")
        test = write(tmp_path / "b.csv", "label,s", "1,y", "0,z", "0,")
        report = prepare([("test", test), ("train", train)], tmp_path / "out")
        assert report.schema.features[0].rows == 3
        y = 1 + list(counts(tmp_path / "out", "s")).index(hash_string("y"))
        assert rows(tmp_path / "out", "test")["s"].to_pylist() == [y, 0, 0]

    def test_hash_mode_keeps_64_bits(self, small, tmp_path):
        report = prepare([small], tmp_path / "out", ids_mode="hash", hash_rows=1000, multi={"tags": "|"}, min_count=2)
        assert {(one.mode, one.rows) for one in report.schema.features} == {("hash", 1000)}
        table = rows(tmp_path / "out", "train")
        assert table.schema.field("city").type == pa.int64()
        assert table["city"].to_pylist()[:2] == [hash_string("Oslo"), hash_string("Rome")]
        assert table["tags"].to_pylist()[0] == [hash_string("a"), hash_string("b"), hash_string("a")]
        assert len(counts(tmp_path / "out", "city")) == 4

    def test_integer_ids_of_parquet_are_themselves(self, tmp_path):
        table = pa.table({"y": [0, 1, 1], "user": [7, None, -5], "bag": [[1, 2], [], [2]], "when": [1.0, None, 3.0]})
        pq.write_table(table, tmp_path / "f.parquet")
        report = prepare([tmp_path / "f.parquet"], tmp_path / "out", ids=["user", "when"])
        assert [one.source for one in report.schema.features] == ["integer", "integer", "string"]
        assert counts(tmp_path / "out", "user") == {7: 1, MISSING_ID: 1, -5: 1}
        assert counts(tmp_path / "out", "bag") == {2: 2, 1: 1}

    def test_parts_and_row_groups(self, tmp_path, monkeypatch):
        monkeypatch.setattr("hotbed.data.prepare.write.GROUP_ROWS", 100)
        monkeypatch.setattr("hotbed.data.prepare.write.PART_ROWS", 250)
        monkeypatch.setattr("hotbed.data.formats.parquet.CHUNK_ROWS", 37)
        n = 1013
        tags = [[str(k) for k in range(i % 4)] for i in range(n)]
        table = pa.table({"label": np.arange(n) % 2, "n": np.arange(n), "tags": tags})
        pq.write_table(table, tmp_path / "f.parquet")
        split = prepare([tmp_path / "f.parquet"], tmp_path / "out", ids=["n"]).schema.splits["train"]
        assert split.file_rows == (250, 250, 250, 250, 13)
        groups = Dataset.open(tmp_path / "out").split("train")
        assert [group.rows for group in groups] == [*([100, 100, 50] * 4), 13]
        back = rows(tmp_path / "out", "train")
        ids = np.array([0, *counts(tmp_path / "out", "n")])
        np.testing.assert_array_equal(ids[back["n"].to_numpy()], np.arange(n))
        assert [len(bag) for bag in back["tags"].to_pylist()] == [i % 4 for i in range(n)]

    def test_names_with_odd_characters(self, tmp_path):
        path = write(tmp_path / "f.csv", "y/n,clicks/day,a b:ü?", "1,2,x", "0,3,y")
        report = prepare([path], tmp_path / "out", label="y/n")
        assert Schema.load(tmp_path / "out") == report.schema
        assert rows(tmp_path / "out", "train").column_names == ["y/n", "clicks/day", "a b:ü?"]


class TestSplits:
    def test_counts_are_in_file_order(self, tmp_path):
        path = write(tmp_path / "f.csv", "label,n", *(f"{i % 2},{i}" for i in range(20)), "oops", "0,20", "0,21")
        report = prepare([path], tmp_path / "out", ids=["n"], split="train=15,test=6", max_bad=1)
        assert {name: split.rows for name, split in report.schema.splits.items()} == {"train": 15, "test": 6}
        assert report.left_out == 1
        assert set(counts(tmp_path / "out", "n")) == {hash_string(str(i)) for i in range(15)}

    def test_reading_stops_when_all_splits_are_full(self, tmp_path):
        first = write(tmp_path / "a.csv", "label,n", *(f"{i % 2},{i}" for i in range(20)))
        second = tmp_path / "b.csv"
        second.write_bytes(b"\xff\xfe")
        assert prepare([first, second], tmp_path / "out", split="train=10,test=10").schema.splits["test"].rows == 10

    def test_fractions_are_random_but_stable(self, tmp_path):
        path = write(tmp_path / "f.csv", "label,n", *(f"{i % 2},{i}" for i in range(5000)))
        report = prepare([path], tmp_path / "out", split={"train": 0.8, "valid": 0.1, "test": 0.1}, ids=["n"])
        sizes = {name: split.rows for name, split in report.schema.splits.items()}
        assert sum(sizes.values()) == 5000
        assert abs(sizes["train"] - 4000) < 150
        prepare([path], tmp_path / "again", split="train=0.8,valid=0.1,test=0.1", ids=["n"])
        assert digest(tmp_path / "out") == digest(tmp_path / "again")
        train = counts(tmp_path / "out", "n")
        assert 100 < sum(hash_string(str(i)) in train for i in range(200)) < 190  # not in file order

    def test_a_bad_row_moves_no_other_row(self, tmp_path):
        lines = [f"{i % 2},{i}" for i in range(300)]
        good = write(tmp_path / "f.csv", "label,n", *lines)
        prepare([good], tmp_path / "good", split="train=0.5,test=0.5", ids=["n"])
        lines[3] = "x"
        bad = write(tmp_path / "f.csv", "label,n", *lines)
        prepare([bad], tmp_path / "bad", split="train=0.5,test=0.5", ids=["n"])
        assert set(counts(tmp_path / "good", "n")) - set(counts(tmp_path / "bad", "n")) <= {hash_string("3")}
        assert set(counts(tmp_path / "bad", "n")) <= set(counts(tmp_path / "good", "n"))

    def test_named_inputs_and_directories(self, tmp_path, monkeypatch):
        (tmp_path / "days").mkdir()
        for day in (2, 10, 1):
            write(tmp_path / "days" / f"day_{day:02d}.csv", "label,s", f"1,day{day}")
        write(tmp_path / "days" / "_SUCCESS")
        write(tmp_path / "test=1.csv", "label,s", "0,day1")
        monkeypatch.chdir(tmp_path)
        report = prepare(["train=days", "valid=test=1.csv"], "out")
        assert report.schema.notes["sources"] == [
            "train=day_01.csv",
            "train=day_02.csv",
            "train=day_10.csv",
            "valid=test=1.csv",
        ]
        assert {name: split.rows for name, split in report.schema.splits.items()} == {"train": 3, "valid": 1}

    def test_an_existing_file_with_an_equals_sign_is_a_file(self, tmp_path, monkeypatch):
        write(tmp_path / "a=b.csv", "label,s", "0,x", "1,y")
        monkeypatch.chdir(tmp_path)
        assert prepare(["a=b.csv"], "out").schema.splits["train"].rows == 2


class TestQuarantine:
    def test_bad_rows_are_written_and_counted(self, tmp_path):
        path = write(tmp_path / "f", *(criteo_line(i % 2) for i in range(10)), "junk", criteo_line(3), criteo_line(""))
        report = prepare([path], tmp_path / "out", format="criteo", max_bad=3)
        found = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
        assert [(one["file"], one["line"], one["reason"]) for one in found] == [
            (str(path), 11, "fewer than 40 columns"),
            (str(path), 12, "label label is not 0 or 1"),
            (str(path), 13, "label label is missing"),
        ]
        assert found[0]["text"] == "junk"
        assert found[1]["text"] == criteo_line(3)
        assert sum(report.bad_rows.values()) == 3
        assert report.schema.notes["bad_rows"] == report.bad_rows

    @pytest.mark.parametrize(("limit", "stops"), [("0", True), (1, True), (2, False), ("1.5%", True), ("2%", False)])
    def test_max_bad(self, tmp_path, limit, stops):
        path = write(tmp_path / "f.csv", "label,s", *["1,x"] * 98, "2,x", "y")
        if stops:
            with pytest.raises(FormatError, match=r"2 of 100 rows are bad.*\n.*line 100|2 of 100 rows"):
                prepare([path], tmp_path / "out", max_bad=limit)
            assert [one.name for one in tmp_path.iterdir()] == ["f.csv"]
        else:
            assert prepare([path], tmp_path / "out", max_bad=limit).schema.splits["train"].rows == 98

    def test_a_long_bad_row_is_cut(self, tmp_path):
        path = write(tmp_path / "f.csv", "label,s", "1,x", "0," + "y," * 5000)
        prepare([path], tmp_path / "out", max_bad="50%")
        (line,) = (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
        assert len(line) < 1000


class TestPlace:
    def test_an_existing_dataset_is_kept_unless_overwritten(self, small, tmp_path):
        out = tmp_path / "out"
        prepare([small], out, drop=["tags"])
        before = digest(out)
        with pytest.raises(ConfigError, match="--overwrite"):
            prepare([small], out)
        assert digest(out) == before
        with pytest.raises(FormatError):
            prepare([write(tmp_path / "bad.csv", "click,a", "x,y")], out, overwrite=True)
        assert digest(out) == before
        prepare([small], out, overwrite=True)
        assert digest(out) != before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.csv", "out", "small.csv"]

    def test_overwrite_replaces_only_datasets(self, small, tmp_path):
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "thesis.txt").write_text("years of work")
        with pytest.raises(ConfigError, match="not a hotbed dataset"):
            prepare([small], tmp_path / "home", overwrite=True)
        assert (tmp_path / "home" / "thesis.txt").read_text() == "years of work"

    def test_an_empty_directory_is_fine(self, small, tmp_path):
        (tmp_path / "out").mkdir()
        prepare([small], tmp_path / "out")
        assert (tmp_path / "out" / "schema.json").is_file()

    def test_interrupt_leaves_nothing(self, small, tmp_path):
        def stop(_):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepare([small], tmp_path / "out", progress=stop)
        assert [path.name for path in tmp_path.iterdir()] == ["small.csv"]

    def test_a_killed_job_leaves_no_dataset_and_the_next_one_clears_up(self, small, tmp_path):
        out = tmp_path / "out"
        code = (
            "import os, signal, sys\n"
            "from hotbed.data.prepare.prepare import prepare\n"
            "prepare([sys.argv[1]], sys.argv[2], progress=lambda _: os.kill(os.getpid(), signal.SIGKILL))"
        )
        assert run_python(code, small, out).returncode == -signal.SIGKILL
        assert not out.exists()
        assert (tmp_path / ".out.partial").exists()
        prepare([small], out)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "small.csv"]

    def test_two_jobs_do_not_share_a_place(self, small, tmp_path):
        def again(_):
            with pytest.raises(ConfigError, match="another job is writing"):
                prepare([small], tmp_path / "out")

        prepare([small], tmp_path / "out", progress=again)
        assert (tmp_path / "out" / "schema.json").is_file()

    def test_progress_reaches_the_end(self, small, tmp_path):
        seen = []
        prepare([small, small], tmp_path / "out", progress=seen.append)
        reading = [one for one in seen if one.stage == "reading"]
        assert reading[-1].done == reading[-1].total == 2 * small.stat().st_size
        assert seen[-1].done == seen[-1].total == 12


class TestReal:
    def test_criteo_equals_plain_python(self, real_data, tmp_path):
        path = real_data / "criteo_raw_10k.tsv.xz"
        prepare([path], tmp_path / "out", split="train=8000,test=2000")
        raw = [line.split("\t") for line in unpack_lines(path)]
        table = pa.concat_tables([rows(tmp_path / "out", "train"), rows(tmp_path / "out", "test")])
        assert table["label"].to_pylist() == [float(row[0]) for row in raw]
        for k in range(26):
            values = [row[14 + k] for row in raw]
            seen = Counter(hash_string(value) for value in values[:8000])
            order = sorted(seen, key=lambda id_: (-seen[id_], id_))
            row_of_id = {id_: 1 + at for at, id_ in enumerate(order)}
            assert counts(tmp_path / "out", f"C{k + 1}") == seen
            assert table[f"C{k + 1}"].to_pylist() == [row_of_id.get(hash_string(value), 0) for value in values]
        for k, spec in enumerate(Schema.load(tmp_path / "out").dense):
            numbers = np.array([float(row[1 + k] or 0) for row in raw])
            logs = np.sign(numbers) * np.log1p(np.abs(numbers))
            np.testing.assert_allclose(spec.mean, logs[:8000].mean(), rtol=1e-12)
            np.testing.assert_allclose(spec.scale, logs[:8000].std(), rtol=1e-12)
            np.testing.assert_allclose(table[spec.name], (logs - spec.mean) / spec.scale, rtol=1e-5, atol=1e-6)

    def test_criteo_60k(self, real_data, tmp_path):
        report = prepare(
            [real_data / "criteo_60k.tsv.xz"], tmp_path / "out", split="train=50000,test=10000", integers="both"
        )
        schema = report.schema
        assert {name: split.rows for name, split in schema.splits.items()} == {"train": 50_000, "test": 10_000}
        assert schema.splits["train"].positives + schema.splits["test"].positives == 13_487
        assert len(schema.dense) == 13
        assert len(schema.features) == 39
        assert not report.bad_rows

    def test_frappe(self, real_data, tmp_path):
        names = ("train", "valid", "test")
        report = prepare([(name, real_data / f"frappe_{name}.csv.xz") for name in names], tmp_path / "out", ids=["*"])
        assert [report.schema.splits[name].rows for name in names] == [202_027, 57_722, 28_860]
        assert not report.schema.dense
        raw = list(csv.DictReader(unpack_lines(real_data / "frappe_valid.csv.xz")))
        table = rows(tmp_path / "out", "valid")
        for feature in report.schema.features:
            ids = np.array([0, *counts(tmp_path / "out", feature.name)])
            stored, expected = (
                ids[table[feature.name].to_numpy()],
                np.array([hash_string(one[feature.name]) for one in raw[:500]]),
            )
            known = np.isin(expected, ids)
            np.testing.assert_array_equal(stored[:500], np.where(known, expected, 0))

    def test_avazu(self, real_data, tmp_path):
        report = prepare(
            [real_data / "avazu_9k.csv.xz"], tmp_path / "out", ids=["*"], drop=["id"], split="train=0.8,test=0.2"
        )
        assert sum(split.rows for split in report.schema.splits.values()) == 8_999
        assert report.schema.label == "click"
        assert len(report.schema.features) == 22
        ids = {hash_string("1005"), hash_string("1002"), hash_string("1010")}
        assert ids <= set(counts(tmp_path / "out", "C1"))

    def test_avazu_without_advice(self, real_data, tmp_path):
        """Numbers beyond 64 bits are names, so the request number becomes an id and not a quantity."""
        schema = prepare([real_data / "avazu_9k.csv.xz"], tmp_path / "out").schema
        assert "id" in [feature.name for feature in schema.features]
        assert "C1" in [column.name for column in schema.dense]

    def test_adult(self, real_data, tmp_path):
        report = prepare([real_data / "adult.parquet"], tmp_path / "out", label="income", positive=">50K")
        schema = report.schema
        assert (schema.splits["train"].rows, schema.splits["train"].positives) == (48_842, 11_687)
        assert (len(schema.dense), len(schema.features)) == (6, 8)
        assert schema.notes["raw"]["negative"] == "<=50K"

    def test_gowalla(self, real_data, tmp_path):
        files = [(split, real_data / f"gowalla_{split}.txt.xz") for split in ("train", "test")]
        schema = prepare(files, tmp_path / "out").schema
        assert {name: (one.rows, one.positives) for name, one in schema.splits.items()} == {
            "train": (810_128, 810_128),
            "test": (217_242, 217_242),
        }
        assert {one.name: one.distinct for one in schema.features} == {"user": 29_858, "item": 40_981}
        assert (schema.raw_format, schema.label, schema.dense) == ("lists", "label", ())

    def test_gowalla_is_no_click_log(self, real_data, tmp_path):
        with pytest.raises(FormatError, match="29,858 of 29,858 rows are bad"):
            prepare([real_data / "gowalla_test.txt.xz"], tmp_path / "out", format="libsvm")


def test_packed_and_plain_give_the_same_dataset(tmp_path):
    lines = [criteo_line(i % 2, {1: i}, {3: f"{i * i:x}"}) for i in range(500)]
    plain = write(tmp_path / "f.tsv", *lines)
    packed = tmp_path / "f.tsv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    prepare([plain], tmp_path / "a", split="train=0.5,test=0.5")
    prepare([packed], tmp_path / "b", split="train=0.5,test=0.5")
    a, b = digest(tmp_path / "a"), digest(tmp_path / "b")
    assert a.pop("schema.json") != b.pop("schema.json")  # names its source
    assert a == b


def test_parquet_strings_and_criteo_text_share_ids(tmp_path):
    lines = [criteo_line(i % 2, hexes={1: f"{i % 7:08x}"}) for i in range(50)]
    prepare([write(tmp_path / "f.tsv", *lines)], tmp_path / "a")
    columns = list(zip(*(line.split("\t") for line in lines)))
    table = pa.table({"label": [int(x) for x in columns[0]], "C1": columns[14]})
    pq.write_table(table, tmp_path / "f.parquet")
    prepare([tmp_path / "f.parquet"], tmp_path / "b")
    assert counts(tmp_path / "a", "C1") == counts(tmp_path / "b", "C1")
