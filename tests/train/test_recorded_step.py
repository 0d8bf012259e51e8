"""Steps that are recorded and replayed, on a stand-in for CUDA graphs: the bits of steps that are run as they are."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import hotbed
from hotbed.errors import HotbedError
from hotbed.train import compiled_step, step_recording
from hotbed.train.compiled_step import CompiledStep, binary_loss
from tests.train import graph_on_cpu


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(compiled_step, "_WHERE", "cpu")
    monkeypatch.setattr(step_recording, "recording", graph_on_cpu.recording)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


class Model(nn.Module):
    """With running statistics and a weight that is never used."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(11, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.unused = nn.Parameter(torch.ones(3))
        self.share = 1.0

    def forward(self, vectors, dense):
        if not isinstance(vectors, torch.Tensor):
            vectors = torch.cat(list(vectors.values()), dim=1)
        return self.layers(torch.cat([vectors.flatten(1), dense], dim=1)).squeeze(1) * self.share


class Trained:
    """A model and tables, trained as written out by hand or by a compiled step."""

    def __init__(self, records, loss=binary_loss, output="stack", optimizer=torch.optim.Adam):
        torch.manual_seed(3)
        self.model, self.said, self.losses = Model(), [], []
        tables = {name: hotbed.Table(90, 4) for name in ("a", "b")}
        self.tables = hotbed.EmbeddingTables(tables, hotbed.optim.Adam(), output=output)
        self.optimizer = optimizer(self.model.parameters(), lr=2.0**-6, fused=True)
        self.step = CompiledStep(self.model, self.optimizer, loss, records=records)
        self.step.say = self.said.append
        self.draw = torch.Generator().manual_seed(5)

    def train(self, number=8, size=16, *others):
        for _ in range(number):
            ids = torch.randint(0, 90, (size, 2), generator=self.draw)
            packed = torch.rand(size, 4, generator=self.draw)  # dense columns and labels
            vectors = self.tables(ids)
            self.losses += self.step.run(vectors, packed[:, :3], packed[:, 3].round(), *others)
        return self

    def bits(self):
        states = [one for state in self.optimizer.state.values() for one in state.values() if one is not None]
        grads = [one.grad for one in self.model.parameters() if one.grad is not None]
        return [*self.losses, *self.model.state_dict().values(), *self.tables.state_dict().values(), *states, *grads]


def assert_same(go_through, num_recorded, **options):
    plain, recorded = (go_through(Trained(records, **options)) for records in (False, True))
    assert recorded.said == []
    assert recorded.step.num_recorded == num_recorded
    one, other = plain.bits(), recorded.bits()
    assert len(one) == len(other)
    assert all(torch.equal(*pair) for pair in zip(one, other))


@pytest.mark.parametrize("output", ["stack", "concat", "dict"])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_the_same_bits(output, optimizer):
    assert_same(
        lambda trained: trained.train(9).train(1, 7).train(3).train(7, 5), 2, output=output, optimizer=optimizer
    )


def test_learning_rates_settings_and_attributes_that_change():
    def go_through(trained):
        group = trained.optimizer.param_groups[0]
        for number in range(9):
            group["lr"] = 2.0**-number
            trained.train(1)
        group["weight_decay"] = 0.25
        trained.train(7)
        trained.model.share = 0.5
        return trained.train(7)

    assert_same(go_through, 3)


def test_a_rate_that_is_a_tensor_is_read_in_every_step():
    def go_through(trained):
        trained.optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.5)
        for _ in range(9):
            rate.mul_(0.5)
            trained.train(1)
        return trained

    assert_same(go_through, 1)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_a_loaded_optimizer_whose_rate_changes(optimizer):
    def go_through(trained):
        trained.train(8)
        trained.optimizer.load_state_dict(trained.optimizer.state_dict())
        for number in range(8):
            trained.optimizer.param_groups[0]["lr"] = 2.0**-number
            trained.train(1)
        return trained

    assert_same(go_through, 2, optimizer=optimizer)


def test_a_group_that_is_added_when_steps_are_recorded():
    def go_through(trained):
        trained.model.later = nn.Parameter(torch.ones(()), requires_grad=False)
        trained.train(8)
        trained.model.later.requires_grad_(True)
        trained.optimizer.add_param_group({"params": [trained.model.later], "lr": 0.5})
        return trained.train(9)

    loss = lambda model, *given: binary_loss(model, *given)[0] * model.later.square()  # noqa: E731
    assert_same(go_through, 2, loss=loss)


