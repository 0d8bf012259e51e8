"""Row groups read from their pages are what Arrow reads, for every way prepare or another writer may store them."""

import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.data.dataset import RowGroup
from hotbed.data.loader import crc
from hotbed.data.loader.chunks import read_pages
from hotbed.data.loader.page_headers import NOT_OURS
from hotbed.data.loader.pages import scatter_pages
from hotbed.data.loader.scatter import NO_LIMIT, TILE, Kinds, RowPlaces

NUMBERS = {"float": np.float32, "int": np.int32, "long": np.int64}


def columns_of(num_rows, num_ids, distinct, seed=0):
    """A label, two numbers, then ids: ints and longs in turn."""
    rng = np.random.default_rng(seed)
    columns = {"label": rng.integers(0, 2, num_rows).astype(np.float32)}
    for name in ("x", "y"):
        columns[name] = np.round(rng.normal(size=num_rows), 1).astype(np.float32)
    for number in range(num_ids):
        drawn = np.minimum(rng.zipf(1.3, num_rows) - 1, distinct - 1)
        columns[f"C{number}"] = drawn.astype(np.int32 if number % 2 == 0 else np.int64)
    return columns


def write(path, columns, **options):
    schema = pa.schema(
        [pa.field(name, pa.from_numpy_dtype(data.dtype), nullable=False) for name, data in columns.items()]
    )
    pq.write_table(pa.table(dict(columns), schema=schema), path, **{"write_page_checksum": True, **options})


def spots_of(num_rows, num_ids, slab_rows, num_dense=2):
    """Slabs for so many rows, and where they lie."""
    slabs = []
    for start in range(0, num_rows, slab_rows):
        rows = min(slab_rows, num_rows - start)
        slabs.append(
            (
                np.full(rows, 7, np.float32),
                np.full((rows, num_dense), 7, np.float32),
                np.full((rows, num_ids), 7, np.int64),
            )
        )
    addresses = np.asarray([[part.ctypes.data for part in slab] for slab in slabs], dtype=np.int64)
    return slabs, RowPlaces(addresses, np.empty(1 + num_dense + num_ids, np.int64), slab_rows, 0, 0, num_rows)


def read(path, columns, place, slab_rows=1000, limit=None):
    """label, dense, ids of all rows in their places; None where Arrow must read them."""
    names = tuple(columns)
    found = read_pages(RowGroup(path, 0, len(place)), names)
    if found is None:
        return None
    num_ids = len(names) - 3
    last = np.full(len(names), NO_LIMIT if limit is None else np.uint64(limit), dtype=np.uint64)
    slabs, spots = spots_of(len(place), num_ids, slab_rows)
    if scatter_pages(found.pages, Kinds(found.letters, last, 1, 2), place, spots) == NOT_OURS:
        return None
    return [np.concatenate(parts) for parts in zip(*slabs)]


def expected(columns, place):
    names = list(columns)
    inverse = np.argsort(place)
    return [
        columns["label"][inverse],
        np.stack([columns[name] for name in names[1:3]], 1)[inverse],
        np.stack([columns[name].astype(np.int64) for name in names[3:]], 1)[inverse],
    ]


def assert_equal(one, other):
    assert one is not None
    for mine, theirs in zip(one, other):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("num_ids", [1, 3, 4, 9])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"compression": "none"},
        {"compression": "none", "use_dictionary": False},
        {"compression": "zstd"},
        {"compression": "snappy", "use_dictionary": ["C0", "label"]},
        {"compression": "none", "max_rows_per_page": 100},
        {"compression": "zstd", "max_rows_per_page": 777, "write_page_checksum": False},
        {"compression": "none", "dictionary_pagesize_limit": 64, "max_rows_per_page": 300},  # falls back to plain pages
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_pages_hold_what_arrow_reads(tmp_path, num_ids, shuffled, options):
    num_rows = 2 * TILE + 131
    columns = columns_of(num_rows, num_ids, 5000)
    write(tmp_path / "part.parquet", columns, **options)
    place = np.random.default_rng(1).permutation(num_rows) if shuffled else np.arange(num_rows)
    assert_equal(read(tmp_path / "part.parquet", columns, place), expected(columns, place))


@pytest.mark.parametrize("distinct", [1, 2, 3, 17, 300, 5000, 20_000, 70_000])
def test_dictionaries_of_every_width(tmp_path, distinct):
    num_rows = 3 * distinct + 5
    columns = columns_of(num_rows, 2, distinct)
    for name in ("C0", "C1"):  # every number, in runs and not
        columns[name] = (np.arange(num_rows) % distinct).astype(columns[name].dtype)
        columns[name][: num_rows // 4] = distinct - 1
    write(tmp_path / "part.parquet", columns, compression="none", dictionary_pagesize_limit=1 << 22)
    place = np.arange(num_rows)
    assert_equal(read(tmp_path / "part.parquet", columns, place, slab_rows=4096), expected(columns, place))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), min_size=1, max_size=60), st.integers(0, 3))
