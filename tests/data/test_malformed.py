"""Malformed input: each case ends as a clear HotbedError or as a counted row in quarantine, never as another exception.

A bad row among good ones must leave the dataset exactly as if it had not been there. Every case also goes through the
command line, where it must end with exit code 2 and without a traceback.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hotbed.cli.prepare import prepare_command
from hotbed.data.formats.blocks import read_blocks
from hotbed.data.prepare.prepare import prepare
from hotbed.data.raw_reader import RawReader
from hotbed.data.schema import Schema
from hotbed.errors import ConfigError, DataError, FormatError, HotbedError, SchemaError
from tests.data.raw_files import PACK, criteo_line, write, zipped
from tests.data.small import read_rows

app = typer.Typer()
app.command("prepare")(prepare_command)


def run_command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def assert_command_fails(arguments: list[str], error: HotbedError) -> None:
    code, output = run_command(*arguments)
    assert code in (1, 2)
    assert "Traceback" not in output
    assert " ".join(str(error).split())[:60] in " ".join(output.split())


def content(directory: Path) -> dict[str, str]:
    """Everything a model could learn from."""
    files = sorted([*directory.glob("train/*"), *directory.glob("counts/*")])
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# Rows: one bad line among good ones.

GOOD_CRITEO = [criteo_line(i % 2, {2: i}, {5: f"{i:x}"}) for i in range(1, 6)]
WRONG_LABEL = "label label is not 0 or 1"
BAD_CRITEO: dict[str, tuple[str | bytes, str]] = {
    "only a label": ("1", "fewer than 40 columns"),
    "cut in the integers": (criteo_line()[:9], "fewer than 40 columns"),
    "cut in the categoricals": (criteo_line()[:150], "fewer than 40 columns"),
    "last column gone": (criteo_line().rpartition("\t")[0], "fewer than 40 columns"),
    "one column more": (criteo_line() + "\t", "more than 40 columns"),
    "two rows on a line": (criteo_line() + criteo_line(), "more than 40 columns"),
    "two rows with a tab": (criteo_line() + "\t" + criteo_line(), "more than 40 columns"),
    "spaces for tabs": (criteo_line().replace("\t", " "), "fewer than 40 columns"),
    "commas for tabs": (criteo_line().replace("\t", ","), "fewer than 40 columns"),
    "only spaces": ("   ", "fewer than 40 columns"),
    "only tabs": ("\t" * 39, "label label is missing"),
    "a long line of junk": ("z" * 100_000, "fewer than 40 columns"),
    "label 2": (criteo_line(2), WRONG_LABEL),
    "label -1": (criteo_line(-1), WRONG_LABEL),
    "label nan": (criteo_line("nan"), WRONG_LABEL),
    "label inf": (criteo_line("inf"), WRONG_LABEL),
    "label empty": (criteo_line(""), "label label is missing"),
    "label space": (criteo_line(" "), WRONG_LABEL),
    "label yes": (criteo_line("yes"), WRONG_LABEL),
    "label 0.5": (criteo_line(0.5), WRONG_LABEL),
    "label almost 1": (criteo_line("1.0000001"), WRONG_LABEL),
    "label almost 0": (criteo_line("1e-300"), WRONG_LABEL),
    "label with underscore": (criteo_line("0_1"), WRONG_LABEL),
    "label in Arabic digits": (criteo_line("١"), WRONG_LABEL),
    "label in hex": (criteo_line("0x1"), WRONG_LABEL),
    "label of 400 digits": (criteo_line("1" + "0" * 400), WRONG_LABEL),
    "label after a byte order mark": ("\ufeff" + criteo_line(1), WRONG_LABEL),
    "integer with a fraction": (criteo_line(1, {1: 1.5}), "I1 is not an integer"),
    "integer in words": (criteo_line(1, {2: "two"}), "I2 is not an integer"),
    "integer in hex": (criteo_line(1, {13: "68fd1e64"}), "I13 is not an integer"),
    "integer beyond 64 bits": (criteo_line(1, {4: 2**63}), "I4 needs more than 64 bits"),
    "integer far beyond 64 bits": (criteo_line(1, {4: 10**40}), "I4 needs more than 64 bits"),
    "negative integer beyond 64 bits": (criteo_line(1, {5: -(2**63) - 1}), "I5 needs more than 64 bits"),
    "integer nan": (criteo_line(1, {6: "nan"}), "I6 is not an integer"),
    "integer inf": (criteo_line(1, {6: "-inf"}), "I6 is not an integer"),
    "integer with a space": (criteo_line(1, {7: " 7"}), "I7 is not an integer"),
    "integer only a sign": (criteo_line(1, {8: "-"}), "I8 is not an integer"),
    "integer with two signs": (criteo_line(1, {8: "--8"}), "I8 is not an integer"),
    "integer with thousands": (criteo_line(1, {9: "1,000"}), "I9 is not an integer"),
    "integer with an escape": (criteo_line(1, {9: "\x1b[31m9"}), "I9 is not an integer"),
    "categorical not hex": (criteo_line(1, hexes={1: "68fd1e6g"}), "C1 is not hex"),
    "categorical beyond 64 bits": (criteo_line(1, hexes={2: "1" * 17}), "C2 needs more than 64 bits"),
    "categorical with a space": (criteo_line(1, hexes={3: "68fd 1e64"}), "C3 is not hex"),
    "categorical negative": (criteo_line(1, hexes={4: "-1"}), "C4 is not hex"),
    "categorical with 0x": (criteo_line(1, hexes={5: "0x12"}), "C5 is not hex"),
    "categorical in Greek": (criteo_line(1, hexes={6: "αβγ"}), "C6 is not hex"),
    "categorical NULL": (criteo_line(1, hexes={7: "\\N"}), "C7 is not hex"),
    "columns shifted by one": (criteo_line().split("\t", 1)[1] + "\tab", "I13 is not an integer"),
    "a carriage return inside": (criteo_line(1, hexes={8: "68\rfd"}), "C8 is not hex"),
    "NUL byte": (criteo_line(1, hexes={9: "68\0fd"}), "a NUL byte"),
    "NUL for a label": (criteo_line("\0"), "a NUL byte"),
    "not UTF-8": (criteo_line().encode() + b"\xff", "not UTF-8"),
    "Latin-1": (criteo_line(1, hexes={9: "é"}).encode("latin-1"), "not UTF-8"),
    "overlong UTF-8": (criteo_line().encode() + b"\xc0\xaf", "not UTF-8"),
    "UTF-8 surrogate": (criteo_line().encode() + b"\xed\xa0\x80", "not UTF-8"),
    "UTF-8 beyond Unicode": (criteo_line().encode() + b"\xf4\x90\x80\x80", "not UTF-8"),
    "UTF-8 cut short": (criteo_line().encode() + b"\xe2\x82", "not UTF-8"),
    "binary junk": (bytes(b for b in range(256) if b not in b"\n"), "a NUL byte"),
    "a header": ("\t".join(["label", *(f"I{i}" for i in range(39))]), "I1 is not an integer"),
}

CSV_HEADER = "label,city,age,price"
GOOD_CSV = [f"{i % 2},c{i % 3},{i * 11},{i / 4}" for i in range(1, 21)]
BAD_CSV: dict[str, tuple[str | bytes, str]] = {
    "too few columns": ("1,x,3", "fewer than 4 columns"),
    "too many columns": ("1,x,3,0.5,", "more than 4 columns"),
    "another delimiter": ("1;x;3;0.5", "fewer than 4 columns"),
    "decimal comma": ("1,x,3,0,5", "more than 4 columns"),
    "a quote not closed": ('1,"x,3,0.5', "a quote is not closed on its line"),
    "a lone quote at the end": ('1,x,3,"', "a quote is not closed on its line"),
    "text after a quote": ('1,"x"y,3,0.5', "text after a closing quote"),
    "three quotes": ('1,""",3,0.5', "a quote is not closed on its line"),
    "label 2": ("2,x,3,0.5", WRONG_LABEL),
    "label -1": ("-1,x,3,0.5", WRONG_LABEL),
    "label empty": (",x,3,0.5", "label label is missing"),
    "label quoted empty": ('"",x,3,0.5', "label label is missing"),
    "label nan": ("nan,x,3,0.5", WRONG_LABEL),
    "label maybe": ("maybe,x,3,0.5", WRONG_LABEL),
    "header again": (CSV_HEADER, WRONG_LABEL),
    "number in words": ("1,x,three,0.5", "age is not a number"),
    "number with a unit": ("1,x,3y,0.5", "age is not a number"),
    "number infinite": ("1,x,inf,0.5", "age is infinite or beyond 1e+30"),
    "number beyond float64": ("1,x,3,1e999", "price is infinite or beyond 1e+30"),
    "number absurdly large": ("1,x,3,-1e31", "price is infinite or beyond 1e+30"),
    "number in hex": ("1,x,0x10,0.5", "age is not a number"),
    "number with underscores": ("1,x,1_000,0.5", "age is not a number"),
    "number with two points": ("1,x,3,0.5.1", "price is not a number"),
    "number without digits": ("1,x,3,.", "price is not a number"),
    "number with an empty exponent": ("1,x,3,1e", "price is not a number"),
    "number in full-width digits": ("1,x,３,0.5", "age is not a number"),
    "NUL byte": ("1,x\0y,3,0.5", "a NUL byte"),
    "not UTF-8": (b"1,\xe9,3,0.5", "not UTF-8"),
    "binary junk": (b"\x89PNG\r\x1a\x89,,,", "not UTF-8"),
}

