"""`hotbed verify` from the outside."""

import json
from dataclasses import replace

import pytest

from hotbed.data.schema import Schema
from hotbed.store.ssd import SsdStore
from tests.data.small import make_dataset


@pytest.fixture
def data(tmp_path):
    make_dataset(tmp_path / "data", {"train": [300, 120], "valid": [50]})
    return tmp_path / "data"


SMALL = ("--set", "data.batch_size=16", "--set", "model.dim=4", "--steps", 10, "--cache", 0.06)


def test_the_same_bits_in_three_ways(hotbed, data):
    result = hotbed("verify", "--data", data, *SMALL)
    assert result.code == 0, result.err
    assert result.out.count("the same bits") == 3 + 1
    assert "the cache is invisible" in result.out


def test_the_plain_command_passes(hotbed, monkeypatch):
    """But for the number of steps, and of rows: making the two million takes most of the time."""
    monkeypatch.setattr("hotbed.data.embedded.TRAIN_ROWS", 200_000)
    result = hotbed("verify", "--steps", 5)
    assert result.code == 0, result.err
    assert "deepfm on criteo-like: the cache is invisible" in result.out


@pytest.mark.parametrize("dynamic", ["false", "true", "[b]"])
def test_memory_holds_the_index_of_any_number_of_rows_and_not_the_rows(hotbed, data, monkeypatch, dynamic):
    schema = Schema.load(data)
    many = [replace(feature, rows=1_000_000) if feature.name == "a" else feature for feature in schema.features]
    replace(schema, features=tuple(many)).save(data)
    written = []
    write = SsdStore.write
    monkeypatch.setattr(
        SsdStore, "write", lambda self, keys, rows: (written.append(len(keys)), write(self, keys, rows))
    )
    flags = ("--set", "model.dim=4", "--set", "data.batch_size=16", "--set", f"tables.dynamic={dynamic}")
    result = hotbed("verify", "--data", data, *flags, "--steps", 20, "--hbm", "8KiB")
    assert result.code == 0, result.err
    assert "the cache is invisible" in result.out
    assert len(written) > 1, "rows go to the ssd before the last flush"


@pytest.mark.parametrize("place", ["row", "write-back"])
def test_an_injected_bit_ends_with_1(hotbed, data, place):
    result = hotbed("verify", "--data", data, *SMALL, "--inject", place, "--json")
    assert result.code == 1, result.err
    found = json.loads(result.out)["ways"][-1]["difference"]
    assert found["what"] == place
    assert found["table"]
    assert found["id"] >= 0


def test_a_cache_that_holds_all_proves_little(hotbed, data):
    result = hotbed("verify", "--data", data, *SMALL[:-1], 1.0, "--steps", 2)
    assert result.code == 0
    assert "no row was evicted" in result.out


def test_wrong_settings_are_errors(hotbed, data):
    result = hotbed("verify", "--data", data, "--inject", "luck", *SMALL)
    assert result.code == 2
    assert "'luck' is not one of row, state, write-back, lookup" in result.err
    result = hotbed("verify", "--data", data, "--set", "model.dmi=3")
    assert result.code == 2
    assert "model.dim" in result.err
