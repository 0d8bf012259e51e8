"""What a trace holds: the keys of training, batch by batch."""

import numpy as np
import pytest

from hotbed import EmbeddingTables, Table
from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader
from hotbed.errors import ConfigError, SchemaError
from hotbed.forecast.trace import read_trace, trace_of
from hotbed.tables.inputs import flatten, read_inputs
from tests.data.small import make_dataset


def test_counts_and_order():
    trace = trace_of([np.array([5, 3, 5, -1]), np.array([], dtype=np.int64), np.array([9])], num_rows=10)
    assert trace.keys.tolist() == [3, 5, 9]
    assert trace.counts.tolist() == [1, 2, 1]
    assert trace.offsets.tolist() == [0, 2, 2, 3]
    assert (trace.num_batches, trace.most_keys, trace.num_lookups) == (3, 2, 4)
    assert trace.batch(0).tolist() == [3, 5]


@pytest.fixture
def dataset(tmp_path):
    make_dataset(tmp_path / "data", {"train": [70, 31], "valid": [10]}, bags=True)
    return Dataset.open(tmp_path / "data")


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_keys_are_those_of_training(dataset, shuffle):
    tables = EmbeddingTables(
        {f.name: Table(rows=f.rows, dim=1, hashing=f.mode == "hash") for f in dataset.schema.features}
    )
    (group,), (inputs,) = tables.groups, tables.group_inputs
    trace = read_trace(dataset, batch_size=16, shuffle=shuffle, seed=5)
    loader = Loader(dataset, "train", batch_size=16, shuffle=shuffle, seed=5)
    for number, batch in enumerate(loader.epoch(0)):
        given = read_inputs(tables.features, batch.ids, batch.bags, tables.device)
        keys, counts = flatten(group, inputs, given).slots.unique(return_counts=True)
        assert trace.batch(number).tolist() == keys.tolist()
        own = slice(trace.offsets[number], trace.offsets[number + 1])
        assert trace.counts[own].tolist() == counts.tolist()
    assert trace.num_batches == 7
    assert trace.num_rows == group.num_rows


def test_a_trace_can_be_cut_and_reports_progress(dataset):
    whole = read_trace(dataset, batch_size=16)
    seen = []
    cut = read_trace(dataset, batch_size=16, max_batches=3, progress=lambda done, total: seen.append((done, total)))
    assert cut.keys.tolist() == whole.keys[: whole.offsets[3]].tolist()
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert read_trace(dataset, batch_size=16, max_batches=100).num_batches == 7


def test_mistakes(dataset):
    with pytest.raises(ConfigError, match="max_batches is 0"):
        read_trace(dataset, batch_size=16, max_batches=0)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        read_trace(dataset, batch_size=0)
    with pytest.raises(SchemaError, match="no split 'test'"):
        read_trace(dataset, batch_size=16, split="test")
