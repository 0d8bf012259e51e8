"""--time: what counts as a time, order over all files, and splits by day."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed.data.formats.chunk import Faults, Floats, Integers
from hotbed.data.prepare.prepare import prepare
from hotbed.data.times import TimeColumn, read_times, show_time
from hotbed.errors import ConfigError, FormatError
from tests.data.raw_files import text_of, write
from tests.data.small import read_rows

MOMENTS = st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31))


def micros(moment: datetime) -> int:
    return round((moment.replace(tzinfo=moment.tzinfo or UTC) - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1e6)


def read(values: list[str], unit: str = "s") -> tuple[list[int], list[bool]]:
    faults = Faults(len(values))
    times = read_times(text_of(values), TimeColumn("t", unit), faults)
    return times.tolist(), faults.good.tolist()


@given(MOMENTS, st.sampled_from([" ", "T"]), st.sampled_from(["", "Z", "+00:00", "+0530", "-08:00"]))
def test_iso_text_equals_datetime(moment, between, offset):
    moment = moment.replace(year=max(moment.year, 2))
    text = moment.isoformat(between) + offset
    expected = datetime.fromisoformat(text)
    exact = expected.replace(tzinfo=expected.tzinfo or UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    (found,), (good,) = read([text])
    assert good
    assert found == exact.days * 86_400_000_000 + exact.seconds * 1_000_000 + exact.microseconds


@pytest.mark.parametrize(
    ("text", "unit", "expected"),
    [
        ("2014-10-21", "s", "2014-10-21 00:00:00"),
        ("2014-10-21 05:30", "s", "2014-10-21 05:30:00"),
        ("2014-1-2 9:05", "s", "2014-01-02 09:05:00"),
        ("2014/10/21 5:30:07", "s", "2014-10-21 05:30:07"),
        ("21.10.2014 5h", "%d.%m.%Y %Hh", "2014-10-21 05:00:00"),
        ("2014-10-21 05:30 +0200", "%Y-%m-%d %H:%M %z", "2014-10-21 03:30:00"),
        ("1413849600", "s", "2014-10-21 00:00:00"),
        ("1413849600.744", "s", "2014-10-21 00:00:00"),
        (" 1413849600 ", "s", "2014-10-21 00:00:00"),
        ("20141021.0", "yyyymmdd", "2014-10-21 00:00:00"),
        ("1413849600123", "ms", "2014-10-21 00:00:00"),
        ("14102105", "yymmddhh", "2014-10-21 05:00:00"),
        ("20141021", "yyyymmdd", "2014-10-21 00:00:00"),
        ("16364", "day", "2014-10-21 00:00:00"),
        ("-1", "s", "1969-12-31 23:59:59"),
    ],
)
def test_units(text, unit, expected):
    (found,), (good,) = read([text], unit)
    assert good
    assert show_time(found) == expected


@pytest.mark.parametrize(
    "text",
    ["", "yesterday", "2014-13-01", "2014-02-30", "2014-10-21 25:00", "2014-10-21 05:61", "2014-10-21x", "2014-10-"],
)
def test_no_times(text):
    assert read([text, "2014-10-21 05:30:00.5x", "2014-10-21 05.5"])[1] == [False] * 3
    assert read([text, "2014-10-21 05:00+9", "99999999999999999", "2014/10-21"])[1] == [False] * 4


def test_numbers_of_arrow():
    faults = Faults(3)
    found = read_times(Floats(np.array([1.5, np.nan, 1e300])), TimeColumn("t"), faults)
    assert found[0] == 1_500_000
    assert faults.good.tolist() == [True, False, False]
    faults = Faults(2)
    read_times(Integers(np.array([2**62, 3]), np.array([False, True])), TimeColumn("t"), faults)
    assert faults.good.tolist() == [False, False]


def test_unit_unknown():
    with pytest.raises(ConfigError, match="'weeks' is not a unit"):
        TimeColumn.parse("t:weeks")
    assert TimeColumn.parse("a:b c") == TimeColumn("a:b c")


DAYS = ["2014-10-21", "2014-10-21", "2014-10-22", "2014-10-23", "2014-10-23", "2014-10-23", "2014-10-25"]


def write_days(directory, days=DAYS, cut=4):
    lines = [f"{i % 2},{day} 0{i % 7}:00,u{i % 3}" for i, day in enumerate(days)]
    files = [directory / "a.csv", directory / "b.csv"]
    write(files[0], "label,when,user", *lines[:cut])
    write(files[1], "label,when,user", *lines[cut:])
    return files


class TestDays:
    def test_the_last_days_are_held_back(self, tmp_path):
        files = write_days(tmp_path)
        schema = prepare(files, tmp_path / "out", time_column="when", split="days:valid=1,test=1").schema
        assert {name: split.rows for name, split in schema.splits.items()} == {"train": 3, "valid": 3, "test": 1}
        assert schema.splits["train"].positives == 1
        assert [feature.name for feature in schema.features] == ["user"]
        assert schema.features[0].lookups == 3
        assert schema.dense == ()
        assert schema.notes["split"] == "days"
        time = schema.notes["time"]
        assert (time["column"], time["days"]) == ("when", 4)
        assert time["first_day"] == {"train": "2014-10-21", "valid": "2014-10-23", "test": "2014-10-25"}

    def test_a_border_inside_a_piece_counts_train_alone(self, tmp_path):
        n = 1000
        when = np.datetime64("2020-01-01T00:00:00", "s") + np.arange(n) * 600  # 144 rows a day
        tags = [[str(i % 5)] * (i % 3) for i in range(n)]
        columns = {"label": np.arange(n) % 2, "when": when, "n": np.arange(n) % 50, "x": np.arange(n) / 3, "tags": tags}
        pq.write_table(pa.table(columns), tmp_path / "f.parquet")
        options = {"ids": ["n"], "time_column": "when"}
        schema = prepare([tmp_path / "f.parquet"], tmp_path / "out", split="days:test=2", **options).schema
        train = 144 * 5
        assert schema.splits["train"].rows == train
        prepare([pa.table(columns).slice(0, train)], tmp_path / "train", **options)
        for part in ("counts/n.parquet", "counts/tags.parquet"):
            assert (tmp_path / "out" / part).read_bytes() == (tmp_path / "train" / part).read_bytes()
        mean = np.mean(np.arange(train) / 3)
        assert schema.dense[0].mean == pytest.approx(mean)
        back = [read_rows(tmp_path / name / "train" / "part-00000.arrow") for name in ("out", "train")]
        assert back[0].equals(back[1])

    def test_counts_in_file_order_over_reels(self, tmp_path, monkeypatch):
        monkeypatch.setattr("hotbed.data.formats.blocks.REEL_BYTES", 300)
        path = write(tmp_path / "f.csv", "label,n", *(f"{i % 2},v{i}" for i in range(400)))
        schema = prepare([path], tmp_path / "out", split="train=217,test=100").schema
        assert {name: split.rows for name, split in schema.splits.items()} == {"train": 217, "test": 100}
        assert schema.splits["train"].positives == 108
        assert schema.features[0].distinct == 217

    @pytest.mark.parametrize("workers", [1, 3])
    def test_out_of_order_within_a_file(self, tmp_path, workers):
        days = [*DAYS[:5], "2014-10-22", "2014-10-25"]
        with pytest.raises(FormatError, match=r"b\.csv, line 3: its time, 2014-10-22 05:00:00, is before"):
            prepare(write_days(tmp_path, days), tmp_path / "out", time_column="when", workers=workers)
        assert not (tmp_path / "out").exists()

    def test_out_of_order_between_files(self, tmp_path):
        files = write_days(tmp_path)
        with pytest.raises(FormatError, match=r"a\.csv, line 2: its time, 2014-10-21 00:00:00, is before"):
            prepare(files[::-1], tmp_path / "out", time_column="when")

    def test_rows_without_a_time_are_bad(self, tmp_path):
        path = write(tmp_path / "f.csv", "label,when,s", "1,2020-01-01,a", "0,,b", "1,soon,c", "0,2020-01-02,d")
        report = prepare([path], tmp_path / "out", time_column="when", max_bad=2)
        assert report.bad_rows == {"time when is missing": 1, "time when is not a time": 1}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"split": "days:test=1"}, "needs a time column"),
            ({"split": "days:test=4", "time_column": "when"}, "spans 4"),
            ({"split": "days:train=1,test=1", "time_column": "when"}, "other than train"),
            ({"split": "days:test=0.5", "time_column": "when"}, "whole days"),
            ({"time_column": "hour"}, "--time hour: no such column"),
            ({"time_column": "label"}, "label is in both --label and --time"),
            ({"time_column": "when", "ids": ["when"]}, "when is in both --time and --ids"),
        ],
    )
    def test_wrong_settings(self, tmp_path, options, message):
        with pytest.raises((ConfigError, FormatError), match=message):
            prepare(write_days(tmp_path), tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 10**14], pa.timestamp("s")),
        ([0, -(2**62)], pa.timestamp("ms")),
        ([0, 2**31 - 1], pa.date32()),
        ([0, -(2**31)], pa.date32()),
        ([0, 253_402_300_800_000_000], pa.timestamp("us")),
        ([0, -62_135_596_800_000_001], pa.timestamp("us")),
        ([0, -62_135_596_801], pa.int64()),
        ([0, 2**62], pa.int64()),
        ([0.0, 1e300], pa.float64()),
    ],
)
def test_times_outside_the_calendar_are_bad_rows(tmp_path, values, kind):
    table = pa.table(
        {"label": [0, 1] * 100, "ad": list(range(200)), "t": pa.array([values[0]] * 199 + [values[1]], kind)}
    )
    pq.write_table(table, tmp_path / "log.parquet")
    report = prepare([tmp_path / "log.parquet"], tmp_path / "out", label="label", ids=["ad"], time_column="t")
    ((reason, rows),) = report.bad_rows.items()
    assert rows == 1
    assert "time t lies outside the years 1 to 9999" in reason
    quarantined = (tmp_path / "out" / "quarantine.jsonl").read_text()
    assert '"line": 200' in quarantined
    assert "log.parquet" in quarantined
