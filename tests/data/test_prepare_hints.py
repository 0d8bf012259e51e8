"""Logs with something wrong in them: `prepare` names the column and the option."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from hotbed.cli.prepare_report import hints
from hotbed.data.formats.chunk import Faults
from hotbed.data.prepare.guess import guess_id, is_named_id
from hotbed.data.prepare.prepare import PrepareReport, prepare
from hotbed.data.raw_reader import RawReader
from hotbed.data.schema import Schema
from hotbed.data.times import NO_TIME, TimeColumn, looks_like_time, read_times, unit_of_numbers
from hotbed.errors import ConfigError, FormatError
from tests.data.raw_files import text_of, write

ROWS = 400


def log(tmp_path, names: str, row, name: str = "log.csv", rows: int = ROWS):
    return write(tmp_path / name, names, *(row(i) for i in range(rows)))


def told(report: PrepareReport, column: str) -> list[str]:
    return [line for line in hints(report) if line.removeprefix("WARNING ").startswith(f"{column}:")]


def random_label(i: int) -> int:
    return int(np.random.default_rng(i).random() < 0.3)


def test_a_column_filled_for_positives_only_is_a_leak(tmp_path):
    raw = log(
        tmp_path,
        "click,app,paid_at,noise",
        lambda i: f"{random_label(i)},a{i % 7},{f'x{i}' if random_label(i) else ''},{i * 37 % 101}",
    )
    report = prepare(raw, tmp_path / "out", split={"train": 0.9, "test": 0.1})
    assert list(Schema.load(tmp_path / "out").notes["leaks"]) == ["paid_at"]
    (line,) = told(report, "paid_at")
    assert "--drop paid_at" in line
    assert "1.0000" in line
    clean = prepare(raw, tmp_path / "clean", split={"train": 0.9, "test": 0.1}, drop=["paid_at"])
    assert "leaks" not in clean.schema.notes


def test_a_number_that_tells_the_label_is_a_leak_in_either_direction(tmp_path):
    raw = log(
        tmp_path,
        "click,spent,left",
        lambda i: f"{random_label(i)},{random_label(i) * 0.7 + i * 1e-4},{-random_label(i)}.5",
    )
    assert set(prepare(raw, tmp_path / "out").schema.notes["leaks"]) == {"spent", "left"}


def test_a_number_filled_for_positives_only_is_a_leak_whatever_its_sign(tmp_path):
    raw = log(
        tmp_path,
        "click,profit,noise",
        lambda i: f"{random_label(i)},{(i * 37 % 101 - 50) / 7 if random_label(i) else ''},{i * 37 % 101 - 50}",
        rows=4000,
    )
    assert list(prepare(raw, tmp_path / "out").schema.notes["leaks"]) == ["profit"]


def test_a_bag_that_is_filled_for_positives_only_is_a_leak(tmp_path):
    raw = log(tmp_path, "click,app,bought", lambda i: f"{random_label(i)},a{i % 7},{'b|c' if random_label(i) else ''}")
    assert list(prepare(raw, tmp_path / "out", multi={"bought": "|"}).schema.notes["leaks"]) == ["bought"]


def test_integers_named_like_ids_become_ids_and_it_is_told(tmp_path):
    raw = log(
        tmp_path,
        "click,user_id,ip,movieId,age,clicks_count",
        lambda i: f"{i % 2},{i % 40},{i % 9},{i % 30},{i % 60},{i % 5}",
    )
    report = prepare(raw, tmp_path / "out")
    assert [one.name for one in report.schema.features] == ["user_id", "ip", "movieId"]
    assert [one.name for one in report.schema.dense] == ["age", "clicks_count"]
    (line,) = told(report, "user_id")
    assert "IDS" in line
    assert "--dense user_id" in line
    assert "--ids user_id" in line


def test_an_option_decides_against_the_guess(tmp_path):
    raw = log(tmp_path, "click,user_id,age", lambda i: f"{i % 2},{i % 40},{i % 60}")
    report = prepare(raw, tmp_path / "out", dense=["user_id"])
    assert [one.name for one in report.schema.dense] == ["user_id", "age"]
    assert not report.guesses


def test_integers_that_repeat_like_ids_are_reported(tmp_path):
    draw = np.random.default_rng(0)
    popular = draw.permutation(200)
    codes = popular[np.minimum(draw.pareto(1.0, 4000) * 10, 199).astype(int)]
    ages = draw.normal(40, 12, 4000).astype(int)
    raw = log(tmp_path, "click,c7,years", lambda i: f"{i % 2},{codes[i]},{ages[i]}", rows=4000)
    report = prepare(raw, tmp_path / "out")
    (line,) = told(report, "c7")
    assert "--ids c7" in line
    assert not told(report, "years")


def test_a_row_number_named_id_stays_a_number_and_is_reported(tmp_path):
    raw = log(tmp_path, "click,id,app", lambda i: f"{i % 2},{i},a{i % 3}", rows=1200)
    report = prepare(raw, tmp_path / "out")
    assert [one.name for one in report.schema.dense] == ["id"]
    (line,) = told(report, "id")
    assert "--drop id" in line


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        *(
            ("userId", True),
            ("UserID", True),
            ("userid", True),
            ("user", True),
            ("site_id", True),
            ("zip", True),
            ("os", True),
        ),
        *(("device_ip", True), ("zipCode", True), ("ad", True)),
        *(
            ("age", False),
            ("num_users", False),
            ("user_count", False),
            ("paid", False),
            ("I3", False),
            ("price", False),
        ),
        *(("valid", False), ("item_price", False), ("days_since_app", False)),
    ],
)
def test_names_of_ids(name, is_id):
    assert is_named_id(name) == is_id


def test_smooth_counts_are_quantities():
    draw = np.random.default_rng(1)
    for values in (draw.normal(500, 90, 20000), draw.exponential(60, 20000), draw.uniform(0, 300, 20000)):
        assert guess_id("x", values.astype(np.int64)) is None
    assert guess_id("x", np.zeros(0, np.int64)) is None
    assert guess_id("x", np.repeat(np.arange(100), 20)) is None  # all equally frequent


def test_a_mixed_column_gets_the_option_for_ids(tmp_path):
    raw = log(
        tmp_path, "click,place,price", lambda i: f"{i % 2},{98101 + i % 30}{'-2117' if i % 11 == 0 else ''},{i / 7}"
    )
    with pytest.raises(FormatError, match="--ids place") as error:
        prepare(raw, tmp_path / "out")
    assert "raise --max-bad" not in str(error.value)
    report = prepare(raw, tmp_path / "lossy", max_bad="20%")
    assert any("--ids place" in line and "37 rows" in line for line in hints(report))
    assert prepare(raw, tmp_path / "ids", ids=["place"]).bad_rows == {}


def test_a_mixed_column_named_like_an_id_is_one(tmp_path):
    raw = log(
        tmp_path, "click,zip,price", lambda i: f"{i % 2},{98101 + i % 30}{'-2117' if i % 11 == 0 else ''},{i / 7}"
    )
    report = prepare(raw, tmp_path / "out")
    assert report.bad_rows == {}
    assert [one.name for one in report.schema.features] == ["zip"]


def test_a_time_column_that_was_read_as_ids_is_reported(tmp_path):
    raw = log(tmp_path, "click,seen,app", lambda i: f"{i % 2},2017-11-07 {i % 24}:30,a{i % 3}")
    (line,) = told(prepare(raw, tmp_path / "out"), "seen")
    assert "--time seen" in line
    assert "--time-features hour,weekday" in line
    odd = log(tmp_path, "click,seen,app", lambda i: f"{i % 2},{1 + i % 28}.11.2017 9:30,a{i % 3}", name="odd.csv")
    (line,) = told(prepare(odd, tmp_path / "odd"), "seen")
    assert "--time 'seen:%d.%m.%Y %H:%M' makes it the time column, if days come before months" in line
    assert looks_like_time(["a|b"]) == looks_like_time([]) == looks_like_time(["1.2.3.4"]) == ""


@pytest.mark.parametrize(
    ("texts", "form"),
    [
        (["01/13/2023 12:00:05 AM", "02/01/2023 01:59:00 PM"], "%m/%d/%Y %I:%M:%S %p"),
        (["25/02/2017", "1/1/2016"], "%d/%m/%Y"),
        (["02-Jan-2023", "31-Dec-2023"], "%d-%b-%Y"),
        (["Mon, 02 Jan 2023 03:04:05 GMT"], "%a, %d %b %Y %H:%M:%S %Z"),
        (["January 2, 2023 3:04 PM"], "%B %d, %Y %I:%M %p"),
        (["07/Mar/2004:16:05:49 -0800"], "%d/%b/%Y:%H:%M:%S %z"),
        (["1.1.2023 5", "x"], ""),
        (["1.1.2023 5 o'clock"], "format"),
        (["Marseille 13", "May 5", "Decathlon 2024"], ""),
        (["iPhone 5 (March)", "2 may"], ""),
    ],
)
def test_the_format_of_dates_is_found(texts, form):
    assert looks_like_time(texts) == form
    if "%" in form:
        assert NO_TIME not in read_times(text_of(texts), TimeColumn("seen", form), Faults(len(texts)))


def test_a_leak_is_not_offered_as_a_time(tmp_path):
    raw = log(
        tmp_path,
        "click,app,paid",
        lambda i: f"{random_label(i)},a{i % 7},{f'2017-11-07 {i % 24}:30' if random_label(i) else ''}",
    )
    (line,) = told(prepare(raw, tmp_path / "out"), "paid")
    assert "--drop paid" in line


def test_a_label_of_one_class_is_said(tmp_path):
    for value in (0, 1):
        raw = log(tmp_path, "click,app", lambda i, value=value: f"{value},a{i % 7}", name=f"{value}.csv")
        (line,) = told(prepare(raw, tmp_path / f"out{value}"), "click")
        assert f"WARNING click: this label is {value} in every row of train" in line


def test_spaces_that_are_a_part_of_ids_are_said(tmp_path):
    raw = log(tmp_path, "click, user, price", lambda i: f"{random_label(i)}, u{i % 9}, {i % 5}.5")
    report = prepare(raw, tmp_path / "out")
    (line,) = told(report, "user")
    assert "such as ' u0'" in line
    assert not told(report, "price")


def test_ids_with_missing_words_get_one_line(tmp_path):
    raw = log(tmp_path, "click,brand", lambda i: f"{random_label(i)},{'NULL' if i % 9 == 0 else i % 40}")
    (line,) = told(prepare(raw, tmp_path / "out"), "brand")
    assert "IDS" in line


@pytest.mark.parametrize(("values", "positive"), [((1, 2), "2"), ((-1, 1), "1"), ((0, 5), "5")])
def test_of_two_numbers_the_larger_is_positive(tmp_path, values, positive):
    raw = log(tmp_path, "label,app", lambda i: f"{values[random_label(i)]},a{i % 7}")
    with pytest.raises(FormatError, match=f"--positive {positive} says"):
        prepare(raw, tmp_path / "out")


def test_a_second_time_is_left_out_and_not_made_the_time_column(tmp_path):
    """Such as the day of a folder day=2017-11-07, or a row's own moment."""
    raw = log(tmp_path, "click,seen,day", lambda i: f"{i % 2},{i},2017-11-{1 + i // 40:02d}")
    (line,) = told(prepare(raw, tmp_path / "out", time_column="seen"), "day")
    assert "--drop day" in line
    assert "--time" not in line
    raw = log(tmp_path, "click,seen,key", lambda i: f"{i % 2},{i},k{i}", rows=3000, name="keys.csv")
    (line,) = told(prepare(raw, tmp_path / "keys", time_column="seen"), "key")
    assert line.endswith("--drop key leaves it out")


