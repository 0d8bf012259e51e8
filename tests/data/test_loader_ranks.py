"""Loaders of ranks: together they read every sample once, in as many batches each, from any batch on."""

import numpy as np
import pytest

from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader, Share
from hotbed.errors import ConfigError
from tests.data.small import make_dataset

BASE = 1 << 40


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("set") / "d"
    make_dataset(directory, {"train": [63, 0, 7, 30]}, bags=True)
    return Dataset.open(directory)


def loaders_of(dataset, world, batch_size, shuffle=True):
    return [
        Loader(
            dataset, "train", batch_size=batch_size, shuffle=shuffle, seed=3, shuffle_rows=40, share=Share(rank, world)
        )
        for rank in range(world)
    ]


def numbers(batches):
    return [(batch.ids[:, 1].numpy() - BASE).tolist() for batch in batches]


@pytest.mark.parametrize("batch_size", [3, 16, 34, 101])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_sample_once(dataset, world, batch_size):
    loaders = loaders_of(dataset, world, batch_size)
    for epoch in (0, 1):
        by_rank = [numbers(loader.epoch(epoch)) for loader in loaders]
        assert {len(batches) for batches in by_rank} == {len(loaders[0])} == {-(-100 // batch_size)}
        sizes = [sum(map(len, batch)) for batch in zip(*by_rank)]
        assert sizes == [loaders[0].size_of(batch) for batch in range(len(loaders[0]))]
        assert sorted(row for batches in by_rank for batch in batches for row in batch) == list(range(100))


def test_in_the_order_of_one_without_shuffling(dataset):
    by_rank = [numbers(loader.epoch(0)) for loader in loaders_of(dataset, 3, 16, shuffle=False)]
    assert [row for batches in by_rank for batch in batches for row in batch] == list(range(100))


def test_a_batch_without_samples_has_all_columns(dataset):
    (*_, last) = loaders_of(dataset, 3, 99)[0].epoch(0)
    assert last.size == 0
    assert last.ids.shape == (0, 2)
    assert last.dense.shape == (0, 2)
    assert last.bags["tags"].offsets.tolist() == [0]


def test_an_epoch_goes_on_where_it_stopped(dataset):
    for loader in loaders_of(dataset, 3, 16):
        assert numbers(loader.epoch(2, 4)) == numbers(loader.epoch(2))[4:]


def test_other_ranks_read_what_was_left(dataset):
    begun = [numbers(loader.epoch(0))[:2] for loader in loaders_of(dataset, 2, 16)]
    middle = [numbers(one.epoch(0, 2, [(0, 2), (2, 3)]))[:3] for one in loaders_of(dataset, 3, 16)]
    rest = [numbers(one.epoch(0, 5, [(0, 2), (2, 3), (5, 1)])) for one in loaders_of(dataset, 1, 16)]
    seen = [row for part in (begun, middle, rest) for rank in part for batch in rank for row in batch]
    assert sorted(seen) == np.arange(100).tolist()
    assert len(rest[0]) == 2


def test_a_batch_has_a_sample_for_every_rank(dataset):
    with pytest.raises(ConfigError, match="batch_size is 2, the samples of a batch of all 3 ranks"):
        loaders_of(dataset, 3, 2)
