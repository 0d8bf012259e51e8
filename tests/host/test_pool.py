import threading

import numpy as np
import pytest
import torch
from numba import njit

from hotbed.errors import HotbedError
from hotbed.host import pool as pool_module
from hotbed.host.handover import Runner
from hotbed.host.intrinsics import fetch_add, store64
from hotbed.host.jobs import begin, kernel_address, run
from hotbed.host.pool import ALONE, Pool, in_parallel, threads_for


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


def _add_chunk(arguments, chunk, scratch):
    fetch_add(arguments + 8 * (chunk % 4), chunk)


@njit(nogil=True)
def add_chunks(pool, scratch, kernel, num_chunks):
    """The sums of all chunk numbers n with the same n % 4, by compiled code."""
    arguments = begin(pool)
    for word in range(4):
        store64(arguments + 8 * word, 0)
    run(pool, kernel, num_chunks, scratch)
    return [fetch_add(arguments + 8 * word, 0) for word in range(4)]


@pytest.fixture(scope="module")
def kernel():
    return kernel_address(_add_chunk)


@pytest.mark.parametrize("futex", [pool_module.FUTEX_NUMBER, 0], ids=["futex", "naps"])
@pytest.mark.parametrize("watch", [0, 1500])
def test_every_chunk_is_done_once_however_workers_wait(watch, futex, kernel):
    pool = Pool("test", 3, watch=watch, futex=futex)
    try:
        for num_chunks in (0, 1, 2, 3, 1000, 7) * 20:
            assert pool.call(add_chunks, kernel, num_chunks) == [sum(range(n, num_chunks, 4)) for n in range(4)]
    finally:
        pool.close()


def test_a_pool_takes_compiled_jobs_and_those_of_python_in_turns(kernel):
    pool, out = Pool("test", 2, watch=100), np.zeros(100)
    try:
        for n in range(30):
            pool.in_parallel(add_one, 3, (out,))
            assert (out == n + 1).all()
            assert sum(pool.call(add_chunks, kernel, 50)) == sum(range(50))
    finally:
        pool.close()


def test_who_calls_after_the_workers_went_works_alone(kernel):
    pool, out = Pool("test", 2, watch=0), np.zeros(10)
    pool.in_parallel(add_one, 3, (out,))
    pool.close()
    pool.in_parallel(add_one, 3, (out,))
    assert (out == 2).all()
    assert sum(pool.call(add_chunks, kernel, 9)) == sum(range(9))
    assert not [thread for thread in threading.enumerate() if thread.name == "test"]


def test_a_worker_that_ended_is_named():
    """Its chunk is never done: a caller looks after a second whether it lives."""
    pool, ended = Pool("hotbed-test", 1, watch=0), Runner(lambda: 1 // 0, "hotbed-test")
    ended.start()
    ended.join()
    pool._workers = [ended]

    def kernel(chunk, num_chunks):
        pool._words[pool_module.NEXT] += 1  # chunk 1 is taken, by nobody

    with pytest.raises(HotbedError, match="a thread of hotbed-test has ended") as caught:
        pool.in_parallel(kernel, 2, ())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    pool._workers = []
    pool.close()
