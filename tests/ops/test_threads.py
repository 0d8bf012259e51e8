import threading

import numpy as np
import pytest
import torch
from numba import njit

from hotbed.host.threads import ALONE, in_parallel, threads_for


@njit(nogil=True)
def add_one(thread, num_threads, out):
    for i in range(out.shape[0] * thread // num_threads, out.shape[0] * (thread + 1) // num_threads):
        out[i] += 1


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_share_runs_once(threads):
    out = np.zeros(1001)
    for _ in range(50):
        in_parallel(add_one, out, threads=threads)
    assert (out == 50).all()


def test_callers_take_turns():
    """Four threads use the workers at once; none disturbs another."""
    results = [np.zeros(500) for _ in range(4)]

    def call(out):
        for _ in range(100):
            in_parallel(add_one, out, threads=3)

    callers = [threading.Thread(target=call, args=(out,)) for out in results]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all((out == 100).all() for out in results)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_exception_reaches_the_caller_and_the_workers_live_on(failing):
    def kernel(thread, num_threads):
        if thread == failing:
            raise ValueError(f"thread {thread}")

    with pytest.raises(ValueError, match=f"thread {failing}"):
        in_parallel(kernel, threads=3)
    out = np.zeros(10)
    in_parallel(add_one, out, threads=3)
    assert (out == 1).all()


def test_small_work_is_done_by_its_caller():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert threads_for(ALONE - 1) == 1
        assert threads_for(ALONE) == 3
    finally:
        torch.set_num_threads(before)