def test_gradients_that_are_expanded():
    loss = lambda model, *given: binary_loss(model, *given)[0] + model.unused.sum() * 0.1  # noqa: E731
    assert_same(lambda trained: trained.train(9), 1, loss=loss)


def test_evaluation_gradients_of_others_and_frozen_weights_in_between():
    def go_through(trained):
        trained.train(8)
        trained.model.eval()
        trained.model(torch.ones(2, 2, 4), torch.ones(2, 3)).sum().backward()
        trained.model.train()
        trained.train(2)
        trained.optimizer.zero_grad()
        trained.train(2)
        trained.model.layers[0].requires_grad_(False)
        trained.train(7)
        trained.model.layers[0].weight.data = trained.model.layers[0].weight.data.clone()
        return trained.train(7)

    assert_same(go_through, 3)


def test_gradients_of_several_batches():
    def go_through(trained):
        trained.tables.accumulate()
        for _ in range(5):
            trained.train(3)
            trained.tables.step()
        return trained

    assert_same(go_through, 1)


def test_hooks_of_vectors_may_keep_gradients():
    def go_through(trained):
        kept, lookup = [], trained.tables.forward

        def look_up(ids):
            vectors = lookup(ids)
            vectors.register_hook(kept.append)
            return vectors

        trained.tables.forward = look_up
        trained.train(9)
        trained.losses += kept
        return trained

    assert_same(go_through, 1)


def test_a_step_without_inputs_and_with_numbers():
    loss = lambda model, vectors, *others: vectors.square().mean() * 2  # noqa: E731
    vectors = [torch.rand(4, 2, requires_grad=True) for _ in range(8)]
    step = CompiledStep(nn.Identity(), None, loss)
    found = [step(one).item() for one in vectors]
    assert step.num_recorded == 1
    assert found == [one.square().mean().mul(2).item() for one in vectors]
    assert all(torch.allclose(one.grad, one * 4 / 8) for one in vectors)
    plain, recorded = (
        Trained(records, lambda m, v, d, y, share: binary_loss(m, v, d, y)[0] * share) for records in (False, True)
    )
    for trained in (plain, recorded):
        trained.train(7, 16, 1.0).train(7, 16, 2.0).train(2, 16, 1.0)
    assert recorded.step.num_recorded == 2
    assert all(torch.equal(*pair) for pair in zip(plain.bits(), recorded.bits()))


def test_more_kinds_than_recordings_are_not_recorded_again_and_again(monkeypatch):
    made = []
    monkeypatch.setattr(compiled_step, "Recording", lambda *given: made.append(1) or step_recording.Recording(*given))
    trained = Trained(True)
    for _ in range(8):
        for size in range(2, 8):
            trained.train(1, size)
    assert len(made) == trained.step.num_recorded == 4
    for _ in range(70):
        trained.train(1, 9)
    assert len(made) == 5


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_is_left_when_recording_fails(error, monkeypatch):
    def fail(pool=None):
        raise error("stop here")

    monkeypatch.setattr(step_recording, "recording", fail)
    plain, trained = Trained(False).train(5), Trained(True).train(5)
    assert trained.step.num_recorded == 0
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            trained.train(1)
        assert all(weight.grad is None for weight in trained.model.parameters())
    else:
        plain.train(1)
        trained.train(1)
        assert "recording it failed (RuntimeError: stop here)" in trained.said[0]
    group = trained.optimizer.param_groups[0]
    assert group["lr"] == 2.0**-6
    assert not group["capturable"]
    assert torch.equal(trained.model.layers[0].weight, plain.model.layers[0].weight)


def test_a_model_that_changes_itself_only_when_it_is_recorded():
    def loss(model, *given):
        if graph_on_cpu.Graph in map(type, _get_current_dispatch_mode_stack()):
            model.num = 3
        return binary_loss(model, *given)

    trained = Trained(True, loss).train(8)
    assert "changes Python objects when it is recorded" in trained.said[0]
    assert trained.step.num_recorded == 0


def test_two_threads_are_refused():
    trained = Trained(True)
    with trained.step._running, pytest.raises(HotbedError, match="called while it runs"):
        trained.train(1)
