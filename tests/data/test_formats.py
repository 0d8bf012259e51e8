"""Every format: what comes out of good files, and exactly which rows are refused."""

from __future__ import annotations

import csv
import io
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed.data.formats import Chunk, Integers, Lists, Text, guess_format, open_format
from hotbed.data.formats.blocks import TextBlock, read_blocks
from hotbed.data.formats.criteo import CATEGORICALS, INTEGERS, _any_chunk, _common_chunk
from hotbed.data.formats.split import split_block
from hotbed.data.hash import hash_text
from tests.data.raw_files import PACK, criteo_line, unpack_lines, write


def strings(text: Text) -> list[str]:
    return [text.string(i) for i in range(len(text.starts))]


def only_chunk(name: str, path: Path, **options) -> Chunk:
    chunks = [chunk for chunk in open_format(name, **options).chunks(path) if len(chunk.lines) or chunk.bad]
    assert len(chunks) == 1
    return chunks[0]


class TestBlocks:
    @pytest.mark.parametrize("packing", ["", *PACK])
    @pytest.mark.parametrize("block_bytes", [11, 16, 1 << 20])
    @pytest.mark.parametrize("last_break", [b"", b"\n"])
    def test_blocks_are_whole_lines(self, tmp_path, packing, block_bytes, last_break):
        data = b"\n".join(b"x" * (i % 11) for i in range(100)) + last_break
        path = tmp_path / "f"
        path.write_bytes(PACK[packing](data) if packing else data)
        blocks = list(read_blocks(path, block_bytes))
        assert b"".join(block.data.tobytes() for block in blocks) == data
        assert all(block.data[-1] == ord("\n") for block in blocks[:-1])
        lines = 1
        for block in blocks:
            assert block.first_line == lines
            lines += block.data.tobytes().count(b"\n")
        index = 75 if packing == "zip" else 0  # of the archive, behind its file
        assert blocks[-1].bytes_read == path.stat().st_size - index

    def test_several_packed_members_in_one_file(self, tmp_path):
        path = tmp_path / "f.gz"
        path.write_bytes(PACK["gz"](b"a\n") + PACK["gz"](b"b\n"))
        assert b"".join(block.data.tobytes() for block in read_blocks(path)) == b"a\nb\n"


class TestSplit:
    @given(
        st.lists(
            st.lists(
                st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), max_size=6),
                min_size=3,
                max_size=3,
            ),
            min_size=1,
            max_size=6,
        ),
        st.sampled_from([",", "\t", ";"]),
        st.sampled_from(["\n", "\r\n"]),
    )
    def test_reads_what_the_csv_module_writes(self, rows, delimiter, end):
        out = io.StringIO()
        csv.writer(out, delimiter=delimiter, lineterminator=end, quoting=csv.QUOTE_MINIMAL).writerows(rows)
        data = np.frombuffer(out.getvalue().encode(), dtype=np.uint8).copy()
        before = data.copy()
        split = split_block(TextBlock(data, 7, 0), "f", 3, delimiter, quote=True)
        assert not split.bad
        assert [list(row) for row in zip(*map(strings, split.text))] == rows
        assert split.lines.tolist() == list(range(7, 7 + len(rows)))
        np.testing.assert_array_equal(data, before)

    @given(st.binary(max_size=60))
    def test_any_bytes_give_rows_or_reasons(self, data):
        block = TextBlock(np.frombuffer(data, dtype=np.uint8).copy(), 1, 0)
        lines = [line[:-1] if line.endswith(b"\r") else line for line in data.split(b"\n")]
        real = {i + 1 for i, line in enumerate(lines) if line}
        for quote in (False, True):
            split = split_block(block, "f", 2, ",", quote=quote)
            assert {*split.lines.tolist(), *(row.line for row in split.bad)} == real
            assert len(split.lines) + len(split.bad) == len(real)
            for i, line in enumerate(split.lines.tolist()):
                raw = lines[line - 1]
                raw.decode()
                assert b"\0" not in raw
                if not quote:
                    assert [text.string(i) for text in split.text] == raw.decode().split(",")


