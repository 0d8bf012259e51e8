"""Arrow files hold what was written, other readers read them, and damage anywhere is an error or harmless."""

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import feather

from hotbed.data.arrow_file import ArrowWriter, checksum, read_batch, read_index
from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader
from hotbed.errors import DataError, SchemaError
from tests.data.small import make_dataset, make_table, write_rows

PART = "train/part-00000.arrow"


def read_all(path):
    index = read_index(path)
    memory = [np.full(place.length, 0xAA, np.uint8) for place in index.places]
    batches = [read_batch(path, *one) for one in zip(index.places, [index.schema] * len(memory), memory)]
    return pa.Table.from_batches(batches, schema=index.schema)


@pytest.mark.parametrize("num_rows", [0, 1, 63, 500, 1000])
@pytest.mark.parametrize("batch_rows", [1, 64, 1000])
def test_what_is_written_is_read(tmp_path, num_rows, batch_rows):
    table = make_table(num_rows, bags=True)
    write_rows(table, tmp_path / "a.arrow", batch_rows)
    assert read_all(tmp_path / "a.arrow").equals(table)
    assert [place.rows for place in read_index(tmp_path / "a.arrow").places][:-1] == [batch_rows] * (
        (num_rows - 1) // batch_rows
    )


def test_other_readers_read_it(tmp_path):
    table = make_table(500, bags=True)
    write_rows(table, tmp_path / "a.arrow", 64)
    assert feather.read_table(tmp_path / "a.arrow").equals(table)
    assert pa.dataset.dataset(tmp_path / "a.arrow", format="ipc").to_table().equals(table)


def test_slices_and_many_calls_write_the_same_bytes(tmp_path):
    table = make_table(300, bags=True)
    write_rows(table, tmp_path / "a.arrow", 100)
    with ArrowWriter(tmp_path / "b.arrow", table.schema) as writer:
        for start in (0, 100, 200):
            writer.write(pa.concat_tables([table.slice(start, 41), table.slice(start + 41, 59)]), 100)
    assert (tmp_path / "a.arrow").read_bytes() == (tmp_path / "b.arrow").read_bytes()


def test_a_file_that_was_not_finished_is_refused(tmp_path):
    table = make_table(300)

    def fail():
        with ArrowWriter(tmp_path / "a.arrow", table.schema) as writer:
            writer.write(table, 100)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    with pytest.raises((ValueError, OSError, pa.ArrowException)):
        read_index(tmp_path / "a.arrow")


def test_a_file_of_another_writer_is_refused(tmp_path):
    """It has no checksums."""
    make_dataset(tmp_path, {"train": [30]})
    feather.write_feather(make_table(30), str(tmp_path / PART), compression="uncompressed")
    with pytest.raises(SchemaError, match=r"part-00000\.arrow is not a readable Arrow file .*no index"):
        Dataset.open(tmp_path)


def batches_of(directory):
    found = list(Loader(Dataset.open(directory), "train", batch_size=50, threads=1).epoch(0))
    return [[one.labels, one.dense, one.ids, one.bags["tags"].values, one.bags["tags"].offsets] for one in found]


def try_batches(directory):
    """The batches, or the message of the error."""
    try:
        return batches_of(directory), ""
    except (SchemaError, DataError) as error:
        return [], str(error)


def test_any_flipped_byte_is_noticed_or_harmless(tmp_path):
    make_dataset(tmp_path, {"train": [40]}, row_group=20, bags=True)
    right = batches_of(tmp_path)
    path = tmp_path / PART
    content = bytearray(path.read_bytes())
    begin, end = read_index(path).places[0].begin, sum(read_index(path).places[-1][:2])
    for at in range(0, len(content), 3):
        content[at] ^= 0x10
        path.write_bytes(content)
        content[at] ^= 0x10
        found, message = try_batches(tmp_path)
        assert found or str(path) in message
        if found:  # a byte that nobody needs: padding, the schema at the beginning
            assert not begin <= at < end
            assert all(torch.equal(a, b) for one, other in zip(found, right, strict=True) for a, b in zip(one, other))


def test_any_length_is_refused(tmp_path):
    make_dataset(tmp_path, {"train": [40]}, row_group=20)
    path = tmp_path / PART
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(SchemaError, match="not a readable Arrow file"):
            Dataset.open(tmp_path)


def test_a_file_that_ends_before_its_rows_is_refused_when_it_is_opened(tmp_path):
    """Bytes are lost in the middle, and the footer is intact."""
    make_dataset(tmp_path, {"train": [3000]}, row_group=1000)
    path = tmp_path / PART
    whole, places = path.read_bytes(), read_index(path).places
    path.write_bytes(whole[: places[0].begin] + whole[places[2].begin + places[2].length :])
    with pytest.raises(SchemaError, match="not a readable Arrow file"):
        Dataset.open(tmp_path)


def test_offsets_of_bags_are_checked(tmp_path):
    """Written with good checksums by someone who means harm: nothing outside the file is read."""
    make_dataset(tmp_path, {"train": [3]}, bags=True)
    table = make_table(3, bags=True)
    bad = pa.ListArray.from_buffers(
        pa.list_(pa.int32()),
        3,
        [None, pa.py_buffer(np.array([0, 1, 10_000, 2], np.int32))],
        children=[pa.array([1, 2], pa.int32())],
    )
    batch = pa.RecordBatch.from_arrays([*(c.combine_chunks() for c in table.columns[:-1]), bad], schema=table.schema)
    with ArrowWriter(tmp_path / PART, table.schema) as writer:
        writer.write(pa.Table.from_batches([batch]), 10)
    with pytest.raises(DataError, match="row group 0 cannot be decoded"):
        batches_of(tmp_path)


@settings(max_examples=200)
@given(st.binary(min_size=8, max_size=600), st.data())
def test_damage_within_one_word_changes_the_checksum(content, data):
    words = np.frombuffer(content[: len(content) // 8 * 8], np.uint8).copy()
    before = checksum(words)
    assert checksum(words.copy()) == before
    word = data.draw(st.integers(0, len(words) // 8 - 1))
    for at in data.draw(st.sets(st.integers(0, 7), min_size=1)):
        words[8 * word + at] ^= data.draw(st.integers(1, 255))
    assert checksum(words) != before


def test_words_in_another_order_change_the_checksum():
    words = np.random.default_rng(0).integers(0, 256, 8 * 100, dtype=np.uint8)
    found = {checksum(np.roll(words.reshape(-1, 8), shift, axis=0).ravel()) for shift in range(100)}
    assert len(found) == 100
    assert checksum(np.zeros(8, np.uint8)) != checksum(np.zeros(16, np.uint8))
