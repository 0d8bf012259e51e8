"""The recorded way without a CUDA device."""

import pytest
import torch

import hotbed
from hotbed.ops.lookups import SortedKeys


@pytest.fixture
def lanes_on_cpu(monkeypatch):
    """Where there is no CUDA device the CPU stands in for it: kernels are interpreted, copies are the C library's."""
    if torch.cuda.is_available():
        pytest.skip("tests/gpu covers this on the device")
    from hotbed.ops.index import triton

    monkeypatch.setattr("hotbed.pipeline.recorded.backend_of", lambda tensor: "triton")
    monkeypatch.setattr("hotbed.cache.cache.ops_for", lambda tensor: triton)

    def ordered(lookups):
        return lookups._replace(sorted=SortedKeys(*torch.sort(lookups.slots, stable=True)))

    monkeypatch.setattr("hotbed.tables.group.cached.ordered", ordered)
    place = triton.place
    monkeypatch.setattr(triton, "place", lambda *arguments: place(*arguments).to(torch.int64))
    original = hotbed.pipeline.recorded.RecordedPlanner._lookups

    def lookups(planner, g, row, batch, ticket):  # the compiled lookup and update on the CPU take 64-bit numbers
        wide = {"slots": row.slots.to(torch.int64)}
        if row.out_row is not None:
            wide |= {"out_row": row.out_row.to(torch.int64), "starts": row.starts.clone(), "scale": row.scale}
        return original(planner, g, row._replace(**wide), batch, ticket)

    monkeypatch.setattr(hotbed.pipeline.recorded.RecordedPlanner, "_lookups", lookups)