def test_a_time_that_cannot_be_read_gets_the_option_for_formats(tmp_path):
    raw = log(tmp_path, "click,seen,app", lambda i: f"{i % 2},07.11.2017 9:{i % 60:02d},a{i % 3}")
    with pytest.raises(FormatError, match=r"--time 'seen:%d/%m/%Y %H:%M'"):
        prepare(raw, tmp_path / "out", time_column="seen")
    with pytest.raises(ConfigError, match="strptime"):
        prepare(raw, tmp_path / "out", time_column="seen:%Q")
    report = prepare(raw, tmp_path / "out", time_column="seen:%d.%m.%Y %H:%M")
    assert report.schema.notes["time"]["first"] == "2017-11-07 09:00:00"


def test_a_small_log_is_sorted_by_its_time(tmp_path):
    raw = log(tmp_path, "click,seen,app", lambda i: f"{i % 2},2017-11-{1 + i * 7 % 20} 9:{i % 60:02d},a{i}")
    said = []
    report = prepare(raw, tmp_path / "out", time_column="seen", split="days:valid=1,test=2", say=said.append)
    assert ["sorted" in line and str(raw) in line for line in said][:1] == [True]
    assert report.schema.notes["time"]["first_day"] == {
        "train": "2017-11-01",
        "valid": "2017-11-18",
        "test": "2017-11-19",
    }
    assert report.schema.splits["test"].rows == ROWS // 10
    again = log(
        tmp_path,
        "click,seen,app",
        lambda i: f"{j % 2},2017-11-{1 + j * 7 % 20} 9:{j % 60:02d},a{j}" if (j := ORDER[i]) >= 0 else "",
        name="sorted.csv",
    )
    prepare(again, tmp_path / "same", time_column="seen", split="days:valid=1,test=2")
    for split in ("train", "valid", "test"):
        one, other = (tmp_path / name / f"{split}/part-00000.arrow" for name in ("out", "same"))
        assert one.read_bytes() == other.read_bytes()


