from __future__ import annotations

import pytest
import torch

from hotbed.bench.setting import Setting
from tests.distributed.ranks import _context


@pytest.fixture
def setting():
    """A setting that takes milliseconds on the CPU."""
    return Setting(torch.device("cpu"), dim=8, batch=64, cache=0.2, cold=True, steps=20, warmup=4, rows=(5, 300, 2000))


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """The matrices are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Measuring the copy speed and collecting garbage take most of a small run; tests of their own do both."""
    monkeypatch.setattr("hotbed.bench.run.copy_speed", lambda device: 1e10)
    monkeypatch.setattr("hotbed.bench.run._release", lambda: None)


@pytest.fixture
def forked_ranks(monkeypatch):
    """Ranks that import nothing again; those of test_a_rank_that_refuses_or_breaks_is_told are spawned, as users' are."""
    _context.set_forkserver_preload(["tests.distributed.ahead"])
    monkeypatch.setattr("hotbed.bench.setting.multiprocessing.get_context", lambda kind: _context)
