"""score.py finds the hour and the weekday that `hotbed prepare` finds, or neither finds one; it needs no ONNX."""

import time
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from hotbed.data.formats.chunk import Faults
from hotbed.data.formats.parquet import read_columns
from hotbed.data.hash import MISSING_ID
from hotbed.data.times import TimeColumn, clock_ids, missing_times, read_times
from hotbed.export.score import _clock_id

HOUR = 1_699_999_200  # a full one
VALUES = {
    "s": [
        "1593878937.744", " 7.5 ", "x5.5",
        HOUR, HOUR - 1, -1, -3600, HOUR + 0.5, -0.5, str(HOUR), "+5", "1e3", float(HOUR), 0, 1e12, 10**13, "", None,
        float("nan"), "NA", "2017-11-07 9:30", "2017-11-07T09:30:00Z", "2017/11/7", "2017-1-7 5", "2017-11-07 23:30-0230",
        "2017-11-07 23:30:59.999999999+02:00", "2017-11-07 24:00", "2017-11-07 12:60", "0001-01-01", "9999-12-31 23:59",
        datetime(2017, 11, 7, 9, 30), datetime(2017, 11, 7, 9, 30, tzinfo=timezone(timedelta(hours=5, minutes=30))),
    ],
    "ms": [HOUR * 10**3, HOUR * 10**3 - 1, str(HOUR * 10**3 - 1), HOUR * 1e3 - 1],
    "us": [HOUR * 10**6, HOUR * 10**6 - 1],
    "ns": [HOUR * 10**9, HOUR * 10**9 - 1, np.int64(HOUR * 10**9 - 1), HOUR * 10**9 - 1000, str(HOUR * 10**9 - 1)],
    "hour": [472_222, 472_222.99, -1],
    "day": [19_675, 19_675.5],
    "yyyymmdd": [20171107, "20171107", "20171107.0", 20171131, 20171107.0, 20171107.5, 2017117, 171107, -20171107, 120171107],
    "yymmddhh": [17110709, "17110709", 17110724, 7110709, 14102100.0, 68010100, 69010100, 99123123],
    "%d.%m.%Y %H:%M": ["07.11.2017 09:30", " 7.11.2017 9:30 ", 5, "x", ""],
    "%Y-%m-%d %H:%M %z": ["2017-11-07 09:30 +0530", "2017-11-07 09:30 Z"],
    "%Y-%m-%d %H:%M %Z": ["2017-11-07 09:30 UTC", "2017-11-07 09:30 gmt", "2017-11-07 09:30 EST", "2017-11-07 09:30"],
    "%%Z %Y": ["%Z 2017", "UTC 2017"],
}  # fmt: skip


def prepared(value, unit, part):
    """The id that `prepare` gives a raw value; None: a bad row."""
    column = read_columns(pa.RecordBatch.from_arrays([pa.array([value])], names=["seen"]), Path("log"), "seen")["seen"]
    faults = Faults(1)
    times = read_times(column, TimeColumn("seen", unit), faults)
    if missing_times(column)[0]:
        return MISSING_ID
    return None if faults.any else int(clock_ids(times, part)[0])


def exported(value, unit, part):
    try:
        return _clock_id(value, "seen", part, unit)
    except ValueError:
        return None


@pytest.fixture
def in_new_york(monkeypatch):
    """A machine whose zone has names that strptime reads."""
    monkeypatch.setenv("TZ", "EST5EDT")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("unit", list(VALUES))
def test_hours_and_weekdays_are_those_of_prepare(unit, in_new_york):
    wanted = [[prepared(value, unit, part) for part in ("hour", "weekday")] for value in VALUES[unit]]
    assert [[exported(value, unit, part) for part in ("hour", "weekday")] for value in VALUES[unit]] == wanted


def test_a_time_is_never_taken_for_one_of_the_zone_of_the_machine(in_new_york):
    """Python reads the name EST on a machine of that zone alone, and drops the five hours."""
    assert datetime.strptime("05 EST", "%H %Z").tzinfo is None
    assert [prepared(f"2017-11-07 05:00 {zone}", "%Y-%m-%d %H:%M %Z", "hour") for zone in ("UTC", "EST")] == [5, None]


def test_dates_of_two_digit_years_are_not_of_the_first_century():
    assert prepared(171107, "yyyymmdd", "hour") is None
    assert prepared(17110709, "yymmddhh", "weekday") == datetime(2017, 11, 7, tzinfo=UTC).weekday()
