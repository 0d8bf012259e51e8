"""The dense part of a step as a CUDA graph: the bits of the loop that launches it kernel by kernel."""

import pytest
import torch
from torch import nn

import hotbed
from hotbed.train.compiled_step import CompiledStep
from hotbed.train.step import repeatable

pytestmark = pytest.mark.gpu
SIZES = [*([256] * 12), 100, *([256] * 8), *([64] * 9)]


class Model(nn.Module):
    """With dropout and running statistics."""

    def __init__(self, beside=None):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(19, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(32, 16),
            nn.ReLU(),
            nn.Linear(16, 1),
        )
        self.beside = beside

    def forward(self, vectors, dense):
        if self.beside is not None:
            self.beside(vectors)
        if not isinstance(vectors, torch.Tensor):
            vectors = torch.cat(list(vectors.values()), dim=1)
        return self.layers(torch.cat([vectors.flatten(1), dense], dim=1)).squeeze(1)


class Trained:
    """A model and tables, trained for some batches."""

    def __init__(self, records, kind="adam", beside=None, **cache):
        torch.manual_seed(3)
        self.model = Model(beside).cuda()
        self.tables = hotbed.EmbeddingTables(
            {name: hotbed.Table(900, 8) for name in ("a", "b")}, hotbed.optim.Adam(), device="cuda", **cache
        )
        optimizers = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
        self.optimizer = optimizers[kind](self.model.parameters(), lr=0.01, fused=True)
        self.said, self.losses = [], []
        self.step = CompiledStep(self.model, self.optimizer, records=records)
        self.step.say = self.said.append

    def train(self, loader, prefetches=True):
        feed = hotbed.prefetch(loader, self.tables) if prefetches else loader
        with repeatable():
            for number, (ids, dense, labels) in enumerate(feed):
                self.optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
                loss, logits = self.step.run(self.tables(ids), dense, labels)
                self.losses += [loss, logits.sum()]
        return self

    def bits(self):
        state = {**self.model.state_dict(), **self.tables.state_dict()}
        return [loss.item() for loss in self.losses], {name: value.cpu() for name, value in state.items()}


def batches():
    draw = torch.Generator().manual_seed(5)
    for size in SIZES:
        ids = (torch.rand(size, 2, generator=draw) ** 3 * 900).long().cuda()
        dense, labels = (
            torch.rand(size, 3, generator=draw).cuda(),
            torch.randint(0, 2, (size,), generator=draw).float().cuda(),
        )
        yield ids, dense, labels


def assert_same(one, other):
    assert one.bits()[0] == other.bits()[0]
    for name, value in one.bits()[1].items():
        assert torch.equal(value, other.bits()[1][name]), name


@pytest.mark.parametrize("cache", [{}, {"cache": 0.6}], ids=["whole", "cached"])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_the_same_bits(kind, cache):
    loader = list(batches())
    plain = Trained(False, kind, **cache).train(loader)
    recorded = Trained(True, kind, **cache).train(loader)
    assert recorded.step.num_recorded == 2, recorded.said
    assert recorded.said == plain.said == []
    assert_same(plain, recorded)


def test_evaluation_frozen_weights_and_loaded_states_in_between():
    loader = list(batches())[:12]

    def go_through(trained):
        trained.train(loader)
        trained.model.eval()
        trained.train(loader)
        trained.model.train()
        trained.model.load_state_dict({name: value.clone() for name, value in trained.model.state_dict().items()})
        states = dict(trained.optimizer.state_dict().items())
        trained.optimizer.load_state_dict(torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, states))
        trained.train(loader)
        trained.model.layers[0].requires_grad_(False)
        return trained.train(loader, prefetches=False)

    plain, recorded = go_through(Trained(False)), go_through(Trained(True))
    assert recorded.step.num_recorded == 4
    assert_same(plain, recorded)


@pytest.mark.parametrize("when", ["always", "when it is recorded"])
def test_a_model_that_cannot_be_recorded(when):
    def beside(vectors):
        if when == "always" or torch.cuda.is_current_stream_capturing():
            vectors.sum().item()

    loader = list(batches())
    plain, refused = Trained(False).train(loader), Trained(True, beside=beside).train(loader)
    assert refused.step.num_recorded == 0
    assert len(refused.said) == 1
    assert ("reads numbers back" if when == "always" else "recording it failed") in refused.said[0]
    assert_same(plain, refused)


@pytest.mark.parametrize("output", ["concat", "dict"])
def test_vectors_of_other_forms(output):
    loader = list(batches())[:12]
    plain, recorded = (Trained(records, output=output).train(loader) for records in (False, True))
    assert recorded.step.num_recorded == 1, recorded.said
    assert_same(plain, recorded)


def test_seeds_attributes_and_loaded_optimizers_in_between():
    loader = list(batches())[:12]

    def go_through(trained):
        trained.train(loader)
        torch.cuda.manual_seed(7)
        trained.train(loader)
        trained.model.layers[3].p = 0.6
        trained.train(loader)
        trained.optimizer.load_state_dict(trained.optimizer.state_dict())
        return trained.train(loader)

    plain, recorded = (go_through(Trained(records, "sgd")) for records in (False, True))
    assert recorded.step.num_recorded >= 2, recorded.said
    assert_same(plain, recorded)


def test_gradients_of_several_batches():
    loader = list(batches())[:12]

    def go_through(trained):
        trained.tables.accumulate()
        for place in range(0, 12, 3):
            trained.train(loader[place : place + 3], prefetches=False)
            trained.tables.step()
        return trained

    plain, recorded = go_through(Trained(False)), go_through(Trained(True))
    assert recorded.step.num_recorded == 1, recorded.said
    assert_same(plain, recorded)


def test_an_input_on_the_host_is_refused():
    trained = Trained(True)
    share = torch.tensor(0.5)
    trained.step = CompiledStep(
        trained.model, trained.optimizer, lambda model, vectors, dense, labels: model(vectors, dense).mean() * labels
    )
    trained.step.say = trained.said.append
    for ids, dense, _ in list(batches())[:8]:
        trained.step(trained.tables(ids), dense, share)
    assert trained.step.num_recorded == 0
    assert "input 2 is on cpu, not on cuda:0; move it before the step" in trained.said[0]


def test_a_rate_that_is_a_tensor():
    """On the device it is read by the recording; on the host it would not be, and nothing is recorded."""

    def go_through(records, device):
        trained = Trained(records)
        group = trained.optimizer.param_groups[0]
        group["lr"] = rate = torch.tensor(0.01, device=device)
        for number, (ids, dense, labels) in enumerate(list(batches())[:12]):
            rate.fill_(0.01 / (1 + number))
            trained.losses += trained.step.run(trained.tables(ids), dense, labels)[:1]
        return trained

    with repeatable():
        for device, num_recorded in (("cuda", 1), ("cpu", 0)):
            plain, recorded = go_through(False, device), go_through(True, device)
            assert recorded.step.num_recorded == num_recorded, recorded.said
            assert_same(plain, recorded)
