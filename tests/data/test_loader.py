"""Batches: every row once, in an order that depends on (seed, epoch) alone, from any start, with no thread left behind."""

import gc
import os
import threading
import traceback

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.data.arrow_file import read_index
from hotbed.data.dataset import Dataset
from hotbed.data.draws import key_of, permutation, words
from hotbed.data.loader import loader as loader_module
from hotbed.data.loader.loader import Loader
from hotbed.data.schema import DenseColumn, IdFeature, Schema, Split
from hotbed.errors import ConfigError, DataError, SchemaError
from tests.data.small import ROWS, make_dataset, make_table, replace_column, write_rows

BASE = 1 << 40
PART = "train/part-00000.arrow"


@pytest.fixture(scope="module", params=["arrow", "parquet"])
def dataset(tmp_path_factory, request):
    directory = tmp_path_factory.mktemp("set") / "d"
    sizes = {"train": [63, 0, 7, 30], "valid": [1], "none": [], "empty": [0]}
    make_dataset(directory, sizes, bags=True, kind=request.param)
    return Dataset.open(directory)


def numbers(batches):
    """The row numbers in the order the batches bring them."""
    found = [batch.ids[:, 1].numpy() - BASE for batch in batches]
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def data_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("hotbed-data")]


def test_plain_order_is_the_order_on_disk(dataset):
    loader = Loader(dataset, "train", batch_size=17)
    batches = list(loader.epoch(0))
    assert [batch.size for batch in batches] == [17] * 5 + [15]
    assert len(loader) == 6
    assert numbers(batches).tolist() == list(range(100))


def test_a_batch_holds_what_the_files_hold(dataset):
    for shuffle in (False, True):
        for batch in Loader(dataset, "train", batch_size=33, shuffle=shuffle).epoch(0):
            number = batch.ids[:, 1] - BASE
            assert batch.ids.dtype == torch.int64
            assert batch.dense.dtype == batch.labels.dtype == torch.float32
            torch.testing.assert_close(batch.ids[:, 0], number * 7 % ROWS)
            torch.testing.assert_close(batch.dense, torch.stack([(number / 7).float(), -number.float()], 1))
            torch.testing.assert_close(batch.labels, (number % 3 == 0).float())
            bag = batch.bags["tags"]
            torch.testing.assert_close(torch.diff(bag.offsets), number % 4)
            torch.testing.assert_close(bag.values, torch.repeat_interleave(number % ROWS, number % 4))
            assert bag.offsets[0] == 0
            assert bag.offsets[-1] == len(bag.values)


@settings(max_examples=25)
@given(
    batch_size=st.integers(1, 120),
    shuffle_rows=st.integers(1, 150),
    seed=st.integers(-5, 1000),
    epoch=st.integers(0, 3),
    threads=st.integers(1, 5),
)
def test_shuffled_epochs_hold_every_row_once_for_any_number_of_threads(
    dataset, batch_size, shuffle_rows, seed, epoch, threads
):
    def order(threads):
        options = {"batch_size": batch_size, "shuffle": True, "seed": seed, "shuffle_rows": shuffle_rows}
        return numbers(Loader(dataset, "train", threads=threads, **options).epoch(epoch))

    once = order(threads)
    assert sorted(once.tolist()) == list(range(100))
    assert once.tolist() == order(1).tolist()


def test_seed_and_epoch_change_the_order_and_batch_size_does_not(dataset):
    def order(seed, epoch, batch_size=10):
        return numbers(Loader(dataset, "train", batch_size=batch_size, shuffle=True, seed=seed).epoch(epoch)).tolist()

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1)]
    assert len({tuple(found) for found in orders}) == 4
    assert order(0, 0, batch_size=7) == orders[0]
    assert order(0, 0) == orders[0]