class TestCriteo:
    def test_reads_integers_and_hex(self, tmp_path):
        path = write(tmp_path / "f", criteo_line(1, {1: -2, 2: "", 13: 2**40}, {1: "68fd1e64", 26: ""}), criteo_line(0))
        chunk = only_chunk("criteo", path)
        assert list(chunk.columns)[:2] == ["label", "I1"]
        assert len(chunk.columns) == 40
        assert strings(chunk.columns["label"]) == ["1", "0"]
        first = chunk.columns["I1"]
        assert isinstance(first, Integers)
        assert first.values.tolist() == [-2, 3]
        assert chunk.columns["I2"].missing.tolist() == [True, False]
        assert chunk.columns["I13"].values[0] == 2**40
        assert strings(chunk.columns["C1"])[0] == "68fd1e64"
        assert strings(chunk.columns["C26"])[0] == ""
        assert chunk.show(1) == criteo_line(0)

    def test_bad_rows_have_exact_lines_and_the_good_ones_stay(self, tmp_path):
        path = write(
            tmp_path / "f",
            criteo_line(0, {1: 10}),
            "",
            criteo_line()[:50],
            criteo_line(1, {3: "4.5"}),
            criteo_line(1, {1: 11}) + "\r",
            criteo_line() + "\tx",
            criteo_line(1, hexes={7: "xyz"}),
            criteo_line(0, {1: 12}),
        )
        chunk = only_chunk("criteo", path)
        assert chunk.lines.tolist() == [1, 5, 8]
        assert chunk.columns["I1"].values.tolist() == [10, 11, 12]
        assert [(row.line, row.reason) for row in chunk.bad] == [
            (3, "fewer than 40 columns"),
            (4, "I3 is not an integer"),
            (6, "more than 40 columns"),
            (7, "C7 is not hex"),
        ]
        assert chunk.bad[1].text == criteo_line(1, {3: "4.5"})
        assert chunk.show(2) == criteo_line(0, {1: 12})

    def test_lines_are_exact_across_blocks(self, tmp_path, monkeypatch):
        monkeypatch.setattr("hotbed.data.formats.criteo.read_blocks", partial(read_blocks, block_bytes=1000))
        bad = {5, 17, 18, 40}
        path = write(tmp_path / "f", *(criteo_line("1" if i not in bad else "1\t2", {1: i}) for i in range(1, 42)))
        chunks = list(open_format("criteo").chunks(path))
        assert len(chunks) > 5
        assert [row.line for chunk in chunks for row in chunk.bad] == sorted(bad)
        lines = np.concatenate([chunk.lines for chunk in chunks])
        values = np.concatenate([chunk.columns["I1"].values for chunk in chunks])
        np.testing.assert_array_equal(lines, values)

    def test_label_is_optional_when_asked(self, tmp_path):
        path = write(tmp_path / "f", criteo_line().split("\t", 1)[1])
        chunk = only_chunk("criteo", path, label_optional=True)
        assert "label" not in chunk.columns
        assert chunk.columns["I1"].values.tolist() == [3]
        assert len(only_chunk("criteo", path).bad) == 1

    def test_real_file_equals_plain_python(self, real_data):
        path = real_data / "criteo_raw_10k.tsv.xz"
        rows = [line.split("\t") for line in unpack_lines(path)]
        chunk = only_chunk("criteo", path)
        assert not chunk.bad
        for at, (name, column) in enumerate(chunk.columns.items()):
            expected = [row[at] for row in rows]
            if isinstance(column, Text):
                assert strings(column) == expected
            else:
                assert ["" if gone else str(value) for value, gone in zip(column.values, column.missing)] == expected, (
                    name
                )


