"""The thread that finds slots in memory and fetches rows ahead is broken off at many points: right bits, or a refusal.

Compiled code moves the rows, as on CUDA; kernels are interpreted, so not every point is tried.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

import hotbed
from hotbed.host import handover
from hotbed.pipeline import reader
from tests.faults.points import record
from tests.faults.walk import Way, walk
from tests.faults.walk import step as train_step
from tests.pipeline.conftest import lanes_on_cpu
from tests.pipeline.test_recorded_tiers import new_tables

__all__ = ["lanes_on_cpu"]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
FILES = {"tier_windows.py", "memory_tier.py", "tiered.py", "transfer_thread.py", "recorded.py", "compiled_transfer.py"}
EVERY = 9  # points


def batches():
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, 50, (7, 3), generator=draw) for _ in range(4)]


def ahead(tables, loader):
    for ids in hotbed.prefetch(loader, tables, window=1, look_ahead=3):
        train_step(tables, ids)


@pytest.mark.usefixtures("lanes_on_cpu")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_points_of_the_tier(tmp_path, monkeypatch):
    monkeypatch.setattr(handover, "_LOOK", 0.005)
    monkeypatch.setattr(reader, "_LOOK_AGAIN", 0.005)
    loader, way = batches(), Way(lambda: new_tables(tmp_path), ahead)
    with record() as points:
        way.train(tables := way.make(), loader)
    for cache in tables.caches:
        cache.store.close()
    near = [point for point in points if Path(point.file).name in FILES]
    assert sum("find_slots" in point.function for point in near if not point.in_main) > 3
    assert sum("_fetch_ahead" in point.function for point in near) > 3
    wanted = set(near[::EVERY])
    outcome = walk(way, new_tables, loader, {point._replace(passing=0) for point in points if point not in wanted})
    assert outcome.num_points >= len(wanted) // 2
    assert outcome.num_refused > 0
