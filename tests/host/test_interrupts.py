"""An interrupt between any two steps of Python: whoever waits for threads leaves none of them at work, and loses none.

A trace function raises KeyboardInterrupt at the n-th place, for every n there is, where CPython runs signal handlers in the
files named: after a call, at the beginning of a function, at a jump backwards.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numba import njit

from hotbed.host import handover, jobs, pool
from hotbed.host.pool import Pool, in_parallel
from hotbed.ops.move import copy
from hotbed.store.ssd import read
from hotbed.store.ssd.format import HEADER_BYTES

STEPS = 2000  # more than any call here has

# what other tests left may be collected meanwhile, and its finalizer interrupted
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def interrupted(call: Callable[[], Any], files: set[str], every: int = 1) -> Iterator[None]:
    """Runs the call again and again, each time interrupted one step later, and stops when it has run through."""
    for at in range(0, STEPS, every):
        if not _is_interrupted(call, files, at):
            return
        yield
    raise AssertionError(f"the call has more than {STEPS} steps")


def _is_interrupted(call: Callable[[], Any], files: set[str], at: int) -> bool:
    left, me = [at], threading.get_ident()

    def follow(frame: FrameType) -> Any:
        frame.f_trace_opcodes = True
        before = ""

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal before
            if event == "opcode":
                name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
                if before.startswith("CALL") or name == "RESUME" or "JUMP_BACKWARD" in name:
                    left[0] -= 1
                    if left[0] == -1:
                        raise KeyboardInterrupt
                before = name
            return step

        return step

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return follow(frame) if frame.f_code.co_filename in files and threading.get_ident() == me else None

    previous = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(previous)
    return False


@njit(nogil=True)
def spin(count: int) -> float:
    x = 0.0
    for i in range(count):
        x += np.sin(x + i)
    return x


def test_no_worker_is_left_at_work() -> None:
    running = np.zeros(3, dtype=np.int64)
    calls = np.zeros(3, dtype=np.int64)

    def kernel(thread: int, num_threads: int) -> None:
        running[thread] += 1
        spin(3_000)
        calls[thread] += 1
        running[thread] -= 1

    in_parallel(kernel, threads=3)
    points = 0
    for _ in interrupted(
        lambda: in_parallel(kernel, threads=3), {pool.__file__, threading.__file__, handover.__file__}
    ):
        assert running[1:].tolist() == [0, 0]
        turn = pool.shared("hotbed-op")._turn
        assert turn.acquire(blocking=False)
        turn.release()
        before = calls.copy()
        in_parallel(kernel, threads=3)  # returns when its own work is done
        assert (calls - before).tolist() == [1, 1, 1]
        assert running[1:].tolist() == [0, 0]
        running[0] = 0
        points += 1
    assert points >= 5, points  # how often the caller waits depends on who takes the chunks


def test_a_first_call_that_is_interrupted_leaves_workers_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    done = np.zeros(2)

    def kernel(thread: int, num_threads: int) -> None:
        done[thread] += 1

    def first() -> None:
        monkeypatch.setattr(pool, "_shared", {})
        in_parallel(kernel, threads=2)

    for _ in interrupted(first, {pool.__file__, threading.__file__, handover.__file__}, every=7):
        done[:] = 0
        in_parallel(kernel, threads=2)
        assert done.tolist() == [1, 1]


def test_a_pool_that_is_interrupted_while_its_threads_start_still_copies() -> None:
    records = np.random.default_rng(0).random((5000, 32))
    rows = np.arange(5000, dtype=np.int64)[::-1].copy()
    packed = np.empty_like(records)
    addresses = records.ctypes.data, rows.ctypes.data, packed.ctypes.data
    pools: list[Pool] = []

    def gather(which: Pool) -> None:
        packed[:] = 0
        which.call(copy.copy_rows, copy.copy_kernel(), copy.GATHER, *addresses, 5000, 256)

    def first() -> None:
        pools.append(copy.copy_pool(2))
        gather(pools[-1])

    for _ in interrupted(first, {pool.__file__, threading.__file__, handover.__file__}, every=5):
        while pools:
            gather(pools[-1])
            assert (packed == records[::-1]).all()
            pools.pop().close()
    while pools:
        pools.pop().close()


def test_a_read_is_never_left_open(tmp_path, monkeypatch) -> None:
    """Workers may take chunks from the moment a job is open, and write to rows whose owner must still be there."""
    path = tmp_path / "segment"
    path.write_bytes(bytes(HEADER_BYTES + 64 * 64))
    monkeypatch.setattr(read, "NUM_THREADS", 3)
    words = read.reading_pool()._words
    with path.open("rb") as file:
        runs = np.array([[file.fileno(), 0, n, n + 1] for n in range(64)], dtype=np.int64)
        offsets = HEADER_BYTES + 64 * np.arange(64, dtype=np.int64)
        rows, keys, out = np.arange(64), np.zeros(64, dtype=np.int64), np.zeros((64, 12), dtype=np.float32)
        arguments = (runs, offsets, rows, keys, out, 64)
        expected = read.read_runs(*arguments)
        for _ in interrupted(lambda: read.read_runs(*arguments), {read.__file__, pool.__file__}):
            assert words[jobs._DONE] == words[jobs._NUM_CHUNKS]
            assert read.read_runs(*arguments).kind == expected.kind  # which record is met first is up to the threads