COMMON = [
    criteo_line(i % 2, {1: i - 3, 2: "", 5: 10**17 + i}, {1: f"{i:x}", 9: "ABCDEF12", 26: "" if i % 3 else "0"})
    for i in range(9)
]
ODD = {
    "plus": criteo_line(1, {3: "+5"}),
    "64 bits": criteo_line(1, {3: 2**63 - 1, 4: -(2**63) + 1}),
    "label in words": criteo_line("true"),
    "return inside": criteo_line(1, hexes={26: "ab"}) + "\r\r",
    "return": criteo_line(0) + "\r",
    "16 digits": criteo_line(0, hexes={3: "0123456789abcdef", 26: "fedcba9876543210"}),
    "17 digits": criteo_line(0, hexes={3: "0123456789abcdef0"}),
    "no hex": criteo_line(0, hexes={3: "0123456g"}),
    "byte 0x90": criteo_line(0, hexes={3: "012345"}).encode() + b"\x90",
    "cut": criteo_line()[:80],
    "more": criteo_line() + "\t",
    "minus": criteo_line(1, {3: "-"}),
    "blank": "",
    "only a return": "\r",
    "all missing": "1" + "\t" * 39,
}


def assert_same_rows(hashed: Chunk, text: Chunk) -> None:
    """Chunks of the two ways to read Criteo's rows."""
    assert hashed.lines.tolist() == text.lines.tolist()
    assert hashed.bad == text.bad
    assert [hashed.show(i) for i in range(len(hashed.lines))] == [text.show(i) for i in range(len(text.lines))]
    assert strings(hashed.columns["label"]) == strings(text.columns["label"])
    for name, column in text.columns.items():
        if isinstance(column, Integers):
            np.testing.assert_array_equal(hashed.columns[name].values, column.values)
            np.testing.assert_array_equal(hashed.columns[name].missing, column.missing)
        elif name != "label":
            np.testing.assert_array_equal(hashed.columns[name].ids, hash_text(column))


class TestCriteoInOnePass:
    @pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
    @pytest.mark.parametrize("at", [0, 4, 9])
    @pytest.mark.parametrize("last_break", ["", "\n"])
    def test_equals_column_by_column(self, tmp_path, odd, at, last_break):
        odd = odd if isinstance(odd, bytes) else odd.encode()
        common = [line.encode() for line in COMMON]
        path = tmp_path / "f"
        path.write_bytes(b"\n".join([*common[:at], odd, *common[at:]]) + last_break.encode())
        assert_same_rows(only_chunk("criteo", path, hashed=True), only_chunk("criteo", path))

    @given(st.data())
    def test_any_damage(self, tmp_path_factory, data):
        text = "\n".join(COMMON[:4]).encode()
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(text)))
            text = text[:at] + data.draw(st.binary(max_size=3)) + text[at + data.draw(st.integers(0, 3)) :]
        block = TextBlock(np.frombuffer(text, dtype=np.uint8).copy(), 1, 0)
        names = ("label", *INTEGERS, *CATEGORICALS)
        assert_same_rows(_common_chunk(block, Path("f")), _any_chunk(block, Path("f"), names))

    def test_real_file(self, real_data):
        path = real_data / "criteo_raw_10k.tsv.xz"
        assert_same_rows(only_chunk("criteo", path, hashed=True), only_chunk("criteo", path))


