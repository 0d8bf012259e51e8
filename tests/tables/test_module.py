import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hotbed
from hotbed import Jagged, Table, optim
from hotbed.errors import ConfigError, HotbedError, IdError, ShapeError


def two_tables(**arguments):
    return hotbed.EmbeddingTables({"user": Table(10, 4), "ad": Table(7, 4)}, optim.SGD(lr=0.5), **arguments)


def ids_of(size=5, generator=None):
    return torch.stack([torch.randint(0, 10, (size,)), torch.randint(0, 7, (size,))], dim=1)


def nested():
    return torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)


def test_matrix_in_stack_out():
    tables, ids = two_tables(), ids_of()
    vectors = tables(ids)
    assert vectors.shape == (5, 2, 4)
    assert torch.equal(vectors[:, 0], tables.weight("user")[ids[:, 0]])
    assert torch.equal(vectors[:, 1], tables.weight("ad")[ids[:, 1]])


def test_rows_move_in_backward_and_only_in_train_mode():
    tables, ids = two_tables(), ids_of()
    before = tables.weight("user").clone()
    with torch.no_grad():
        tables(ids)
    tables.eval()
    assert not tables(ids).requires_grad
    assert torch.equal(tables.weight("user"), before)
    tables.train()
    tables(ids).sum().backward()
    counts = torch.bincount(ids[:, 0], minlength=10).unsqueeze(1)
    torch.testing.assert_close(tables.weight("user"), before - 0.5 * counts)
    assert tables.num_updates == 1


def test_shared_table_sums_over_features():
    tables = hotbed.EmbeddingTables({"item": Table(6, 3, features=("seen", "bought"))}, optim.SGD(lr=1.0))
    before = tables.weight("item").clone()
    tables(torch.tensor([[2, 2], [2, 5]])).sum().backward()
    moved = before - tables.weight("item")
    torch.testing.assert_close(moved[:, 0], torch.tensor([0.0, 0, 3, 0, 0, 1]))


def test_mixed_dims_poolings_and_sequences():
    tables = hotbed.EmbeddingTables(
        {
            "user": Table(10, 4),
            "tags": Table(20, 4, pooling="mean"),
            "history": Table(30, 2, pooling="none"),
            "city": Table(5, 2),
        },
        optim.SGD(lr=0.1),
    )
    tags = Jagged(torch.tensor([1, 2, 2]), torch.tensor([0, 0, 3]))
    inputs = {
        "user": torch.tensor([1, 2]),
        "tags": tags,
        "history": torch.tensor([[3, 4, 5], [6, 7, 8]]),
        "city": torch.tensor([0, 4]),
    }
    out = tables(inputs)
    assert list(out) == ["user", "tags", "history", "city"]
    assert out["history"].shape == (2, 3, 2)
    assert torch.equal(out["history"], tables.weight("history")[inputs["history"]])
    assert torch.equal(out["tags"][0], torch.zeros(4))
    w = tables.weight("tags")
    torch.testing.assert_close(out["tags"][1], (w[1] + 2 * w[2]) / 3)
    before = {name: tables.weight(name).clone() for name in tables.tables}
    sum(value.sum() for value in out.values()).backward()
    assert tables.num_updates == 1  # two groups, one step
    torch.testing.assert_close((before["tags"] - tables.weight("tags"))[2], torch.full((4,), 0.1 * 2 / 3))
    torch.testing.assert_close((before["history"] - tables.weight("history"))[3:9], torch.full((6, 2), 0.1))


def test_concat_output():
    tables = hotbed.EmbeddingTables({"a": Table(4, 2), "b": Table(4, 3)}, output="concat")
    ids = torch.tensor([[1, 2]])
    assert torch.equal(tables(ids), torch.cat([tables.weight("a")[1:2], tables.weight("b")[2:3]], dim=1))


