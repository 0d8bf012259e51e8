"""Losses and rows of eight configurations are those of before, to the bit: `python -m benchmarks.golden` says which, and why.

A change that means to alter bits records them anew (`python -m benchmarks.golden --out tests/golden/cpu.json`) and says so.
"""

import copy
import json
from pathlib import Path

import pytest

from benchmarks.golden import CASES, STEPS, differences, environment, record

GOLDEN = json.loads((Path(__file__).parent / "cpu.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_before(name):
    where = environment("cpu")
    if where["device"] != GOLDEN["environment"]["device"]:
        pytest.skip(f"recorded on {GOLDEN['environment']['device']}, and this is {where['device']}")
    golden = GOLDEN["configurations"][name]
    assert list(differences({name: golden}, {name: record(name, golden["seed"], "cpu")})) == []


def test_every_difference_is_found():
    golden = GOLDEN["configurations"]
    assert all(len(one["losses"]) == STEPS for one in golden.values())
    assert not list(differences(golden, golden))
    other = copy.deepcopy(golden)
    other["plain"]["losses"][7] = other["plain"]["losses"][8] = (0.25).hex()
    other["cached"]["rows"]["item"] = "0"
    other["dynamic"]["others"]["id_counts"]["user"][0] += 1
    other["bf16"]["seed"] += 1
    found = list(differences(golden, other))
    assert [line.partition(":")[0] for line in found] == ["plain", "cached", "dynamic", "bf16"]
    assert "step 7 " in found[0]
    assert " item " in found[1]
    assert list(differences({}, {"plain": golden["plain"]})) == ["plain: not recorded"]