class TestReels:
    @pytest.mark.parametrize("kind", ["csv", "criteo", "libsvm", "lists", "parquet"])
    @pytest.mark.parametrize("reel_bytes", [400, 1000, 1 << 30])
    def test_reels_are_the_file(self, tmp_path, monkeypatch, kind, reel_bytes):
        monkeypatch.setattr("hotbed.data.formats.blocks.REEL_BYTES", reel_bytes)
        monkeypatch.setattr("hotbed.data.formats.parquet.REEL_BYTES", reel_bytes)
        path = tmp_path / "f"
        if kind == "parquet":
            table = pa.table({"label": np.arange(300) % 2, "n": np.arange(300)})
            pq.write_table(table, path, row_group_size=37)
        else:
            lines = {"csv": ["label,n", *(f"{i % 2},{i}" for i in range(300)), "", "x"], "criteo": COMMON * 8}
            lines["lists"] = [" ".join(str(i + k) for k in range(1 + i % 4)) for i in range(300)]
            write(path, *lines.get(kind, [f"{i % 2} {i}:1" for i in range(300)]))
        reader = open_format(kind)
        reels = list(reader.reels(path))
        assert (len(reels) > 1) == (reel_bytes < 1 << 30)
        assert sum(reel.num_bytes for reel in reels) == pytest.approx(path.stat().st_size, abs=len(reels))
        whole = list(reader.chunks(path))
        parts = [chunk for reel in reels for chunk in reader.chunks(path, reel)]
        for of in (lambda chunk: chunk.lines.tolist(), lambda chunk: chunk.bad):
            assert [one for chunk in parts for one in of(chunk)] == [one for chunk in whole for one in of(chunk)]
        shown = [[chunk.show(i) for chunk in chunks for i in range(len(chunk.lines))] for chunks in (parts, whole)]
        assert shown[0] == shown[1]

    def test_a_packed_file_is_one_reel(self, tmp_path, monkeypatch):
        monkeypatch.setattr("hotbed.data.formats.blocks.REEL_BYTES", 50)
        path = tmp_path / "f.gz"
        path.write_bytes(PACK["gz"]("\n".join(COMMON).encode()))
        assert len(list(open_format("criteo").reels(path))) == 1


class TestLists:
    def test_every_item_is_a_row_of_its_user(self, tmp_path):
        path = tmp_path / "f"
        path.write_bytes(b"\xef\xbb\xbf7 1 2\r\n\r\n 8\t3 \n9\n10 x\x00y\nabc  \xc3\xa9 1")
        chunk = only_chunk("lists", path)
        assert {name: strings(column) for name, column in chunk.columns.items()} == {
            "label": ["1"] * 5,
            "user": ["7", "7", "8", "abc", "abc"],
            "item": ["1", "2", "3", "é", "1"],
        }
        assert chunk.lines.tolist() == [1, 1, 3, 6, 6]
        assert chunk.show(2) == " 8\t3 "
        assert [(row.line, row.reason) for row in chunk.bad] == [(5, "a NUL byte")]

    def test_users_alone_have_no_rows(self, tmp_path):
        for text in ("1", "1\x00"):
            (chunk,) = open_format("lists").chunks(write(tmp_path / "f", text, "2"))
            assert len(chunk.lines) == 0

    @given(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=20))
    def test_any_lists(self, tmp_path_factory, lists):
        path = write(tmp_path_factory.mktemp("lists") / "f", *(" ".join(map(str, one)) for one in ([1], *lists)))
        (chunk,) = open_format("lists").chunks(path)
        pairs = zip(strings(chunk.columns["user"]), strings(chunk.columns["item"]))
        assert [tuple(map(int, one)) for one in pairs] == [(one[0], item) for one in lists if one for item in one[1:]]