def test_outputs_differ_in_form_alone():
    """Rows are the same to the bit, also where a feature is not used and its gradient missing."""
    tables = {"a": Table(9, 2), "b": Table(9, 2), "c": Table(9, 2, pooling="none"), "d": Table(9, 3)}
    names = {"stack": ("a", "b"), "concat": ("a", "b", "d"), "dict": ("a", "b", "c", "d")}
    grads = {name: torch.randn(5, table.dim) for name, table in tables.items()}
    rows = []
    for output, used in names.items():
        made = hotbed.EmbeddingTables({name: tables[name] for name in used}, optim.Adam(lr=0.1), output=output)
        for seed in range(3):
            ids = torch.randint(9, (5, 4), generator=torch.Generator().manual_seed(seed))[:, : len(used)]
            vectors = made(ids)
            if output == "dict":
                torch.autograd.backward([vectors[name] for name in ("a", "b")], [grads[name] for name in ("a", "b")])
            elif output == "concat":
                vectors.backward(torch.cat([grads["a"], grads["b"], torch.zeros(5, 3)], dim=1))
            else:
                vectors.backward(torch.stack([grads["a"], grads["b"]], dim=1))
        rows.append((made.weight("a").clone(), made.weight("b").clone()))
    assert all(torch.equal(one, other) for each in rows[1:] for one, other in zip(each, rows[0]))


@pytest.mark.parametrize("output", ["stack", "concat", "dict"])
def test_one_node_of_the_graph_cuts_a_group_into_features(output):
    """A slice for each feature would give each a gradient as large as all of them."""
    tables = hotbed.EmbeddingTables({f"t{n}": Table(9, 2) for n in range(7)}, output=output)
    vectors = tables(torch.zeros(3, 7, dtype=torch.int64))
    nodes, todo = set(), [one.grad_fn for one in (vectors.values() if output == "dict" else [vectors])]
    while todo:
        node = todo.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            todo += [one for one, _ in node.next_functions]
    assert len(nodes) <= 3  # view, lookup, trigger


def test_bags_beside_a_matrix():
    tables = hotbed.EmbeddingTables({"a": Table(4, 2), "b": Table(9, 2), "c": Table(4, 2)})
    out = tables(torch.tensor([[1, 3], [2, 0]]), {"b": Jagged(torch.tensor([8, 8]), torch.tensor([0, 2, 2]))})
    assert out.shape == (2, 3, 2)
    assert torch.equal(out[0, 1], 2 * tables.weight("b")[8])
    assert torch.equal(out[1, 2], tables.weight("c")[0])


def test_weights_get_a_gradient():
    tables = hotbed.EmbeddingTables({"a": Table(4, 3)}, optim.SGD(lr=1.0))
    rows = tables.weight("a").clone()
    weights = torch.tensor([0.5, 2.0, 1.0], requires_grad=True)
    out = tables({"a": Jagged(torch.tensor([1, 2, 1]), torch.tensor([0, 2, 3]), weights)})
    torch.testing.assert_close(out[:, 0], torch.stack([0.5 * rows[1] + 2 * rows[2], rows[1]]))
    out.sum().backward()
    torch.testing.assert_close(weights.grad, rows[[1, 2, 1]].sum(1))
    torch.testing.assert_close(tables.weight("a")[1], rows[1] - 1.5)


