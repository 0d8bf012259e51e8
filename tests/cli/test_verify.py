"""`hotbed verify` from the outside."""

import json

import pytest

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


@pytest.mark.parametrize("place", ["row", "write-back"])
def test_an_injected_bit_ends_with_1(hotbed, data, place):
    result = hotbed("verify", "--data", data, *SMALL, "--inject", place, "--json")
    assert result.code == 1, result.err
    found = json.loads(result.out)[-1]["difference"]
    assert found["what"] == place
    assert found["table"]
    assert found["id"] >= 0


def test_a_cache_that_holds_all_proves_little(hotbed, data):
    result = hotbed("verify", "--data", data, *SMALL[:-1], 1.0, "--steps", 2)
    assert result.code == 0
    assert "no row has left the device" in result.out


def test_wrong_settings_are_errors(hotbed, data):
    result = hotbed("verify", "--data", data, "--inject", "luck", *SMALL)
    assert result.code == 2
    assert "'luck' is not one of row, state, write-back, look-up" in result.err
    result = hotbed("verify", "--data", data, "--set", "model.dmi=3")
    assert result.code == 2
    assert "model.dim" in result.err
