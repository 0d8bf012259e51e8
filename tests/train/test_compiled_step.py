"""The dense part of a step, compiled: what it does as it is, and what it refuses to record."""

import copy
import random

import pytest
import torch
from torch import nn

import hotbed
from hotbed.errors import HotbedError, ShapeError
from hotbed.models import MODELS, build_model
from hotbed.train.compiled_step import CompiledStep, binary_loss
from hotbed.train.step import repeatable
from hotbed.train.step_inspection import why_not_hooks
from hotbed.train.step_kind import NotRecordableError, shape_of, torch_settings
from hotbed.train.step_recording import copy_all, twins_of


class Model(nn.Module):
    """Two layers over vectors and dense columns."""

    warmth = 0

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


def look(model, optimizer=None, loss=binary_loss, vectors=None, inputs=None, times=2):
    """Why it is not recorded, after two looks."""
    said = []
    step = CompiledStep(model, optimizer or torch.optim.Adam(model.parameters(), fused=True), loss)
    step.say = said.append
    step._as_it_is(*look_inputs(vectors, inputs))
    calls = []
    for _ in range(times):
        _, calls = step._inspected(*look_inputs(vectors, inputs), calls)
        if step.why_not is not None:
            assert len(said) == 1
            return step.why_not
    assert said == []
    return None


def look_inputs(vectors=None, inputs=None):
    _, dense, labels = batches(1)[0]
    vectors = torch.rand(16, 2, 4, requires_grad=True) if vectors is None else vectors()
    return vectors, (dense, labels) if inputs is None else inputs


def test_what_can_be_recorded():
    assert look(Model()) is None


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_recorded(name):
    """On a device without memory nothing can be read back or computed on the host unnoticed."""
    model = build_model(name, num_features=3, dim=8, num_dense=2, options={}).to("meta").requires_grad_(False)
    step = CompiledStep(model, None)
    shape, calls = (16, 3, model.vector_width(8)), []
    for _ in range(2):
        vectors = torch.empty(shape, device="meta", requires_grad=True)
        inputs = torch.empty(16, 2, device="meta"), torch.empty(16, device="meta")
        before = step._kind_of(vectors, inputs)
        _, calls = step._inspected(vectors, inputs, calls)
        assert step.why_not is None
        assert step._kind_of(vectors, inputs) == before
    assert len(calls) > 10


def keep(model, vectors):
    model.last = vectors.detach().clone()


def keep_in_list(model, vectors):
    model.__dict__.setdefault("history", []).append(vectors.detach())


def replace_buffer(model, vectors):
    model.layers.register_buffer("mean", vectors.detach().mean())


@pytest.mark.parametrize(
    ("beside", "reason"),
    [
        (count, "changes model.num_steps in Python"),
        (keep, "changes model.last in Python"),
        (keep_in_list, "changes model.history"),
        (replace_buffer, "changes model.layers.mean in Python"),
        (lambda model, vectors: random.random(), "changes random in Python"),
        (lambda model, vectors: vectors.sum().item(), "reads numbers back to the host .*_local_scalar_dense"),
        (lambda model, vectors: vectors.nonzero(), "reads numbers back to the host .*nonzero"),
    ],
)
def test_models_that_are_not_recorded(beside, reason):
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(look(Model(beside)))


def test_a_generator_of_ones_own_is_seen_by_what_it_does():
    draw = random.Random(0)
    assert "computed different things: mul.Tensor(" in look(Model(lambda model, vectors: vectors * draw.random()))


def test_hooks_and_optimizers_that_are_not_recorded():
    model = Model()
    assert "Adagrad runs in part on the host" in look(model, torch.optim.Adagrad(model.parameters()))
    model.layers[0].register_forward_hook(lambda *_: None)
    assert look(model) == "module layers.0 has hooks"
    model = Model()
    model.layers[0].weight.register_hook(lambda grad: grad)
    assert look(model) == "a dense weight has hooks"
    compiled = Model()
    compiled.layers.compile(backend="eager")
    assert why_not_hooks(compiled, binary_loss, []) == "module layers is compiled by torch.compile"
    model.tables = make_tables()
    assert "looks rows up itself (tables)" in look(model)