ORDER = sorted(range(ROWS), key=lambda i: (1 + i * 7 % 20, i % 60))  # by day, then minute; equal times in file order


def test_hour_and_weekday_are_features_and_read_again_for_scores(tmp_path):
    raw = log(tmp_path, "click,seen,app", lambda i: f"{i % 2},2017-11-{1 + i // 24:02d} {i % 24}:30,a{i % 3}")
    report = prepare(raw, tmp_path / "out", time_column="seen", time_features=["hour", "weekday"])
    assert {one.name: one.distinct for one in report.schema.features} == {"app": 3, "seen_hour": 24, "seen_weekday": 7}
    (batch,) = RawReader(tmp_path / "out", [raw])
    assert len(np.unique(batch.ids[:, 1])) == 24
    assert (batch.ids > 0).all()  # every hour and weekday is known
    gaps = write(tmp_path / "gaps.csv", "click,seen,app", "1,,a1")
    (batch,) = RawReader(tmp_path / "out", [gaps])
    assert batch.ids[0].tolist()[1:] == [0, 0]
    with pytest.raises(ConfigError, match="needs a time column"):
        prepare(raw, tmp_path / "none", time_features=["hour"])
    with pytest.raises(ConfigError, match="there are hour, weekday"):
        prepare(raw, tmp_path / "none", time_column="seen", time_features=["month"])


