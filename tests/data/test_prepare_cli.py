"""`hotbed prepare` as a user meets it."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from hotbed.cli import prepare_report
from hotbed.cli.prepare import prepare_command
from hotbed.data.schema import Schema
from tests.data.raw_files import criteo_line, write

app = typer.Typer()
app.command("prepare")(prepare_command)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def raw(tmp_path):
    lines = [f"{i % 2},c{i % 3},{i},{i / 7},a|b{i},r{i}" for i in range(100)]
    return write(tmp_path / "f.csv", "click,city,age,price,tags,request", *lines, "7,x,1,1,,r")


def test_all_options_arrive(tmp_path, raw):
    out = tmp_path / "out"
    code, output = run(
        *(raw, "--out", out, "--format", "csv", "--label", "click", "--dense", "price", "--ids", "city,age"),
        *("--multi", "tags:|", "--drop", "request", "--splits", "train=0.7,test=0.3", "--max-bad", "2"),
        *("--ids-mode", "hash", "--hash-rows", "64", "--delimiter", ","),
    )
    assert code == 0, output
    schema = Schema.load(out)
    assert [one.name for one in schema.dense] == ["price"]
    assert [(one.name, one.mode, one.rows, one.multi) for one in schema.features] == [
        ("city", "hash", 64, False),
        ("age", "hash", 64, False),
        ("tags", "hash", 64, True),
    ]
    assert set(schema.splits) == {"train", "test"}


def test_the_table_tells_all(tmp_path, raw):
    code, output = run(
        raw, "--out", tmp_path / "out", "--drop", "request,tags", "--splits", "train=60,test=30", "--integers", "both"
    )
    assert code == 0, output
    for piece in (
        "train",
        "60",
        "30 (50.0%)",
        "age_bucket",
        "city",
        "price",
        "age (log)",
        "label click is not 0 or 1",
        "10 good rows",
    ):
        assert piece in output


def test_two_words_for_a_label(tmp_path):
    table = pa.table({"income": [">50K", "<=50K", "<=50K"], "job": ["a", "b", "a"]})
    pq.write_table(table, tmp_path / "f.parquet")
    code, output = run(
        f"train={tmp_path / 'f.parquet'}", "--out", tmp_path / "out", "--label", "income", "--positive", ">50K"
    )
    assert code == 0, output
    assert Schema.load(tmp_path / "out").splits["train"].positives == 1


def test_a_tab_can_be_typed(tmp_path):
    raw = write(tmp_path / "f", "label\tx,y", "1\ta,b", "0\tc,d")
    code, output = run(raw, "--out", tmp_path / "out", "--delimiter", "\\t")
    assert code == 0, output
    assert [one.name for one in Schema.load(tmp_path / "out").features] == ["x,y"]


def test_overwrite(tmp_path):
    raw = write(tmp_path / "f", *(criteo_line(i % 2) for i in range(10)))
    assert run(raw, "--out", tmp_path / "out")[0] == 0
    code, output = run(raw, "--out", tmp_path / "out")
    assert code == 2
    assert "--overwrite" in output
    assert run(raw, "--out", tmp_path / "out", "--overwrite")[0] == 0


def test_interrupt(tmp_path, raw, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("hotbed.data.prepare.stages.write_part", stop)
    code, output = run(raw, "--out", tmp_path / "out")
    assert code == 130
    assert "nothing was written" in output
    assert [path.name for path in tmp_path.iterdir()] == ["f.csv"]


def test_help_names_every_option_and_an_example():
    code, output = run("--help")
    assert code == 0
    for option in (
        "--integers",
        "--min-count",
        "--max-bad",
        "--positive",
        "hotbed prepare train=clicks.csv",
        "quarantine.jsonl",
    ):
        assert option in output


def test_names_are_shown_as_they_are(tmp_path):
    """Brackets are no markup, and :100: is no emoji."""
    raw = write(tmp_path / "f.csv", "label,c[red],:100:,n[/x]", *["1,a,b,3", "0,c,d,4"] * 5, "1,a,b,many")
    code, output = run(raw, "--out", tmp_path / "o[bold]", "--max-bad", 1, "--dense", "n[/x]")
    assert code == 0, output
    for name in ("c[red]", ":100:", "n[/x] (log)", "n[/x] is not a number", "o[bold]"):
        assert name in output


def test_columns_that_differ_in_every_row_are_named(tmp_path):
    rows = [f"{n % 2},{n % 7},2026-11-{1 + n % 28:02d} {n % 24:02d}:00:{n:05d}" for n in range(2000)]
    raw = write(tmp_path / "f.csv", "label,c,when", *rows)
    code, output = run(raw, "--out", tmp_path / "out", "--ids", "c")
    assert code == 0, output
    assert "when: nearly every row has a different value" in output
    assert "--drop when" in output
    assert "c: nearly" not in output


@pytest.mark.parametrize("name", ["raw.csv", "notes.txt", "train/plan.txt", "mine/x.csv"])
def test_overwrite_deletes_nothing_but_a_dataset(tmp_path, raw, name):
    out = tmp_path / "out"
    assert run(raw, "--out", out, "--max-bad", 1)[0] == 0
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_bytes(raw.read_bytes())
    code, output = run(out / name, "--out", out, "--overwrite", "--format", "csv", "--max-bad", 1)
    assert code == 2
    assert f"holds more than a dataset ({name.partition('/')[0]})" in output
    assert (out / name).read_bytes() == raw.read_bytes()


def tagged(tmp_path, separator: str, head: str = "my tags"):
    tags = ("news", "art", "food", "sport")
    bags = [separator.join(tag for k, tag in enumerate(tags) if i >> k & 1) for i in range(16)]
    lines = [f'{i % 2},"{bags[i % 16]}","Berlin, {i % 40}"' for i in range(200)]
    return write(tmp_path / "f.csv", f"click,{head},place", *lines)


@pytest.mark.parametrize("separator", ["|", ";", ","])
def test_several_ids_in_one_value_are_noticed(tmp_path, separator):
    raw = tagged(tmp_path, separator)
    code, output = run(raw, "--out", tmp_path / "out")
    assert code == 0, output
    assert f"my tags: its values look like several ids separated by '{separator}'" in output
    assert f"--multi 'my tags:{separator}' splits them" in output
    assert "place: its values" not in output  # forty places, one of them each
    code, output = run(raw, "--out", tmp_path / "apart", "--multi", f"my tags:{separator}")
    assert code == 0, output
    assert "look like several ids" not in output
    assert Schema.load(tmp_path / "apart").features[0].distinct == 4


def test_a_row_that_nothing_trains_is_told_once_with_the_way_out(tmp_path):
    raw = write(tmp_path / "f.csv", "click,city,ad", *(f"{i % 2},c{i % 3},a{i}" for i in range(60)))
    code, output = run(raw, "--out", tmp_path / "one")
    assert code == 0, output
    assert output.count("nothing trains it") == 1
    assert "--min-count 2" in output
    code, output = run(raw, "--out", tmp_path / "two", "--min-count", "2")
    assert code == 0, output
    assert "nothing trains it" not in output
    code, output = run(raw, "--out", tmp_path / "hash", "--ids-mode", "hash", "--hash-rows", "10")
    assert "nothing trains it" not in output


def test_ids_that_share_by_chance_are_reported(tmp_path, monkeypatch):
    raw = write(tmp_path / "f.csv", "click,city,ad", *(f"{i % 2},c{i % 3},a{i}" for i in range(60)))
    told = "ids share one of 10 rows with another id"
    assert told not in run(raw, "--out", tmp_path / "listed")[1]
    monkeypatch.setattr(prepare_report, "_SOME_PAIRS", 1e-30)
    code, output = run(raw, "--out", tmp_path / "hash", "--ids-mode", "hash", "--hash-rows", "10")
    assert code == 0, output
    assert told in output
    assert "pairs share an id" in output


def test_look_ups_of_row_0_have_a_column_where_there_are_some(tmp_path):
    raw = write(
        tmp_path / "f.csv", "click,city", *(f"{i % 2},c{i}" for i in range(10)), *(f"{i % 2},d" for i in range(30))
    )
    _, output = run(raw, "--out", tmp_path / "all")
    assert "distinct ids in train" in output
    assert "lookups of row 0" not in output
    _, output = run(raw, "--out", tmp_path / "frequent", "--min-count", "2")
    assert "lookups of row 0" in output
    assert "25.0%" in output


def test_commands_quote_names_with_spaces(tmp_path):
    raw = write(tmp_path / "f.csv", "click,request id", *(f"{i % 2},r{i}" for i in range(2000)))
    _, output = run(raw, "--out", tmp_path / "out")
    assert "--drop 'request id' leaves it out" in output


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        (("no", "yes"), (), "Values of click: 'no', 'yes'. --positive yes says that 'yes' means 1."),
        (("1", "-1"), (), "Values of click: '1', '-1'. --positive 1 says"),
        (
            ("no", "yes"),
            ("--positive", "Yes"),
            "None of the first 60 labels is 'Yes' (--positive). Values of click: 'no', 'yes'. --positive yes",
        ),
        (
            ("no", "no"),
            ("--positive", "yes"),
            "no row is positive. None of the first 60 labels is 'yes' (--positive). Values of click: 'no'. A label has",
        ),
        (("a", "b", "c"), (), "Values of click: 'a', 'b', 'c'. A label has two values; --label names another"),
        (("", ""), (), "Column click is empty. --label names another one."),
    ],
)
def test_labels_that_cannot_be_read_name_the_option_to_paste(tmp_path, words, options, said):
    raw = write(tmp_path / "f.csv", "click,city", *(f"{words[i % len(words)]},c{i % 9}" for i in range(60)))
    code, output = run(raw, "--out", tmp_path / "out", *options)
    assert code == 1
    assert said in " ".join(output.split())
    assert "--format" not in output


def test_labels_of_numbers_in_a_table(tmp_path):
    pq.write_table(pa.table({"click": [1, 2, None, 2], "city": list("abab")}), tmp_path / "f.parquet")
    code, output = run(tmp_path / "f.parquet", "--out", tmp_path / "out")
    assert code == 1
    assert "Values of click: '1', '2'. --positive 2 says" in " ".join(output.split())


def test_text_of_another_encoding(tmp_path):
    raw = tmp_path / "f.csv"
    raw.write_bytes("\n".join(["click,city", *(f"{i % 2},Orléans" for i in range(60))]).encode("latin-1"))
    code, output = run(raw, "--out", tmp_path / "out")
    assert code == 1
    assert "f.csv is not UTF-8. Convert it: iconv -f latin1 -t utf-8" in " ".join(output.split())
    assert "--format" not in output
    raw.write_bytes("click,cité\n1,a\n".encode("latin-1"))
    _, output = run(raw, "--out", tmp_path / "out")
    assert "iconv -f latin1 -t utf-8" in output


def test_a_label_of_words_and_numbers_that_are_ids_have_a_way_out(tmp_path):
    raw = write(
        tmp_path / "f.csv", "income,level", *(f"{'<=50K' if i % 3 else '>50K'},{10000 + i % 9}" for i in range(60))
    )
    code, output = run(raw, "--out", tmp_path / "out", "--label", "income")
    assert code == 1
    assert "Values of income: '>50K', '<=50K'. --positive '>50K' says that '>50K' means 1." in " ".join(output.split())
    code, output = run(raw, "--out", tmp_path / "out", "--label", "income", "--positive", ">50K")
    assert code == 0, output
    assert "--ids A,B reads those that are ids as ids" in output
    code, output = run(raw, "--out", tmp_path / "ids", "--label", "income", "--positive", ">50K", "--ids", "level")
    assert "--ids A,B" not in output


def test_a_small_file_in_the_order_of_time_is_left_alone_and_another_is_sorted_with_one_line(tmp_path):
    rows = [f"{n % 2},c{n % 3},2026-11-{1 + n // 100:02d} 10:{n % 60:02d}:00" for n in range(60)]
    raw = write(tmp_path / "f.csv", "click,city,seen", *rows)
    _, output = run(raw, "--out", tmp_path / "sorted", "--time", "seen")
    assert "rows are not in the order" not in output
    raw = write(tmp_path / "g.csv", "click,city,seen", *rows[30:], *rows[:30])
    _, output = run(raw, "--out", tmp_path / "mixed", "--time", "seen")
    assert output.count("rows are not in the order of seen; they are sorted by it") == 1