def test_samples_of_one_block_are_in_another_order_every_epoch(tmp_path):
    """One row group, whose own place cannot change."""
    make_dataset(tmp_path / "d", {"train": [40]}, row_group=40)
    loader = Loader(Dataset.open(tmp_path / "d"), "train", batch_size=7, shuffle=True)
    orders = {tuple(numbers(loader.epoch(epoch)).tolist()) for epoch in range(5)}
    assert len(orders) == 5


def test_row_groups_are_in_another_order_every_epoch(tmp_path):
    """Row groups of one sample, each a block of its own, within which nothing can be shuffled."""
    make_dataset(tmp_path / "d", {"train": [40]}, row_group=1)
    loader = Loader(Dataset.open(tmp_path / "d"), "train", batch_size=7, shuffle=True, shuffle_rows=1)
    orders = {tuple(numbers(loader.epoch(epoch)).tolist()) for epoch in range(5)}
    assert len(orders) == 5


@pytest.mark.parametrize("count", [0, 1, 2, 3, 100, 4097, 131_072])
def test_a_permutation_is_the_order_of_its_words(count):
    for key in (0, 5, key_of(3, -1, 2)):
        np.testing.assert_array_equal(permutation(key, count), np.argsort(words(key, count), kind="stable"))


def test_rows_of_one_group_are_torn_apart(dataset):
    """A block joins several row groups, so that neighbours on disk are seldom neighbours in a batch."""
    order = numbers(Loader(dataset, "train", batch_size=100, shuffle=True).epoch(0))
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.1
    assert np.mean(np.abs(order[:50] - np.arange(50))) > 10


@settings(max_examples=30)
@given(data=st.data(), batch_size=st.integers(1, 40), shuffle=st.booleans(), shuffle_rows=st.integers(1, 60))
def test_resume_continues_exactly(dataset, data, batch_size, shuffle, shuffle_rows):
    loader = Loader(dataset, "train", batch_size=batch_size, shuffle=shuffle, shuffle_rows=shuffle_rows, seed=3)
    start = data.draw(st.integers(0, len(loader)))
    whole = list(loader.epoch(2))
    resumed = list(loader.epoch(2, start_batch=start))
    assert [batch.size for batch in resumed] == [batch.size for batch in whole[start:]]
    assert numbers(resumed).tolist() == numbers(whole[start:]).tolist()


def test_resume_decodes_nothing_before_its_block(dataset, monkeypatch):
    decoded = []
    real = loader_module.decode

    def spy(columns, groups, place, spots, buffers):
        decoded.append(sum(group.rows for group in groups))
        return real(columns, groups, place, spots, buffers)

    monkeypatch.setattr(loader_module, "decode", spy)
    loader = Loader(dataset, "train", batch_size=10, shuffle=True, shuffle_rows=20)
    list(loader.epoch(0, start_batch=9))
    assert sum(decoded) <= 2 * 20 + 3


@pytest.mark.parametrize("shuffle", [False, True])
def test_ids_alone_are_those_of_the_batches(dataset, shuffle):
    loader = Loader(dataset, "train", batch_size=17, shuffle=shuffle, seed=4)
    for whole, alone in zip(loader.epoch(1, start_batch=2), loader.id_batches(1, start_batch=2), strict=True):
        assert torch.equal(whole.ids, alone.ids)
        assert torch.equal(whole.bags["tags"].values, alone.bags["tags"].values)
        assert torch.equal(whole.bags["tags"].offsets, alone.bags["tags"].offsets)
        assert alone.dense.shape == (whole.size, 0)
        assert alone.size == whole.size
        assert alone.labels.isnan().all()


def test_ids_alone_read_no_other_column(tmp_path):
    """A label that is wrong is not even looked at."""
    directory = tmp_path / "d"
    make_dataset(directory, {"train": [30]})
    replace_column(directory / PART, "label", pa.array([9.0] * 30, pa.float32()))
    loader = Loader(Dataset.open(directory), "train", batch_size=8)
    assert numbers(loader.id_batches(0)).tolist() == list(range(30))
    with pytest.raises(DataError, match=r"label is 9\.0"):
        list(loader.epoch(0))