GOOD_LIBSVM = [f"{(-1) ** i} {i}:1 {i + 2}:1" for i in range(1, 6)]
BAD_LIBSVM: dict[str, tuple[str | bytes, str]] = {
    "no colon": ("1 5", "a pair is not index:value"),
    "two colons": ("1 2:3:1", "a pair is not index:value"),
    "no index": ("1 :1", "a pair is not index:value"),
    "no value": ("1 5:", "a value is not a number"),
    "space before the colon": ("1 5 :1", "a pair is not index:value"),
    "index in words": ("1 five:1", "an index is not a whole number from 0"),
    "query id": ("1 qid:7 5:1", "an index is not a whole number from 0"),
    "index negative": ("1 -5:1", "an index is not a whole number from 0"),
    "index with a fraction": ("1 5.5:1", "an index is not a whole number from 0"),
    "index of 64 bits": (f"1 {2**63}:1", "an index needs more than 64 bits"),
    "index far beyond 64 bits": (f"1 {10**30}:1", "an index needs more than 64 bits"),
    "index twice": ("1 5:1 6:1 5:1", "an index occurs twice"),
    "value in words": ("1 5:one", "a value is not a number"),
    "value nan": ("1 5:nan", "a value is not a number"),
    "value inf": ("1 5:inf", "a value is not a number"),
    "value real": ("1 5:0.25", "a value is neither 0 nor 1"),
    "label 2": ("2 5:1", WRONG_LABEL),
    "label nan": ("nan 5:1", WRONG_LABEL),
    "label gone": ("5:1 6:1", WRONG_LABEL),
    "several labels": ("1,0 5:1", WRONG_LABEL),
    "NUL byte": ("1 5:1\0", "a NUL byte"),
    "not UTF-8": (b"1 5:1 # caf\xe9", "not UTF-8"),
}

