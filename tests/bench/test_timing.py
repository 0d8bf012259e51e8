from dataclasses import replace

import pytest
import torch

from hotbed.bench import timing
from hotbed.bench.timing import COUNTED, DensePart, Timing, batches_needed, time_steps
from hotbed.bench.workload import make_workload
from tests.bench.fakes import FakeSystem


class Clock:
    """Every look is a second later than the last, and notes how far the system was."""

    def __init__(self, system):
        self.system, self.seconds, self.steps_at_look = system, 0, []

    def perf_counter(self):
        self.seconds += 1
        self.steps_at_look.append(self.system.steps)
        return float(self.seconds)


@pytest.fixture
def timed(setting, monkeypatch):
    def run(**options):
        system = FakeSystem(setting, **options)
        clock = Clock(system)
        monkeypatch.setattr(timing, "time", clock)
        workload = make_workload(setting, batches_needed(setting))
        return system, clock, time_steps(system, setting, workload, DensePart(setting))

    return run


def test_the_clock_is_read_at_the_ends_of_groups_only(setting, timed):
    _, clock, result = timed()
    assert clock.steps_at_look == [4, 14, 24]  # 4 steps of warm-up, two groups of ten
    assert result.ms_of_group == [100.0, 100.0]
    assert result.stall_share is None


def test_the_pipeline_is_closed_with_input_left(setting, timed):
    system, _, _ = timed()
    assert system.is_closed
    assert system.steps == setting.warmup + setting.steps
    assert batches_needed(setting) >= system.steps + 32
    assert batches_needed(replace(setting, look_ahead=100)) >= system.steps + 100


def test_counts_are_of_timed_steps(timed):
    _, _, result = timed(wrong="counts")
    assert result.counts_per_step == {**dict.fromkeys(COUNTED, 0), "hits": 10, "misses": 3}
    assert result.stall_share == pytest.approx(1.0)  # 20 steps of 0.1 s each, in 2 s


def test_numbers_that_are_not_finite_give_no_time(timed):
    with pytest.raises(ArithmeticError, match="not finite"):
        timed(wrong="nan")


def test_quantiles_over_groups():
    measured = Timing([float(n) for n in range(1, 12)], {}, None)
    assert [measured.quantile(tenths) for tenths in (2, 5, 8)] == [3, 6, 9]
    assert Timing([4.0], {}, None).quantile(5) == 4


@pytest.mark.parametrize("dense", [0, 16])
def test_what_is_behind_sends_gradients_back(setting, dense):
    behind = DensePart(replace(setting, dense=dense))
    out = torch.randn(64, 3, 8, requires_grad=True)
    behind.backward(out)
    assert float(out.grad.abs().sum()) > 0


def test_every_system_gets_the_same_mlp(setting):
    grads = []
    for shape in ((64, 3, 8), (64, 24)):
        out = torch.linspace(-1, 1, 64 * 24).view(shape).requires_grad_()
        behind = DensePart(replace(setting, dense=16))
        behind.backward(out)
        behind.backward(out)  # the MLP learned meanwhile
        grads.append(out.grad.view(-1))
    assert torch.equal(*grads)