class TestCsv:
    @pytest.mark.parametrize("delimiter", [",", "\t", ";", "|"])
    def test_finds_the_delimiter(self, tmp_path, delimiter):
        path = write(tmp_path / "f", delimiter.join(["click", "a b", "c"]), delimiter.join(["1", "x y", ""]))
        chunk = only_chunk("csv", path)
        assert {name: strings(column) for name, column in chunk.columns.items()} == {
            "click": ["1"],
            "a b": ["x y"],
            "c": [""],
        }

    def test_quotes_in_header_and_values(self, tmp_path):
        path = write(tmp_path / "f", '"label","a,b"', '1,"he said ""hi"", twice"', '0,""', '1,a"b')
        chunk = only_chunk("csv", path)
        assert strings(chunk.columns["a,b"]) == ['he said "hi", twice', "", 'a"b']
        assert chunk.show(0) == '1,"he said ""hi"", twice"'

    def test_mark_blank_lines_and_windows_breaks(self, tmp_path):
        path = tmp_path / "f"
        path.write_bytes(b"\xef\xbb\xbf\r\n\r\nlabel,a\r\n1,x\r\n\r\n0,y")
        chunk = only_chunk("csv", path)
        assert list(chunk.columns) == ["label", "a"]
        assert strings(chunk.columns["a"]) == ["x", "y"]
        assert chunk.lines.tolist() == [4, 6]

    def test_one_stray_quote_spoils_one_row(self, tmp_path):
        path = write(tmp_path / "f", "label,a", '1,"x', "0,y", '1,"x"y', '0,"z"')
        chunk = only_chunk("csv", path)
        assert strings(chunk.columns["a"]) == ["y", "z"]
        assert [(row.line, row.reason) for row in chunk.bad] == [
            (2, "a quote is not closed on its line"),
            (4, "text after a closing quote"),
        ]

    def test_real_file_equals_the_csv_module(self, real_data):
        path = real_data / "avazu_9k.csv.xz"
        expected = list(csv.DictReader(unpack_lines(path)))
        chunk = only_chunk("csv", path)
        assert list(chunk.columns) == list(expected[0])
        for name, column in chunk.columns.items():
            assert strings(column) == [row[name] for row in expected]


class TestLibsvm:
    def test_reads_bags(self, tmp_path):
        path = write(tmp_path / "f", "1 3:1 7:1.0 9:0", "-1\t12:1  5:1 # seen twice", "# only a comment", "0", "+1 0:1")
        chunk = only_chunk("libsvm", path)
        assert strings(chunk.columns["label"]) == ["1", "-1", "0", "+1"]
        bags = chunk.columns["index"]
        assert isinstance(bags, Lists)
        assert bags.offsets.tolist() == [0, 2, 4, 4, 5]
        assert bags.values.values.tolist() == [3, 7, 12, 5, 0]
        assert chunk.lines.tolist() == [1, 2, 4, 5]
        assert not chunk.bad

    def test_bad_pairs_leave_the_neighbours_alone(self, tmp_path):
        path = write(tmp_path / "f", "1 1:1", "1 2", "1 3:1:1", "1 x:1", "1 4:0.5", "1 5:1 5:1", "1 -6:1", "0 7:1")
        chunk = only_chunk("libsvm", path)
        assert chunk.columns["index"].values.values.tolist() == [1, 7]
        assert [row.line for row in chunk.bad] == [2, 3, 4, 5, 6, 7]
        assert chunk.bad[3].reason == "a value is neither 0 nor 1"
        assert chunk.bad[4].reason == "an index occurs twice"