ROWS = [
    *(pytest.param("criteo", GOOD_CRITEO, [], *case, id=f"criteo: {name}") for name, case in BAD_CRITEO.items()),
    *(pytest.param("csv", GOOD_CSV, [CSV_HEADER], *case, id=f"csv: {name}") for name, case in BAD_CSV.items()),
    *(pytest.param("libsvm", GOOD_LIBSVM, [], *case, id=f"libsvm: {name}") for name, case in BAD_LIBSVM.items()),
]


@pytest.mark.parametrize(("kind", "good", "header", "bad", "reason"), ROWS)
def test_a_bad_row_is_quarantined_and_changes_nothing_else(tmp_path, kind, good, header, bad, reason):
    prepare([write(tmp_path / "clean", *header, *good)], tmp_path / "expected", format=kind)
    raw = write(tmp_path / "raw", *header, *good[:2], bad, *good[2:])
    report = prepare([raw], tmp_path / "out", format=kind, max_bad=1)
    assert report.bad_rows == {reason: 1}
    (line,) = (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert (found["file"], found["line"], found["reason"]) == (str(raw), len(header) + 3, reason)
    assert content(tmp_path / "out") == content(tmp_path / "expected")

    code, output = run_command(str(raw), "--out", str(tmp_path / "cli"), "--format", kind, "--max-bad", "0")
    assert code == 1
    assert "Traceback" not in output
    assert reason in " ".join(output.split())
    assert not (tmp_path / "cli").exists()


def test_a_line_break_inside_quotes_spoils_its_two_lines_only(tmp_path):
    raw = write(tmp_path / "f.csv", CSV_HEADER, *GOOD_CSV, '1,"x', 'y",3,0.5', *GOOD_CSV)
    report = prepare([raw], tmp_path / "out", max_bad=2)
    assert sum(report.bad_rows.values()) == 2
    assert report.schema.splits["train"].rows == 40


PARQUET_GOOD = {"label": [0, 1, 1, 0], "city": ["a", "b", None, "a"], "n": [1.5, 2.5, None, 4.0], "user": [1, 2, 3, 1]}


@pytest.mark.parametrize(
    ("column", "value", "kind", "reason"),
    [
        ("label", None, pa.int64(), "label label is missing"),
        ("label", 2, pa.int64(), WRONG_LABEL),
        ("label", -1, pa.int64(), WRONG_LABEL),
        ("label", float("nan"), pa.float64(), "label label is missing"),
        ("label", float("inf"), pa.float64(), WRONG_LABEL),
        ("label", 0.5, pa.float32(), WRONG_LABEL),
        ("n", float("inf"), pa.float64(), "n is infinite or beyond 1e+30"),
        ("n", float("-inf"), pa.float64(), "n is infinite or beyond 1e+30"),
        ("user", 1.5, pa.float64(), "user is not a whole number"),
        ("user", 1e300, pa.float64(), "user is not a whole number"),
        ("user", float("inf"), pa.float64(), "user is not a whole number"),
        ("user", -(2**63), pa.int64(), "user is -2**63, the id of missing values"),
    ],
)
def test_a_bad_parquet_row(tmp_path, column, value, kind, reason):
    def table(values: dict[str, list]) -> pa.Table:
        return pa.table({name: pa.array(cells, kind if name == column else None) for name, cells in values.items()})

    pq.write_table(table(PARQUET_GOOD), tmp_path / "clean.parquet")
    raw = tmp_path / "raw.parquet"
    with_bad = {
        name: [*cells[:2], value if name == column else cells[0], *cells[2:]] for name, cells in PARQUET_GOOD.items()
    }
    pq.write_table(table(with_bad), raw)
    prepare([tmp_path / "clean.parquet"], tmp_path / "expected", ids=["user"])
    report = prepare([raw], tmp_path / "out", ids=["user"], max_bad=1)
    assert report.bad_rows == {reason: 1}
    assert json.loads((tmp_path / "out" / "quarantine.jsonl").read_text())["line"] == 3
    assert content(tmp_path / "out") == content(tmp_path / "expected")
    code, output = run_command(str(raw), "--out", str(tmp_path / "cli"), "--ids", "user", "--max-bad", "0")
    assert code == 1
    assert "Traceback" not in output


# Files: the whole input is refused.


def parquet_bytes(**columns: object) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns or {"label": [0, 1] * 500, "s": [f"value {i}" for i in range(1000)]}), sink)
    return sink.getvalue().to_pybytes()


