"""The output rows of a group cut into features, and their gradients joined."""

import pytest
import torch

import hotbed
from hotbed import Jagged, Table, optim
from hotbed.errors import HotbedError
from hotbed.tables.outputs import FeatureSplit

NAMES = ("a", "b", "c")


def block_and_parts(size=4, dim=3, dtype=torch.float32):
    cut = FeatureSplit(size, NAMES, {})
    block = torch.randn(size * len(NAMES), dim, dtype=dtype)
    return cut, block, cut.split(block)


@pytest.mark.parametrize(("size", "dim"), [(4, 3), (1, 3), (4, 1), (1, 1), (0, 3)])
def test_parts_of_one_block_are_joined_without_a_copy(size, dim):
    cut, block, parts = block_and_parts(size, dim)
    joined = cut.join(parts)
    assert torch.equal(joined, block)
    assert joined.data_ptr() == block.data_ptr()


def test_gradients_of_cat_and_stack_are_joined_without_a_copy():
    cut, _, parts = block_and_parts()
    for put_together in (lambda p: torch.cat(p, dim=1), lambda p: torch.stack(p, dim=1)):
        leaves = [part.clone().requires_grad_() for part in parts]
        out = put_together(leaves)
        grad = torch.randn_like(out)
        joined = cut.join(torch.autograd.grad(out, leaves, grad))
        assert joined.data_ptr() == grad.data_ptr()
        assert torch.equal(joined, grad.view(-1, 3))


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: [part.clone() for part in parts],
        lambda parts: [parts[1], parts[0], parts[2]],
        lambda parts: [parts[0], parts[0], parts[2]],
        lambda parts: [parts[0], parts[1], parts[2].clone()],
        lambda parts: [part[:1].expand(4, 3) for part in parts],
        lambda parts: [part[:, :1].expand(4, 3) for part in parts],
        lambda parts: [parts[0].t().contiguous().t(), *parts[1:]],
    ],
)
def test_gradients_anywhere_in_memory_are_joined_as_stack_joins_them(change):
    cut, block, parts = block_and_parts()
    before = block.clone()
    changed = change(list(parts))
    assert torch.equal(cut.join(changed), torch.stack(changed, dim=1).view(-1, 3))
    assert torch.equal(block, before)


def test_neighbours_in_memory_of_different_tensors_are_copied():
    """An address alone does not say that a tensor may be read beyond its own memory."""
    cut = FeatureSplit(1, NAMES, {})
    memory = torch.randn(9)
    apart = [torch.frombuffer(memory.numpy(), dtype=torch.float32, offset=12 * j, count=3).view(1, 3) for j in range(3)]
    joined = cut.join(apart)
    assert torch.equal(joined, memory.view(3, 3))
    assert joined.data_ptr() != memory.data_ptr()


def test_a_part_without_a_gradient_counts_as_zero():
    cut, _, parts = block_and_parts()
    for j in range(3):
        grads = [None if i == j else part for i, part in enumerate(parts)]
        expected = torch.stack([torch.zeros(4, 3) if grad is None else grad for grad in grads], dim=1)
        assert torch.equal(cut.join(grads), expected.view(-1, 3))


def test_sequences_follow_the_pooled_rows():
    cut = FeatureSplit(2, ("a",), {"s": (5,), "m": (2, 3)})
    block = torch.randn(2 + 5 + 6, 4)
    parts = cut.split(block)
    assert [tuple(part.shape) for part in parts] == [(2, 4), (5, 4), (2, 3, 4)]
    assert torch.equal(cut.join(parts), block)
    assert torch.equal(cut.join([None, parts[1], None])[2:7], parts[1])
    assert not cut.join([None, parts[1], None])[[0, 1, 7, 12]].any()
    alone = FeatureSplit(2, (), {"m": (2, 3)})
    assert torch.equal(alone.join([parts[2]]), block[7:])


def tables_of(output, **settings):
    declared = {"a": Table(9, 2), "b": Table(9, 2), "c": Table(9, 2)}
    return hotbed.EmbeddingTables(declared, optim.SGD(lr=0.5), output=output, **settings)


IDS = torch.tensor([[1, 2, 3], [4, 2, 0]])