def test_a_valid_split_is_taken_out_of_a_train_file(tmp_path):
    train = log(tmp_path, "click,app", lambda i: f"{i % 2},a{i % 7}", name="train.csv")
    test = log(tmp_path, "click,app", lambda i: f"{i % 2},a{i % 7}", name="test.csv", rows=50)
    files = [("train", train), ("test", test)]
    plain = prepare(files, tmp_path / "plain")
    assert any("--splits valid=0.1" in line for line in hints(plain))
    report = prepare(files, tmp_path / "out", split="valid=0.1")
    rows = {name: split.rows for name, split in report.schema.splits.items()}
    assert rows["test"] == 50
    assert rows["train"] + rows["valid"] == ROWS
    assert 20 < rows["valid"] < 60
    assert report.schema.notes["split"] == "random"
    assert not any("no valid split" in line for line in hints(report))
    for wrong in ("test=0.1", "valid=50", "train=0.9,valid=0.1"):
        with pytest.raises(ConfigError, match=r"valid=0\.1"):
            prepare(files, tmp_path / "wrong", split=wrong)


@pytest.mark.parametrize(
    ("value", "option"),
    [
        (lambda i: f"1410{21 + i // 200:02d}{i % 24:02d}", "seen:yymmddhh"),
        (lambda i: f"201410{1 + i % 30:02d}", "seen:yyyymmdd"),
        (lambda i: str(956_703_932 + i * 977), "seen:s"),
        (lambda i: str((1_500_000_000 + i * 977) * 1000), "seen:ms"),
        (lambda i: f"{1_593_878_937 + i * 977}.744", "seen:s"),
        (lambda i: f"202007{1 + i % 30:02d}.0", "seen:yyyymmdd"),
    ],
)
def test_times_written_as_numbers_are_reported(tmp_path, value, option):
    raw = log(tmp_path, "click,seen,app", lambda i: f"{i % 2},{value(i)},a{i % 3}")
    (line,) = told(prepare(raw, tmp_path / "out"), "seen")
    assert f"--time {option}" in line
    assert "as an amount" in line
    (line,) = told(prepare(raw, tmp_path / "ids", ids=["*"]), "seen")
    assert f"--time {option}" in line
    assert prepare(raw, tmp_path / "time", time_column=option).schema.notes["time"]["column"] == "seen"
    assert not told(prepare(raw, tmp_path / "amounts", dense=["seen"]), "seen")


