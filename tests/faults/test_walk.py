"""Training is broken off at every point: right bits, or a refusal."""

from unittest import mock

import pytest
import torch
from torch import distributed

import hotbed
from hotbed import Table, optim
from hotbed.host import handover
from hotbed.pipeline import reader
from hotbed.store import int8
from hotbed.tables import module as tables_module
from hotbed.tables.sizing.budget import rooms_of
from tests.faults.walk import Way, step, walk

# Most places are passed in three batches; the others are walked in five.
NUM_BATCHES = (3, 5)
WALKED = set()  # places, on any way


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    """A process group of this process alone."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('ranks') / 'store'}", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def short_looks(monkeypatch):
    """A fault may be what would have woken a thread; that one looks again by itself, after half a second otherwise."""
    monkeypatch.setattr(handover, "_LOOK", 0.005)
    monkeypatch.setattr(reader, "_LOOK_AGAIN", 0.005)


def unrounded(monkeypatch):
    """A store of int8 rows rounds nothing: how often a row is rounded depends on where training was broken off."""
    monkeypatch.setattr(int8, "packed_width", lambda layout: layout.width)
    monkeypatch.setattr(int8, "pack", lambda records, keys, layout: records.clone())
    monkeypatch.setattr(int8, "unpack", lambda packed, layout, out: out.copy_(packed))


@pytest.fixture(autouse=True)
def exact_rows(monkeypatch):
    """See `unrounded`."""
    unrounded(monkeypatch)


def tables_of(kind, folder, slots=24):
    """Tables with `slots` slots a group; the memory over an ssd holds a third as many rows."""
    dynamic, tier = kind.startswith("dynamic"), kind.split()[-1]
    tables = {"a": Table(60, 3), "b": Table(50, 3), "c": Table(40, 5)}
    if dynamic:
        tables = {name: Table(None, table.dim) for name, table in tables.items()}
    if tier == "plain":
        return hotbed.EmbeddingTables(tables, optim.Adagrad(lr=0.1), output="dict")
    if kind == "ranked":
        return hotbed.ShardedTables(tables, optim.Adagrad(lr=0.1), output="dict", cache=0.5)
    budgets = {"hbm": "1MiB", "memory": "64MiB"}
    if tier == "int8":
        budgets["store_precision"] = "int8"
    elif tier != "memory":
        budgets["ssd"] = f"{folder}:64MiB"
    if tier == "ssd":
        del budgets["hbm"]

    def small(*arguments):
        rooms = [room._replace(num_slots=slots) for room in rooms_of(*arguments)]
        few = {"memory_slots": slots // 3} if tier == "tiered" else {}
        return [room._replace(place=room.place._replace(**few)) for room in rooms]

    with mock.patch.object(tables_module, "rooms_of", small):
        return hotbed.EmbeddingTables(tables, optim.Adagrad(lr=0.1), output="dict", **budgets)


def batches_of(tables, count=NUM_BATCHES[-1]):
    draw = torch.Generator().manual_seed(0)
    return [{name: torch.randint(0, 40, (9,), generator=draw) for name in tables} for _ in range(count)]


def one_by_one(tables, batches):
    for ids in batches:
        step(tables, ids)


def ahead(tables, batches):
    for ids in hotbed.prefetch(batches, tables, window=2, look_ahead=3):
        step(tables, ids)


def with_evaluation(tables, batches):
    for n, ids in enumerate(hotbed.prefetch(batches, tables, window=1, look_ahead=2)):
        step(tables, ids)
        if n % 3 == 1:
            with torch.no_grad():
                tables(batches[(n + 2) % len(batches)])
            tables.flush()


WAYS = {"one by one": one_by_one, "ahead": ahead, "evaluating in between": with_evaluation}


KINDS = ["plain", "memory", "ssd", "tiered", "int8", "dynamic memory", "dynamic tiered", "dynamic int8", "ranked"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a fault while a generator is collected
@pytest.mark.parametrize("train", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_batches", NUM_BATCHES)
def test_every_point(num_batches, kind, train, tmp_path):
    plain = "dynamic memory" if kind.startswith("dynamic") else "plain"
    batches = batches_of("abc", num_batches)
    way = Way(lambda: tables_of(kind, tmp_path), train)
    walk(way, lambda: tables_of(plain, tmp_path, slots=500), batches, WALKED)
