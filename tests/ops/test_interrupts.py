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

from hotbed.host import threads
from hotbed.ops.move import pool as crew
from hotbed.store.ssd import readers
from hotbed.store.ssd.format import HEADER_BYTES

STEPS = 2000  # more than any call here has


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

    threads.in_parallel(kernel, threads=3)
    points = 0
    for _ in interrupted(lambda: threads.in_parallel(kernel, threads=3), {threads.__file__, threading.__file__}):
        assert running[1:].tolist() == [0, 0]
        assert threads._crew()._turn.acquire(blocking=False)
        threads._crew()._turn.release()
        before = calls.copy()
        threads.in_parallel(kernel, threads=3)  # returns when its own work is done
        assert (calls - before).tolist() == [1, 1, 1]
        assert running[1:].tolist() == [0, 0]
        running[0] = 0
        points += 1
    assert points > 20


def test_a_first_call_that_is_interrupted_leaves_workers_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    done = np.zeros(2)

    def kernel(thread: int, num_threads: int) -> None:
        done[thread] += 1

    def first() -> None:
        monkeypatch.setattr(threads, "_the_crew", threads._Crew())
        threads.in_parallel(kernel, threads=2)

    for _ in interrupted(first, {threads.__file__, threading.__file__}, every=7):
        done[:] = 0
        threads.in_parallel(kernel, threads=2)
        assert done.tolist() == [1, 1]


def test_a_crew_that_is_interrupted_while_it_forms_still_copies() -> None:
    records = np.random.default_rng(0).random((5000, 32))
    rows = np.arange(5000, dtype=np.int64)[::-1].copy()
    packed = np.empty_like(records)
    crews: list[crew.Crew] = []

    def gather(which: crew.Crew) -> None:
        packed[:] = 0
        which.run(crew.GATHER, records.ctypes.data, rows.ctypes.data, packed.ctypes.data, 5000, 256)

    def first() -> None:
        crews.append(crew.Crew(2))
        gather(crews[-1])

    for _ in interrupted(first, {crew.__file__, threading.__file__}, every=5):
        while crews:
            gather(crews[-1])
            assert (packed == records[::-1]).all()
            crews.pop().close()
    while crews:
        crews.pop().close()


def test_a_job_of_the_readers_is_never_left_open(tmp_path) -> None:
    """Workers may take chunks from the moment a job is open, and write to rows whose owner must still be there."""
    path = tmp_path / "segment"
    path.write_bytes(bytes(HEADER_BYTES + 64 * 64))
    those = readers.Readers(3)
    with path.open("rb") as file:
        runs = np.array([[file.fileno(), 0, n, n + 1] for n in range(64)], dtype=np.int64)
        offsets = HEADER_BYTES + 64 * np.arange(64, dtype=np.int64)
        rows, keys, out = np.arange(64), np.zeros(64, dtype=np.int64), np.zeros((64, 12), dtype=np.float32)
        arguments = (runs, offsets, rows, keys, out, 64)
        expected = those.read(*arguments)
        words = those._words[those._first :]
        for _ in interrupted(lambda: those.read(*arguments), {readers.__file__}):
            assert words[readers._DONE] == words[readers._NUM_CHUNKS]
            assert those.read(*arguments).kind == expected.kind  # which record is met first is up to the threads
    those.stop()