@settings(max_examples=40)
@given(
    dense=st.integers(0, 9),
    widths=st.lists(st.sampled_from(["int32", "int64"]), max_size=11),
    rows=st.integers(1, 1100),
    batch_size=st.integers(1, 1200),
    shuffle=st.booleans(),
    seed=st.integers(0, 9),
    kind=st.sampled_from(["arrow", "parquet"]),
)
def test_any_columns_come_as_pyarrow_reads_them(tmp_path_factory, dense, widths, rows, batch_size, shuffle, seed, kind):
    """Columns in fours and the rest, rows in tiles and the rest, ids of 32 and 64 bits side by side, in any file order."""
    part = f"train/part-00000.{kind}"
    rng = np.random.default_rng(seed)
    columns = {"label": rng.integers(0, 2, rows).astype(np.float32), "n": np.arange(rows)}
    columns |= {f"x{i}": rng.standard_normal(rows).astype(np.float32) for i in range(dense)}
    columns |= {f"c{i}": rng.integers(0, 2**31 - 1, rows).astype(width) for i, width in enumerate(widths)}
    names = list(columns)
    directory = tmp_path_factory.mktemp("any")
    (directory / "train").mkdir()
    table = pa.table({names[i]: columns[names[i]] for i in rng.permutation(len(names))})
    write_rows(table, directory / part, 700)
    features = [IdFeature("n", rows), *(IdFeature(f"c{i}", 2**31) for i in range(len(widths)))]
    splits = {"train": Split((part,), (rows,), int(columns["label"].sum()))}
    Schema("label", tuple(DenseColumn(f"x{i}") for i in range(dense)), tuple(features), splits).save(directory)
    loader = Loader(Dataset.open(directory), "train", batch_size=batch_size, shuffle=shuffle, shuffle_rows=900)
    order = []
    for batch in loader.epoch(0):
        row = batch.ids[:, 0].numpy()
        order.append(row)
        np.testing.assert_array_equal(batch.labels.numpy(), columns["label"][row])
        for i in range(dense):
            np.testing.assert_array_equal(batch.dense[:, i].numpy(), columns[f"x{i}"][row])
        for i in range(len(widths)):
            np.testing.assert_array_equal(batch.ids[:, 1 + i].numpy(), columns[f"c{i}"][row])
    assert sorted(np.concatenate(order).tolist()) == list(range(rows))


@pytest.mark.parametrize(("split", "rows"), [("none", 0), ("empty", 0), ("valid", 1)])
def test_tiny_splits(dataset, split, rows):
    for shuffle in (False, True):
        loader = Loader(dataset, split, batch_size=4, shuffle=shuffle)
        assert len(loader) == min(rows, 1)
        assert sum(batch.size for batch in loader.epoch(0)) == rows


def test_a_dataset_without_numbers_or_ids(tmp_path):
    directory = tmp_path / "d"
    schema = make_dataset(directory, {"train": [25]})
    for changed, shape in (({"dense": ()}, (25, 0)), ({"features": ()}, (25, 2))):
        type(schema)(**{**vars(schema), **changed}).save(directory)
        (batch,) = Loader(Dataset.open(directory), "train", batch_size=25, shuffle=True).epoch(0)
        assert tuple(batch.dense.shape) == shape
        assert batch.ids.shape[0] == 25


def test_wrong_arguments_are_named(dataset):
    for name in ("batch_size", "threads", "shuffle_rows"):
        with pytest.raises(ConfigError, match=f"{name} is -1"):
            Loader(dataset, "train", **{"batch_size": 1, name: -1})
    with pytest.raises(ConfigError, match="start_batch is 11; the epoch has 10 batches"):
        Loader(dataset, "train", batch_size=10).epoch(0, start_batch=11)
    with pytest.raises(SchemaError, match=r"no split 'trian'.*train, valid"):
        Loader(dataset, "trian", batch_size=10)


