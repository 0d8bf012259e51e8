"""Keys that are recorded where every row is on the device, run here launch by launch under Triton's interpreter."""

import importlib.util

import pytest
import torch

import hotbed
from hotbed import Jagged, Table, optim
from hotbed.errors import IdError, ShapeError
from hotbed.tables import recorded

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
ROWS = {"a": 120, "again": 120, "b": 50, "c": 90}
SIZES = [5, 3, 5, 5, 1, 5, 5, 9, 0, 1, 6, 5, 30, 2, 1, 1, 2, 1, 0, 1, 2]  # recorded from the sixth batch on


@pytest.fixture
def num_recorded(monkeypatch):
    """Where there is no CUDA device the CPU stands in for it; how many batches were recorded."""
    if torch.cuda.is_available():
        pytest.skip("tests/gpu covers this on the device")
    monkeypatch.setattr(recorded, "backend_of", lambda tensor: "triton")
    original, seen = recorded._KindsRecording._lookups, []

    def wide(self, g, *arguments):  # the compiled lookup and update on the CPU take 64-bit numbers
        found = original(self, g, *arguments)
        seen.append(g)
        bags = found.bags and found.bags._replace(out_row=found.bags.out_row.to(torch.int64))
        return found._replace(slots=found.slots.to(torch.int64), bags=bags)

    monkeypatch.setattr(recorded._KindsRecording, "_lookups", wide)
    return lambda: seen.count(0)


def tables_of(pooling="sum", dim=3):
    tables = {
        "ab": Table(120, 3, pooling=pooling, features=("a", "again"), padding_id=7),
        "b": Table(50, 3),
        "c": Table(90, dim, pooling=pooling),
    }
    return hotbed.EmbeddingTables(tables, optim.Adam(lr=0.1), output="concat")


def draw_ids(name, count, draw):
    return (torch.rand(count, generator=draw) ** 3 * ROWS[name]).long()


def varying(size, draw, weighted=()):
    found = {}
    for name in ROWS:
        offsets = torch.nn.functional.pad(torch.randint(0, 6, (size,), generator=draw).cumsum(0), (1, 0))
        count = int(offsets[-1])
        weights = torch.rand(count, generator=draw) if name in weighted else None
        found[name] = Jagged(draw_ids(name, count, draw), offsets, weights)
    return found


def single(size, draw):
    return torch.stack([draw_ids(name, size, draw) for name in ROWS], dim=1)


def weighted(size, draw):
    return varying(size, draw, weighted=("b",))


def train(tables, batches, late=1):
    """Backward comes `late` batches at a time."""
    losses, waiting = [], []
    for ids in batches:
        vectors = tables(ids)
        waiting.append((vectors.tanh() + vectors).pow(2).sum())
        losses.append(waiting[-1].item())
        if len(waiting) == late:
            for loss in waiting:
                loss.backward()
            waiting = []
    return losses


@pytest.mark.parametrize("dim", [3, 5])  # one group, and two
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("make", [single, varying, weighted])
def test_the_same_bits(make, pooling, dim, num_recorded):
    draw = torch.Generator().manual_seed(3)
    batches = [make(size, draw) for size in SIZES]
    plain, ours = tables_of(pooling, dim), tables_of(pooling, dim)
    plain.stop_recording()
    assert train(ours, batches) == train(plain, batches)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, ours.state_dict()[name]), name
    assert num_recorded() == len(SIZES) - 5


def test_backward_may_come_late(num_recorded):
    draw = torch.Generator().manual_seed(4)
    batches = [varying(5, draw) for _ in range(40)]
    plain, ours = tables_of("mean"), tables_of("mean")
    plain.stop_recording()
    assert train(ours, batches, late=12) == train(plain, batches, late=12)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, ours.state_dict()[name]), name
    assert num_recorded() == 35


@pytest.mark.parametrize("wrong", ["id", "offsets"])
def test_what_is_wrong_is_reported_by_the_next_call(wrong, num_recorded):
    draw = torch.Generator().manual_seed(5)
    batches = [varying(5, draw) for _ in range(9)]
    tables = tables_of()
    bag = batches[7]["c"]
    if wrong == "id":
        bag.values[0] = 90
    else:
        bag.offsets[2] = bag.offsets[3] + 1
    with torch.no_grad():
        for batch in batches[:8]:
            tables(batch)
        with pytest.raises(IdError if wrong == "id" else ShapeError, match="'c'"):
            tables(batches[8])
        tables(batches[8])
    assert num_recorded() == 4


def test_weights_that_want_a_gradient_get_it(num_recorded):
    """They go launch by launch."""
    draw = torch.Generator().manual_seed(6)
    tables = tables_of()
    for _ in range(8):
        batch = weighted(5, draw)
        batch["b"].weights.requires_grad_()
        tables(batch).sum().backward()
        assert batch["b"].weights.grad is not None
    assert num_recorded() == 0


def test_a_group_whose_bags_all_have_weights(num_recorded):
    draw = torch.Generator().manual_seed(8)
    batches = [varying(size, draw, weighted=tuple(ROWS)) for size in SIZES]
    plain, ours = tables_of(), tables_of()
    plain.stop_recording()
    assert train(ours, batches) == train(plain, batches)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, ours.state_dict()[name]), name
    assert num_recorded() == len(SIZES) - 5
