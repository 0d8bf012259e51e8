"""What docs/existing-code.md says of code that people have already; every row of its table names a test that exists."""

from __future__ import annotations

import ast
import re
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import hotbed
from hotbed import Table
from hotbed.errors import ConfigError, ShapeError

ROOT = Path(__file__).parents[2]


def test_every_row_of_the_page_names_a_test_that_exists():
    page = (ROOT / "docs" / "existing-code.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for path, function in named:
            defined = {
                node.name
                for node in ast.walk(ast.parse((ROOT / path).read_text()))
                if isinstance(node, ast.FunctionDef)
            }
            assert function in defined, row


def test_a_parameter_can_be_put_in_place_of_the_weight():
    bag, theirs = hotbed.EmbeddingBag(6, 3, mode="sum"), nn.EmbeddingBag(6, 3, mode="sum")
    weight = torch.randn(6, 3)
    bag.weight = nn.Parameter(weight)
    theirs.weight = nn.Parameter(weight.clone())
    ids = torch.tensor([[1, 2], [3, 3]])
    assert torch.equal(bag(ids), theirs(ids))
    assert list(bag.parameters()) == []  # rows are none
    bag.weight = torch.zeros(6, 3)
    assert not bag(ids).any()
    cached = hotbed.EmbeddingBag(6, 3, mode="sum", cache=0.7)
    cached.weight = nn.Parameter(weight)
    assert torch.equal(cached.weight, weight)
    with pytest.raises(ShapeError, match=r"\[6, 3\], not \[5, 3\]"):
        bag.weight = nn.Parameter(torch.zeros(5, 3))
    with pytest.raises(ShapeError, match="must be a tensor"):
        bag.weight = None


def test_the_last_offset_must_be_the_number_of_ids():
    bag = hotbed.EmbeddingBag(6, 3, mode="sum", include_last_offset=True)
    ids = torch.tensor([1, 2, 3])
    assert bag(ids, torch.tensor([0, 2, 3])).shape == (2, 3)
    for last in (2, 4):
        with pytest.raises(ShapeError, match="offsets must rise from 0 to 3"):
            bag(ids, torch.tensor([0, 1, last]))


class Pool(Enum):
    SUM = "SUM"
    MEAN = "MEAN"
    MAX = "MAX"


class BagConfig(NamedTuple):
    """As torchrec.EmbeddingBagConfig, as far as it is read."""

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: list[str]
    pooling: Pool = Pool.SUM


class Collection:
    """As torchrec.EmbeddingBagCollection: one nn.EmbeddingBag per table."""

    def __init__(self, configs):
        self._configs = configs
        self.embedding_bags = nn.ModuleDict(
            {
                one.name: nn.EmbeddingBag(one.num_embeddings, one.embedding_dim, mode=one.pooling.value.lower())
                for one in configs
            }
        )

    def embedding_bag_configs(self):
        return self._configs

    def state_dict(self):
        return {f"embedding_bags.{name}": one for name, one in self.embedding_bags.state_dict().items()}


def test_tables_are_made_from_the_configs_of_a_collection():
    configs = [BagConfig("users", 9, 4, ["user"]), BagConfig("ads", 7, 4, ["item", "seen"], Pool.MEAN)]
    collection = Collection(configs)
    tables = hotbed.EmbeddingTables(hotbed.interop.tables_of(collection), output="dict")
    assert tables.tables["ads"] == Table(7, 4, "mean", features=("item", "seen"))
    hotbed.interop.load_state_dict(tables, collection.state_dict(), style="torchrec")
    ids = torch.tensor([[1, 2, 2], [6, 0, 0]])
    found = tables({"user": ids, "item": ids, "seen": ids})
    torch.testing.assert_close(found["seen"], collection.embedding_bags["ads"](ids))
    torch.testing.assert_close(found["user"], collection.embedding_bags["users"](ids))
    assert hotbed.interop.tables_of(configs) == hotbed.interop.tables_of(collection)
    with pytest.raises(ConfigError, match=r"pooling .*MAX.* is not supported"):
        hotbed.interop.tables_of([configs[0]._replace(pooling=Pool.MAX)])
    with pytest.raises(ConfigError, match="takes a TorchRec EmbeddingBagCollection"):
        hotbed.interop.tables_of(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="the same name"):
        hotbed.interop.tables_of([configs[0], configs[0]])


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.tables = hotbed.EmbeddingTables(
            {"a": Table(20, 4), "b": Table(20, 4)}, hotbed.optim.SGD(lr=0.1), **options
        )
        self.dense = nn.Linear(8, 1)

    def forward(self, ids):
        return self.dense(self.tables(ids).flatten(1)).squeeze(1)


def ids_of(size, seed=0):
    return torch.randint(0, 20, (size, 2), generator=torch.Generator().manual_seed(seed))


def train_in_hooks(model, batches, every, scaler=None):
    """The order in which Lightning and Accelerate call things: backward of every batch, the optimizer after `every` of them."""
    optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    for number, ids in enumerate(batches, 1):
        loss = model(ids).square().mean() / every
        (scaler.scale(loss) if scaler else loss).backward()
        if number % every:
            continue
        if scaler:
            scaler.step(model.tables)  # in on_before_optimizer_step
            scaler.step(optimizer)
            scaler.update()
        else:
            model.tables.step()
            optimizer.step()
        model.tables.zero_grad()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("scaled", [False, True])
def test_batches_accumulated_by_a_trainer_move_rows_as_one(scaled):
    """accumulate_grad_batches=4, with precision 32 and 16-mixed."""
    batches = [ids_of(12, seed) for seed in range(3)]
    whole, parts = Model(), Model(cache=0.9)
    for model in (whole, parts):
        model.tables.accumulate()
    train_in_hooks(whole, batches, 1)
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    train_in_hooks(parts, [part for ids in batches for part in ids.split(3)], 4, scaler)
    for name in "ab":
        torch.testing.assert_close(parts.tables.weight(name), whole.tables.weight(name), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(parts.dense.weight, whole.dense.weight)


def test_a_trainer_that_accumulates_without_being_told_moves_rows_at_every_batch():
    model = Model()
    model(ids_of(3)).sum().backward()
    assert model.tables.num_updates == 1  # docs: tables.accumulate() first


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process
def test_dense_weights_in_a_distributed_checkpoint_and_rows_in_ours(tmp_path):
    import torch.distributed.checkpoint as dcp

    model, other = Model(), Model()
    for seed in range(3):
        model(ids_of(6, seed)).square().sum().backward()
    nn.init.ones_(model.dense.weight)
    dcp.save({"dense": model.dense.state_dict()}, checkpoint_id=tmp_path / "dense", no_dist=True)
    hotbed.checkpoint.save(tmp_path / "rows", model.tables, step=1)
    state = {"dense": other.dense.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "dense", no_dist=True)
    other.dense.load_state_dict(state["dense"])
    hotbed.checkpoint.load(tmp_path / "rows", other.tables)
    assert torch.equal(other(ids_of(5, 9)), model(ids_of(5, 9)))


def test_an_average_of_the_dense_weights_scores_with_the_rows():
    model = Model()
    average = torch.optim.swa_utils.AveragedModel(model.dense)
    optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    for seed in range(3):
        optimizer.zero_grad()
        model(ids_of(6, seed)).square().sum().backward()
        optimizer.step()
        average.update_parameters(model.dense)
    ids = ids_of(4, 9)
    assert average(model.tables(ids).flatten(1)).shape == (4, 1)
    assert int(average.n_averaged) == 3


def test_clipping_dense_weights_alone_leaves_rows_as_they_are():
    plain, clipped = Model(), Model()
    for model in (plain, clipped):
        model(ids_of(6)).square().sum().backward()
    nn.utils.clip_grad_norm_(clipped.parameters(), 1e-6)
    assert torch.equal(plain.tables.weight("a"), clipped.tables.weight("a"))
    assert float(clipped.dense.weight.grad.norm()) < 1e-5


def test_rows_are_no_parameters_of_an_optimizer():
    model = Model()
    assert [name for name, _ in model.named_parameters()] == ["dense.weight", "dense.bias"]
    assert "tables.a.weight" in model.state_dict()