def test_gradients_that_a_recording_would_not_give():
    model = Model()
    part = torch.optim.Adam([*model.layers[0].parameters(), model.layers[2].weight], fused=True)
    assert "layers.2.bias gets a gradient and is not a weight of the optimizer" in look(model, part)
    outside = nn.Parameter(torch.ones(()))
    loss = lambda *given: outside * binary_loss(*given)[0]  # noqa: E731
    assert "a tensor outside of the model gets a gradient" in look(model, loss=loss)
    both = torch.optim.Adam([*model.parameters(), outside], fused=True)
    assert look(model, both, loss) is None
    scale = nn.Parameter(torch.ones(()))
    both = torch.optim.Adam([*model.parameters(), scale], fused=True)
    before = torch.rand(16, 2, 4)
    assert "used before the step, to make the vectors" in look(model, both, vectors=lambda: before * scale)
    assert scale.item() != 1  # it was trained all the same


def test_a_model_that_computes_elsewhere_is_not_recorded():
    model = Model(lambda model, vectors: vectors * torch.tensor(0.5)).to("meta")
    step = CompiledStep(model, None, lambda model, vectors, dense: model(vectors, dense).mean())
    step.say = lambda text: None
    for weight in model.parameters():
        weight.requires_grad_(False)
    vectors, dense = torch.empty(16, 2, 4, device="meta", requires_grad=True), torch.empty(16, 2, device="meta")
    step._inspected(vectors, (dense,), [])
    assert "computes with tensors that are not on meta (" in step.why_not
    assert "mul.Tensor" in step.why_not


def test_inputs_that_change_in_place_or_cannot_be_copied():
    loss = lambda model, vectors, dense, labels: binary_loss(model, vectors, dense.add_(1), labels)  # noqa: E731
    assert look(Model(), loss=loss) == "the model or the loss changes an input in place"
    cpu = torch.device("cpu")
    for value, reason in [
        ({"a": torch.ones(2)}, "input 1 is a dict; give its tensors as inputs of their own"),
        ((torch.ones(2),), "input 1 is a tuple"),
        (torch.ones(2, requires_grad=True), "input 1 requires a gradient"),
        (torch.ones(2, 1).expand(2, 3), "input 1 is expanded; call .contiguous()"),
        (torch.ones(2, device="meta"), "input 1 is on meta, not on cpu; move it before the step"),
        (torch.ones(2).to_sparse(), "not a plain tensor"),
    ]:
        with pytest.raises(NotRecordableError, match=reason):
            shape_of(1, value, cpu)
    shapes = [
        1,
        1.0,
        True,
        None,
        "a",
        torch.ones(2, 3),
        torch.ones(1, 0).expand(2, 0),
        torch.ones(3, 2).T,
        torch.ones(2, 3).double(),
    ]
    assert len({shape_of(1, one, cpu) for one in shapes}) == len(shapes)