def test_closing_early_leaves_no_thread(dataset):
    before = set(threading.enumerate())
    stream = Loader(dataset, "train", batch_size=5, shuffle=True, shuffle_rows=10, threads=3).epoch(0)
    next(stream)
    assert data_threads()
    stream.close()
    assert set(threading.enumerate()) <= before


def test_dropping_an_epoch_leaves_no_thread(dataset):
    before = set(threading.enumerate())
    stream = Loader(dataset, "train", batch_size=5, threads=3).epoch(0)
    next(stream)
    del stream
    gc.collect()
    assert set(threading.enumerate()) <= before


def test_an_error_in_a_reader_reaches_the_consumer_with_its_traceback(dataset, monkeypatch):
    before = set(threading.enumerate())

    def broken(columns, groups, place, spots, buffers):
        raise ZeroDivisionError("deep down")

    monkeypatch.setattr(loader_module, "decode", broken)
    with pytest.raises(ZeroDivisionError, match="deep down") as caught:
        list(Loader(dataset, "train", batch_size=10).epoch(0))
    assert "in broken" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert set(threading.enumerate()) <= before


BROKEN = {
    "null id": ("a", pa.array([None] + [1] * 29, pa.int32()), r"row group 0: column 'a' has 1 nulls"),
    "null label": ("label", pa.array([0.0] * 29 + [None], pa.float32()), r"row group 2: column 'label' has 1 nulls"),
    "odd label": ("label", pa.array([0.0] * 12 + [0.5] + [1.0] * 17, pa.float32()), r"group 1, row 2: label is 0.5"),
    "nan label": ("label", pa.array([float("nan")] + [1.0] * 29, pa.float32()), r"group 0, row 0: label is nan"),
    "nan": (
        "y",
        pa.array([0.0] * 11 + [float("nan")] + [0.0] * 18, pa.float32()),
        r"group 1, row 1: column 'y' is nan",
    ),
    "infinite": ("x", pa.array([0.0] * 29 + [float("inf")], pa.float32()), r"group 2, row 9: column 'x' is inf"),
    "too large": ("a", pa.array([0] * 9 + [ROWS] + [0] * 20, pa.int32()), r"group 0, row 9: id 1000 of feature 'a'"),
    "negative": ("a", pa.array([-1] + [0] * 29, pa.int64()), r"group 0, row 0: id -1 of feature 'a'.*1,000 rows"),
    "null bag": ("tags", pa.array([None] + [[1]] * 29, pa.list_(pa.int32())), r"column 'tags' has 1 nulls"),
    "null in bag": ("tags", pa.array([[1, None]] + [[1]] * 29, pa.list_(pa.int32())), r"bags of 'tags' hold 1 nulls"),
    "bag id": ("tags", pa.array([[]] * 29 + [[5, 1000]], pa.list_(pa.int64())), r"group 2, in a bag: id 1000 .*'tags'"),
}


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("case", BROKEN)
def test_wrong_values_name_file_and_row_group(tmp_path, case, kind):
    name, values, message = BROKEN[case]
    directory, part = tmp_path / "d", f"train/part-00000.{kind}"
    make_dataset(directory, {"train": [30]}, bags=True, kind=kind)
    replace_column(directory / part, name, values)
    with pytest.raises(DataError, match=message) as caught:
        list(Loader(Dataset.open(directory), "train", batch_size=8, shuffle=True).epoch(0))
    assert str(directory / part) in str(caught.value)


def test_a_flipped_bit_names_file_and_row_group(tmp_path):
    directory = tmp_path / "d"
    make_dataset(directory, {"train": [3000]}, row_group=1000)
    place = read_index(directory / PART).places[2]
    damaged = bytearray((directory / PART).read_bytes())
    damaged[place.begin + place.length - 1000] ^= 1
    (directory / PART).write_bytes(bytes(damaged))
    with pytest.raises(DataError, match=r"part-00000.arrow, row group 2 cannot be decoded .*checksum"):
        list(Loader(Dataset.open(directory), "train", batch_size=100).epoch(0))


