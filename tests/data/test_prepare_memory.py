"""Beyond the memory bound a vocabulary holds exactly the ids seen more than the stated error, with exact counts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.data.dataset import Dataset
from hotbed.data.prepare.arrays import ArrayFile, write_arrays
from hotbed.data.prepare.merge import BYTES_OF_ID, CountedPiece, IdRule, load_feature, merge_table
from hotbed.data.prepare.prepare import prepare
from hotbed.data.schema import IdFeature
from hotbed.errors import ConfigError, DataError
from tests.data.small import read_rows

IDS = st.lists(st.integers(-60, 60), min_size=1, max_size=120)


def write_piece(path, ids) -> CountedPiece:
    distinct, numbers = np.unique(np.array(ids, dtype=np.int64), return_inverse=True)
    counts = np.bincount(numbers)
    arrays = {"ids.0": [distinct], "counts.0": [counts], "numbers.0": [numbers.astype(np.int32)]}
    write_arrays(path, arrays)
    return CountedPiece(path, len(ids), (0, len(ids)), whole=True)


@given(st.lists(IDS, min_size=1, max_size=5), st.integers(16, 80), st.integers(1, 3))
@settings(max_examples=60)
def test_the_vocabulary_is_what_a_min_count_would_give(tmp_path_factory, pieces, most_ids, min_count):
    directory = tmp_path_factory.mktemp("merge")
    (directory / "work").mkdir()
    (directory / "counts").mkdir()
    files = [write_piece(directory / "work" / f"p{i}", ids) for i, ids in enumerate(pieces)]
    rule = IdRule("vocabulary", min_count)
    merge_table({0: IdFeature("f", 0)}, files, rule, most_ids * BYTES_OF_ID, directory / "work")
    made = load_feature(0, directory / "work")
    true = Counter(id_ for ids in pieces for id_ in ids)
    assert (made.counting == "sketch") == (made.count_error > 0)
    if len(true) <= most_ids:
        assert made.counting == "exact"
        assert made.distinct == len(true)
    kept = {id_: count for id_, count in true.items() if count >= max(min_count, made.count_error + 1)}
    listed = pq.read_table(directory / "counts" / "f.parquet")
    assert dict(zip(listed["id"].to_pylist(), listed["count"].to_pylist())) == kept
    order = sorted(kept, key=lambda id_: (-kept[id_], id_))
    assert listed["id"].to_pylist() == order
    assert made.rows == 1 + len(kept)
    assert made.lookups == true.total()
    assert made.unlisted_lookups == true.total() - sum(kept.values())
    rows = np.fromfile(directory / "work" / "feature-0.rows", np.int32)
    row_of = {id_: 1 + k for k, id_ in enumerate(order)}
    expected = [row_of.get(id_, 0) for ids in pieces for id_ in sorted(set(ids))]
    assert rows.tolist() == expected


def test_prepare_says_what_it_could_not_count(tmp_path, monkeypatch):
    """C1 has 4,000 distinct ids, three of them frequent; memory is made to hold some hundreds."""
    monkeypatch.setattr("hotbed.data.prepare.merge.BYTES_OF_ID", (1 << 30) // 2 // 300)
    monkeypatch.setattr("hotbed.data.prepare.merge.HeavyHitters", small_sketch)
    rare = np.arange(4000)
    ids = np.where(rare % 4 == 0, -1 - rare % 3, rare)
    pq.write_table(pa.table({"label": rare % 2, "big": ids, "small": rare % 7}), tmp_path / "f.parquet")
    options = {"ids": ["big", "small"], "memory": "1GiB"}
    schema = prepare([tmp_path / "f.parquet"], tmp_path / "out", **options).schema
    big, small = schema.features
    assert (small.counting, small.count_error, small.distinct, small.rows) == ("exact", 0, 7, 8)
    assert big.counting == "sketch"
    assert 0 < big.count_error <= 2 * 4000 / 192
    assert big.distinct == big.distinct_estimate == pytest.approx(3003, rel=0.02)
    true = Counter(ids.tolist())
    listed = Dataset.open(tmp_path / "out").counts("big")
    assert set(listed.ids.tolist()) == {id_ for id_, count in true.items() if count > big.count_error} == {-1, -2, -3}
    assert big.unlisted_lookups == 3000
    table = read_rows(tmp_path / "out" / "train" / "part-00000.arrow")
    assert np.count_nonzero(table["big"].to_numpy()) == 1000
    again = prepare([tmp_path / "f.parquet"], tmp_path / "again", **options, workers=1).schema
    assert again == schema


def small_sketch(_: int):
    from hotbed.data.prepare.sketches import HeavyHitters

    return HeavyHitters(256 * 32)


def test_raw_ids_are_written_whole_whatever_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("hotbed.data.prepare.merge.BYTES_OF_ID", (1 << 30) // 2 // 300)
    monkeypatch.setattr("hotbed.data.prepare.merge.HeavyHitters", small_sketch)
    ids = np.arange(2000)
    pq.write_table(pa.table({"label": ids % 2, "big": ids}), tmp_path / "f.parquet")
    schema = prepare([tmp_path / "f.parquet"], tmp_path / "out", ids=["big"], ids_mode="raw", memory="1GiB").schema
    assert schema.features[0].counting == "sketch"
    table = read_rows(tmp_path / "out" / "train" / "part-00000.arrow")
    np.testing.assert_array_equal(table["big"].to_numpy(), ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "100MiB"}, "prepare needs 1.0 GiB at least"),
        ({"memory": "lots"}, "--memory"),
        ({"workers": 0}, "--workers 0"),
    ],
)
def test_wrong_bounds(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        prepare([pa.table({"label": [0, 1], "s": ["a", "b"]})], tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_temporary_file_is_named(tmp_path):
    (tmp_path / "x").write_bytes(b"nonsense" * 5)
    with pytest.raises(DataError, match="is damaged"):
        ArrayFile(tmp_path / "x")
