"""Which planner takes a batch, and the reason why it is not a recorded one."""

import importlib.util

import pytest
import torch

import hotbed
from hotbed import Jagged, Table
from hotbed.ops.inputs import Capacity
from hotbed.pipeline.choice import PlannerChoice
from hotbed.pipeline.eager import EagerPlanner
from hotbed.pipeline.encodings import lookups_by_group
from hotbed.pipeline.recorded import RecordedPlanner, why_not_recorded
from hotbed.tables.descriptions import MALFORMED, parts_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")


def tables_of(**tables):
    return hotbed.EmbeddingTables(tables or {"a": Table(40, 3)}, cache=0.5)


def test_without_cuda_all_is_eager():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert why_not_recorded(tables_of()) == "there is no cache on a CUDA device"


@pytest.mark.usefixtures("lanes_on_cpu")
def test_tables_that_are_recorded_and_those_that_never_are(tmp_path):
    assert why_not_recorded(tables_of()) is None
    assert why_not_recorded(tables_of(a=Table(40, 3), b=Table(40, 3, pooling="none"))) is None
    dynamic = hotbed.EmbeddingTables({"a": Table(None, 3)}, memory="1MiB", hbm="64KiB")
    assert why_not_recorded(dynamic) is None
    tiered = hotbed.EmbeddingTables({"a": Table(40, 3)}, memory="1MiB", ssd=f"{tmp_path / 'rows'}:8MiB")
    assert why_not_recorded(tiered) is None
    shared = tables_of()
    shared.is_shared = True
    assert why_not_recorded(shared) == "rows are spread over ranks"
    stopped = tables_of()
    stopped.stop_recording(feeds=True)
    assert why_not_recorded(stopped) == "recording was stopped"


def kinds_of(planner):
    return planner.encoding.kinds if isinstance(planner, RecordedPlanner) else None


@pytest.mark.usefixtures("lanes_on_cpu")
def test_a_feed_uses_what_was_chosen(monkeypatch):
    planned = []
    for planner in (EagerPlanner, RecordedPlanner):
        arrive = planner.arrive
        monkeypatch.setattr(
            planner, "arrive", lambda self, batch, arrive=arrive: planned.append(kinds_of(self)) or arrive(self, batch)
        )
    tables = tables_of()
    weights = torch.ones(3, requires_grad=True)
    loader = [torch.tensor([[1], [2]]), {"a": Jagged(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]), weights)}]
    for ids in hotbed.prefetch([*loader, loader[0]], tables, window=1, look_ahead=1):
        tables(ids).sum().backward()
    assert planned == [("one id",), ("keys",), ("one id",)]
    assert weights.grad is not None
    tables.stop_recording(feeds=True)
    for ids in hotbed.prefetch(loader[:1], tables, window=1, look_ahead=1):
        tables(ids).sum().backward()
    assert planned[3:] == [None]


def test_a_reason_is_logged_once(caplog):
    tables = tables_of()
    with caplog.at_level("INFO", logger="hotbed.tables"):
        for _ in range(3):
            tables.ownership.log_eager("ids are dynamic")
        tables.ownership.log_eager("feature 'b' is not pooled")
    assert [record.args for record in caplog.records] == [("ids are dynamic",), ("feature 'b' is not pooled",)]


IDS = torch.arange(6)
JAGGED = Jagged(IDS, torch.tensor([0, 2, 6]))


@pytest.mark.parametrize(
    "ids",
    [
        IDS,
        IDS.reshape(2, 3),
        IDS.reshape(3, 2).float(),
        {"a": JAGGED},
        {"a": JAGGED, "b": JAGGED, "c": JAGGED},
        {"a": JAGGED, "b": IDS},
        {"a": JAGGED, "b": JAGGED._replace(values=IDS.float())},
        {"a": JAGGED, "b": JAGGED._replace(values=IDS.reshape(2, 3))},
        {"a": JAGGED, "b": JAGGED._replace(weights=torch.ones(5))},
        {"a": JAGGED, "b": JAGGED._replace(weights=torch.ones(6))},  # of a mean
        {"a": Jagged(IDS, IDS[:1]), "b": Jagged(IDS, IDS[:1])},  # ids of no sample
        {"a": Jagged(IDS, IDS[:0]), "b": Jagged(IDS, IDS[:0])},
        [[1, 2]],
    ],
)
def test_malformed_batches_are_left_to_the_eager_way(ids):
    """Which says what is wrong with them."""
    tables = tables_of(a=Table(40, 3), b=Table(40, 3, pooling="mean"))
    assert parts_of(tables.features, ids, None, tables.device) == MALFORMED
    with pytest.raises(hotbed.errors.ShapeError):
        tables(ids)


def test_a_choice_begins_with_the_eager_planner():
    tables = tables_of()
    eager = EagerPlanner(tables, tables.caches)
    assert PlannerChoice(tables, eager, None).planners == [eager]


@pytest.mark.parametrize("ids", [{"a": JAGGED, "b": JAGGED}, None, 7])
def test_ids_by_name_come_without_bags_and_other_things_are_no_ids(ids):
    tables = tables_of(a=Table(40, 3), b=Table(40, 3))
    bags = {"b": JAGGED} if isinstance(ids, dict) else None
    assert parts_of(tables.features, ids, bags, tables.device) == MALFORMED
    with pytest.raises(hotbed.errors.ShapeError):
        tables(ids, bags)


def test_lookups_of_a_batch_by_group():
    """A batch without ids is a batch; one whose ids nobody can count is not."""
    tables = tables_of(a=Table(40, 3), b=Table(40, 3))
    empty = Jagged(IDS[:0], torch.zeros(4, dtype=torch.int64))
    assert lookups_by_group(tables, IDS.reshape(3, 2)[:0], None) == [Capacity(0, 1)]
    assert lookups_by_group(tables, {"a": JAGGED, "b": empty}, None) == [Capacity(6, 1)]
    assert lookups_by_group(tables, {"a": JAGGED, "b": [1, 2]}, None) is None
    assert lookups_by_group(tables, IDS, None) is None
    assert lookups_by_group(tables, IDS.reshape(3, 2).to_sparse(), None) is None
