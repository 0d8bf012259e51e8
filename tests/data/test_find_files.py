"""Folders, globs, partition columns, Delta tables, and files whose columns differ."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.data.formats.align import ColumnKind, partition_values, unify
from hotbed.data.prepare.find_files import FoundFile, find_files
from hotbed.data.prepare.inputs import list_sources
from hotbed.data.prepare.prepare import prepare
from hotbed.errors import FormatError

CLICKS = {"label": [0, 1, 0, 1], "ad": ["a", "b", "a", "c"], "price": [1.0, 2.0, 3.0, 4.0]}


def write(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({name: value for name, value in (CLICKS | columns).items() if value is not None}), path)
    return path


@pytest.fixture
def table(tmp_path):
    """As Spark writes it."""
    for day in ("2026-11-15", "2026-11-16"):
        for hour in (7, 12):
            write(tmp_path / "t" / f"day={day}" / f"hour={hour}" / "part-0.parquet")
    (tmp_path / "t" / "_SUCCESS").touch()
    (tmp_path / "t" / "other").mkdir()
    return tmp_path / "t"


def partitions(found):
    return [dict(one.partition) for one in found]


class TestPartitions:
    def test_a_folder(self, table):
        found = find_files(table)
        assert len(found) == 4
        assert partitions(found)[1:3] == [{"day": "2026-11-15", "hour": "7"}, {"day": "2026-11-16", "hour": "12"}]
        assert partitions(find_files(table / "day=2026-11-15")) == [{"hour": "12"}, {"hour": "7"}]
        assert partitions(find_files(table / "day=2026-11-15" / "hour=7" / "part-0.parquet")) == [{}]

    def test_a_glob(self, table):
        assert partitions(find_files(table / "day=*-16" / "*" / "*.parquet")) == [
            {"day": "2026-11-16", "hour": "12"},
            {"day": "2026-11-16", "hour": "7"},
        ]
        assert len(find_files(table / "**" / "*.parquet")) == 4
        assert len(find_files(table / "day=2026-11-1[56]")) == 4  # folders that match are read as folders
        with pytest.raises(FormatError, match="no file matches"):
            find_files(table / "day=2027*")

    def test_a_relative_glob_is_not_a_split(self, table, monkeypatch):
        monkeypatch.chdir(table)
        assert [source.split for source in list_sources("day=*/hour=7/*.parquet")] == ["", ""]
        assert [source.split for source in list_sources("train=day=2026-11-15")] == ["train", "train"]

    def test_columns_of_a_dataset(self, table, tmp_path):
        report = prepare(table, tmp_path / "out")
        assert {feature.name: feature.distinct for feature in report.schema.features} == {"ad": 3, "day": 2}
        assert [one.name for one in report.schema.dense] == ["price", "hour"]
        assert report.schema.splits["train"].rows == 16
        dropped = prepare(table, tmp_path / "less", drop=["hour"], ids=["day"])
        assert [one.name for one in dropped.schema.dense] == ["price"]

    def test_the_folder_wins_over_the_file(self, tmp_path):
        for day in ("x", "y"):
            write(tmp_path / "t" / f"ad={day}" / "0.parquet")
        report = prepare(tmp_path / "t", tmp_path / "out")
        assert [(one.name, one.distinct) for one in report.schema.features] == [("ad", 2)]

    def test_text_files_have_them_too(self, tmp_path):
        for day in ("a%20b", "__HIVE_DEFAULT_PARTITION__"):
            (tmp_path / "t" / f"day={day}").mkdir(parents=True)
            (tmp_path / "t" / f"day={day}" / "0.csv").write_text("label,ad\n1,x\n0,y\n")
        assert partitions(find_files(tmp_path / "t")) == [{"day": None}, {"day": "a b"}]
        report = prepare(tmp_path / "t", tmp_path / "out")
        assert {one.name: one.distinct for one in report.schema.features} == {"ad": 2, "day": 2}

    def test_integers_where_all_are(self):
        assert partition_values([{"a": "7", "b": "07"}, {"a": "12", "b": "12"}]) == [
            {"a": 7, "b": "07"},
            {"a": 12, "b": "12"},
        ]
        assert partition_values([{"a": "7"}, {"b": "x"}]) == [{"a": "7", "b": None}, {"a": None, "b": "x"}]


class TestColumnsThatDiffer:
    def test_a_new_column_and_a_missing_one(self, tmp_path):
        files = [write(tmp_path / "a.parquet"), write(tmp_path / "b.parquet", price=None, user=["u", "v", "u", "u"])]
        said = []
        report = prepare(files, tmp_path / "out", say=said.append)
        assert {one.name: one.distinct for one in report.schema.features} == {"ad": 3, "user": 3}  # u, v, and missing
        assert [one.name for one in report.schema.dense] == ["price"]
        assert report.bad_rows == {}
        assert report.schema.splits["train"].rows == 8
        assert [text.partition(",")[0] for text in said] == [
            "column price: 1 of 2 files lack it",
            "column user: 1 of 2 files lack it",
        ]

    def test_the_order_of_files_changes_no_column(self, tmp_path):
        files = [write(tmp_path / "a.parquet"), write(tmp_path / "b.parquet", price=None, user=["u", "v", "u", "u"])]
        one, other = (prepare(some, tmp_path / name) for some, name in ((files, "one"), (files[::-1], "other")))
        assert {feature.name for feature in one.schema.features} == {feature.name for feature in other.schema.features}

    def test_kinds(self, tmp_path):
        whole = pa.array([1, 2, 3, 4], pa.int32())
        nothing = pa.nulls(4)
        files = [
            write(tmp_path / "a.parquet", price=whole, ad=nothing, tags=[["x"], [], ["y"], None]),
            write(tmp_path / "b.parquet"),
        ]
        found = unify(files)
        assert found.kinds["price"] == ColumnKind("float")
        assert found.kinds["ad"] == ColumnKind("text")
        assert found.kinds["tags"] == ColumnKind("text", True)
        assert {name: len(paths) for name, paths in found.lacking.items()} == {"ad": 1, "tags": 1}
        report = prepare(files, tmp_path / "out")
        assert {one.name: one.multi for one in report.schema.features} == {"ad": False, "tags": True}
        assert [(one.name, one.transform) for one in report.schema.dense] == [("price", "none")]

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (["1.0", "2", "x", "y"], [1.0, 2.0, 3.0, 4.0]),
            (["true", "x", "y", "z"], [True, False, True, False]),
            (["1970-01-01", "x", "y", "z"], pa.array([1, 2, 3, 4], pa.timestamp("s"))),
            ([1, 2, 3, 4], pa.array([1, 2, 3, 4], pa.timestamp("s"))),
        ],
    )
    @pytest.mark.parametrize("swapped", [False, True])
    def test_ids_that_two_files_spell_differently_are_refused(self, tmp_path, one, other, swapped):
        """1.0 of a float is not the text 1.0: one user would become two."""
        both = (other, one) if swapped else (one, other)
        files = [write(tmp_path / f"{n}.parquet", user=values) for n, values in enumerate(both)]
        with pytest.raises(FormatError, match=r"column user is .* and .*: the same id would be spelled in two ways"):
            prepare(files, tmp_path / "out", ids=["user"])
        assert prepare(files, tmp_path / "less", drop=["user"]).schema.splits["train"].rows == 8

    def test_text_and_integers_are_the_same_ids(self, tmp_path):
        files = [
            write(tmp_path / "a.parquet", user=["1", "2", "3", "4"]),
            write(tmp_path / "b.parquet", user=[1, 2, 3, 4]),
        ]
        report = prepare(files, tmp_path / "out", ids=["user"])
        assert next(one.distinct for one in report.schema.features if one.name == "user") == 4

    def test_numbers_may_be_text_in_some_files(self, tmp_path):
        files = [write(tmp_path / "a.parquet"), write(tmp_path / "b.parquet", price=["1.5", "2", "3", "4"])]
        assert prepare(files, tmp_path / "out", dense=["price"]).bad_rows == {}

    def test_every_file_needs_the_label_and_the_time(self, tmp_path):
        files = [write(tmp_path / "a.parquet"), write(tmp_path / "b.parquet", label=None)]
        with pytest.raises(FormatError, match=r"b\.parquet has no column label, which every file needs"):
            prepare(files, tmp_path / "out", label="label")


class TestDelta:
    def log(self, table, version, *actions):
        path = table / "_delta_log" / f"{version:020}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(json.dumps(action) for action in actions))

    def add(self, name, **values):
        return {"add": {"path": name, "partitionValues": values, "size": 1, "dataChange": True}}

    def test_removed_files_do_not_count(self, tmp_path):
        table = tmp_path / "t"
        for name in ("a", "b", "c"):
            write(table / f"{name}.parquet")
        self.log(table, 0, {"protocol": {}}, self.add("a.parquet"), self.add("b.parquet"))
        self.log(table, 1, {"remove": {"path": "a.parquet"}}, self.add("c.parquet"))
        assert find_files(table) == [FoundFile(table / "b.parquet"), FoundFile(table / "c.parquet")]
        assert prepare(table, tmp_path / "out").schema.splits["train"].rows == 8

    def test_a_checkpoint_and_partitions(self, tmp_path):
        table = tmp_path / "t"
        write(table / "day=1%20x" / "a.parquet")
        kind = pa.struct({"path": pa.string(), "partitionValues": pa.map_(pa.string(), pa.string())})
        rows = [{"path": "day=1%2520x/a.parquet", "partitionValues": [("day", "1 x")]}, None]
        self.log(table, 2, self.add("old.parquet"))
        pq.write_table(pa.table({"add": pa.array(rows, kind)}), table / "_delta_log" / f"{2:020}.checkpoint.parquet")
        (table / "_delta_log" / "_last_checkpoint").write_text(json.dumps({"version": 2, "size": 2}))
        assert find_files(table) == [FoundFile(table / "day=1%20x" / "a.parquet", (("day", "1 x"),))]

    def test_deletion_vectors_are_refused(self, tmp_path):
        write(tmp_path / "t" / "a.parquet")
        action = self.add("a.parquet")
        action["add"]["deletionVector"] = {"storageType": "u"}
        self.log(tmp_path / "t", 0, action)
        with pytest.raises(FormatError, match="deletion vector"):
            find_files(tmp_path / "t")

    @pytest.mark.parametrize("is_added_first", [True, False])
    def test_a_file_that_gets_a_deletion_vector_is_refused_and_not_lost(self, tmp_path, is_added_first):
        """One version adds it with the vector, and removes it without."""
        table = tmp_path / "t"
        self.log(table, 0, self.add("a.parquet"), self.add("b.parquet"))
        again = self.add("a.parquet")
        again["add"]["deletionVector"] = {"storageType": "u", "pathOrInlineDv": "ab", "offset": 1}
        both = [again, {"remove": {"path": "a.parquet"}}]
        self.log(table, 1, *(both if is_added_first else both[::-1]))
        with pytest.raises(FormatError, match=r"a\.parquet has a deletion vector"):
            find_files(table)

    @pytest.mark.parametrize("versions", [(1, 2), (0, 2), (4,)])
    def test_a_log_that_lacks_versions_is_refused(self, tmp_path, versions):
        """Old ones are removed once there is a checkpoint; without that, the files that they added would be left out."""
        table = tmp_path / "t"
        for version in versions:
            write(table / f"{version}.parquet")
            self.log(table, version, self.add(f"{version}.parquet"))
        with pytest.raises(FormatError, match=r"lacks versions.*Copy the whole log"):
            find_files(table)

    def test_a_checkpoint_with_sidecars_is_refused(self, tmp_path):
        table = tmp_path / "t"
        self.log(table, 0, self.add("a.parquet"))
        rows = pa.table({"add": pa.array([None], pa.struct({"path": pa.string()})), "sidecar": ["more.parquet"]})
        pq.write_table(rows, table / "_delta_log" / f"{0:020}.checkpoint.parquet")
        (table / "_delta_log" / "_last_checkpoint").write_text(json.dumps({"version": 0, "size": 2}))
        with pytest.raises(FormatError, match="it has sidecar files, which hotbed does not read"):
            find_files(table)

    def test_an_iceberg_table_is_refused_with_the_way_out(self, tmp_path):
        write(tmp_path / "t" / "data" / "a.parquet")
        (tmp_path / "t" / "metadata").mkdir()
        (tmp_path / "t" / "metadata" / "v1.metadata.json").write_text("{}")
        with pytest.raises(FormatError, match=r"Iceberg table.*pyiceberg"):
            find_files(tmp_path / "t")
        assert len(find_files(tmp_path / "t" / "data")) == 1
