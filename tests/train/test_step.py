import math

import pytest
import torch
from torch import nn

from hotbed.models import MODELS
from hotbed.optim import SGD
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.spec import Table
from hotbed.telemetry.observer import Progress
from hotbed.train.interval import RunClock
from hotbed.train.step import Learner, repeatable
from hotbed.types import Batch

CPU = torch.device("cpu")


def a_learner(lr=0.5, name="deepfm", **options):
    torch.manual_seed(3)
    model = MODELS[name](2, 4, 1, **options)
    width = model.vector_width(4)
    tables = EmbeddingTables({"a": Table(7, width), "b": Table(5, width)}, SGD(lr=lr), seed=1)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=lr) if parameters else None
    return Learner(tables, model, optimizer, lr, CPU)


def a_batch(size=6):
    generator = torch.Generator().manual_seed(size)
    return Batch(
        labels=(torch.arange(size) % 2).float(),
        dense=torch.randn(size, 1, generator=generator),
        ids=torch.randint(0, 5, (size, 2), generator=generator),
    )


def test_a_step_is_that_of_plain_torch():
    learner = a_learner(hidden=[8], dropout=0.0)
    twin = a_learner(hidden=[8], dropout=0.0)
    weights = [nn.Parameter(twin.tables.weight(name).clone()) for name in ("a", "b")]
    optimizer = torch.optim.SGD([*weights, *twin.model.parameters()], lr=0.5)
    for size in (6, 3, 4):
        batch = a_batch(size)
        found = learner.step(batch)
        vectors = torch.stack([weight[batch.ids[:, f]] for f, weight in enumerate(weights)], dim=1)
        logits = twin.model(vectors, batch.dense)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.logits, logits.detach(), rtol=1e-5, atol=1e-6)
    for name, weight in zip(("a", "b"), weights):
        torch.testing.assert_close(learner.tables.weight(name), weight.detach(), rtol=1e-5, atol=1e-6)
    for one, other in zip(learner.model.parameters(), twin.model.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_scoring_learns_nothing():
    learner = a_learner(hidden=[8], dropout=0.5, batch_norm=True)
    before = {
        name: value.clone() for name, value in {**learner.model.state_dict(), **learner.tables.state_dict()}.items()
    }
    first, second = learner.score(a_batch()), learner.score(a_batch())
    assert torch.equal(first, second)
    assert not first.requires_grad
    after = {**learner.model.state_dict(), **learner.tables.state_dict()}
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_single_sample_is_learned_even_with_batch_norm():
    learner = a_learner(hidden=[8], batch_norm=True)
    before = learner.tables.weight("a").clone()
    found = learner.step(a_batch(1))
    assert math.isfinite(found.loss)
    assert not torch.equal(before, learner.tables.weight("a"))
    learner.step(a_batch(2))
    assert learner.model.training


def test_a_model_without_dense_weights_still_learns():
    learner = a_learner(hidden=[8])
    rows_only = Learner(learner.tables, learner.model, None, 0.0, CPU)
    dense = [one.clone() for one in learner.model.parameters()]
    before = learner.tables.weight("a").clone()
    rows_only.set_rate(0.5)
    rows_only.step(a_batch())
    assert not torch.equal(before, learner.tables.weight("a"))
    assert all(torch.equal(one, other) for one, other in zip(dense, learner.model.parameters()))


def test_the_rate_reaches_rows_and_dense_weights():
    learner = a_learner(hidden=[8])
    learner.set_rate(0.0)
    before = [one.clone() for one in (learner.tables.weight("a"), *learner.model.parameters())]
    learner.step(a_batch())
    assert all(
        torch.equal(one, other) for one, other in zip(before, (learner.tables.weight("a"), *learner.model.parameters()))
    )
    learner.set_rate(0.5)
    learner.set_rate(0.5)
    assert learner.optimizer is not None
    assert learner.optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("before", [False, True])
def test_repeatable_puts_torch_back(before):
    torch.use_deterministic_algorithms(before)
    try:
        with repeatable():
            assert torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_seconds_of_training_leave_out_what_was_compiled_meanwhile(monkeypatch):
    clock, progress = RunClock(torch.device("cpu")), Progress()
    compiled = iter([100.0, 100.0, 100.0, 102.5, 102.5])
    now = iter([10.0, 14.0, 14.0, 20.0, 20.0])
    monkeypatch.setattr("hotbed.train.interval.compile_seconds", lambda: next(compiled))
    monkeypatch.setattr("hotbed.train.interval.time.perf_counter", lambda: next(now))
    monkeypatch.setattr(clock, "read", lambda _: 0.0)
    clock.resume()
    clock.pause(progress)
    assert progress.train_seconds == 4.0
    clock.pause(progress)
    assert progress.train_seconds == 4.0 + 6.0 - 2.5


def test_the_rate_of_a_resumed_run_is_of_its_own_steps():
    clock, progress = RunClock(torch.device("cpu")), Progress(train_seconds=10.0)
    clock.continue_from(progress, 3)
    progress.train_seconds = 12.0
    assert clock.end_line(progress, 40, 4) == (2.0, 5.0)
    progress.train_seconds = 14.0
    assert clock.end_line(progress, 40, 4) == (2.0, 20.0)
    clock.continue_from(progress, 4)
    progress.train_seconds += 1e-6
    assert clock.end_line(progress, 40, 4)[1] is None