def arrow_bytes(open_writer: Callable = pa.ipc.new_file) -> bytes:
    table = pa.table({"label": [0, 1] * 500, "s": [f"value {i}" for i in range(1000)]})
    sink = pa.BufferOutputStream()
    with open_writer(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def twice_named() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([0])], names=["label", "label"]), sink)
    return sink.getvalue().to_pybytes()


def damaged(data: bytes) -> bytes:
    """Some bytes in the middle overwritten."""
    middle = len(data) // 3
    return data[:middle] + b"\xa5" * 60 + data[middle + 60 :]


CSV = "\n".join([CSV_HEADER, *GOOD_CSV * 100]).encode()
CRITEO = "\n".join(GOOD_CRITEO * 40).encode()


def tarred(data: bytes) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        about = tarfile.TarInfo("log.csv")
        about.size = len(data)
        archive.addfile(about, io.BytesIO(data))
    return sink.getvalue()


FILES: dict[str, tuple[str, bytes, list[str], str]] = {  # name, bytes, arguments, what the message says
    "empty csv": ("f.csv", b"", [], "is empty"),
    "empty criteo": ("f.tsv", b"", ["--format", "criteo"], "is empty"),
    "empty libsvm": ("f.svm", b"", [], "is empty"),
    "empty parquet": ("f.parquet", b"", [], "is not Parquet"),
    "empty gz": ("f.csv.gz", PACK["gz"](b""), [], "is empty"),
    "blank lines": ("f.csv", b"\n\r\n\n", [], "is empty"),
    "only a byte order mark": ("f.csv", b"\xef\xbb\xbf", [], "is empty"),
    "header only": ("f.csv", b"label,a\n", [], "no good row"),
    "header without break": ("f.csv", b"label,a", [], "no good row"),
    "comments only": ("f.svm", b"# nothing\n# here\n", [], "no good row"),
    "UTF-16": ("f.csv", CSV.decode().encode("utf-16"), [], "UTF-16"),
    "UTF-16 big endian": ("f.csv", b"\xfe\xff" + CSV.decode().encode("utf-16-be"), [], "UTF-16"),
    "a zip of two files": ("f.zip", zipped(CSV, "users.csv", "movies.csv"), [], r"2 files \(users.csv, movies.csv\)"),
    "a tar archive": ("f.tar", tarred(CSV), [], "tar -xf"),
    "a packed tar archive": ("f.tar.gz", PACK["gz"](tarred(CSV)), [], "tar -xf"),
    "carriage returns alone": ("f.csv", CSV.replace(b"\n", b"\r"), [], r"tr '\\r' '\\n'"),
    "the index of a frame": ("f.csv", b",label,b\n0,1,2\n", [], r"column 1 has no name.*index=False.*sed '1s/\^/row/'"),
    "line breaks in values": ("f.csv", b'label,a,b\n1,"x\ny",2\n' * 9, [], "newlines_in_values=True"),
    "names twice": ("f.csv", b"label,a,b,a\n1,2,3,4\n", [], "names a more than once"),
    "a column without name": ("f.csv", b"label,,b\n1,2,3\n", [], "column 2 has no name"),
    "header quote open": ("f.csv", b'label,"a\n1,2\n', [], "header"),
    "header not UTF-8": ("f.csv", b"label,caf\xe9\n1,2\n", [], "header"),
    "header with NUL": ("f.csv", b"label,a\0\n1,2\n", [], "header"),
    "no label column": ("f.csv", b"a,b\n1,2\n", [], "which column is the label"),
    "label misspelt": ("f.csv", b"label,b\n1,2\n", ["--label", "Label"], "no label column 'Label'"),
    "only the label": ("f.csv", b"label\n1\n", [], "no column is left"),
    "column named like a path": ("f.csv", b"label,../a\n1,x\n", [], "cannot be the name of a file"),
    "all rows bad": ("f.csv", b"label,a\n7,x\n8,y\n", ["--max-bad", "100%"], "no good row"),
    "more bad than allowed": ("f.csv", CSV + b"\n2,x,1,1" * 30, [], "30 of 2,030 rows are bad"),
    "two-word labels": ("f.csv", b"label,a\nyes,x\nno,y\n", [], "2 of 2 rows are bad"),
    "three-word labels": ("f.csv", b"label,a\nyes,x\nno,y\nmaybe,z\n", ["--positive", "yes"], "1 of 3 rows are bad"),
    "criteo read as csv": ("f", CRITEO, ["--format", "csv"], "more than once"),
    "csv read as criteo": ("f", CSV, ["--format", "criteo"], "2,001 of 2,001 rows are bad"),
    "csv read as parquet": ("f.csv", CSV, ["--format", "parquet"], "is not Parquet"),
    "csv read as libsvm": ("f.csv", CSV, ["--format", "libsvm"], "rows are bad"),
    "parquet read as csv": ("f", parquet_bytes(), ["--format", "csv"], "header"),
    "parquet read as criteo": ("f", parquet_bytes(), ["--format", "criteo"], "rows are bad"),
    "executable": ("f", b"\x7fELF" + bytes(range(256)) * 50, [], "header"),
    "one endless line": ("f.csv", b"label,a\n1," + b"x" * (9 << 20), [], "longer than"),
    "text named parquet": ("f.parquet", b"label,a\n1,x\n", [], "is not Parquet"),
    "only the magic": ("f.parquet", b"PAR1", [], "is not Parquet"),
    "parquet cut short": ("f.parquet", parquet_bytes()[:-100], [], "is not Parquet"),
    "parquet half": ("f.parquet", parquet_bytes()[: len(parquet_bytes()) // 2], [], "is not Parquet"),
    "parquet pages damaged": ("f.parquet", damaged(parquet_bytes()), [], "is not Parquet"),
    "parquet without rows": (
        "f.parquet",
        parquet_bytes(label=pa.array([], pa.int64()), s=pa.array([], pa.string())),
        [],
        "no good row",
    ),
    "parquet without label": ("f.parquet", parquet_bytes(a=[1], b=[2]), [], "which column is the label"),
    "parquet names twice": ("f.parquet", twice_named(), [], "more than once"),
    "parquet with a struct": ("f.parquet", parquet_bytes(label=[1], s=[{"a": 1}]), [], "--drop s"),
    "parquet with a map": (
        "f.parquet",
        parquet_bytes(label=[1], s=pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))),
        [],
        "--drop s",
    ),
    "parquet lists of lists": ("f.parquet", parquet_bytes(label=[1], s=[[[1]]]), [], "--drop s"),
    "parquet label of lists": ("f.parquet", parquet_bytes(label=[[1]], s=["x"]), [], "must hold one value per row"),
    "parquet label of words": ("f.parquet", parquet_bytes(label=["a", "b"], s=["x", "y"]), [], "2 of 2 rows are bad"),
    "arrow cut short": ("f.arrow", arrow_bytes()[:-50], [], "is not Parquet"),
    "arrow half": ("f.arrow", arrow_bytes()[: len(arrow_bytes()) // 2], [], "is not Parquet"),
    "arrow stream half": ("f.arrow", arrow_bytes(pa.ipc.new_stream)[:5000], [], "is not Parquet"),
    "arrow of junk": ("f.arrow", b"ARROW1" + b"\0" * 99, [], "is not Parquet"),
    **{
        f"{kind} cut short": (f"f.csv.{kind}", pack(CSV)[:-20], [], "damaged or truncated")
        for kind, pack in PACK.items()
    },
    **{
        f"{kind} damaged": (f"f.csv.{kind}", damaged(pack(CSV)), [], "damaged or truncated")
        for kind, pack in PACK.items()
    },
    "gz of a gz": ("f.csv.gz", PACK["gz"](PACK["gz"](CSV)), [], "header"),
    "junk after gz": ("f.csv.gz", PACK["gz"](CSV) + b"junk", [], "damaged or truncated"),
}


@pytest.mark.parametrize(("name", "data", "arguments", "message"), FILES.values(), ids=FILES)
def test_a_bad_file_is_refused(tmp_path, name, data, arguments, message):
    raw = tmp_path / name
    raw.write_bytes(data)
    options = {arguments[i].removeprefix("--").replace("-", "_"): arguments[i + 1] for i in range(0, len(arguments), 2)}
    with pytest.raises(HotbedError, match=message) as caught:
        prepare([raw], tmp_path / "out", **options)
    assert str(raw) in str(caught.value) or "column" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert_command_fails([str(raw), "--out", str(tmp_path / "out"), *arguments], caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


SECOND_FILES: dict[str, tuple[str, str]] = {
    "lacks a column": ("label,city,age\n1,x,3", "lacks price"),
    "lacks the label": ("city,age,price\nx,3,1", "lacks label"),
    "other names": ("Label,City,Age,Price\n1,x,3,1", "lacks label, age, price, city"),
    "no header": ("1,x,3,0.5\n0,y,4,1.5", "lacks"),
    "empty": ("", "is empty"),
}


@pytest.mark.parametrize(("text", "message"), SECOND_FILES.values(), ids=SECOND_FILES)
def test_a_second_file_that_does_not_fit(tmp_path, text, message):
    first, second = write(tmp_path / "a.csv", CSV_HEADER, *GOOD_CSV), tmp_path / "b.csv"
    second.write_text(text)
    with pytest.raises(FormatError, match=f"b.csv.*{message}") as caught:
        prepare([first, second], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert_command_fails([str(first), str(second), "--out", str(tmp_path / "out")], caught.value)


@pytest.mark.parametrize("change", ["cut", "grown", "gone"])
def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch, change):
    """Half of a log that is still being copied is never taken for the whole of it."""
    monkeypatch.setattr("hotbed.data.formats.csv.read_blocks", partial(read_blocks, block_bytes=4096))
    raw = write(tmp_path / "f.csv", CSV_HEADER, *GOOD_CSV * 2000)
    whole = raw.read_bytes()

    def meddle(_: object) -> None:
        if change == "gone":
            raw.unlink(missing_ok=True)
        else:
            raw.write_bytes(whole[:10_000] if change == "cut" else whole * 2)

    with pytest.raises(FormatError, match=r"changed while it was being read|f\.csv cannot be read"):
        prepare([raw], tmp_path / "out", progress=meddle)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "header", ["label," + ",".join(f"c{i}" for i in range(10_000)), 'label,"' + "c," * 9_000, "label" + ",c" * 9_000]
)
def test_a_header_of_very_many_columns(tmp_path, header):
    raw = write(tmp_path / "f.csv", header, "1" + ",2" * 10_000)
    message = "10,001 columns; at most 10,000|a quote is not closed|names c more than once"
    with pytest.raises(FormatError, match=message):
        prepare([raw], tmp_path / "out")


def test_a_second_file_with_more_columns_in_another_order_is_fine(tmp_path):
    first = write(tmp_path / "a.csv", "label,city", "1,x", "0,y")
    second = write(tmp_path / "b.csv", "extra,city,label", "7,x,0")
    report = prepare([first, second], tmp_path / "out")
    assert (report.schema.splits["train"].rows, report.schema.splits["train"].positives) == (3, 1)
    assert report.schema.features[0].distinct == 2


# Settings: nothing is read, or not for long.

SETTINGS: dict[str, tuple[list[str], str]] = {
    "unknown format": (["--format", "json"], "criteo, csv, parquet, libsvm, lists"),
    "unknown integers": (["--integers", "sqrt"], "log, bucket, both"),
    "unknown ids mode": (["--ids-mode", "direct"], "vocabulary, hash"),
    "hash without rows": (["--ids-mode", "hash"], "needs --hash-rows"),
    "hash with no rows": (["--ids-mode", "hash", "--hash-rows", "0"], "at least 1"),
    "rows without hash": (["--hash-rows", "10"], "belongs to --ids-mode hash"),
    "min count 0": (["--min-count", "0"], "below 1"),
    "max bad in words": (["--max-bad", "few"], "max-bad 'few'"),
    "max bad negative": (["--max-bad=-1"], "max-bad '-1'"),
    "max bad over 100%": (["--max-bad", "101%"], "max-bad '101%'"),
    "max bad nan": (["--max-bad", "nan%"], "max-bad 'nan%'"),
    "delimiter of two": (["--delimiter", ",,"], "delimiter"),
    "delimiter a quote": (["--delimiter", '"'], "delimiter"),
    "delimiter not ASCII": (["--delimiter", "§"], "delimiter"),
    "wrong delimiter": (["--delimiter", ";"], "which column is the label"),
    "unknown dense column": (["--dense", "height"], "--dense height: no such column"),
    "unknown id column": (["--ids", "cities"], "--ids cities: no such column"),
    "unknown multi column": (["--multi", "tags:|"], "--multi tags: no such column"),
    "multi without separator": (["--multi", "city"], "COLUMN:SEPARATOR"),
    "multi with a long separator": (["--multi", "city:||"], "separator"),
    "two parts": (["--dense", "age", "--ids", "age"], "age is in both --dense and --ids"),
    "unknown dropped column": (
        ["--drop", "cty"],
        "--drop cty: no such column. The columns are: label, city, age, price",
    ),
    "one unknown dropped column of two": (["--drop", "age,cty"], "--drop cty: no such column"),
    "label dropped": (["--drop", "label"], "label is in both --label and --drop"),
    "label as id": (["--ids", "label"], "label is in both"),
    "every other twice": (["--dense", "*", "--ids", "*"], "cannot both"),
    "everything dropped": (["--drop", "city,age,price"], "no column is left"),
    "split in words": (["--splits", "train=most"], "cannot be read"),
    "split empty": (["--splits", ""], "cannot be read"),
    "split negative": (["--splits", "train=-0.5"], "cannot be read"),
    "split nan": (["--splits", "train=nan"], "cannot be read"),
    "split over 1": (["--splits", "train=0.8,test=0.3"], "adds up to 1.1"),
    "split mixed": (["--splits", "train=0.8,test=100"], "mixes rows and fractions"),
    "split twice": (["--splits", "train=0.5,train=0.5"], "cannot be read"),
    "split without train": (["--splits", "valid=0.5,test=0.5"], "no split is called train"),
    "split with a path": (["--splits", "train=0.5,../x=0.5"], "name of a split"),
    "split named counts": (["--splits", "train=0.5,counts=0.5"], "name of a split"),
    "split larger than the file": (["--splits", "train=20,test=5"], "split test got no rows"),
    "split far too large": (["--splits", f"train={10**30}"], "split"),
}


@pytest.mark.parametrize(("arguments", "message"), SETTINGS.values(), ids=SETTINGS)
def test_a_wrong_setting_is_refused(tmp_path, arguments, message):
    raw = write(tmp_path / "f.csv", CSV_HEADER, *GOOD_CSV)
    code, output = run_command(str(raw), "--out", str(tmp_path / "out"), *arguments)
    assert code in (1, 2)
    assert "Traceback" not in output
    assert message in " ".join(output.split())
    assert [path.name for path in tmp_path.iterdir()] == ["f.csv"]


@pytest.mark.parametrize("kind", ["f.parquet", "f.arrow", "table"])
def test_columns_to_drop_are_looked_for_in_tables_too(tmp_path, kind):
    table = pa.table({"label": [0, 1], "city": ["a", "b"], "odd": [{"x": 1}, {"x": 2}]})
    given = table if kind == "table" else tmp_path / kind
    if kind == "f.parquet":
        pq.write_table(table, given)
    elif kind == "f.arrow":
        with pa.ipc.new_file(given, table.schema) as writer:
            writer.write_table(table)
    prepare([given], tmp_path / "out", drop=["odd"])
    with pytest.raises(ConfigError, match=r"--drop od: no such column\. The columns are: label, city, odd"):
        prepare([given], tmp_path / "other", drop=["odd", "od"])


def test_all_mistakes_about_columns_come_together(tmp_path):
    raw = write(tmp_path / "f.csv", CSV_HEADER, *GOOD_CSV)
    with pytest.raises(ConfigError) as caught:
        prepare([raw], tmp_path / "out", dense=["x", "age"], ids=["age"], integers="sqrt")
    assert len(str(caught.value).splitlines()) == 3


def test_a_bucket_name_that_is_taken(tmp_path):
    raw = write(tmp_path / "f.csv", "label,n,n_bucket", "1,2,x", "0,3,y")
    with pytest.raises(ConfigError, match="n_bucket would be written twice"):
        prepare([raw], tmp_path / "out", integers="bucket")


@pytest.mark.parametrize(
    "inputs",
    [
        [],
        ["train=a.csv", "b.csv"],
        ["test=a.csv"],
        ["train/=a.csv"],
        ["tr ain=a.csv"],
        [("counts", "a.csv")],
        ["=a.csv"],
    ],
)
def test_wrong_inputs(tmp_path, monkeypatch, inputs):
    write(tmp_path / "a.csv", CSV_HEADER, *GOOD_CSV)
    write(tmp_path / "b.csv", CSV_HEADER, *GOOD_CSV)
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, FormatError)):
        prepare(inputs, "out")
    assert not (tmp_path / "out").exists()