def test_empty_batch_and_empty_bags():
    tables = two_tables()
    before = copy.deepcopy(tables.state_dict())
    out = tables(torch.empty(0, 2, dtype=torch.int64))
    assert out.shape == (0, 2, 4)
    out.sum().backward()
    empty = Jagged(torch.empty(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    out = tables({"user": empty, "ad": empty})
    assert torch.equal(out, torch.zeros(3, 2, 4))
    out.sum().backward()
    for name in ("user.weight", "ad.weight"):
        assert torch.equal(tables.state_dict()[name], before[name])


def test_padding_is_zero_and_never_moves():
    tables = hotbed.EmbeddingTables({"a": Table(5, 2, pooling="mean", padding_id=0)}, optim.SGD(lr=1.0))
    out = tables({"a": torch.tensor([[0, 3], [0, 0], [2, 3]])})
    w = tables.weight("a").clone()
    assert torch.equal(w[0], torch.zeros(2))
    torch.testing.assert_close(out[:, 0], torch.stack([w[3], torch.zeros(2), (w[2] + w[3]) / 2]))
    out.sum().backward()
    assert torch.equal(tables.weight("a")[0], torch.zeros(2))
    torch.testing.assert_close(tables.weight("a")[3], w[3] - 1.5)


@pytest.mark.parametrize("bad", [10, -1, 2**62])
def test_id_out_of_range_names_everything(bad):
    tables, ids = two_tables(), ids_of(50)
    ids[33, 0] = bad
    before = tables.weight("user").clone()
    with pytest.raises(IdError) as caught:
        tables(ids)
    for word in (f"id {bad}", "feature 'user'", "sample 33", "table 'user'", "10 rows"):
        assert word in str(caught.value)
    assert torch.equal(tables.weight("user"), before)


def test_id_out_of_range_in_a_bag():
    tables = two_tables()
    bag = Jagged(torch.tensor([1, 2, 3, 7]), torch.tensor([0, 0, 3, 3, 4]))
    with pytest.raises(IdError, match=r"id 7 of feature 'ad' in sample 3 is outside table 'ad'"):
        tables({"user": torch.zeros(4, dtype=torch.int64), "ad": bag})


def test_hashing_takes_any_id():
    tables = hotbed.EmbeddingTables({"a": Table(7, 2, hashing=True)})
    ids = torch.tensor([[2**63 - 1], [-(2**63)], [-1], [8]])
    assert torch.equal(tables(ids)[:, 0], tables.weight("a")[[(2**63 - 1) % 7, (-(2**63)) % 7, 6, 1]])


SHAPE_MISTAKES = {
    "an array": (lambda: ids_of().numpy(), r"not ndarray; torch.as_tensor"),
    "lists": (lambda: ids_of().tolist(), r"not list; torch.as_tensor"),
    "nothing": (lambda: None, r"not NoneType"),
    "an array in a mapping": (lambda: {"user": ids_of()[:, 0].numpy(), "ad": ids_of()[:, 1]}, "not ndarray"),
    "arrays in a bag": (
        lambda: {"user": Jagged(ids_of()[:, 0].numpy(), torch.arange(6)), "ad": ids_of()[:, 1]},
        "not ndarray",
    ),
    "sparse": (lambda: ids_of().to_sparse(), "'ids' is a sparse tensor.*Jagged"),
    "sparse in a mapping": (lambda: {"user": ids_of().to_sparse(), "ad": ids_of()[:, 1]}, "'user' is a sparse tensor"),
    "nested": (nested, r"'ids' is a nested tensor.*Jagged.*offsets"),
    "nested in a mapping": (lambda: {"user": nested(), "ad": ids_of(2)[:, 1]}, "'user' is a nested tensor"),
    "float ids": (lambda: torch.zeros(3, 2), "int64"),
    "one dimension": (lambda: torch.zeros(3, dtype=torch.int64), r"\[B, 2\]"),
    "too many columns": (lambda: torch.zeros(3, 3, dtype=torch.int64), r"\[B, 2\]"),
    "unknown feature": (lambda: {"user": ids_of()[:, 0], "add": ids_of()[:, 1]}, "unknown: 'add'; missing: 'ad'"),
    "unequal sizes": (lambda: {"user": ids_of(4)[:, 0], "ad": ids_of(5)[:, 1]}, "same number of samples"),
    "a list": (lambda: {"user": [1, 2], "ad": ids_of(2)[:, 1]}, "not list"),
    "three dimensions": (lambda: {"user": torch.zeros(2, 2, 2, dtype=torch.int64), "ad": ids_of(2)[:, 1]}, "shape"),
    "falling offsets": (
        lambda: {"user": Jagged(torch.tensor([1, 2]), torch.tensor([0, 2, 1, 2])), "ad": ids_of(3)[:, 1]},
        "must rise from 0 to 2",
    ),
    "short offsets": (
        lambda: {"user": Jagged(torch.tensor([1, 2]), torch.tensor([0, 1])), "ad": ids_of(1)[:, 1]},
        "must rise from 0 to 2",
    ),
    "wrong weights": (
        lambda: {
            "user": Jagged(torch.tensor([1, 2]), torch.tensor([0, 2]), torch.ones(3)),
            "ad": ids_of(1)[:, 1],
        },
        "weights must be",
    ),
}


@pytest.mark.parametrize(("count", "more"), [(8, ""), (9, " and 1 more"), (30, " and 22 more")])
def test_eight_features_of_many_are_named(count, more):
    tables = hotbed.EmbeddingTables({f"f{n}": Table(5, 2) for n in range(count)})
    named = ", ".join(f"'f{n}'" for n in range(8))
    with pytest.raises(ShapeError, match=f"; missing: {named}{more}; the features are {named}{more}$"):
        tables({})


@pytest.mark.filterwarnings("ignore")  # torch's own, of nested and sparse tensors
@pytest.mark.parametrize("name", SHAPE_MISTAKES)
def test_shape_mistakes(name):
    make, message = SHAPE_MISTAKES[name]
    with pytest.raises(ShapeError, match=message):
        two_tables()(make())


TABLE_MISTAKES = {
    "no tables": ({}, "no tables"),
    "no rows": ({"a": Table(0, 4)}, "rows must be"),
    "no dim": ({"a": Table(4, 0)}, "dim must be"),
    "pooling": ({"a": Table(4, 2, pooling="max")}, "pooling must be"),
    "feature twice": ({"a": Table(4, 2, features=("x",)), "b": Table(4, 2, features=("x",))}, "reads two tables"),
    "all at once": ({"a": Table(0, 0)}, "rows.*dim"),
}


@pytest.mark.parametrize("name", TABLE_MISTAKES)
def test_table_mistakes(name):
    tables, message = TABLE_MISTAKES[name]
    with pytest.raises(ConfigError, match=message):
        hotbed.EmbeddingTables(tables)


def test_output_mistakes():
    with pytest.raises(ConfigError, match="equal dims"):
        hotbed.EmbeddingTables({"a": Table(4, 2), "b": Table(4, 3)}, output="stack")
    with pytest.raises(ConfigError, match="sequence"):
        hotbed.EmbeddingTables({"a": Table(4, 2, pooling="none")}, output="concat")


def test_backward_twice_is_refused():
    tables = two_tables()
    loss = tables(ids_of()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(HotbedError, match="twice"):
        loss.backward()


@pytest.mark.parametrize("optimizer", [optim.Adam(), optim.RowwiseAdagrad()])
def test_state_dict_round_trip(optimizer):
    model = torch.nn.ModuleDict(
        {"emb": hotbed.EmbeddingTables({"a": Table(9, 3), "b": Table(4, 5)}, optimizer, seed=1)}
    )
    for _ in range(3):
        sum(v.sum() for v in model["emb"](torch.tensor([[1, 2], [3, 3]])).values()).backward()
    model["emb"].lr_factor = 0.25
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    other = torch.nn.ModuleDict(
        {"emb": hotbed.EmbeddingTables({"a": Table(9, 3), "b": Table(4, 5)}, optimizer, seed=2)}
    )
    other.load_state_dict(saved)
    assert other["emb"].num_updates == 3
    assert other["emb"].lr_factor == 0.25
    for name, value in other.state_dict().items():
        assert torch.equal(value, saved[name]), name
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({name: value for name, value in saved.items() if "b.weight" not in name})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict({**saved, "emb.c.weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="but the table has"):
        other.load_state_dict({**saved, "emb.a.weight": torch.zeros(8, 3)})


def test_rows_are_no_parameters_and_stay_float32():
    tables = two_tables()
    assert list(tables.parameters()) == []
    with pytest.raises(ConfigError, match="float32"):
        tables.half()
    assert tables.double().weight("user").dtype == torch.float64


def test_learning_rate_schedule_and_factor():
    tables = hotbed.EmbeddingTables({"a": Table(2, 1)}, optim.SGD(lr=optim.Decay(lr=1.0, every=2, factor=0.5)))
    moves = []
    for step in range(5):
        if step == 4:
            tables.lr_factor = 0.1
        before = tables.weight("a")[0].item()
        tables(torch.tensor([[0]])).sum().backward()
        moves.append(before - tables.weight("a")[0].item())
    assert moves == pytest.approx([1.0, 1.0, 0.5, 0.5, 0.025], rel=1e-5)


def test_same_rows_in_any_company():
    """A row's first value depends on (seed, table, id): not on other tables, their order, or the table's size."""
    alone = hotbed.EmbeddingTables({"ad": Table(50, 4)}, seed=9)
    crowd = hotbed.EmbeddingTables({"user": Table(10, 4), "ad": Table(80, 4), "x": Table(3, 2)}, seed=9)
    assert torch.equal(alone.weight("ad"), crowd.weight("ad")[:50])
    other = hotbed.EmbeddingTables({"ad": Table(50, 4)}, seed=10)
    assert not torch.equal(alone.weight("ad"), other.weight("ad"))


@settings(max_examples=40)
@given(data=st.data())
def test_any_input_form_gives_the_same_vectors_and_rows(data):
    """Matrix, mapping of columns and bags of one are the same thing."""
    size = data.draw(st.integers(0, 12))
    column = st.lists(st.integers(0, 5), min_size=size, max_size=size)
    a, b = torch.tensor(data.draw(column), dtype=torch.int64), torch.tensor(data.draw(column), dtype=torch.int64)
    one_each = torch.arange(size + 1)
    forms = [
        torch.stack([a, b], dim=1),
        {"a": a, "b": b},
        {"a": Jagged(a, one_each), "b": Jagged(b, one_each)},
        {"a": a.unsqueeze(1), "b": b},
    ]
    grad = torch.randn(size, 2, 3)
    results = []
    for form in forms:
        tables = hotbed.EmbeddingTables({"t": Table(6, 3, features=("a", "b"))}, optim.Adam(lr=0.1))
        out = tables(form)
        out.backward(grad)
        results.append((out.detach(), tables.weight("t").clone()))
    for out, rows in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(rows, results[0][1])


def test_a_key_is_named_by_its_table_and_id():
    keys = hotbed.EmbeddingTables({"a": Table(10, 4), "b": Table(20, 4), "c": Table(5, 4)}).groups[0].keyspace
    assert [keys.name_of(key) for key in (0, 9, 10, 29, 30, 34)] == [
        ("a", 0), ("a", 9), ("b", 0), ("b", 19), ("c", 0), ("c", 4),
    ]  # fmt: skip
    assert keys.name_of(35) == ("", None)


@pytest.mark.parametrize("factor", [-1, float("nan"), float("inf"), "x", None])
def test_a_factor_that_would_ruin_rows_is_refused(factor):
    tables = hotbed.EmbeddingTables({"a": Table(10, 4)}, optim.SGD(lr=0.5))
    before = tables.weight("a").clone()
    tables.lr_factor = 0.5
    with pytest.raises(ConfigError, match="lr_factor must be a finite number, 0 or more, not"):
        tables.lr_factor = factor
    assert tables.lr_factor == 0.5
    tables(torch.tensor([[3]])).sum().backward()
    assert torch.equal(tables.weight("a")[3], before[3] - 0.25)


def test_factors_of_a_learning_rate():
    tables = hotbed.EmbeddingTables({"a": Table(10, 4)}, optim.SGD(lr=0.5))
    before = tables.weight("a").clone()
    for factor in (0, torch.tensor(0.0), 0.0):
        tables.lr_factor = factor
        tables(torch.tensor([[3]])).sum().backward()
        assert torch.equal(tables.weight("a"), before)
    assert type(tables.lr_factor) is float