@pytest.mark.parametrize("output", ["stack", "concat", "dict"])
def test_features_may_be_changed_in_place(output):
    """relu_ and the like; only the changed feature changes, and the gradient is that of what was computed."""
    tables, twin = tables_of(output), tables_of("stack")
    vectors = tables(IDS)
    one = vectors["b"] if output == "dict" else vectors.view(2, 3, 2)[:, 1]
    one.mul_(3.0)
    rest = [vectors["a"], vectors["c"]] if output == "dict" else [vectors.view(2, 3, 2)[:, j] for j in (0, 2)]
    expected = twin(IDS)
    assert torch.equal(one, 3.0 * expected[:, 1])
    assert torch.equal(torch.stack(rest, dim=1), expected[:, [0, 2]])
    (one.sum() + sum(part.sum() for part in rest)).backward()
    (expected * torch.tensor([1.0, 3.0, 1.0])[:, None]).sum().backward()
    for name in NAMES:
        assert torch.equal(tables.weight(name), twin.weight(name))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("output", ["concat", "dict"])
def test_outputs_without_learning(mode, output):
    tables, expected = tables_of(output), tables_of("stack").eval()(IDS)
    if mode is torch.enable_grad:
        tables.eval()
    with mode():
        vectors = tables(IDS)
        block = torch.stack(list(vectors.values()), dim=1) if output == "dict" else vectors.view(2, 3, 2)
    assert torch.equal(block, expected)
    assert not block.requires_grad
    assert tables.num_updates == 0


def test_a_loss_that_uses_no_feature_updates_nothing():
    tables = tables_of("dict")
    vectors = tables(IDS)
    assert all(vector.requires_grad for vector in vectors.values())
    (sum(vector.detach().sum() for vector in vectors.values()) + torch.ones(1, requires_grad=True).sum()).backward()
    assert tables.num_updates == 0


def test_backward_twice_through_a_feature_is_refused():
    vectors = tables_of("dict")(IDS)
    vectors["a"].sum().backward(retain_graph=True)
    with pytest.raises(HotbedError, match="backward ran twice"):
        vectors["b"].sum().backward()


def test_two_lookups_in_one_graph_keep_their_gradients_apart():
    """Gradients that are joined by a copy share memory from step to step, and two may be there at once."""
    rows = {}
    for output in ("stack", "dict"):
        tables = tables_of(output)
        losses = []
        for factor, ids in ((1.0, IDS), (2.0, IDS.flip(0) + 1)):
            vectors = tables(ids)
            parts = vectors.values() if output == "dict" else vectors.unbind(1)
            losses.append(sum((factor * (j + 1) * part).sum() for j, part in enumerate(parts)))
        sum(losses).backward()
        rows[output] = [tables.weight(name).clone() for name in NAMES]
    assert all(map(torch.equal, rows["stack"], rows["dict"]))


def test_several_groups_have_gradients_of_their_own():
    """None is updated before all have theirs."""
    declared = {"a": Table(9, 2), "b": Table(9, 2), "c": Table(9, 3), "d": Table(9, 3)}
    tables = hotbed.EmbeddingTables(declared, optim.SGD(lr=0.5), output="dict")
    before = {name: tables.weight(name).clone() for name in declared}
    vectors = tables(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    sum((j + 1) * part.sum() for j, part in enumerate(vectors.values())).backward()
    for j, (name, rows) in enumerate(before.items()):
        rows[[1 + j, 5 + j]] -= 0.5 * (j + 1)
        torch.testing.assert_close(tables.weight(name), rows)


def test_a_batch_of_no_bags():
    none = Jagged(torch.empty(0, dtype=torch.int64), torch.tensor([0]))
    vectors = tables_of("dict")(dict.fromkeys(NAMES, none))
    assert [tuple(vectors[name].shape) for name in NAMES] == [(0, 2)] * 3


def test_weights_of_bags_get_their_gradient_in_a_dict():
    weights = torch.tensor([0.5, 2.0, 1.0], requires_grad=True)
    tables = tables_of("dict")
    rows = tables.weight("b").clone()
    bags = Jagged(torch.tensor([1, 2, 1]), torch.tensor([0, 2, 3]), weights)
    vectors = tables(IDS[:, [0, 2]], {"b": bags})
    (vectors["a"].sum() + vectors["b"].sum()).backward()
    torch.testing.assert_close(weights.grad, rows[[1, 2, 1]].sum(1))
    torch.testing.assert_close(tables.weight("b")[1], rows[1] - 0.5 * 1.5)


def test_large_blocks_have_the_same_bits(monkeypatch):
    monkeypatch.setattr("hotbed.ops.blocks._NEVER_KEPT", 64)
    rows = {}
    for output in ("stack", "dict"):
        tables = hotbed.EmbeddingTables({name: Table(900, 64) for name in NAMES}, output=output)
        ids = torch.randint(900, (5000, 3), generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            vectors = tables(ids)
            parts = list(vectors.values()) if output == "dict" else list(vectors.unbind(1))
            sum(part.sin().sum() for part in parts).backward()
        rows[output] = [tables.weight(name).clone() for name in NAMES]
    assert all(map(torch.equal, rows["stack"], rows["dict"]))