def test_named_inputs_and_a_split_rule_contradict(tmp_path):
    raw = write(tmp_path / "a.csv", CSV_HEADER, *GOOD_CSV)
    with pytest.raises(ConfigError, match="leave out --split"):
        prepare([("train", raw)], tmp_path / "out", split="train=0.5,test=0.5")


# Places: files that cannot be read, directories that cannot be written.


def no_such_file(tmp_path: Path) -> Path:
    return tmp_path / "absent.csv"


def broken_link(tmp_path: Path) -> Path:
    (tmp_path / "link.csv").symlink_to(tmp_path / "gone.csv")
    return tmp_path / "link.csv"


def link_to_itself(tmp_path: Path) -> Path:
    (tmp_path / "link.csv").symlink_to(tmp_path / "link.csv")
    return tmp_path / "link.csv"


def long_name(tmp_path: Path) -> Path:
    return tmp_path / ("x" * 300)


def name_with_nul(tmp_path: Path) -> Path:
    return Path("a\0b")


def empty_directory(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def directory_of_directories(tmp_path: Path) -> Path:
    (tmp_path / "logs" / "monday").mkdir(parents=True)
    return tmp_path / "logs"


def below_a_file(tmp_path: Path) -> Path:
    return write(tmp_path / "f.csv", CSV_HEADER) / "more.csv"


def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize(
    "place",
    [
        no_such_file,
        broken_link,
        link_to_itself,
        long_name,
        name_with_nul,
        empty_directory,
        directory_of_directories,
        below_a_file,
        pipe,
    ],
)
def test_a_place_that_cannot_be_read(tmp_path, place):
    path = place(tmp_path)
    with pytest.raises(FormatError) as caught:
        prepare([path], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert_command_fails([str(path), "--out", str(tmp_path / "out")], caught.value)


@pytest.mark.parametrize("method", ["open", "iterdir"])
def test_no_permission(tmp_path, monkeypatch, method):
    (tmp_path / "logs").mkdir()
    write(tmp_path / "logs" / "f.csv", CSV_HEADER, *GOOD_CSV)
    original = getattr(Path, method)

    def refuse(self: Path, *arguments: object, **options: object) -> object:
        if "logs" in self.parts:
            raise PermissionError(13, "Permission denied")
        return original(self, *arguments, **options)

    monkeypatch.setattr(Path, method, refuse)
    with pytest.raises(FormatError, match="Permission denied"):
        prepare([tmp_path / "logs"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("there", "exists already"),
        ("file", "is a file"),
        ("file/below", "cannot be written"),
        (".", "exists already|not the name"),
        ("/", "not the name|exists already"),
        ("x" * 300, "cannot be written"),
        ("/proc/hotbed", "cannot be written"),
    ],
)
def test_a_place_that_cannot_be_written(tmp_path, monkeypatch, out, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").write_text("")
    (tmp_path / "file").write_text("")
    raw = write(tmp_path / "f.csv", CSV_HEADER, *GOOD_CSV)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        prepare([raw], out)
    assert_command_fails([str(raw), "--out", out], caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_name_with_nul_cannot_be_written(tmp_path):
    with pytest.raises(DataError, match="cannot be written"):
        prepare([write(tmp_path / "f.csv", CSV_HEADER, *GOOD_CSV)], tmp_path / "a\0b")


def test_a_full_disk(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "Error writing bytes to file. Detail: [errno 28] No space left on device")

    monkeypatch.setattr("hotbed.data.prepare.write.ArrowWriter.write", full)
    with pytest.raises(DataError, match=r"cannot be written: No space left on device\. [\d.]+ \w+ had been") as caught:
        prepare([write(tmp_path / "f.csv", CSV_HEADER, *GOOD_CSV)], tmp_path / "out")
    for said in ("are free", "about as much as the raw text (files of ", "on another disk with --out"):
        assert said in str(caught.value)
    assert "rrno 28" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["f.csv"]


# schema.json: what a later reader of the dataset may find.


def changed(**changes: object) -> Callable[[dict], object]:
    return lambda raw: {**raw, **changes}


def without(key: str) -> Callable[[dict], object]:
    return lambda raw: {name: value for name, value in raw.items() if name != key}


def feature(**changes: object) -> Callable[[dict], object]:
    return lambda raw: {**raw, "features": [{**raw["features"][0], **changes}]}


def number(**changes: object) -> Callable[[dict], object]:
    return lambda raw: {**raw, "dense": [{**raw["dense"][0], **changes}]}


def split(**changes: object) -> Callable[[dict], object]:
    return lambda raw: {**raw, "splits": {"train": {**raw["splits"]["train"], **changes}}}


SCHEMAS: dict[str, Callable[[dict], object] | bytes] = {
    "empty": b"",
    "not JSON": b"schema",
    "cut short": b'{"label": "y"',
    "binary": b"\xff\xfe\x00",
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "nested too deep": b"[" * 100_000,
    "future version": changed(format_version=3),
    "version in words": changed(format_version="one"),
    "version null": changed(format_version=None),
    "no version": without("format_version"),
    "no label": without("label"),
    "no features": without("features"),
    "no dense": without("dense"),
    "no splits": without("splits"),
    "unknown key": changed(colour="red"),
    "label a number": changed(label=3),
    "features null": changed(features=None),
    "features a dict": changed(features={"a": 1}),
    "features of words": changed(features=["city"]),
    "splits a list": changed(splits=[]),
    "notes a list": changed(notes=[1]),
    "feature unknown key": feature(size=3),
    "feature rows in words": feature(rows="many"),
    "feature rows negative": feature(rows=-1),
    "feature rows a fraction": feature(rows=2.5),
    "feature name a number": feature(name=7),
    "feature name a path": feature(name="../../etc/passwd"),
    "feature mode unknown": feature(mode="magic"),
    "feature source unknown": feature(source="magic"),
    "feature multi in words": feature(multi="yes"),
    "number transform unknown": number(transform="sqrt"),
    "number scale 0": number(scale=0.0),
    "number mean in words": number(mean="big"),
    "number mean nan": number(mean=float("nan")),
    "split rows in words": split(file_rows=["many"]),
    "split rows missing": split(file_rows=[]),
    "split files a number": split(files=3),
    "names twice": lambda raw: {**raw, "features": raw["features"] * 2},
}


@pytest.mark.parametrize("damage", SCHEMAS.values(), ids=SCHEMAS)
def test_a_damaged_schema(tmp_path, damage):
    raw = write(tmp_path / "f.csv", "label,city,age", "1,x,2", "0,y,3")
    prepare([raw], tmp_path / "out")
    path = tmp_path / "out" / "schema.json"
    path.write_bytes(damage if isinstance(damage, bytes) else json.dumps(damage(json.loads(path.read_text()))).encode())
    with pytest.raises(SchemaError, match=r"schema\.json"):
        Schema.load(tmp_path / "out")
    with pytest.raises(SchemaError):
        list(RawReader(tmp_path / "out", [raw]))


def test_no_schema_at_all(tmp_path):
    with pytest.raises(SchemaError, match=r"has no schema\.json"):
        RawReader(tmp_path, ["f.csv"])


@given(st.binary(max_size=300), st.sampled_from(["criteo", "csv", "libsvm", "lists", "parquet"]))
@settings(max_examples=60)
def test_any_bytes_at_all(tmp_path_factory, data, kind):
    directory = tmp_path_factory.mktemp("any")
    (directory / "raw").write_bytes(data)
    with pytest.raises(HotbedError):
        prepare([directory / "raw"], directory / "out", format=kind)
    assert not (directory / "out").exists()


@given(st.data())
@settings(max_examples=60)
def test_any_damage_to_a_good_file(tmp_path_factory, data):
    """Flip, cut or insert bytes in a good log: either an error, or a dataset whose rows all pass the format's rules."""
    directory = tmp_path_factory.mktemp("damage")
    kind, text = data.draw(st.sampled_from([("csv", CSV[:400]), ("criteo", CRITEO[:2500])]))
    at = data.draw(st.integers(0, len(text)))
    text = text[:at] + data.draw(st.binary(max_size=8)) + text[at + data.draw(st.integers(0, 8)) :]
    (directory / "raw").write_bytes(text)
    try:
        report = prepare([directory / "raw"], directory / "out", format=kind, max_bad="100%", label="label")
    except HotbedError:
        return
    lines = [line for line in text.replace(b"\xef\xbb\xbf", b"", 1).split(b"\n") if line not in (b"", b"\r")]
    good, bad = report.schema.splits["train"].rows, sum(report.bad_rows.values())
    assert good + bad == len(lines) - (kind == "csv")
    table = read_rows(directory / "out" / "train" / "part-00000.arrow")
    assert set(np.unique(table["label"].to_numpy()).tolist()) <= {0.0, 1.0}
    assert all(np.isfinite(table[spec.name].to_numpy()).all() for spec in report.schema.dense)


def test_there_are_more_than_a_hundred():
    assert len(ROWS) + len(FILES) + len(SETTINGS) + len(SCHEMAS) + len(SECOND_FILES) >= 200