def kinds_of(change, loss=binary_loss):
    """Whether a step is of the same kind after a change."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = CompiledStep(model, optimizer, loss)
    step._as_it_is(*look_inputs())  # makes the state of the optimizer
    before = step._kind_of(*look_inputs())
    step._as_it_is(*look_inputs())
    assert step._kind_of(*look_inputs()) == before
    change(model, optimizer)
    return step._kind_of(*look_inputs()) == before


def swap_tensor(model, optimizer):
    model.layers[0].weight.data = model.layers[0].weight.data.clone()


def add_group(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.1})


@pytest.mark.parametrize(
    "change",
    [
        swap_tensor,
        add_group,
        lambda model, optimizer: model.eval(),
        lambda model, optimizer: model.layers[1].eval(),
        lambda model, optimizer: setattr(model, "num_steps", 3),
        lambda model, optimizer: setattr(model, "temperature", 0.5),
        lambda model, optimizer: setattr(Model, "warmth", Model.warmth + 1),
        lambda model, optimizer: setattr(model.layers, "1", nn.GELU()),
        lambda model, optimizer: model.layers[0].requires_grad_(False),
        lambda model, optimizer: model.layers[0].register_forward_hook(lambda *_: None),
        lambda model, optimizer: model.layers[0].weight.register_hook(lambda grad: grad),
        lambda model, optimizer: model.register_buffer("mask", torch.ones(2)),
        lambda model, optimizer: optimizer.param_groups[0].update(weight_decay=0.1),
        lambda model, optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.1)),
        lambda model, optimizer: optimizer.register_step_pre_hook(lambda *_: None),
    ],
)
def test_changes_that_make_another_kind(change):
    assert not kinds_of(change)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, optimizer: optimizer.param_groups[0].update(lr=0.3),
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: model.eval().train(),
    ],
)
def test_changes_that_a_recording_follows(change):
    assert kinds_of(change)


SHARE = 1.0


def test_numbers_outside_of_the_loss_function_are_part_of_the_kind(monkeypatch):
    share, kept = 1.0, {"share": 1.0}

    def with_closure(*given):
        return share * binary_loss(*given)[0]

    def with_container(*given):
        return kept["share"] * binary_loss(*given)[0]

    def with_global(*given):
        return SHARE * binary_loss(*given)[0]

    def with_module(*given):
        return random.SHARE * binary_loss(*given)[0]

    def change(model, optimizer):
        nonlocal share
        share = 0.5

    assert not kinds_of(change, with_closure)
    assert not kinds_of(lambda *_: kept.update(share=0.5), with_container)
    assert not kinds_of(lambda *_: monkeypatch.setitem(globals(), "SHARE", 0.5), with_global)
    monkeypatch.setattr(random, "SHARE", 1.0, raising=False)
    assert not kinds_of(lambda *_: monkeypatch.setattr(random, "SHARE", 0.5), with_module)


def test_settings_of_torch_are_part_of_the_kind():
    before = torch_settings()
    for setting in (torch.no_grad(), torch.autograd.set_grad_enabled(False), repeatable()):
        with setting:
            assert torch_settings() != before
    matmul = torch.backends.cuda.matmul
    precision, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        assert torch_settings() != before
    finally:
        matmul.fp32_precision = precision
    assert torch_settings() == before


def test_weights_that_are_added_later_forget_their_gradients_too():
    model = Model()
    optimizer = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
    step = CompiledStep(model, optimizer)
    optimizer.add_param_group({"params": list(model.layers[2].parameters())})
    grads = []
    for _ in range(2):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.0
        torch.manual_seed(0)
        vectors, inputs = look_inputs()
        step.run(vectors, *inputs)
        grads.append(model.layers[2].weight.grad.clone())
    assert torch.equal(*grads)


def test_kinds_are_counted_up_to_a_limit_and_then_refused():
    step, said = CompiledStep(Model(), None), []
    step.say = said.append
    for number in range(300):
        step._seen[number] = None
        step._forget_kinds()
        if step.why_not:
            break
    assert number == 256
    assert len(said) == 1
    assert "256 kinds of steps have come, none of them often" in said[0]
    assert not step._seen


def test_a_copy_has_no_recordings_and_its_own_weights():
    model = Model()
    step = CompiledStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step._recorded["kind"] = None
    other = copy.deepcopy(step)
    assert other.num_recorded == 0
    assert other._weights[0] is other._model.layers[0].weight
    assert other._weights[0] is not step._weights[0]


def test_a_step_inside_of_a_step_and_losses_that_are_not_tensors():
    model = Model()
    vectors, (dense, labels) = look_inputs()
    inner = CompiledStep(model, None, lambda *given: inner.run(vectors, dense, labels)[0])
    with pytest.raises(HotbedError, match="was called while it runs"):
        inner(vectors, dense, labels)
    for wrong, reason in [
        (lambda *given: (binary_loss(*given)[0], 0.5), "gave a float"),
        (lambda *given: 0.5, "gave a float"),
        (lambda *given: (), "gave a tuple"),
    ]:
        weights = [weight.clone() for weight in model.parameters()]
        with pytest.raises(ShapeError, match=reason):
            CompiledStep(model, torch.optim.SGD(model.parameters(), lr=0.1), wrong)(vectors, dense, labels)
        assert all(torch.equal(one, other) for one, other in zip(weights, model.parameters()))


def test_a_scaled_loss_is_refused():
    make_tables()  # from then on scalers report
    scaler = torch.amp.GradScaler("cpu")
    step = CompiledStep(Model(), None, lambda *given: scaler.scale(binary_loss(*given)[0]))
    vectors, inputs = look_inputs()
    with pytest.raises(HotbedError, match="has hooks, as a GradScaler sets them"):
        step(vectors, *inputs)


def test_twins_have_the_strides_of_their_tensors_and_memory_of_their_own():
    block = torch.arange(60.0).view(5, 3, 4)
    row = torch.arange(8.0)
    tensors = [*block.unbind(1), torch.ones(2, 3).T, row[1:5], row[3:7], row[:0], torch.ones(())]
    twins = twins_of(tensors)
    assert [one.stride() for one in twins] == [one.stride() for one in tensors]
    copy_all(twins, tensors)
    assert all(torch.equal(one, other) for one, other in zip(twins, tensors))
    assert len({one.untyped_storage().data_ptr() for one in twins[:3]}) == 1
    assert twins[4].untyped_storage().data_ptr() != twins[5].untyped_storage().data_ptr()