def test_any_mixture_of_runs(tmp_path_factory, runs, more_ids):
    values = np.concatenate([np.full(length, value) for value, length in runs])
    columns = columns_of(len(values), 2 + more_ids, 50)
    columns["C0"], columns["C1"] = values.astype(np.int32), values.astype(np.int64)
    path = tmp_path_factory.mktemp("runs") / "part.parquet"
    write(path, columns, compression="none")
    place = np.arange(len(values))
    assert_equal(read(path, columns, place, slab_rows=64), expected(columns, place))


def test_any_flipped_byte_is_noticed_or_harmless(tmp_path):
    columns = columns_of(400, 3, 50)
    path = tmp_path / "part.parquet"
    write(path, columns, compression="none", max_rows_per_page=150)
    place = np.arange(400)
    right = expected(columns, place)
    content = bytearray(path.read_bytes())
    noticed = 0
    wrong = range(0, len(content), 3)
    for at in wrong:
        content[at] ^= 0x10
        path.write_bytes(content)
        content[at] ^= 0x10
        found = read(path, columns, place)
        noticed += found is None
        if found is not None:  # a byte of a header or the footer that nobody needs
            assert_equal(found, right)
    assert noticed > 0.6 * len(wrong)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda columns: columns.__setitem__("C0", np.where(np.arange(400) == 313, -1, columns["C0"]).astype(np.int32)),
        lambda columns: columns.__setitem__("C1", np.where(np.arange(400) == 313, 51, columns["C1"]).astype(np.int64)),
        lambda columns: columns.__setitem__(
            "x", np.where(np.arange(400) == 7, np.nan, columns["x"]).astype(np.float32)
        ),
        lambda columns: columns.__setitem__(
            "label", np.where(np.arange(400) == 7, 2, columns["label"]).astype(np.float32)
        ),
    ],
)
@pytest.mark.parametrize("dictionary", [False, True])
def test_wrong_values_are_left_to_arrow(tmp_path, spoil, dictionary):
    columns = columns_of(400, 3, 50)
    write(tmp_path / "right.parquet", columns, compression="none", use_dictionary=dictionary)
    assert read(tmp_path / "right.parquet", columns, np.arange(400), limit=50) is not None
    spoil(columns)
    write(tmp_path / "part.parquet", columns, compression="none", use_dictionary=dictionary)
    assert read(tmp_path / "part.parquet", columns, np.arange(400), limit=50) is None


def test_files_of_other_writers_are_left_to_arrow(tmp_path):
    columns = columns_of(400, 3, 50)
    place = np.arange(400)
    path = tmp_path / "part.parquet"
    pq.write_table(pa.table(columns), path)  # nullable
    assert read(path, columns, place) is None
    write(path, columns, data_page_version="2.0")
    assert read(path, columns, place) is None
    write(path, columns, use_dictionary=False, column_encoding={"C0": "DELTA_BINARY_PACKED"})
    assert read(path, columns, place) is None
    write(path, {name: data for name, data in columns.items() if name != "C0"})
    assert read(path, columns, place) is None


def test_a_file_that_is_cut_short_is_left_to_arrow(tmp_path):
    columns = columns_of(400, 3, 50)
    path = tmp_path / "part.parquet"
    write(path, columns)
    whole = path.read_bytes()
    for size in (0, 3, 12, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert read(path, columns, np.arange(400)) is None
    path.unlink()
    assert read(path, columns, np.arange(400)) is None


def test_some_columns_alone(tmp_path):
    columns = columns_of(3000, 6, 5000)
    write(tmp_path / "part.parquet", columns, compression="none")
    names = ("C5", "C0")
    found = read_pages(RowGroup(tmp_path / "part.parquet", 0, 3000), names)
    slabs, spots = spots_of(3000, 2, 1000, num_dense=0)
    kinds = Kinds(found.letters, np.full(2, NO_LIMIT, np.uint64), 0, 0)
    assert scatter_pages(found.pages, kinds, np.arange(3000), spots) == 0
    ids = np.concatenate([slab[2] for slab in slabs])
    np.testing.assert_array_equal(ids, np.stack([columns[name] for name in names], 1))


@given(st.binary(max_size=700), st.integers(0, 8))
@settings(max_examples=200, deadline=None)
def test_checksums_are_those_of_zlib(content, shift):
    memory = np.frombuffer(b"." * shift + content + b".", dtype=np.uint8)
    start = memory.ctypes.data + shift
    assert crc.crc32(start, len(content)) == zlib.crc32(content)
    assert int(crc._by_tables(crc._ONES, start, len(content)) ^ crc._ONES) == zlib.crc32(content)