def test_timestamps_of_a_table_are_reported(tmp_path):
    times = pa.array(range(1_500_000_000, 1_500_000_000 + ROWS), pa.timestamp("s"))
    table = pa.table({"click": [0, 1] * (ROWS // 2), "seen": times})
    (line,) = told(prepare(table, tmp_path / "out"), "seen")
    assert "--time seen" in line


def test_amounts_and_ids_are_not_taken_for_times():
    draw = np.random.default_rng(0)
    for values in (draw.integers(0, 2**31, 500), draw.integers(0, 10**8, 500), np.arange(500), np.zeros(500, np.int64)):
        assert unit_of_numbers(values) == ""
        assert unit_of_numbers(values + 0.5) == ""
    assert unit_of_numbers(np.zeros(0, np.int64)) == ""


def test_integers_with_leading_zeros_are_ids(tmp_path):
    raw = log(tmp_path, "click,customer,age", lambda i: f"{i % 2},{i % 50:06d},{i % 60}")
    report = prepare(raw, tmp_path / "out")
    assert [one.name for one in report.schema.features] == ["customer"]
    (line,) = told(report, "customer")
    assert "--dense customer" in line
    assert "leading zeros" in line


@pytest.mark.parametrize("value", ["{:,.2f}", "{:.1f} %", "€{:.2f}", "{:.2f} EUR"])
def test_numbers_that_are_not_plain_are_reported(tmp_path, value):
    to_commas = str.maketrans(".,", ",.")
    raw = log(tmp_path, "click;price;app", lambda i: f"{i % 2};{value.format(i * 37.31).translate(to_commas)};a{i % 3}")
    (line,) = told(prepare(raw, tmp_path / "out"), "price")
    assert "--ids price" in line
    assert "--multi" not in line


def test_a_column_of_numbers_and_words_is_reported(tmp_path):
    raw = log(tmp_path, "click,price,app", lambda i: f"{i % 2},{'none given' if i % 4 == 0 else i / 7},a{i % 3}")
    (line,) = told(prepare(raw, tmp_path / "out"), "price")
    assert "'none given'" in line
    assert not told(prepare(raw, tmp_path / "ids", ids=["price"]), "price")


@pytest.mark.parametrize("missing", ["", "NA", "n/a", "NULL", r"\N", "-", "?"])
def test_missing_numbers_in_many_spellings(tmp_path, missing):
    raw = log(tmp_path, "click,price,n", lambda i: f"{i % 2},{missing if i % 3 else i / 7},{missing if i % 3 else i}")
    report = prepare(raw, tmp_path / "out")
    assert report.bad_rows == {}
    assert [one.name for one in report.schema.dense] == ["price", "n"]


@pytest.mark.parametrize(
    ("lines", "way_out"),
    [
        (["1653::1966::3", "82::2607::4"], "sed 's/::/"),
        (["1,1193,5", "0,661,3"], "Is the first line data?"),
        (["1,1,5", "0,661,3"], "Is the first line data?"),
        (['{"click": 1, "user": "a"}', '{"click": 0, "user": "b"}'], "is JSON"),
        (['[{"click": 1}]'], "is JSON"),
    ],
)
def test_a_file_without_a_header_gets_the_way_to_make_one(tmp_path, lines, way_out):
    with pytest.raises((ConfigError, FormatError)) as error:
        prepare(write(tmp_path / "log.txt", *lines), tmp_path / "out")
    assert way_out in str(error.value)


def test_a_header_is_not_taken_for_data(tmp_path):
    with pytest.raises(ConfigError) as error:
        prepare(write(tmp_path / "log.csv", "user,item", "1,2"), tmp_path / "out")
    assert "first line" not in str(error.value)


def test_a_delimiter_of_two_characters_gets_the_way_to_replace_it(tmp_path):
    with pytest.raises(ConfigError, match="sed 's/::/"):
        prepare(write(tmp_path / "log.csv", "1::2"), tmp_path / "out", delimiter="::")


@pytest.mark.parametrize("kind", ["text", "table"])
def test_ids_written_as_floats_are_ids(tmp_path, kind):
    """As pandas writes integers of which some are missing."""
    raw = log(
        tmp_path, "click,user_id,item_price", lambda i: f"{i % 2},{'' if i % 9 == 0 else f'{i % 40}.0'},{i % 7}.0"
    )
    users = [None if i % 9 == 0 else float(i % 40) for i in range(ROWS)]
    table = pa.table(
        {"click": [i % 2 for i in range(ROWS)], "user_id": users, "item_price": [i % 7.0 for i in range(ROWS)]}
    )
    report = prepare(raw if kind == "text" else table, tmp_path / "out")
    assert [one.name for one in report.schema.features] == ["user_id"]
    assert report.schema.features[0].distinct == 41
    (line,) = told(report, "user_id")
    assert "--dense user_id" in line


def test_fractions_are_no_ids(tmp_path):
    raw = log(tmp_path, "click,user,n", lambda i: f"{i % 2},{i % 40 / 2:g},{i % 5}")
    assert [one.name for one in prepare(raw, tmp_path / "out").schema.dense] == ["user", "n"]
