"""How long a GPU works."""

from types import SimpleNamespace

import pytest
import torch
from torch._C._autograd import DeviceType

from hotbed.bench.timing import BusyClock, _work, covered


def test_time_that_spans_share_counts_once():
    assert covered([]) == 0
    assert covered([(0, 1), (2, 4)]) == 3
    assert covered([(2, 4), (0, 3)]) == 4
    assert covered([(0, 10), (2, 3), (9, 11)]) == 11


def test_only_work_on_the_gpu_counts():
    def event(device, **more):
        return SimpleNamespace(device_type=device, time_range=SimpleNamespace(start=1.0, end=3.0), **more)

    events = [event(DeviceType.CUDA), event(DeviceType.CPU), event(DeviceType.CUDA, is_user_annotation=True)]
    assert list(_work(events)) == [(1.0, 3.0)]


def test_a_cpu_has_no_such_time():
    with BusyClock(torch.device("cpu")) as busy:
        assert not busy.start()


@pytest.mark.gpu
def test_a_gpu_works_for_some_of_the_time():
    device = torch.device("cuda", 0)
    matrix = torch.randn(2048, 2048, device=device)
    with BusyClock(device) as busy:
        assert busy.start()
        for _ in range(20):
            matrix @ matrix
        once = busy.stop()
        assert busy.start()
        for _ in range(200):
            matrix @ matrix
        assert 5 * once < busy.stop() < 20 * once
