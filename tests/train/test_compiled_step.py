"""The dense part of a step, compiled: what it does as it is, and what it refuses to record."""

import random

import pytest
import torch
from torch import nn

import hotbed
from hotbed.errors import ShapeError
from hotbed.train.compiled_step import CompiledStep


class Model(nn.Module):
    """Two layers over vectors and dense columns."""

    def __init__(self, beside=lambda *_: None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 1))
        self.num_steps = 0
        self.beside = beside

    def forward(self, vectors, dense):
        self.beside(self, vectors)
        return self.layers(torch.cat([vectors.flatten(1), dense], dim=1)).squeeze(1)


def count(model, vectors):
    model.num_steps += 1


def batches(number=6, size=16):
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(0, 50, (size, 2), generator=draw),
            torch.rand(size, 2, generator=draw),
            torch.randint(0, 2, (size,), generator=draw).float(),
        )
        for _ in range(number)
    ]


def make_tables():
    tables = {name: hotbed.Table(50, 4) for name in ("a", "b")}
    return hotbed.EmbeddingTables(tables, hotbed.optim.Adagrad(lr=0.1), seed=0)


def test_it_trains_as_the_loop_written_out():
    model, tables = Model(), make_tables()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    expected = []
    for ids, dense, labels in batches():
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(tables(ids), dense), labels)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    other, others = Model(), make_tables()
    step = hotbed.compile_step(other, torch.optim.Adam(other.parameters(), lr=0.01))
    assert [step(others(ids), dense, labels).item() for ids, dense, labels in batches()] == expected
    for one, two in zip((*model.parameters(), tables.weight("a")), (*other.parameters(), others.weight("a"))):
        assert torch.equal(one, two)


def test_a_loss_of_ones_own_and_vectors_by_name():
    model, tables = (
        nn.Linear(4, 1),
        hotbed.EmbeddingTables(
            {name: hotbed.Table(50, 4) for name in ("a", "b")}, hotbed.optim.SGD(lr=0.1), output="dict"
        ),
    )
    before = tables.weight("a").clone()
    loss = lambda model, vectors, labels: ((model(vectors["a"] * vectors["b"])[:, 0] - labels) ** 2).mean()  # noqa: E731
    step = hotbed.compile_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    for ids, _, labels in batches():
        step(tables({"a": ids[:, 0], "b": ids[:, 1]}), labels)
    assert not torch.equal(before, tables.weight("a"))
    wrong = hotbed.compile_step(model, None, lambda model, vectors: model(vectors["a"]))
    with pytest.raises(ShapeError, match=r"compile_step gave \[16, 1\]; it must give one number"):
        wrong(tables({"a": ids[:, 0], "b": ids[:, 1]}))


def look(model, optimizer=None):
    said = []
    step = CompiledStep(model, optimizer or torch.optim.Adam(model.parameters(), fused=True))
    step.say = said.append
    _, dense, labels = batches(1)[0]
    step._looked_at(torch.rand(16, 2, 4, requires_grad=True), (dense, labels))
    assert said == ([] if step.why_not is None else [said[0]])
    return step.why_not


def test_what_can_be_recorded():
    assert look(Model()) is None


@pytest.mark.parametrize(
    ("beside", "reason"),
    [
        (count, "changes num_steps in Python"),
        (lambda model, vectors: random.random(), "changes random in Python"),
        (lambda model, vectors: vectors.sum().item(), "reads numbers back to the host .*_local_scalar_dense"),
        (lambda model, vectors: vectors.nonzero(), "reads numbers back to the host .*nonzero"),
    ],
)
def test_models_that_are_not_recorded(beside, reason):
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(look(Model(beside)))


def test_hooks_and_optimizers_that_are_not_recorded():
    model = Model()
    assert "counts its steps on the host" in look(model, torch.optim.Adagrad(model.parameters()))
    model.layers[0].register_forward_hook(lambda *_: None)
    assert look(model) == "module layers.0 has hooks"
    model = Model()
    model.layers[0].weight.register_hook(lambda grad: grad)
    assert look(model) == "a dense weight has hooks"
    model.tables = make_tables()
    assert "looks rows up itself (tables)" in look(model)