def test_a_flipped_bit_of_a_parquet_file(tmp_path):
    """In pages that are not packed, nothing but the checksum of a page would notice."""
    directory, part = tmp_path / "d", "train/part-00000.parquet"
    make_dataset(directory, {"train": [3000]}, kind="parquet")
    table = make_table(3000)
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True, "row_group_size": 1000}
    pq.write_table(table, directory / part, **options)
    with pq.ParquetFile(directory / part) as parquet:
        column = parquet.metadata.row_group(2).column(table.column_names.index("b"))
    damaged = bytearray((directory / part).read_bytes())
    damaged[column.data_page_offset + column.total_compressed_size - 1000] ^= 1
    (directory / part).write_bytes(bytes(damaged))
    with pytest.raises(DataError, match=r"part-00000.parquet, row group 2 cannot be decoded .*CRC"):
        list(Loader(Dataset.open(directory), "train", batch_size=100).epoch(0))


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("change", ["replaced", "cut short", "written again"])
def test_a_file_that_changes_while_it_is_read_is_a_data_error(tmp_path, change, kind):
    directory, part = tmp_path / "d", f"train/part-00000.{kind}"
    make_dataset(directory, {"train": [3000]}, row_group=1000, kind=kind)
    stream = Loader(Dataset.open(directory), "train", batch_size=100, threads=1).epoch(0)
    whole = (directory / part).read_bytes()
    if change == "replaced":
        write_rows(make_table(3000, first=1), directory / part, 1000)
    else:
        (directory / part).write_bytes(whole[: len(whole) // 5] if change == "cut short" else whole)
    os.utime(directory / part, ns=(0, 0))
    words = "cannot be decoded .*" if change == "cut short" else ""
    with pytest.raises(DataError, match=rf"part-00000.{kind}, row group 0 .*{words}has changed since the dataset"):
        list(stream)


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_a_file_that_vanishes_is_a_data_error(tmp_path, kind):
    directory, part = tmp_path / "d", f"train/part-00000.{kind}"
    make_dataset(directory, {"train": [30]}, kind=kind)
    dataset = Dataset.open(directory)
    (directory / part).unlink()
    with pytest.raises(DataError, match=rf"part-00000\.{kind}, row group 0 cannot be decoded"):
        list(Loader(dataset, "train", batch_size=8).epoch(0))


def test_hash_ids_keep_all_64_bits(tmp_path):
    directory = tmp_path / "d"
    make_dataset(directory, {"train": [30]})
    replace_column(directory / PART, "b", pa.array([-(2**63), 2**63 - 1] * 15, pa.int64()))
    (batch,) = Loader(Dataset.open(directory), "train", batch_size=30).epoch(0)
    assert batch.ids[:2, 1].tolist() == [-(2**63), 2**63 - 1]


def test_columns_beyond_the_schema_are_ignored(tmp_path):
    directory = tmp_path / "d"
    make_dataset(directory, {"train": [12]})
    table = make_table(12).append_column("comment", pa.array([None] * 12, pa.string()))
    table = table.append_column("nothing", pa.nulls(12))
    write_rows(table, directory / PART)
    assert sum(batch.size for batch in Loader(Dataset.open(directory), "train", batch_size=5).epoch(0)) == 12


@pytest.mark.gpu
def test_pinned_batches_are_pinned_and_equal(dataset):
    plain = Loader(dataset, "train", batch_size=17, shuffle=True)
    pinned = Loader(dataset, "train", batch_size=17, shuffle=True, pin_memory=True)
    for left, right in zip(plain.epoch(0), pinned.epoch(0), strict=True):
        tensors = (right.labels, right.dense, right.ids, right.bags["tags"].values, right.bags["tags"].offsets)
        assert all(tensor.is_pinned() for tensor in tensors)
        assert torch.equal(left.ids, right.ids)
        assert torch.equal(left.bags["tags"].values, right.bags["tags"].values)
