"""Table by hotbed's names and by torch's: the same table, one name at a time."""

import dataclasses
import inspect
import pickle

import pytest
import torch

import hotbed
from hotbed.errors import ConfigError
from hotbed.tables.spec import Table


def test_torchs_names_make_the_same_table():
    table = Table(num_embeddings=1000, embedding_dim=16, pooling="mean")
    assert table == Table(rows=1000, dim=16, pooling="mean") == Table(1000, 16, "mean")
    assert hash(table) == hash(Table(1000, 16, "mean"))
    assert (table.rows, table.dim, table.num_embeddings, table.embedding_dim) == (1000, 16, 1000, 16)
    assert Table(num_embeddings=None, dim=16).rows is None


def test_torchs_names_train():
    def loss_of(table):
        tables = hotbed.EmbeddingTables({"ad": table}, seed=3)
        tables(torch.arange(8)[:, None]).square().sum().backward()
        return tables(torch.arange(8)[:, None]).square().sum().item()

    assert loss_of(Table(num_embeddings=100, embedding_dim=4)) == loss_of(Table(rows=100, dim=4))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rows": 10, "num_embeddings": 20, "dim": 4}, ["rows=10", "num_embeddings=20", "only one"]),
        ({"rows": None, "num_embeddings": 20, "dim": 4}, ["rows=None", "num_embeddings=20"]),
        ({"rows": 10, "dim": 4, "embedding_dim": 4}, ["dim=4", "embedding_dim=4", "only one"]),
        ({"dim": 4}, ["needs rows=", "num_embeddings=", "Table(rows=1000, dim=16)"]),
        ({"num_embeddings": 10}, ["needs dim=", "embedding_dim="]),
    ],
)
def test_one_name_at_a_time(given, words):
    with pytest.raises(ConfigError) as error:
        Table(**given)
    assert not [word for word in words if word not in str(error.value)]


def test_a_table_is_frozen_pickled_and_replaced():
    table = Table(num_embeddings=1000, embedding_dim=16, features=("a", "b"))
    assert pickle.loads(pickle.dumps(table)) == table
    assert dataclasses.replace(table, rows=7) == Table(7, 16, features=("a", "b"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.rows = 5
    with pytest.raises(ConfigError, match="only one"):
        dataclasses.replace(table, num_embeddings=7)  # rows= comes from the table itself


def test_arguments_are_the_fields_in_order():
    """Every field is an argument, in the same place and with the same default: positional calls keep their meaning."""
    parameters = inspect.signature(Table).parameters
    fields = dataclasses.fields(Table)
    assert [field.name for field in fields] == [
        name for name, one in parameters.items() if one.kind != one.KEYWORD_ONLY
    ]
    for field in fields[2:]:
        assert parameters[field.name].default == field.default


def test_features_of_one_table_may_be_pooled_otherwise():
    table = Table(9, 4, pooling={"item": "sum", "history": "none"})
    assert table.features == ("item", "history")
    assert hash(table) == hash(pickle.loads(pickle.dumps(table)))
    assert table.pooling_of("items") == {"item": "sum", "history": "none"}
    assert Table(9, 4, "mean").pooling_of("tags") == {"tags": "mean"}
    tables = hotbed.EmbeddingTables({"items": table}, hotbed.optim.SGD(lr=1.0))
    ids = {"item": torch.tensor([3, 5]), "history": hotbed.Jagged(torch.tensor([3, 3, 5]), torch.tensor([0, 2, 3]))}
    found = tables(ids)
    assert torch.equal(found["history"], found["item"][[0, 0, 1]])
    before = tables.weight("items")[3].clone()
    (found["item"].sum() + found["history"].sum()).backward()
    torch.testing.assert_close(tables.weight("items")[3], before - 3)  # one row, trained by both
    with pytest.raises(ConfigError, match="pooling names item, tags, and the table is read by item, history"):
        hotbed.EmbeddingTables({"items": Table(9, 4, {"item": "sum", "tags": "sum"}, ("item", "history"))})
    with pytest.raises(ConfigError, match="must be 'sum', 'mean' or 'none', not 'max'"):
        hotbed.EmbeddingTables({"items": Table(9, 4, {"item": "max", "history": "sum"})})
