import math

import pytest
import torch

from hotbed.train.interval import Interval

CPU = torch.device("cpu")


def filled(sizes=(5, 3)):
    generator = torch.Generator().manual_seed(1)
    interval = Interval()
    for size in sizes:
        logits = torch.randn(size, generator=generator, requires_grad=True)
        interval.add(logits.mean(), logits, (torch.arange(size) % 2).float())
    return interval


def test_means_are_over_samples():
    interval = Interval()
    interval.add(torch.tensor(1.0), torch.tensor([-1.0, 1.0, 2.0]), torch.tensor([0.0, 1.0, 1.0]))
    interval.add(torch.tensor(3.0), torch.tensor([5.0]), torch.tensor([0.0]))
    found = interval.summary()
    assert found.loss == (3 * 1.0 + 1 * 3.0) / 4
    assert found.auc == 0.5
    assert found.samples == 4


def test_one_class_has_no_auc():
    interval = Interval()
    interval.add(torch.tensor(1.0), torch.tensor([1.0]), torch.tensor([0.0]))
    assert math.isnan(interval.summary().auc)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_bad_step_is_found(bad):
    interval = filled()
    assert interval.first_bad() is None
    interval.add(torch.tensor(bad), torch.zeros(2), torch.zeros(2))
    interval.add(torch.tensor(math.nan), torch.zeros(2), torch.zeros(2))
    assert interval.first_bad() == 2
    assert Interval().first_bad() is None


def test_a_checkpoint_keeps_the_open_interval():
    interval = filled()
    again = Interval.from_state(interval.state(), CPU)
    more = torch.tensor([0.3, -0.2]), torch.tensor([1.0, 0.0])
    for one in (interval, again):
        one.add(torch.tensor(0.25), *more)
    assert again.summary() == interval.summary()
    assert len(again) == len(interval) == 3
    assert len(Interval.from_state(Interval().state(), CPU)) == 0


def test_without_samples_there_are_as_many_steps():
    state = filled().emptied().state()
    assert state["interval.losses"].tolist() == [0.0, 0.0]
    assert state["interval.sizes"].tolist() == [0, 0]
    assert state["interval.logits"].shape == state["interval.labels"].shape == (0,)
