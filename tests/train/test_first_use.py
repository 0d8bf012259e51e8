"""Compiled code is loaded before the clock starts, and nothing else changes."""

import pytest
import torch

import hotbed
from hotbed.data.dataset import Dataset
from hotbed.train import first_use
from tests.data.small import make_dataset


@pytest.fixture
def schema(tmp_path):
    return make_dataset(tmp_path / "data", {"train": [40]}, bags=True)


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    monkeypatch.setattr(first_use, "_loaded", set())


def tables_of(rows=1000, **cache):
    kinds = {"a": hotbed.Table(rows, 4, padding_id=77 if rows else None), "b": hotbed.Table(50, 4, hashing=True)}
    kinds["tags"] = hotbed.Table(rows, 4, pooling="mean")
    return hotbed.EmbeddingTables(kinds, hotbed.optim.Adam(lr=0.1), **cache)


@pytest.mark.parametrize("cache", [{}, {"cache": 0.1}])
def test_a_step_of_a_twin_leaves_the_tables_alone(schema, cache):
    tables, untouched = tables_of(**cache), tables_of(**cache)
    random = torch.get_rng_state()
    first_use.load_kernels(tables, schema)
    assert len(first_use._loaded) == 1
    assert torch.equal(torch.get_rng_state(), random)
    for name in tables.tables:
        assert torch.equal(tables.weight(name), untouched.weight(name))
    assert tables.num_updates == 0


def test_every_kind_once(schema, monkeypatch):
    first_use.load_kernels(tables_of(), schema)
    monkeypatch.setattr(first_use, "EmbeddingTables", None)  # a second twin would fail
    first_use.load_kernels(tables_of(), schema)
    with pytest.raises(TypeError):
        first_use.load_kernels(tables_of(cache=0.1), schema)


def test_tables_of_dynamic_ids_load_in_their_first_step(schema):
    first_use.load_kernels(tables_of(rows=None, hbm="1MiB"), schema)
    assert not first_use._loaded


def test_the_reader_reads_a_split_that_is_held_out_once(tmp_path, monkeypatch):
    make_dataset(tmp_path / "data", {"train": [40], "valid": [30, 30]}, bags=True)
    dataset, asked = Dataset.open(tmp_path / "data"), []
    split = Dataset.split
    monkeypatch.setattr(Dataset, "split", lambda self, name: asked.append(name) or split(self, name))
    first_use.load_reader(dataset)
    first_use.load_reader(dataset)
    assert asked == ["valid"]


def test_rows_that_are_trained_on_are_not_read_before(tmp_path):
    make_dataset(tmp_path / "data", {"train": [40]}, bags=True)
    first_use.load_reader(Dataset.open(tmp_path / "data"))
    assert not first_use._loaded