class TestParquet:
    TABLE = pa.table(
        {
            "label": pa.array([1, 0, None], pa.int8()),
            "text": pa.array(["a", None, "żółw"]),
            "large": pa.array(["a", "bb", None], pa.large_string()),
            "category": pa.array(["x", None, "x"]).dictionary_encode(),
            "bytes": pa.array([b"1", b"\xff", None]),
            "fixed": pa.array([b"ab", None, b"cd"], pa.binary(2)),
            "unsigned": pa.array([0, 2**64 - 1, None], pa.uint64()),
            "flag": pa.array([True, None, False]),
            "price": pa.array([1.5, None, float("nan")]),
            "half": pa.array(np.array([1, 2, 3], dtype=np.float16)),
            "day": pa.array([0, 1, None], pa.date32()),
            "time": pa.array([5, 6, None], pa.timestamp("us")),
            "tags": pa.array([["a", "b"], [], None]),
            "numbers": pa.array([[1], None, [2, None]], pa.list_(pa.int32())),
            "nothing": pa.nulls(3),
        }
    )

    @pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
    def test_types(self, tmp_path, kind):
        path = tmp_path / "f"
        if kind == "parquet":
            pq.write_table(self.TABLE, path)
        else:
            with (pa.ipc.new_file if kind == "file" else pa.ipc.new_stream)(str(path), self.TABLE.schema) as writer:
                writer.write_table(self.TABLE)
        assert guess_format(path) == "parquet"
        columns = only_chunk("parquet", path).columns
        assert list(columns) == self.TABLE.column_names
        assert strings(columns["text"]) == ["a", "", "żółw"]
        assert strings(columns["large"]) == ["a", "bb", ""]
        assert strings(columns["category"]) == ["x", "", "x"]
        assert columns["bytes"].data.tobytes() == b"1\xff"
        assert strings(columns["fixed"]) == ["ab", "", "cd"]
        assert columns["unsigned"].values.tolist()[:2] == [0, -1]
        assert columns["unsigned"].missing.tolist() == [False, False, True]
        assert columns["flag"].values.tolist() == [1, 0, 0]
        assert np.isnan(columns["price"].values).tolist() == [False, True, True]
        assert columns["half"].values.tolist() == [1, 2, 3]
        assert columns["day"].values.tolist()[:2] == [0, 86_400_000_000]
        assert columns["time"].values.tolist()[:2] == [5, 6]
        assert columns["tags"].offsets.tolist() == [0, 2, 2, 2]
        assert strings(columns["tags"].values) == ["a", "b"]
        assert columns["numbers"].offsets.tolist() == [0, 1, 1, 3]
        assert columns["numbers"].values.missing.tolist() == [False, False, True]
        assert columns["nothing"].missing.all()

    def test_rows_are_numbered_across_chunks(self, tmp_path):
        rows = 150_001
        pq.write_table(pa.table({"label": np.zeros(rows), "n": np.arange(rows)}), tmp_path / "f", row_group_size=40_000)
        chunks = list(open_format("parquet").chunks(tmp_path / "f"))
        assert max(len(chunk.lines) for chunk in chunks) <= 1 << 16
        lines = np.concatenate([chunk.lines for chunk in chunks])
        values = np.concatenate([chunk.columns["n"].values for chunk in chunks])
        np.testing.assert_array_equal(lines, values + 1)
        assert chunks[-1].bytes_read == (tmp_path / "f").stat().st_size
        assert chunks[-1].show(0) == str({"label": 0.0, "n": int(values[-len(chunks[-1].lines)])})

    def test_sliced_strings(self, tmp_path):
        table = pa.table({"s": [str(i) for i in range(9)]}).slice(4, 3)
        with pa.ipc.new_file(str(tmp_path / "f"), table.schema) as writer:
            writer.write_table(table)
        assert strings(only_chunk("parquet", tmp_path / "f").columns["s"]) == ["4", "5", "6"]


@pytest.mark.parametrize(
    ("name", "first", "expected"),
    [
        ("f.parquet", b"", "parquet"),
        ("f.feather", b"", "parquet"),
        ("f", b"PAR1....", "parquet"),
        ("f.svm.gz", b"", "libsvm"),
        ("f", b"1 3:1 4:1\n", "libsvm"),
        ("f", b"-1 3:0.5 # x\n", "libsvm"),
        ("f.txt", b"0 17 4 23\n1 5\n", "lists"),
        ("f.txt", b"0 7 \n", "lists"),
        ("f.txt", b"0 a\n", "csv"),
        ("f.txt", criteo_line().encode(), "criteo"),
        ("f.csv", criteo_line(0, dict.fromkeys(range(1, 14), "")).encode(), "criteo"),
        ("f.txt", b"\xef\xbb\xbf" + criteo_line().encode(), "criteo"),
        ("f.tsv", b"label\ta\n", "csv"),
        ("f", b"label,a\n1,2:3\n", "csv"),
        ("f", b"\t".join(b"c%d" % i for i in range(40)), "csv"),
    ],
)
def test_guess(tmp_path, name, first, expected):
    path = tmp_path / name
    path.write_bytes(first)
    assert guess_format(path) == expected
    if not name.endswith("gz"):
        path.write_bytes(PACK["xz"](first))
        assert guess_format(path) == ("csv" if first.startswith(b"PAR1") else expected)
