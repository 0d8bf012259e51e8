"""`plan` counts the bytes that rows on their way and the planner take in addition to the budgets."""

import importlib.util
import json

import numpy as np
import pytest
import torch

from hotbed.cache import MOST_BATCHES
from hotbed.forecast.memory import _PLANNED, _WINDOWS, ON_THEIR_WAY, BatchShape, planner_bytes
from hotbed.ops.inputs import Capacity, InputLayout
from hotbed.ops.keys.addresses import Addresses
from hotbed.tables.descriptions import capacity_for
from hotbed.tables.sizing.budget import STAGED_WINDOWS
from tests.cli.conftest import cache, hotbed  # noqa: F401  fixtures
from tests.data.small import make_dataset

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")


@needs_triton
@pytest.mark.parametrize(("lookups", "num_slots"), [(512, 10_000), (512, 700), (3000, 100_000)])
def test_planner_bytes_are_those_of_its_buffers(lookups, num_slots):
    from hotbed.cache import recorded_planner
    from hotbed.ops.index.recorded import WINDOWS, new_buffers

    assert (_PLANNED, _WINDOWS) == (recorded_planner._PLANNED, WINDOWS)
    shape = BatchShape(samples=128, features=4, dense=0, lookups=lookups, keys=300, width=8)
    is_bags = lookups != 512
    numbers, no = np.full(4, 100, dtype=np.int64), np.zeros(4, dtype=np.bool_)
    addresses = Addresses(numbers, numbers, no, no, numbers)
    layout = InputLayout(addresses, is_bags, is_scaled=is_bags)
    capacity = capacity_for(Capacity(lookups, 128), is_bags, Capacity(0, 0))
    room = min(num_slots, capacity.num_lookups * MOST_BATCHES)
    buffers = new_buffers(capacity, _PLANNED * MOST_BATCHES, room, layout, torch.device("cpu"))
    rings = (buffers.arrival_counts, buffers.host_arrival_counts, buffers.window_counts, buffers.host_window_counts)
    large = [part for part in buffers if isinstance(part, torch.Tensor) and all(part is not one for one in rings)]
    on_device = sum(part.nbytes for part in (*large, *buffers.lists[:3]))
    on_host = sum(part.nbytes for part in buffers.lists[3:])
    assert planner_bytes(shape, num_slots, None, key_bytes=4) == pytest.approx((on_device, on_host), rel=0.01)


@needs_triton
def test_buffers_are_of_no_more_windows_than_are_counted():
    from hotbed.ops.move.compiled_transfer import SLOTS

    assert STAGED_WINDOWS["cuda"] >= SLOTS


@pytest.fixture
def plan(hotbed, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HOTBED_CACHE", str(tmp_path / "cache"))
    make_dataset(tmp_path / "data", {"train": [300, 120], "valid": [50]})
    usual = ("--batch-size", 16, "--dim", 4, "--device", "cpu", "--calibrate", "no", "--no-curve", "--json")

    def call(*arguments):
        found = hotbed("plan", tmp_path / "data", *usual, *arguments)
        return json.loads(found.out), found.code

    return call


def moved(found):
    return {one["tier"]: one["num_bytes"] for one in found["bytes"] if one["name"] == ON_THEIR_WAY}


def test_rows_on_their_way_are_counted_where_they_wait(plan, tmp_path):
    assert moved(plan("--cache", "0.5")[0]) == {}, "they move from memory to memory"
    tiers = ("--cache", "0.5", "--memory", "1MiB", "--ssd", f"{tmp_path / 'rows'}:64MiB")
    free, _ = plan(*tiers)
    assert moved(free)["memory"] > 0
    bounded, code = plan(*tiers, "--set", "tables.staging=24KiB")
    assert code == 0
    assert 0 < moved(bounded)["memory"] <= 24 << 10 < moved(free)["memory"]
    assert bounded["traffic"] != free["traffic"], "windows are cut"


def test_a_batch_that_does_not_fit_is_a_problem_with_numbers(plan, tmp_path):
    tiers = ("--cache", "0.5", "--memory", "1MiB", "--ssd", f"{tmp_path / 'rows'}:64MiB")
    found, code = plan(*tiers, "--set", "tables.staging=4KiB")
    assert code == 3
    (problem,) = found["problems"]
    assert "tables.staging: 4KiB has room for" in problem
    enough = problem.split("Take ")[1].split(" ")[0]
    assert plan(*tiers, "--set", f"tables.staging={enough}")[1] == 0
